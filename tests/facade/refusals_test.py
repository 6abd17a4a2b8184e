"""What the façade refuses: one clear sentence, and no variable changes.

A new mistake is a new row of its error: words of the message, and a call.
"""

import copy
import pickle

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import optax

import cases
import graphs
from shard_transforms import facade
from shard_transforms.facade import tf

X = np.arange(8, dtype=np.float32)
sgd = graphs.sgd
drop_stale = graphs.drop_stale
sync_replicas = graphs.sync_replicas
cross_shard = facade.CrossShardOptimizer
tower = facade.TowerOptimizer
losses = tf.losses
Base, Adam = facade.Optimizer, facade.AdamOptimizer
Optax, TX = facade.OptaxOptimizer, optax.sgd(1)


def sharded(computation, num_shards=4, **kwargs):
  return facade.shard(computation, [X], num_shards, **kwargs)


def mean(x):
  return lax.pmean(x[0], 'shard')


def kept(num_shards=4, **kwargs):
  return sharded(lambda x: x, num_shards, **kwargs)


def minimized(t, opt):
  """Minimizes on four shards."""
  return sharded(lambda x: opt.minimize(lambda: jnp.mean(t.b * x)))


def towers(model_fn=lambda features: facade.EstimatorSpec(None), **kwargs):
  return facade.replicate_model_fn(
      model_fn, **{'devices': graphs.IN_TURN} | kwargs
  )


def grouped(groups):
  opt = cross_shard(sgd(), group_assignment=groups)
  with facade.shard_context(4):
    opt.compute_gradients(lambda: facade.trainable_variables()[1] * 1.0)


def of_another_graph(name):
  with facade.Graph().as_default():
    return facade.Variable(1.0, name=name)


def in_scope(t, name, **scope):
  with facade.variable_scope('a', **scope), facade.variable_scope('inner'):
    facade.get_variable(name, initializer=1.0)


def restored(t, **changes):
  variables = [t.w, t.step]
  saved = jax.tree.map(jnp.zeros_like, facade.get_values(variables))
  saved |= changes
  facade.set_values(
      variables, {k: v for k, v in saved.items() if v is not None}
  )


def averaged(t, *unsuited):
  facade.ExponentialMovingAverage(0.9).apply([t.w, *unsuited])


def apply_on_another_axis(t):
  def of_shard(x):
    with facade.shard_context(4):
      cross_shard(sgd()).apply_gradients([(x, t.b)])

  jax.vmap(of_shard, axis_name='shard')(X)


def apply_unmapped(t):
  with facade.shard_context(4):
    cross_shard(sgd()).apply_gradients([(1.0, t.b)])


def mine(base, *args, **methods):
  """Returns an optimizer of a class with methods of its own."""
  return type('Mine', (base,), methods)(*args)


def nothing(*_):
  pass


def hidden(opt):
  """Returns an optimizer of a program, in which another is hidden."""
  return mine(
      *(Base, False, 'Hides'),
      compute_gradients=lambda _, *args, **kw: opt.compute_gradients(
          *args, **kw
      ),
      apply_gradients=lambda _, *args, **kw: opt.apply_gradients(*args, **kw),
  )


def in_towers(t, opt):
  train = graphs.mapped(
      lambda x: opt.minimize(lambda: jnp.mean(t.b * x), t.step, [t.b]),
      *(graphs.IN_TURN, False),
  )
  train(X)


def updated(t, opt):
  """Minimizes in a function."""
  return facade.function(lambda: opt.minimize(lambda: t.b**2))()


OPTAX = 'facade.OptaxOptimizer'

