"""What every gate keeps; gates inside gates are in nested_gates_test."""

import functools

from absl.testing import parameterized
import chex
import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
import numpy as np
import optax
import pytest

import cases
import modes
import shard_transforms as st
from shard_transforms._src.base import axes as axes_lib

AXIS = modes.AXIS
KINDS = AxisType.Auto, AxisType.Explicit
# Around an inner transformation, over the axis.
WEIGHING = {
    'drop_stale': functools.partial(st.drop_stale, 9, axis_name=AXIS),
    'guard': functools.partial(st.guard, axis_name=AXIS, on_bad='exclude'),
    'tower_reduce': functools.partial(st.tower_reduce, 2, axis_name=AXIS),
}
# Without an axis.
GATES = {
    'drop_stale': lambda inner: st.drop_stale(0, inner),
    'tower_reduce': lambda inner: st.tower_reduce(2, inner),
}
ALL_GATES = {**GATES, 'guard': st.guard}


@functools.partial(jax.jit, static_argnums=0)
def _pass_or_stop(inner, params):
  """Returns (updates, inner state) of a step left out, and of one taken."""
  found = {}
  for name, gate in ALL_GATES.items():
    tx = gate(inner)
    state = tx.init(params)
    late = -1 if name == 'drop_stale' else 0
    bad = params
    if name == 'guard':
      bad = jax.tree.map(lambda x: x * jnp.nan, params)
    stopped = tx.update(bad, state, params, local_step=late)
    passed = tx.update(params, stopped[1], params, local_step=0)
    found[name] = [(x, state.inner_state) for x, state in (stopped, passed)]
  return found


