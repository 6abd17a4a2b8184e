"""Errors of the façade: the message, and that no variable changes.

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
Base, Adam = tf.train.Optimizer, tf.train.AdamOptimizer
Optax, TX = facade.OptaxOptimizer, optax.sgd(1)


def sharded(computation, num_shards=4, **kwargs):
  return facade.shard(computation, [X], num_shards, **kwargs)


def mean(x):
  return lax.pmean(x[0], 'shard')


def identity(num_shards=4, **kwargs):
  return sharded(lambda x: x, num_shards, **kwargs)


def minimize_on_shards(t, opt):
  """Minimizes on four shards."""
  return sharded(lambda x: opt.minimize(lambda: jnp.mean(t.b * x)))


def towers(
    model_fn=lambda features: tf.estimator.EstimatorSpec(None), **kwargs
):
  return tf.contrib.estimator.replicate_model_fn(
      model_fn, **{'devices': graphs.IN_TURN} | kwargs
  )


def minimize_in_groups(groups):
  opt = cross_shard(sgd(), group_assignment=groups)
  with facade.shard_context(4):
    opt.compute_gradients(lambda: tf.trainable_variables()[1] * 1.0)


def of_another_graph(name):
  with tf.Graph().as_default():
    return tf.Variable(1.0, name=name)


def in_scope(t, name, **scope):
  with tf.variable_scope('a', **scope), tf.variable_scope('inner'):
    tf.get_variable(name, initializer=1.0)


def restore(t, **changes):
  variables = [t.w, t.step]
  saved = jax.tree.map(jnp.zeros_like, facade.get_values(variables))
  saved |= changes
  facade.set_values(
      variables, {k: v for k, v in saved.items() if v is not None}
  )


def average(t, *unsuited):
  tf.train.ExponentialMovingAverage(0.9).apply([t.w, *unsuited])


def apply_on_another_axis(t):
  def of_shard(x):
    with facade.shard_context(4):
      cross_shard(sgd()).apply_gradients([(x, t.b)])

  jax.vmap(of_shard, axis_name='shard')(X)


def apply_unmapped(t):
  with facade.shard_context(4):
    cross_shard(sgd()).apply_gradients([(1.0, t.b)])


def subclassed(base, *args, **methods):
  """Returns an optimizer of a subclass with other methods."""
  return type('Mine', (base,), methods)(*args)


def do_nothing(*_):
  pass


def opaque(opt):
  """Returns an optimizer of a program, in which another is hidden."""
  return subclassed(
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


def minimize_compiled(t, opt):
  """Minimizes in a function."""
  return facade.function(lambda: opt.minimize(lambda: t.b**2))()


OPTAX = 'facade.OptaxOptimizer'

# A call takes the test, which has variables `w` and `b`, an integer `n`, the
# global step `step` and an optimizer `opt` with slots.
ATTRIBUTE_ERRORS = [
    (
        'Call `super',
        lambda t: subclassed(Base, __init__=do_nothing).variables(),
    ),
    ('`tf.layers` is not available.*docs/port', lambda t: tf.layers),
    ('`tf.train.Saver` is not available', lambda t: tf.train.Saver),
]
NOT_IMPLEMENTED = [
    (
        'does not define `_apply_d',
        lambda t: minimize_compiled(t, subclassed(Base, False, 'N')),
    ),
    ('w:0, but.*IndexedSlices', lambda t: t.opt._apply_sparse(None, t.w)),
    ('`shard` cannot b', lambda t: sharded(lambda x: identity())),
    ('`infeed_queue`', lambda t: identity(infeed_queue=1)),
    ('`replicate_model_fn` cann', lambda t: towers(towers())(np.zeros(16))),
]
TYPE_ERRORS = [
    # Variables.
    ("The initial value of 'v'", lambda t: tf.Variable({}, name='v')),
    ('must be int32', lambda t: tf.Variable(0.5, dtype=jnp.int32)),
    (r'dtype float\d+, but must be int32', lambda t: t.n.assign(0.5)),
    ("'w:0' cannot be copied or", lambda t: copy.deepcopy(t.w)),
    ('with slots cannot be deep-copied.*Mom', lambda t: pickle.dumps(t.opt)),
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
    (r'b:0 has the dtype int\d+, .* float32', lambda t: t.apply((3, t.b))),
    (r'n:0 has the dtype float\d+, .* int32', lambda t: t.apply((1.0, t.n))),
    # Optimizers.
    (OPTAX, lambda t: tf.contrib.estimator.clip_gradients_by_norm(TX, 1.0)),
    (OPTAX, lambda t: cross_shard(TX)),
    (OPTAX, lambda t: drop_stale(TX)),
    (OPTAX, lambda t: sync_replicas(TX)),
    (OPTAX, lambda t: tower(lambda: TX)),
    ('`tx` must be an Optax', lambda t: facade.OptaxOptimizer(optax.adam)),
    ('lambda: schedule', lambda t: sgd(len).minimize(t.square)),
    (
        'Override `apply_gradients`',
        lambda t: minimize_compiled(t, subclassed(Optax, TX, _apply_dense=len)),
    ),
    ('initial_accumulator_value.*real', lambda t: t.adagrad('0.1')),
    ('`global_step` must be', lambda t: t.opt.minimize(t.square, 0)),
    (
        '`global_step` must be',
        lambda t: towers(lambda x: tower(t.opt).apply_gradients(t.pairs, 0))(X),
    ),
    (
        'is a TowerOptimizer.*outer optimizer',
        lambda t: cross_shard(tower(t.opt)),
    ),
    ('`input_shard_axes` must be ', lambda t: identity(input_shard_axes=[0.5])),
    ('is not an array', lambda t: sharded(lambda x: ['loss'])),
    ('EstimatorSpec', lambda t: towers(lambda features: 1.0)(X)),
    # Parts.
    ('floating-point', lambda t: average(t, t.n)),
    ('`t_list` must be a list', lambda t: tf.global_norm(3.0)),
    (
        r't_list\[1\]` has the dtype',
        lambda t: tf.clip_by_global_norm([None, 3], 1.0),
    ),
    ('does not support `on_value`', lambda t: tf.one_hot([1], 2, on_value=2.0)),
    (r"where\(condition, x, .* needs \['x'\]", lambda t: tf.where(X > 0, y=X)),
    (
        r"`tf.reduce_mean\(.* needs \['input_tensor'\]",
        lambda t: tf.reduce_mean(),
    ),
    (r'`tf.sqrt\(x, name=None\)`: too many', lambda t: tf.sqrt(X, 'name', 3)),
]
VALUE_ERRORS = [
    # Variables.
    (r'shape \(2,\), but the assigned .* \(8', lambda t: t.w.assign(X)),
    (
        'value of .n:0. .* not fit into int32',
        lambda t: t.n.assign(np.int64(2**40)),
    ),
    ("'v'", lambda t: facade.function(t.make)()),
    ("'b:0' was read.*facade.function", lambda t: jax.jit(t.times)(X)),
    ("'b:0'.*facade.function", lambda t: jax.jit(t.b.assign)(2.0)),
    ('cannot be assigned', lambda t: jax.jit(facade.function(t.add))(2.0)),
    ("Two variables have the name 'w'", lambda t: facade.get_values(t.ws)),
    ("'other'", lambda t: restore(t, other=1.0)),
    (r"\['w'\].*build", lambda t: restore(t, w=None)),
    (r'shape \(2,\), but the value to restore', lambda t: restore(t, w=X)),
    ("'w:0' .* cannot represent", lambda t: restore(t, w=np.full(2, 0.1))),
    # Graphs.
    (
        r'has the shape \(\), but \(3',
        lambda t: t.get('global_step', shape=[3]),
    ),
    (
        "_step' has the dtype int32, but int8",
        lambda t: t.get('global_step', dtype='int8'),
    ),
    (r"\['v', 'a/v'\], but found \[\]", lambda t: t.lost()),
    (r"found \['v', 'a/v'\].*leave the sc", lambda t: t.lost('', 'a')),
    (
        "found 'v', but its other variables.*require 'a/v'",
        lambda t: t.strayed(),
    ),
    ("found 'v', but .* object .* require 'a/v'", lambda t: t.strayed(True)),
    ('cannot be filtered by `scope`', lambda t: t.arrays_by_scope()),
    ("'v' does not exist.*`initializer` and `shape`", lambda t: t.get('v')),
    (
        "initial value of 'v'",
        lambda t: facade.function(
            lambda: t.get('v', initializer=jnp.zeros(3)).value()
        )(),
    ),
    (
        "'a/inner/v' does not exist.*reuse",
        lambda t: in_scope(t, 'v', reuse=True),
    ),
    ('`name_or_s', lambda t: tf.variable_scope(None, 'a').__enter__()),
    ('inside `Graph.as_default', lambda t: tf.reset_default_graph()),
    ("Invalid Reduction: 'me", lambda t: tf.losses.Reduction.validate('mean')),
    ('must be an integer sc', lambda t: t.opt.minimize(t.square, t.b)),
    # Losses and gradients.
    ('No gradients.*does not read any', lambda t: t.opt.minimize(t.free)),
    ('`gate_gra', lambda t: t.opt.minimize(t.square, gate_gradients=3)),
    (
        r'arguments \(x\).*if `var_list` is None',
        lambda t: t.opt.minimize(t.times),
    ),
    (
        r'arguments \(x\).* or 2',
        lambda t: t.opt.minimize(t.times, None, [t.w, t.b]),
    ),
    ('did not evaluate the loss', lambda t: t.blind()),
    ('No variables to opt', lambda t: t.opt.minimize(t.square, None, [])),
    (
        'Create.*`tf.get_variable`',
        lambda t: t.opt.minimize(lambda: tf.Variable(3.0)),
    ),
    (r'shape \(8,\), but the loss has the shape \(\)', lambda t: t.weighted(X)),
    ("`var_list` contains 'w'", lambda t: t.over(t.w, 'w')),
    ('int32 for n:0', lambda t: t.over(t.w, t.n)),
    (r"more than once: \['w'\]", lambda t: t.over(t.w, t.b, t.w)),
    ('No variables provided', lambda t: t.apply()),
    ('No gradients provided.*w:0', lambda t: t.apply((None, t.w))),
    ('is not a pair', lambda t: t.apply(t.w)),
    ('second item of a pair', lambda t: t.apply((t.b, 1.0))),
    (r'of w:0 has the shape \(\), but', lambda t: t.apply((1.0, t.w))),
    (r"more than once: \['b'\]", lambda t: t.apply((1.0, t.b), (None, t.b))),
    ('at least one', lambda t: tf.gradients([], [t.b])),
    ('1 losses and', lambda t: tf.gradients([t.square], t.b, [1, 2])),
    ('`xs` contains 1.0', lambda t: tf.gradients(t.square, [1.0])),
    ('`true_fn` .* but `false_fn`', lambda t: t.chosen()),
    # Optimizers.
    ('accumulator_value.*positive', lambda t: t.adagrad(0)),
    ('`learning_rate_power` must', lambda t: tf.train.FtrlOptimizer(1, 0.1)),
    ('`initial_acc.* must not b', lambda t: tf.train.FtrlOptimizer(1, 0, -1)),
    (
        '`weight_decay` ',
        lambda t: tf.contrib.opt.LARSOptimizer(1, weight_decay=-1),
    ),
    ('`momentum` must not be', lambda t: tf.contrib.opt.LARSOptimizer(1, -1)),
    (
        'called before `_prepare`.*`apply_grad',
        lambda t: t.opt._apply_dense(X, t.w),
    ),
    (
        'not created slots',
        lambda t: minimize_compiled(
            t, subclassed(Adam, _create_slots=do_nothing)
        ),
    ),
    (
        "'b/First' is the traced array",
        lambda t: minimize_compiled(t, t.starting()),
    ),
    ('optimizer per graph', lambda t: t.apply((1.0, of_another_graph('v')))),
    (
        'group_assignment.*equal size',
        lambda t: minimize_in_groups([[0, 1, 2], [3]]),
    ),
    ('permutation of', lambda t: minimize_in_groups([[0, 1], [1, 2], [2, 3]])),
    ('list of lists', lambda t: minimize_in_groups([0, 1, 2, 3])),
    ('`num_shards` must', lambda t: facade.shard_context(0).__enter__()),
    (
        'outside of a shard context',
        lambda t: cross_shard(t.opt).minimize(t.square),
    ),
    (
        '`cross_replica_sum` was used outside',
        lambda t: tf.tpu.cross_replica_sum(X),
    ),
    ('has 8 shards, but .* with 4', apply_on_another_axis),
    (
        'is the same on all shards .* N times too large',
        lambda t: t.cross(lambda opt, x: opt.minimize(lambda: mean(t.b * x))),
    ),
    (
        'already reduced',
        lambda t: t.cross(lambda opt, x: opt.apply_gradients([(mean(x), t.b)])),
    ),
    ("'b:0' would differ between", lambda t: minimize_on_shards(t, sgd())),
    ("'n:0' would", lambda t: sharded(lambda x: t.n.assign(jnp.int32(x[0])))),
    # Shards and towers.
    ('dimension 0 .* by 3 shards', lambda t: identity(3)),
    ('dimension 3', lambda t: identity(input_shard_axes=[3])),
    ('`input_shard_axes` is', lambda t: identity(input_shard_axes=[0, 1])),
    ('`outputs_from_a', lambda t: identity(outputs_from_all_shards=[True] * 2)),
    ('`device_assignment` is', lambda t: identity(device_assignment=[None])),
    ('only 8 devices', lambda t: facade.shard(lambda: None, num_shards=64)),
    ('would create new slots', lambda t: sharded(lambda x: sgd(), 1)),
    (r'explicit axes.*jax\.device_get', lambda t: t.explicit()),
    ('Invalid Reduction', lambda t: towers(loss_reduction='sum')),
    (
        'all towers on one device',
        lambda t: towers(devices=['/gpu:0', '/gpu:1']),
    ),
    (r"divisible .* 4, .*\['x'\]", lambda t: towers()({'x': np.zeros([6, 2])})),
    ('inside an opt', lambda t: in_towers(t, drop_stale(opaque(tower(sgd()))))),
    (
        'an opt',
        lambda t: in_towers(t, drop_stale(opaque(sync_replicas(sgd())))),
    ),
    (
        'Keep only the outer one',
        lambda t: in_towers(t, tower(opaque(tower(sgd())))),
    ),
    ('Please wrap optimizers with Tower', lambda t: in_towers(t, sgd())),
    # Workers.
    (
        'DropS.* needs the global step',
        lambda t: drop_stale(t.opt).minimize(t.square),
    ),
    (
        'SyncR.* needs the global step',
        lambda t: sync_replicas(t.opt).minimize(t.square),
    ),
    ('get_or_create_global_step', lambda t: t.without_step()),
    (
        'before `compute_gradients`',
        lambda t: drop_stale(t.opt).apply_gradients(t.pairs, t.step),
    ),
    ('`replicas_to_aggregate`', lambda t: sync_replicas(t.opt, 0)),
    (
        'Pass both or neither',
        lambda t: sync_replicas(t.opt, variables_to_average=[]),
    ),
    (r'TowerOptimizer\(SyncReplica', lambda t: sync_replicas(tower(t.opt))),
    (
        'threads cannot wait',
        lambda t: facade.function(
            lambda: sync_replicas(t.opt, 2).minimize(t.square, t.step)
        )(),
    ),
    # Parts.
    ('`x` of `piecewi', lambda t: tf.train.piecewise_constant(None, [], [1])),
    (
        '1 values for 1 boundaries',
        lambda t: tf.train.piecewise_constant(t.step, [10], [1])(),
    ),
    ('never changes', lambda t: tf.train.cosine_decay(0.5, t.step + 1, 10)),
    ('never change again', lambda t: jnp.sqrt(t.rate())),
    ('To log its present value', lambda t: float(t.rate())),
    ('never change ag', lambda t: tf.cond(t.step < 2, t.rate, lambda: 1.0)),
    ('must be a list of at least', lambda t: tf.add_n([])),
    ('`num` of', lambda t: tf.unstack(X, 5)),
    ('predictions require', lambda t: losses.huber_loss(X, X[:, None])),
    ('shape of', lambda t: losses.softmax_cross_entropy(X[None, :1], X[None])),
    ('shape', lambda t: losses.sparse_softmax_cross_entropy([0, 0], X[None])),
    ('Invalid Red', lambda t: losses.huber_loss(X, X, reduction='mean')),
    ('`weights` of', lambda t: losses.huber_loss(X[None], X[None], [1.0])),
    (
        'There is no average',
        lambda t: tf.train.ExponentialMovingAverage(1).average(t.w),
    ),
    ('only the Euclidean norm', lambda t: tf.norm(X, ord=1)),
    ('`num_or_size_splits` of', lambda t: tf.split(X, [1, 2])),
    (
        'a condition of shape.*Reshape',
        lambda t: tf.where([True, False], X[None], X[None]),
    ),
]
ROWS = [
    (words, error, call)
    for error, rows in {
        AttributeError: ATTRIBUTE_ERRORS,
        NameError: [
            ("axis 'shard' is not bound.*facade.shard", apply_unmapped)
        ],
        NotImplementedError: NOT_IMPLEMENTED,
        TypeError: TYPE_ERRORS,
        ValueError: VALUE_ERRORS,
    }.items()
    for words, call in rows
]


class RefusalsTest(graphs.OptimizerTest):

  def setUp(self):
    super().setUp()
    self.n = tf.Variable(7, trainable=False, name='n')
    self.opt = tf.train.MomentumOptimizer(0.25, 0.5)
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
    tf.Variable(1.0, name='v')

  def get(self, name, **kwargs):
    return tf.get_variable(name, **kwargs)

  def lost(self, *made_in):
    """Looks up `v` in the loss of an optimizer in a scope."""
    for scope in made_in:
      with tf.variable_scope(scope):
        self.get('v', initializer=1.0)
    with tf.variable_scope('a'):
      self.opt.minimize(
          lambda: self.b * self.get('v', initializer=1.0), var_list=[self.b]
      )

  def strayed(self, enters=False):
    """Looks up a variable of another scope than the others in a loss."""
    self.get('v', initializer=1.0)
    with tf.variable_scope('a') as a:
      self.get('u', initializer=1.0)

      def loss():
        with tf.variable_scope(a if enters else ''):
          return self.b * self.get('u') * self.get('v')

      self.opt.minimize(loss, var_list=[self.b])

  def arrays_by_scope(self):
    tf.add_to_collection('arrays', jnp.ones(2))
    tf.get_collection('arrays', 'a')

  def apply(self, *pairs):
    self.opt.apply_gradients(pairs, self.step)

  def over(self, *variables):
    self.opt.compute_gradients(self.square, variables)

  def weighted(self, grad_loss):
    self.opt.compute_gradients(self.square, [self.b], grad_loss=grad_loss)

  def adagrad(self, value):
    tf.train.AdagradOptimizer(0.1, initial_accumulator_value=value)

  def blind(self):
    opt = subclassed(
        tf.train.GradientDescentOptimizer,
        1.0,
        compute_gradients=lambda *_, **__: [(1.0, self.b)],
    )
    opt.minimize(self.square, return_loss=True)

  def starting(self):
    def apply(opt, grad, var):
      opt._get_or_make_slot(var, grad, 'first', 'First')

    return subclassed(tf.train.Optimizer, False, 'T', _apply_dense=apply)

  def chosen(self):
    choose = facade.function(
        lambda x: tf.cond(x, lambda: self.w.value(), lambda: x)
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
    return tf.train.exponential_decay(1.0, self.step, 1, 0.5)

  def without_step(self):
    with tf.Graph().as_default():
      w = tf.Variable(1.0)
      drop_stale(self.opt).compute_gradients(lambda: w * 1.0)

  @cases.parameters(ROWS)
  def test_raises(self, words, error, call):
    before = self.values()

    with self.assertRaisesRegex(error, words):
      call(self)

    after = self.values()
    self.assert_equal({name: after[name] for name in before}, before)
    # Training continues after the error.
    self.opt.minimize(self.square, self.step, [self.b])
    self.assertEqual(int(self.step), 2)

  def test_a_decay_needs_a_step(self):
    for decay in (
        *(tf.train.cosine_decay, tf.train.cosine_decay_restarts),
        *(tf.train.exponential_decay, tf.train.inverse_time_decay),
        *(tf.train.natural_exp_decay, tf.train.polynomial_decay),
    ):
      words = f'`global_step` of `{decay.__name__}` is None'
      with self.assertRaisesRegex(ValueError, words):
        decay(0.5, None, 10, 0.7)

  def test_only_assignments_change_a_variable(self):
    for name in ('add', 'sub', 'mul', 'truediv', 'floordiv', 'mod', 'pow'):
      # As in TensorFlow, `w *= 2` is `w = w * 2`: an array.
      expected = getattr(self.w, f'__{name}__')(2.0)
      self.assert_equal(getattr(self.w, f'__i{name}__')(2.0), expected)
    self.assert_holds(self.w, graphs.W)
    with self.assertRaisesRegex(TypeError, "'w:0'.*assign_add"):
      np.add(graphs.W, 1.0, out=self.w)