# A call takes the test, which has variables `w` and `b`, an integer `n`, the
# global step `step` and an optimizer `opt` with slots.
ATTRIBUTE_ERRORS = [
    ('must call `super', lambda t: mine(Base, __init__=nothing).variables()),
    ('`tf.layers` is not here. docs/port', lambda t: tf.layers),
    ('`tf.train.Saver` is not here', lambda t: tf.train.Saver),
]
NOT_IMPLEMENTED = [
    ('must define `_apply_d', lambda t: updated(t, mine(Base, False, 'N'))),
    ('w:0 must be dense', lambda t: t.opt._apply_sparse(None, t.w)),
    ('`shard` cannot b', lambda t: sharded(lambda x: kept())),
    ('`infeed_queue`', lambda t: kept(infeed_queue=1)),
    ('`replicate_model_fn` cann', lambda t: towers(towers())(np.zeros(16))),
]
TYPE_ERRORS = [
    # Variables.
    ("The initial value of 'v'", lambda t: facade.Variable({}, name='v')),
    ('must be int32', lambda t: facade.Variable(0.5, dtype=jnp.int32)),
    (r'must be int32, got float\d+', lambda t: t.n.assign(0.5)),
    ("'w:0' must not be copied or", lambda t: copy.deepcopy(t.w)),
    ('that has slots must not.*Mom', lambda t: pickle.dumps(t.opt)),
    # Losses and gradients.
    ('`fn` must be a function, got', lambda t: facade.function('step')),
    ('`loss` must be.*Write `lambda', lambda t: t.opt.minimize(3.0)),
    (r'real numbers, got int\d+', lambda t: t.opt.minimize(lambda: 3)),
    ("an array, got 'text'", lambda t: t.opt.minimize(lambda: 'text')),
    ('must return a pai', lambda t: t.opt.minimize(t.square, has_aux=True)),
    ('Add several.*has_aux', lambda t: t.opt.minimize(lambda: (t.b, 1.0))),
    ('must be an array', lambda t: t.weighted([1.0])),
    ('must hold real', lambda t: t.weighted(True)),
    ('The gradient of b:0 must be', lambda t: t.apply(('text', t.b))),
    (r'got int\d+ for b:0 of float32', lambda t: t.apply((3, t.b))),
    (r'got float\d+ for n:0 of int32', lambda t: t.apply((1.0, t.n))),
    # Optimizers.
    (OPTAX, lambda t: facade.clip_gradients_by_norm(TX, 1.0)),
    (OPTAX, lambda t: cross_shard(TX)),
    (OPTAX, lambda t: drop_stale(TX)),
    (OPTAX, lambda t: sync_replicas(TX)),
    (OPTAX, lambda t: tower(lambda: TX)),
    ('`tx` must be a transf', lambda t: facade.OptaxOptimizer(optax.adam)),
    ('lambda: schedule', lambda t: sgd(len).minimize(t.square)),
    ('not override', lambda t: updated(t, mine(Optax, TX, _apply_dense=len))),
    ('initial_accumulator_value.*real', lambda t: t.adagrad('0.1')),
    ('`global_step` must be', lambda t: t.opt.minimize(t.square, 0)),
    (
        '`global_step` must be',
        lambda t: towers(lambda x: tower(t.opt).apply_gradients(t.pairs, 0))(X),
    ),
    ('got a TowerOptimizer.*outside', lambda t: cross_shard(tower(t.opt))),
    ('`input_shard_axes` must be ', lambda t: kept(input_shard_axes=[0.5])),
    ('must be an array', lambda t: sharded(lambda x: ['loss'])),
    ('EstimatorSpec', lambda t: towers(lambda features: 1.0)(X)),
    # Parts.
    ('floating-point', lambda t: averaged(t, t.n)),
    ('`t_list` must be a seq', lambda t: facade.global_norm(3.0)),
    ('hold.* at 1', lambda t: facade.clip_by_global_norm([None, 3], 1.0)),
    ('must be left out', lambda t: tf.one_hot([1], 2, on_value=2.0)),
    ('of `tf.where` is missing', lambda t: tf.where(X > 0, y=X)),
    ('`tf.sqrt` must be given some', lambda t: tf.sqrt(X, 'name', 3)),
]
VALUE_ERRORS = [
    # Variables.
    (r'have the shape \(2,\), got \(8', lambda t: t.w.assign(X)),
    ('value of .n:0. must fit', lambda t: t.n.assign(np.int64(2**40))),
    ("'v'", lambda t: facade.function(t.make)()),
    ("'b:0' must not be read.*func", lambda t: jax.jit(t.times)(X)),
    ("'b:0'.*facade.function", lambda t: jax.jit(t.b.assign)(2.0)),
    ('not be assigned', lambda t: jax.jit(facade.function(t.add))(2.0)),
    ("Two variables have the name 'w'", lambda t: facade.get_values(t.ws)),
    ("'other'", lambda t: restored(t, other=1.0)),
    (r"\['w'\].*build", lambda t: restored(t, w=None)),
    (r"'w:0' must have the shape \(2,\)", lambda t: restored(t, w=X)),
    ("'w:0' must fit float32", lambda t: restored(t, w=np.full(2, 0.1))),
    # Graphs.
    (r'must be \(\), got \(3', lambda t: t.made('global_step', shape=[3])),
    ("_step' must be i", lambda t: t.made('global_step', dtype='int8')),
    (r"\['v', 'a/v'\].*, got \[\]", lambda t: t.lost()),
    (r"got \['v', 'a/v'\].*leave the sc", lambda t: t.lost('', 'a')),
    ("find 'a/v', as its other .*, got 'v'", lambda t: t.strayed()),
    ("find 'a/v', as .* object .*, got 'v'", lambda t: t.strayed(True)),
    ('`scope` must be left out', lambda t: t.arrays_by_scope()),
    ("`initializer` or `shape` of 'v'", lambda t: t.made('v')),
    (
        "initial value of 'v'",
        lambda t: facade.function(
            lambda: t.made('v', initializer=jnp.zeros(3)).value()
        )(),
    ),
    ('must exist in a scope with', lambda t: in_scope(t, 'v', reuse=True)),
    ('`name_or_s', lambda t: facade.variable_scope(None, 'a').__enter__()),
    ('outside `Graph.as_default', lambda t: facade.reset_default_graph()),
    ("Invalid Reduction: 'me", lambda t: facade.Reduction.validate('mean')),
    ('must be an integer sc', lambda t: t.opt.minimize(t.square, t.b)),
    # Losses and gradients.
    ('No gradients.*The loss must read', lambda t: t.opt.minimize(t.free)),
    ('`gate_gra', lambda t: t.opt.minimize(t.square, gate_gradients=3)),
    (r'is not given, got one of \(x\)', lambda t: t.opt.minimize(t.times)),
    (r'or of 2.*\(x\)', lambda t: t.opt.minimize(t.times, None, [t.w, t.b])),
    ('must evaluate the loss', lambda t: t.blind()),
    ('No variables to opt', lambda t: t.opt.minimize(t.square, None, [])),
    ('Use `facade.g', lambda t: t.opt.minimize(lambda: facade.Variable(3.0))),
    (r'loss, \(\), got \(8', lambda t: t.weighted(X)),
    ('`var_list` must hold.*else, got', lambda t: t.over(t.w, 'w')),
    ('int32 for n:0', lambda t: t.over(t.w, t.n)),
    (r"\['w'\] again", lambda t: t.over(t.w, t.b, t.w)),
    ('No variables provided', lambda t: t.apply()),
    ('No gradients provided.*w:0', lambda t: t.apply((None, t.w))),
    ('must hold pairs', lambda t: t.apply(t.w)),
    ('must hold pairs.*in its place', lambda t: t.apply((t.b, 1.0))),
    (r'of w:0 must have the shape \(2,\)', lambda t: t.apply((1.0, t.w))),
    (r"\['b'\] again", lambda t: t.apply((1.0, t.b), (None, t.b))),
    ('at least one', lambda t: facade.gradients([], [t.b])),
    ('each of 1', lambda t: facade.gradients([t.square], t.b, [1, 2])),
    ('`xs` must hold', lambda t: facade.gradients(t.square, [1.0])),
    ('`true_fn` and `false_fn` must', lambda t: t.chosen()),
    # Optimizers.
    ('accumulator_value.*positive', lambda t: t.adagrad(0)),
    ('`learning_rate_power` must', lambda t: facade.FtrlOptimizer(1, 0.1)),
    ('`initial_acc.* must not b', lambda t: facade.FtrlOptimizer(1, 0, -1)),
    ('`weight_decay` ', lambda t: facade.LARSOptimizer(1, weight_decay=-1)),
    ('`momentum` must not be', lambda t: facade.LARSOptimizer(1, -1)),
    ('must be called by `apply_grad', lambda t: t.opt._apply_dense(X, t.w)),
    ('made first', lambda t: updated(t, mine(Adam, _create_slots=nothing))),
    ("'b/First' must be known b", lambda t: updated(t, t.starting())),
    ('optimizer for each', lambda t: t.apply((1.0, of_another_graph('v')))),
    ('group_assignment.*equal size', lambda t: grouped([[0, 1, 2], [3]])),
    ('permutation of', lambda t: grouped([[0, 1], [1, 2], [2, 3]])),
    ('list of lists', lambda t: grouped([0, 1, 2, 3])),
    ('`num_shards` must', lambda t: facade.shard_context(0).__enter__()),
    ('inside a shard con', lambda t: cross_shard(t.opt).minimize(t.square)),
    ('`cross_replica_sum` must be ', lambda t: facade.cross_replica_sum(X)),
    ('the 4 shards of its', apply_on_another_axis),
    (
        'must be per shard',
        lambda t: t.cross(lambda opt, x: opt.minimize(lambda: mean(t.b * x))),
    ),
    (
        'already reduced',
        lambda t: t.cross(lambda opt, x: opt.apply_gradients([(mean(x), t.b)])),
    ),
    ("'b:0' would differ between", lambda t: minimized(t, sgd())),
    ("'n:0' would", lambda t: sharded(lambda x: t.n.assign(jnp.int32(x[0])))),
    # Shards and towers.
    ('dimension 0 that 3 shards', lambda t: kept(3)),
    ('dimension 3', lambda t: kept(input_shard_axes=[3])),
    ('`input_shard_axes` must ha', lambda t: kept(input_shard_axes=[0, 1])),
    ('`outputs_from_a', lambda t: kept(outputs_from_all_shards=[True] * 2)),
    ('`device_assignment` must ', lambda t: kept(device_assignment=[None])),
    ('must not excee', lambda t: facade.shard(lambda: None, num_shards=64)),
    ('slots would be new', lambda t: sharded(lambda x: sgd(), 1)),
    (r'explicit axes.*jax\.device_get', lambda t: t.explicit()),
    ('Invalid Reduction', lambda t: towers(loss_reduction='sum')),
    ('name one device', lambda t: towers(devices=['/gpu:0', '/gpu:1'])),
    (r"divisible .* 4, .*\['x'\]", lambda t: towers()({'x': np.zeros([6, 2])})),
    ('inside an opt', lambda t: in_towers(t, drop_stale(hidden(tower(sgd()))))),
    (
        'an opt',
        lambda t: in_towers(t, drop_stale(hidden(sync_replicas(sgd())))),
    ),
    ('gathered once', lambda t: in_towers(t, tower(hidden(tower(sgd()))))),
    ('Please wrap optimizers with Tower', lambda t: in_towers(t, sgd())),
    # Workers.
    ('must be a variable', lambda t: drop_stale(t.opt).minimize(t.square)),
    ('belongs to a ste', lambda t: sync_replicas(t.opt).minimize(t.square)),
    ('get_or_create_global_step', lambda t: t.without_step()),
    ('come bef', lambda t: drop_stale(t.opt).apply_gradients(t.pairs, t.step)),
    ('`replicas_to_aggregate`', lambda t: sync_replicas(t.opt, 0)),
    ('come together', lambda t: sync_replicas(t.opt, variables_to_average=[])),
    (r'TowerOptimizer\(SyncReplica', lambda t: sync_replicas(tower(t.opt))),
    (
        'threads cannot wait',
        lambda t: facade.function(
            lambda: sync_replicas(t.opt, 2).minimize(t.square, t.step)
        )(),
    ),
    # Parts.
    ('`x` of `piecewi', lambda t: facade.piecewise_constant(None, [], [1])),
    ('one more', lambda t: facade.piecewise_constant(t.step, [10], [1])()),
    ('never changes', lambda t: facade.cosine_decay(0.5, t.step + 1, 10)),
    ('never change again', lambda t: jnp.sqrt(t.rate())),
    ('To log its present value', lambda t: float(t.rate())),
    ('never change ag', lambda t: tf.cond(t.step < 2, t.rate, lambda: 1.0)),
    ('must be a list of at least', lambda t: tf.add_n([])),
    ('`num` of', lambda t: tf.unstack(X, 5)),
    ('must have the sh', lambda t: losses.huber_loss(X, X[:, None])),
    ('shape of', lambda t: losses.softmax_cross_entropy(X[None, :1], X[None])),
    ('shape', lambda t: losses.sparse_softmax_cross_entropy([0, 0], X[None])),
    ('Invalid Red', lambda t: losses.huber_loss(X, X, reduction='mean')),
    ('`weights` of', lambda t: losses.huber_loss(X[None], X[None], [1.0])),
    ('`var` must', lambda t: facade.ExponentialMovingAverage(1).average(t.w)),
    ('`tf.norm` must be the Euclidean', lambda t: tf.norm(X, ord=1)),
    ('`num_or_size_splits` of', lambda t: tf.split(X, [1, 2])),
    ('`condition` of', lambda t: tf.where([True, False], X[None], X[None])),
]
ROWS = [
    (words, error, call)
    for error, rows in {
        AttributeError: ATTRIBUTE_ERRORS,
        NameError: [("mapped axis 'shard'.*facade.shard", apply_unmapped)],
        NotImplementedError: NOT_IMPLEMENTED,
        TypeError: TYPE_ERRORS,
        ValueError: VALUE_ERRORS,
    }.items()
    for words, call in rows
]