class GateTest(parameterized.TestCase):

  def test_keeps_every_bit_of_the_state_when_closed(self):
    odd = {
        'zero': jnp.array([-0.0, 0.0]),
        'nan': jnp.array([0x7FC00123, 0xFFC00001], jnp.uint32).view(
            jnp.float32
        ),
        'infinite': jnp.array([jnp.inf, -jnp.inf]),
        'int': jnp.array([7, -7]),
        'bool': jnp.array([True]),
        'half': jnp.array([1e-7, -0.0], jnp.bfloat16),
        'key': jax.random.key(3),
        'none': None,
    }

    def update(updates, state, params=None):
      del params
      return updates, jax.tree.map(_changed, state)

    inner = optax.GradientTransformation(lambda _: odd, update)

    found = _pass_or_stop(inner, np.ones(3, 'f'))

    after = _bits(jax.tree.map(_changed, odd))
    for name, ((_, kept), (_, changed)) in found.items():
      with self.subTest(name):
        chex.assert_trees_all_equal(_bits(kept), _bits(odd), strict=True)
        chex.assert_trees_all_equal(_bits(changed), after, strict=True)

  def test_takes_an_inner_state_in_64_bits_of_numpy(self):
    self.enterContext(jax.enable_x64(False))
    tx = GATES['drop_stale'](optax.ema(0.9))
    params = jnp.ones(3)
    state = tx.init(params)
    wide = {'f': np.float64, 'i': np.int64}
    given = state._replace(
        inner_state=jax.tree.map(
            lambda x: np.asarray(x, wide[x.dtype.kind]), state.inner_state
        )
    )

    found = tx.update(params, given, local_step=0)

    expected = tx.update(params, state, local_step=0)
    chex.assert_trees_all_equal(found, expected, strict=True)

  def test_a_window_leaves_a_state_in_numpy_as_it_is(self):
    tx = GATES['tower_reduce'](optax.adam(0.1))
    params = jnp.ones(3)
    state = jax.tree.map(np.array, tx.init(params))

    _, result = tx.update(params, state, weight=2.0)

    chex.assert_trees_all_equal(state, tx.init(params))
    np.testing.assert_array_equal(result.total_weight, 2.0)

  def test_gives_zeros_like_the_inner_updates_when_closed(self):
    params = {'w': np.ones((3, 5), 'f'), 'h': np.ones(4, 'bfloat16'), 'n': None}
    to_half = optax.stateless(lambda u, _: optax.tree.cast(u, jnp.float16))

    found = _pass_or_stop(to_half, params)

    ones = jax.tree.map(lambda x: np.ones(x.shape, 'float16'), params)
    zeros = jax.tree.map(np.zeros_like, ones)
    for name, ((stopped, _), (passed, _)) in found.items():
      with self.subTest(name):
        chex.assert_trees_all_equal(stopped, zeros, strict=True)
        chex.assert_trees_all_equal(passed, ones, strict=True)

  def test_a_window_sends_nothing_outside_of_its_branch(self):
    mean = st.cross_shard_mean(AXIS)

    are_conditional, program = self.traced(GATES['tower_reduce'](mean))

    self.assertEqual(are_conditional, [True])
    self.assertIn(' while[', program)
    self.assertNotIn(' cond[', program)

  @cases.parameters('drop_stale', 'guard', 'nested')
  def test_gates_select_without_a_branch(self, name):
    mean = optax.chain(st.cross_shard_mean(AXIS), optax.sgd(0.1))
    guarded = st.guard(mean, AXIS, on_bad='exclude')
    tx = {
        'drop_stale': st.drop_stale(0, mean, axis_name=AXIS),
        'guard': guarded,
        'nested': st.drop_stale(0, guarded, axis_name=AXIS),
    }[name]

    are_conditional, program = self.traced(tx)

    # The updates, their total weight, and the numbers that each gate needs.
    self.assertEqual(are_conditional, [False] * (4 if name == 'nested' else 3))
    self.assertNotRegex(program, r' (while|cond)\[')

  def traced(self, tx):
    """Returns whether each collective is in a branch, and the program."""

    def shard(step, x):
      like = st.per_shard(jnp.zeros(3), AXIS)
      is_window = isinstance(jax.eval_shape(tx.init, like), st.TowerReduceState)
      state = tx.init(like if is_window else jnp.zeros(3))
      return tx.update(x, state, local_step=step)[0]

    mapped = modes.map_shards('shard_map', shard)
    given = jnp.int32(0), jnp.ones((8, 3))
    report = st.monitoring.communication_report(mapped, *given)
    program = str(jax.make_jaxpr(mapped)(*given))
    return [sent.conditional for sent in report.collectives], program

  @cases.parameters(*GATES)
  def test_what_only_inner_makes_the_same_is_typed_as_varying(self, gate):
    # The state differs between shards until `inner` has run once.
    average = optax.GradientTransformation(
        lambda params: params, lambda u, _, params: (u, lax.pmean(u, AXIS))
    )
    tx = GATES[gate](average)

    def shard(params, x):
      own = st.per_shard(params, AXIS)
      _, state = tx.update(x, tx.init(own), local_step=0)
      self.assertEqual(axes_lib.varying_axes(state.inner_state), {AXIS})
      return x

    mapped = modes.map_shards('shard_map', shard)
    jax.eval_shape(mapped, jnp.ones(3), jnp.ones((8, 3)))

  @cases.parameters(('drop_stale', KINDS[0]), ('tower_reduce', KINDS[1]))
  def test_works_where_a_mesh_axis_is_not_mapped(self, gate, kind):
    mesh = jax.make_mesh((2, 4), ('data', 'model'), (kind,) * 2)
    mean = st.cross_shard_mean('data')
    tx = GATES[gate](optax.chain(mean, optax.trace(0.5)))

    def shard(params, x):
      grad = st.value_and_grad(lambda w: jnp.sum(w * x[0]), 'data')
      _, grads = grad(params)
      own = st.per_shard(params, 'data')
      state = tx.init(own if gate == 'tower_reduce' else params)
      state = state._replace(inner_state=tx.init(params).inner_state)
      late = -1 if gate == 'drop_stale' else 0
      stopped, state = tx.update(grads, state, local_step=late)
      passed, _ = tx.update(grads, state, local_step=0)
      return stopped, passed

    specs = dict(in_specs=(P(), P('data')), out_specs=P())
    mapped = jax.shard_map(shard, mesh=mesh, axis_names={'data'}, **specs)

    def put(x, *spec):
      return jax.device_put(x, jax.NamedSharding(mesh, P(*spec)))

    x = np.arange(16, dtype=np.float32).reshape(2, 8)
    given = put(np.ones(8, np.float32), 'model'), put(x, 'data', 'model')

    stopped, passed = jax.jit(mapped)(*given)

    np.testing.assert_array_equal(stopped, np.zeros(8))
    np.testing.assert_array_equal(passed, x.mean(0))


class EarlySelectionTest(parameterized.TestCase):
  """Each leaf of a state is selected where `inner` makes it."""

  def steps(self, gate, inner, params):
    """Returns (updates, inner state) of a skipped step, and of one taken."""
    return _pass_or_stop(inner, params)[gate]

  @cases.parameters('drop_stale', 'guard')
  def test_what_follows_a_moment_reads_the_one_that_is_kept(self, gate):
    seen = []

    def update(updates, state, params=None):
      del params
      after = jax.tree.map(lambda s, u: s + u, state, updates)
      jax.debug.callback(lambda x: seen.append(np.array(x)), after + 1)
      return updates, after

    inner = optax.GradientTransformation(lambda params: 2 * params, update)
    tx = ALL_GATES[gate](inner)

    @jax.jit
    def step(updates, local_step):
      return tx.update(updates, tx.init(jnp.ones(3)), local_step=local_step)

    bad = jnp.nan if gate == 'guard' else 1.0
    step(jnp.full(3, bad), -1 if gate == 'drop_stale' else 0)
    step(jnp.ones(3), 0)
    jax.effects_barrier()

    np.testing.assert_array_equal(seen, [[3.0] * 3, [4.0] * 3])

  def test_what_follows_a_moment_of_16_bits_reads_all_of_its_bits(self):
    # In 16 bits, the second moment of the last element is zero.
    grads = np.tile(np.float16([1, 1e-1, 1e-3]), (8, 1))
    params = np.ones(3, np.float16)
    mean = st.cross_shard_mean('data')
    adam = optax.chain(mean, optax.clip_by_global_norm(0.5), optax.adam(0.1))

    def update_of(tx):
      def shard(params, grads):
        return tx.update(grads, tx.init(params), params)[0]

      return modes.map_shards('shard_map', shard)(params, grads)

    guarded = update_of(st.guard(adam, 'data'))

    np.testing.assert_array_equal(guarded, update_of(adam))

  @cases.parameters('drop_stale', 'guard')
  def test_one_array_may_be_several_leaves(self, gate):
    inner = optax.GradientTransformation(
        lambda params: {'a': params, 'b': 3 * params, 'c': params},
        lambda u, state, params=None: (
            u,
            dict.fromkeys('ab', 2 * u) | {'c': state['c']},
        ),
    )

    stopped, passed = self.steps(gate, inner, np.float32([2, 5]))

    x = np.float32([2, 5])
    before, after = {'a': x, 'b': 3 * x, 'c': x}, {
        'a': 2 * x,
        'b': 2 * x,
        'c': x,
    }
    chex.assert_trees_all_equal(stopped[1], before, strict=True)
    chex.assert_trees_all_equal(passed[1], after, strict=True)

  @cases.parameters('drop_stale', 'guard')
  def test_constants_keep_their_dtypes(self, gate):
    half = jnp.bfloat16
    inner = optax.GradientTransformation(
        lambda _: {'first': jnp.array(True), 'half': jnp.ones((), half)},
        lambda *_: (
            jnp.ones((), half),
            {'first': jnp.array(False), 'half': jnp.zeros((), half)},
        ),
    )

    (stopped, kept), (passed, changed) = self.steps(
        gate, inner, np.ones((), half)
    )

    one, zero = np.ones((), half), np.zeros((), half)
    found = stopped, passed, kept, changed
    expected = zero, one, {'first': np.array(True), 'half': one}
    expected += ({'first': np.array(False), 'half': zero},)
    chex.assert_trees_all_equal(found, expected, strict=True)

  @cases.product(gate=('drop_stale', 'guard'), is_bad=(False, True))
  def test_keeps_what_inner_calls(self, gate, is_bad):
    @jax.custom_jvp
    def own(x):
      return x * x

    # Wrong on purpose, so that it is seen.
    own.defjvp(lambda x, dx: (own(*x), 7 * dx[0]))

    @jax.jit
    def average(trace, u):
      return 0.5 * trace + own(u)

    def update(updates, state, params=None):
      del params
      after = average(state, updates)
      looped, _ = lax.scan(lambda x, _: (2 * x, None), after, length=3)
      return looped + updates**2, after

    inner = optax.GradientTransformation(jnp.zeros_like, update)
    tx = ALL_GATES[gate](inner)

    def loss(grads, local_step):
      updates, state = tx.update(grads, tx.init(grads), local_step=local_step)
      return jnp.sum(updates) + jnp.sum(state.inner_state)

    late, x = 0, np.float32([2, 3])
    if is_bad and gate == 'guard':
      x[0] = np.inf
    elif is_bad:
      late = -1
    found = jax.jit(jax.value_and_grad(loss))(x, late)

    # Of 9 x^2, with a derivative of its own, and of x^2.
    expected = (0, [0, 0]) if is_bad else (10 * 13, [63 + 4, 63 + 6])
    np.testing.assert_array_equal(found[0], expected[0])
    np.testing.assert_array_equal(found[1], expected[1])

  @cases.parameters('drop_stale', 'guard')
  def test_leaks_no_tracer(self, gate):
    tx = ALL_GATES[gate](optax.adam(0.1))
    step = jax.jit(lambda x: tx.update(x, tx.init(x), x, local_step=0))

    with jax.checking_leaks():
      jax.eval_shape(step, jnp.ones(3))