class RefusalsTest(graphs.OptimizerTest):

  def setUp(self):
    super().setUp()
    self.n = facade.Variable(7, trainable=False, name='n')
    self.opt = facade.MomentumOptimizer(0.25, 0.5)
    self.opt.minimize(lambda: self.b**2, self.step, [self.w, self.b])
    self.pairs = [(1.0, self.b)]
    self.ws = [self.w, of_another_graph('w')]

  def times(self, x):
    return self.b * x

  def square(self):
    return self.b**2

  def free(self):
    return jnp.float32(1)

  def add(self, x):
    return self.b.assign_add(x)

  def make(self):
    facade.Variable(1.0, name='v')

  def made(self, name, **kwargs):
    return facade.get_variable(name, **kwargs)

  def lost(self, *made_in):
    """Looks up `v` in the loss of an optimizer in a scope."""
    for scope in made_in:
      with facade.variable_scope(scope):
        self.made('v', initializer=1.0)
    with facade.variable_scope('a'):
      self.opt.minimize(
          lambda: self.b * self.made('v', initializer=1.0), var_list=[self.b]
      )

  def strayed(self, enters=False):
    """Looks up a variable of another scope than the others in a loss."""
    self.made('v', initializer=1.0)
    with facade.variable_scope('a') as a:
      self.made('u', initializer=1.0)

      def loss():
        with facade.variable_scope(a if enters else ''):
          return self.b * self.made('u') * self.made('v')

      self.opt.minimize(loss, var_list=[self.b])

  def arrays_by_scope(self):
    facade.add_to_collection('arrays', jnp.ones(2))
    facade.get_collection('arrays', 'a')

  def apply(self, *pairs):
    self.opt.apply_gradients(pairs, self.step)

  def over(self, *variables):
    self.opt.compute_gradients(self.square, variables)

  def weighted(self, grad_loss):
    self.opt.compute_gradients(self.square, [self.b], grad_loss=grad_loss)

  def adagrad(self, value):
    facade.AdagradOptimizer(0.1, initial_accumulator_value=value)

  def blind(self):
    opt = mine(
        facade.GradientDescentOptimizer,
        1.0,
        compute_gradients=lambda *_, **__: [(1.0, self.b)],
    )
    opt.minimize(self.square, return_loss=True)

  def starting(self):
    def apply(opt, grad, var):
      opt._get_or_make_slot(var, grad, 'first', 'First')

    return mine(facade.Optimizer, False, 'T', _apply_dense=apply)

  def chosen(self):
    choose = facade.function(
        lambda x: facade.cond(x, lambda: self.w.value(), lambda: x)
    )
    choose(True)

  def cross(self, step):
    opt = cross_shard(sgd())
    sharded(lambda x: step(opt, x))

  def explicit(self):
    mesh = jax.make_mesh((4,), ('data',))
    x = jax.device_put(X, jax.NamedSharding(mesh, jax.P('data')))
    facade.function(lambda x: facade.shard(lambda x: x, [x], 4))(x)

  def rate(self):
    return facade.exponential_decay(1.0, self.step, 1, 0.5)

  def without_step(self):
    with facade.Graph().as_default():
      w = facade.Variable(1.0)
      drop_stale(self.opt).compute_gradients(lambda: w * 1.0)

  @cases.parameters(ROWS)
  def test_refuses(self, words, error, call):
    before = self.values()

    with self.assertRaisesRegex(error, words):
      call(self)

    after = self.values()
    self.assert_equal({name: after[name] for name in before}, before)
    # What was refused is not in the way of what follows.
    self.opt.minimize(self.square, self.step, [self.b])
    self.assertEqual(int(self.step), 2)

  def test_a_decay_needs_a_step(self):
    for decay in (
        *(facade.cosine_decay, facade.cosine_decay_restarts),
        *(facade.exponential_decay, facade.inverse_time_decay),
        *(facade.natural_exp_decay, facade.polynomial_decay),
    ):
      words = f'`global_step` of `{decay.__name__}` must be given'
      with self.assertRaisesRegex(ValueError, words):
        decay(0.5, None, 10, 0.7)

  def test_a_variable_changes_by_assignment_alone(self):
    for name in ('add', 'sub', 'mul', 'truediv', 'floordiv', 'mod', 'pow'):
      # As in TensorFlow, `w *= 2` is `w = w * 2`: an array.
      expected = getattr(self.w, f'__{name}__')(2.0)
      self.assert_equal(getattr(self.w, f'__i{name}__')(2.0), expected)
    self.assert_holds(self.w, graphs.W)
    with self.assertRaisesRegex(TypeError, "'w:0'.*assign_add"):
      np.add(graphs.W, 1.0, out=self.w)