def _changed(leaf):
  if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
    return jax.random.fold_in(leaf, 1)
  return ~leaf if leaf.dtype == bool else leaf + 1


def _bits(tree):
  """Returns the bits of each leaf, so that a NaN equals itself."""

  def bits(leaf):
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
      leaf = jax.random.key_data(leaf)
    return np.asarray(leaf).view(f'u{leaf.dtype.itemsize}')

  return jax.tree.map(bits, tree)


class StateTest(parameterized.TestCase):

  @cases.parameters(
      (
          *('drop_stale', {'mu': jnp.ones(3, 'bfloat16')}),
          r'float\d+\[3\] to bfloat16\[3\]',
      ),
      (
          'one tower',
          {'mu': jnp.ones(4)},
          r" at .*\['mu'\] from .*\d\[3\] to .*\d\[4\]\. Pass .* the shapes",
      ),
      (
          *('drop_stale', {'mu': jnp.ones(3), 'n': jnp.ones(())}),
          r'int32\[\] to float\d+\[\]',
      ),
      (
          'tower_reduce',
          {'nu': jnp.ones(3)},
          'tree .* from .*mu.* to .*nu.*`.*masked`',
      ),
  )
  def test_refuses_an_inner_that_changes_its_state(self, gate, after, words):
    inner = optax.GradientTransformation(
        lambda params: {'mu': params, 'n': jnp.int32(0)},
        lambda u, state, params=None: (u, {'n': state['n']} | after),
    )

    one_tower = functools.partial(st.tower_reduce, 1)
    tx = {**ALL_GATES, 'one tower': one_tower}[gate](inner)
    message = f'The inner transformation changed .*{words}'
    with self.assertRaisesRegex(ValueError, message):
      tx.update(jnp.ones(3), tx.init(jnp.ones(3)), local_step=0)


class MixedPrecisionTest(parameterized.TestCase):
  """float32 gradients of bfloat16 parameters, as optimizers alone take them."""

  def setUp(self):
    super().setUp()
    self.params = np.array([1.0, 2.0, 3.0], jnp.bfloat16)
    self.grads = np.float32([[x, 1 / 3, 1e-3] for x in (1.0, 0.7, -2.0)])

  def train(self, tx, grads, local_steps=0):
    """Returns the parameters and the state after a call for each gradient."""

    @jax.jit
    def step(carry, now):
      params, state = carry
      grad, local_step = now
      updates, state = tx.update(grad, state, params, local_step=local_step)
      return optax.apply_updates(params, updates), state

    # The first step may widen the state.
    local_steps = np.broadcast_to(local_steps, len(grads))
    carry = self.params, tx.init(self.params)
    for now in zip(grads, local_steps, strict=True):
      carry = step(carry, now)
    return carry

  def assert_trains_alike(self, params, state, grads, rtol=1e-6):
    adam = optax.with_extra_args_support(optax.adam(0.1))
    expected = self.train(adam, grads)
    found = params, state
    chex.assert_trees_all_equal_dtypes(found, expected)
    chex.assert_trees_all_close(found, expected, rtol=rtol)

  @cases.parameters('drop_stale', 'guard')
  def test_trains_with_the_dtypes_of_the_inner_state(self, gate):
    tx = ALL_GATES[gate](optax.adam(0.1))
    bad = np.full(3, np.nan, np.float32)
    grads = [bad, self.grads[0], bad, self.grads[2]]

    params, state = self.train(tx, grads, [-1, 1, -1, 1])

    self.assert_trains_alike(params, state.inner_state, self.grads[::2])

  def test_towers_train_with_the_dtypes_of_the_inner_state(self):
    tx = st.tower_reduce(2, optax.adam(0.1))

    params, state = self.train(tx, np.repeat(self.grads, 2, axis=0))

    self.assert_trains_alike(params, state.inner_state, self.grads)

  def test_local_updates_train_with_the_dtypes_of_the_inner_state(self):
    outer = optax.chain(st.cross_shard_mean(AXIS), optax.sgd(1.0))
    tx = st.contrib.local_updates(optax.adam(0.1), outer, AXIS, every=2)
    tx = optax.with_extra_args_support(tx)

    mapped = jax.jit(jax.vmap(lambda x: self.train(tx, x), axis_name=AXIS))
    grads = np.stack([self.grads[0]] * 4)
    params, state = jax.device_get(mapped(np.stack([grads] * 2)))

    state = jax.tree.map(lambda x: x[0, 0], state.inner_state)
    self.assert_trains_alike(params[0], state, grads, rtol=1e-2)


class DerivativeTest(parameterized.TestCase):

  @cases.parameters('drop_stale', 'guard')
  def test_gates_are_differentiated(self, gate):
    tx = ALL_GATES[gate](optax.adam(0.5))
    params = np.float32([1, 2])

    def after(params, grads, late):
      state = tx.init(params)
      updates, _ = tx.update(grads, state, params, local_step=-late)
      return jnp.sum(params * (1 + updates))

    derivatives = jax.jit(jax.grad(after, (0, 1)))

    # A skipped step has updates of zero, and no derivative that is NaN.
    bad = np.float32([1, np.nan])
    found = derivatives(params, bad, int(gate == 'drop_stale'))
    np.testing.assert_array_equal(found, [[1, 1], [0, 0]])
    found = derivatives(params, np.float32([1, 3]), 0)
    np.testing.assert_allclose(found[0], [0.5, 0.5], rtol=1e-4)

  def test_towers_are_differentiated(self):
    mean = st.cross_shard_mean('data')
    inner = optax.chain(mean, optax.sgd(0.5))
    tx = st.tower_reduce(2, inner, axis_name='data')

    @functools.partial(jax.vmap, axis_size=1, axis_name='data', in_axes=None)
    def shard(grads):
      params = jnp.ones(2)
      state = tx.init(params)
      for _ in range(2):
        updates, state = jax.checkpoint(tx.update)(grads, state, params)
        params += updates
      return params[0]

    def loss(grads):
      return shard(grads)[0]

    @jax.jit
    def derivatives(x):
      return jax.jvp(loss, (x,), (x,))[1], jax.grad(loss)(x)

    tangent, grad = derivatives(np.ones(2, np.float32))
    self.assertEqual(tangent, -0.5)
    np.testing.assert_array_equal(grad, [-0.5, 0.0])

  def test_towers_leak_no_tracer(self):
    tx = st.tower_reduce(2, optax.sgd(0.5), axis_name='data')
    step = jax.vmap(lambda x: tx.update(x, tx.init(x), x)[0], axis_name='data')

    with jax.checking_leaks():
      jax.eval_shape(jax.jit(step), jnp.ones((2, 3)))

  @cases.parameters(False, True)
  def test_towers_are_differentiated_by_all_that_inner_reads(self, closes_over):
    def scaled(known):
      def update(updates, state, params=None, *, scale):
        _, key = state
        scale = known if closes_over else scale
        return scale * updates * params, (updates + params, key)

      return optax.GradientTransformationExtraArgs(
          lambda params: (params, jax.random.key(0)), update
      )

    @jax.jit
    def after_two(grad, param, scale):
      tx = st.tower_reduce(2, scaled(scale))
      state = tx.init(param)
      for _ in range(2):
        updates, state = tx.update(grad, state, param, scale=scale)
        param += updates
      return param + 10 * state.inner_state[0]

    given = 3.0, 5.0, 7.0
    found = jax.grad(after_two, argnums=(0, 1, 2))(*given)

    # Of param + scale * grad * param + 10 * (grad + param).
    self.assertEqual(found, (5 * 7 + 10, 1 + 3 * 7 + 10, 3 * 5))
    names = str(jax.make_jaxpr(after_two)(*given))
    # JAX could not differentiate a loop by what it closes over.
    loops, branches = ' while[' in names, ' cond[' in names
    self.assertEqual((loops, branches), (not closes_over, closes_over))


def _objective(params):
  return jnp.sum((params - 1) ** 2)


VALUE_FNS = {
    'params': _objective,
    'any keywords': lambda params, **kwargs: _objective(params),
    'a batch': lambda params, batch: _objective(params) + 0 * jnp.sum(batch),
    'a weight': lambda params, weight: weight * _objective(params),
}


class LineSearchTest(parameterized.TestCase):
  """Optax refuses extra arguments that `value_fn` does not name."""

  def setUp(self):
    super().setUp()
    self.params = jnp.zeros(3)
    value, self.grad = jax.value_and_grad(_objective)(self.params)
    self.given = {'value': value, 'grad': self.grad, 'value_fn': _objective}

  def test_value_fn_takes_what_it_names(self):
    search = optax.chain(
        optax.sgd(2.0), optax.scale_by_backtracking_linesearch(3)
    )
    late = st.drop_stale(0, search)
    weight, step = {'weight': 1.0}, {'local_step': 0}
    rows = {
        'any keywords': (st.guard(search), weight),
        'a batch': (late, weight | step | {'batch': jnp.ones(2)}),
        'a weight': (st.tower_reduce(1, search), weight),
        'params': (st.tower_reduce(1, late), weight | step),
    }

    def update(tx, **given):
      given = self.given | given
      return tx.update(self.grad, tx.init(self.params), self.params, **given)[0]

    @jax.jit
    def updates():
      found = {
          name: update(tx, value_fn=VALUE_FNS[name], **given)
          for name, (tx, given) in rows.items()
      }
      return found, update(search)

    found, expected = updates()
    for name, x in found.items():
      np.testing.assert_allclose(x, expected, rtol=1e-6, err_msg=name)

  def test_an_argument_that_nothing_takes_is_refused(self):
    tx = st.guard(optax.lbfgs())

    def update():
      state = tx.init(self.params)
      return tx.update(self.grad, state, self.params, **self.given, tokens=3)

    with self.assertRaisesRegex(TypeError, 'not consumed.*tokens'):
      jax.eval_shape(update)


class ExplicitMeshTest(parameterized.TestCase):

  @pytest.mark.thorough
  def test_an_inner_that_compares_parameters_runs_without_jit(self):
    inner = optax.stateless(
        lambda updates, params: jnp.where(params == updates, updates, 0.0)
    )
    mesh = jax.make_mesh((8,), ('data',), (AxisType.Explicit,))
    with jax.set_mesh(mesh):
      params = jnp.ones((2, 8), out_sharding=P(None, 'data'))
      # `drop_stale` selects as `guard` does.
      for name in 'guard', 'tower_reduce':
        tx = ALL_GATES[name](inner)

        updates, _ = tx.update(params, tx.init(params), params, local_step=0)

        self.assertEqual(jax.typeof(updates).sharding.spec, P(None, 'data'))


class WeightTest(parameterized.TestCase):
  """Gates that leave out shards require that `inner` uses the weight."""

  def update(self, gates, inners, mode='vmap', params=None):
    """Returns the last updates of two calls of each gate around each."""

    def run(tx, params, x):
      updates = jax.tree.map(lambda p: x * p, params)
      updates = st.per_shard(updates, AXIS)
      state, given = tx.init(params), {'local_step': 0, 'weight': 1.0}
      for _ in range(2):
        found, state = tx.update(updates, state, params, **given)
      return found

    def fn(params, x):
      txs = [WEIGHING[gate](inner=x) for gate in gates for x in inners]
      return [run(tx, params, x) for tx in txs]

    params = {'w': np.ones(3, 'f')} if params is None else params
    return modes.map_shards(mode, fn)(params, np.arange(8, dtype='f'))

  def test_parameters_may_have_what_is_no_array(self):
    mean = st.cross_shard_mean(AXIS)

    @jax.jit
    @functools.partial(jax.vmap, axis_name=AXIS)
    def updates(x):
      params, found = {'w': x, 'activation': jnp.tanh}, []
      for gate in 'drop_stale', 'tower_reduce':
        tx = WEIGHING[gate](inner=mean)
        state = tx.init(x)
        for _ in range(2):
          last, state = tx.update(x, state, params, weight=x, local_step=0)
        found.append(last)
      return found

    np.testing.assert_allclose(updates(np.float32([1, 3])), [[2.5, 2.5]] * 2)

  def test_the_word_of_the_user_is_a_boolean(self):
    message = "`assume_weighted` must be a boolean, got 'yes'"
    with self.assertRaisesRegex(TypeError, message):
      WEIGHING['guard'](inner=optax.identity(), assume_weighted='yes')

  @cases.parameters('drop_stale', 'tower_reduce')
  def test_refuses_what_does_not_hand_the_weight_on(self, gate):
    mean = optax.chain(st.cross_shard_mean(AXIS), optax.sgd(0.1))
    inner = optax.contrib.split_real_and_imaginary(mean)

    with self.assertRaisesRegex(ValueError, 'forward extra arguments'):
      self.update([gate], [inner])

  @cases.parameters('jit', 'guard', 'partition', 'cond', 'scan')
  def test_refuses_a_reduction_by_hand_within(self, within):
    pmean = functools.partial(lax.pmean, axis_name=AXIS)
    by_hand = optax.stateless(lambda updates, _: pmean(updates))

    def update(updates, state, params=None, **extra_args):
      del params, extra_args
      if within == 'jit':
        updates = jax.jit(lambda u, _: pmean(u))(updates, 0)
      elif within == 'cond':
        updates = lax.cond(True, pmean, lambda u: u, updates)
      else:
        updates, _ = lax.scan(lambda u, _: (pmean(u), None), updates, length=2)
      return updates, state

    mean = st.cross_shard_mean(AXIS)
    labels = {'w': 'hand', 'v': 'own'}
    inner = {
        'guard': st.guard(by_hand, AXIS),
        'partition': optax.partition({'own': mean, 'hand': by_hand}, labels),
    }.get(within, optax.GradientTransformationExtraArgs(mean.init, update))
    params = dict.fromkeys(labels, jnp.ones(3))

    with self.assertRaisesRegex(ValueError, 'must use .* `weight`'):
      self.update(['guard'], [inner], params=params)

  def test_what_is_no_number_may_go_through(self):
    mean = st.cross_shard_mean(AXIS)
    tx = st.drop_stale(1, mean, axis_name=AXIS)

    def fn(x):
      updates = {'w': x, 'steps': np.zeros(3, jax.dtypes.float0)}
      return tx.update(updates, tx.init(updates), local_step=0)[0]['w']

    mapped = jax.jit(jax.vmap(fn, axis_name=AXIS))

    np.testing.assert_array_equal(mapped(np.float32([0, 1, 2])), [1.0] * 3)

  def test_finds_the_weight_or_nothing_that_needs_it(self):
    mean = st.cross_shard_mean(AXIS)

    def scaled(updates, state, params=None, **extra_args):
      # A sum of what is the same on all shards.
      updates, state = mean.update(updates, state, params, **extra_args)
      lr = lax.pmean(jnp.sum(params['w']), AXIS)
      return jax.tree.map(lambda u: lr * u, updates), state

    def compiled(updates, state, params=None, *, weight, **extra_args):
      del params, extra_args
      run = jax.jit(lambda u, w: mean.update(u, state, weight=w))
      return run(updates, weight)

    inners = [
        optax.GradientTransformationExtraArgs(mean.init, update)
        for update in (scaled, compiled)
    ]
    gates, names = ('guard', 'tower_reduce'), ('vmap', 'shard_map')
    for mode, inner, want in zip(names, inners, (3 * 3.5, 3.5), strict=True):
      found = self.update(gates, [inner, optax.set_to_zero()], mode)
      for updates, x in zip(found, [want, 0] * 2, strict=True):
        np.testing.assert_allclose(updates['w'], np.full((8, 3), x))
    for params in {}, {'w': None}:
      found = self.update(gates, [optax.identity()], params=params)
      self.assertEqual(found, [params] * 2)
