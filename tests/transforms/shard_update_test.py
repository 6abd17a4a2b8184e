"""`shard_update`: trains as replicated; its slices, axes and refusals."""

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

import cases
import harness
import modes
import shard_transforms as st
from shard_transforms import cross_shard_mean
from shard_transforms import shard_update

AXIS = modes.AXIS
SHARDS, STEPS = 8, 3
EVEN = [[0, 4], [1, 5], [2, 6], [3, 7]]


def params_of(seed=0):
  """Returns leaves that are cut evenly, with padding, and not at all."""
  normal = np.random.default_rng(seed).normal
  return {
      'even': normal(size=(4, 6)).astype(np.float32),
      'padded': normal(size=(3, 5, 1)).astype(np.float32),
      'vector': normal(size=71).astype(np.float32),
      'few': normal(size=3).astype(np.float32),
      'scalar': np.float32(normal()),
  }


def gradients():
  """Returns other ones for each shard and step: [shards, steps, ...]."""
  rng = np.random.default_rng(1)
  return jax.tree.map(
      lambda p: rng.normal(size=(SHARDS, STEPS, *p.shape)).astype(p.dtype),
      params_of(),
  )


def ranked(params):
  return jax.tree.map(lambda p: jnp.ndim(p) > 1, params)


def by_leaf(fn):
  return optax.stateless(lambda updates, _: jax.tree.map(fn, updates))


def repeatedly(u):
  return lax.fori_loop(0, 3, lambda i, x: 0.9 * x + 0.1 * u, u)


def rounded(u):
  bits = lax.bitcast_convert_type(u.astype(jnp.float32), jnp.int32)
  cut = lax.bitcast_convert_type(bits & ~0xFFFF, jnp.float32)
  return cut.astype(u.dtype)


def divided(axes=()):
  """Returns what divides by the norm of what is here, or over axes."""

  def update(updates, params):
    del params
    squares = sum(jnp.sum(u * u) for u in jax.tree.leaves(updates) if u.ndim)
    norm = jnp.sqrt(lax.psum(squares, axes))
    return jax.tree.map(lambda u: (u / norm).astype(u.dtype), updates)

  return optax.stateless(update)


# Its state has the values of the parameters.
COPY = optax.GradientTransformation(
    lambda params: jax.tree.map(jnp.copy, params),
    lambda updates, state, params=None: (updates, state),
)
# What it wraps; wrappers of Optax are in `works_with_test.py`.
INNERS = {
    'adamw': optax.adamw(0.1, weight_decay=0.1, mask=ranked),
    'towers': st.tower_reduce(2, optax.adam(0.1)),
    'loops and bits': optax.chain(
        by_leaf(repeatedly), by_leaf(rounded), optax.sgd(0.1)
    ),
    # Zero over zero where padding is.
    'bad padding': optax.scale_by_rms(eps=0.0, decay=0.9),
}


def first_step(tx, params):
  """Traces the first update of gradients that differ between shards."""

  def step(params):
    grads = st.per_shard(params, AXIS)
    return tx.update(grads, tx.init(params), params)[0]

  mapped = jax.shard_map(step, mesh=modes.mesh(), in_specs=P(), out_specs=P())
  return jax.eval_shape(mapped, params)


def loss_of(params, data):
  products = jax.tree.map(lambda p, d: jnp.sum(p * d), params, data)
  return sum(jax.tree.leaves(products))


def averaged(inner, **options):
  return optax.chain(cross_shard_mean(AXIS, **options), inner)


def train(txs, mode='shard_map', own_params=False):
  """Returns the parameters [shards, ...] after some steps, by name.

  Args:
    txs: Transformations by name.
    mode: How they are mapped.
    own_params: Whether parameters come to differ between shards.
  """
  trained = harness.train(
      txs,
      params_of(),
      gradients(),
      mode,
      grad=harness.gradient(loss_of, modes.HOSTS if mode == 'hosts' else AXIS),
      per_shard_params=own_params,
  )
  params = {name: x.params for name, x in trained.items()}
  return jax.tree.map(lambda x: x[:, -1], params)


def assert_trains_alike(tx, expected, *args, **kwargs):
  actual = train({'actual': tx, 'expected': expected}, *args, **kwargs)
  assert_close(actual['actual'], actual['expected'])


def assert_close(actual, expected):
  chex.assert_trees_all_equal_shapes_and_dtypes(actual, expected)
  chex.assert_trees_all_close(actual, expected, rtol=2e-6, atol=2e-6)


class EqualityTest(parameterized.TestCase):
  """It trains as the replicated optimizer does."""

  def test_trains_as_the_replicated_optimizer(self):
    sliced = {name: shard_update(tx, AXIS) for name, tx in INNERS.items()}
    sliced['norm'] = shard_update(divided(AXIS), AXIS)
    sliced['sum'] = shard_update(optax.sgd(0.1), AXIS, reduction='sum')
    whole = {name: averaged(tx) for name, tx in INNERS.items()}
    whole['norm'] = averaged(divided())
    whole['sum'] = optax.chain(st.cross_shard_sum(AXIS), optax.sgd(0.1))

    actual = train(
        {f'sliced {name}': tx for name, tx in sliced.items()} | whole
    )

    for name in whole:
      with self.subTest(name):
        assert_close(actual[f'sliced {name}'], actual[name])

  def test_groups_train_separately(self):
    sliced = shard_update(optax.adam(0.1), AXIS, groups=EVEN)
    whole = averaged(optax.adam(0.1), groups=EVEN)

    assert_trains_alike(sliced, whole, own_params=True)

  @cases.parameters(*modes.MAPPED)
  def test_groups_train_a_leaf_of_one_element(self, mode):
    tx = shard_update(optax.sgd(1.0, momentum=0.5), AXIS, groups=EVEN)

    def fn(params, scale):
      state = tx.update(scale * params, tx.init(params), params)[1]
      return tx.update(scale * params, state, params)[0]

    updates = modes.map_shards(mode, fn)(jnp.ones(1), jnp.arange(8.0))

    means = np.float32([2, 3, 4, 5, 2, 3, 4, 5])
    np.testing.assert_array_equal(updates, -1.5 * means[:, None])

  def test_leaves_without_a_gradient_are_unchanged(self):
    params = {'x': jnp.ones(16), 'count': jnp.arange(9), 'none': None}
    tx = shard_update(optax.identity(), AXIS)

    def fn(params, scale):
      zeros = np.zeros(9, jax.dtypes.float0)
      grads = {'x': scale * params['x'], 'count': zeros, 'none': None}
      updates, _ = tx.update(grads, tx.init(params), params)
      self.assertEqual(updates['count'].dtype, jax.dtypes.float0)
      self.assertIsNone(updates['none'])
      return updates['x']

    updates = modes.map_shards('shard_map', fn)(params, jnp.arange(8.0))

    np.testing.assert_array_equal(updates, np.full((SHARDS, 16), 3.5))


class StateTest(parameterized.TestCase):
  """What a shard keeps."""

  @cases.parameters(
      # Slices of [3, 2] are of either leaf, along another dimension.
      lambda p: {'in a': jnp.copy(p['a']), 'in b': jnp.copy(p['b'])},
      optax.masked(COPY, lambda p: {k: p[k].ndim > 0 for k in p}).init,
      (COPY.init, jax.jit),
      (COPY.init, lambda init: lambda p: jax.tree.map(jnp.copy, init(p))),
  )
  def test_slices_are_joined_anywhere_in_the_state(
      self, init, wrap=lambda x: x
  ):
    inner = optax.GradientTransformation(init, lambda u, s, _: (u, s))
    tx = shard_update(inner, ('host', 'core'))
    tx = tx._replace(init=wrap(tx.init))
    mesh = jax.make_mesh((2, 4), ('host', 'core'), (AxisType.Auto,) * 2)
    params = {'a': jnp.arange(24.0).reshape(3, 8), 'b': jnp.arange(8.0)}
    params['c'] = jnp.arange(24.0).reshape(8, 3)

    state = st.init_state(tx, params, mesh)

    chex.assert_trees_all_equal(state.inner_state, init(params))

  def test_leaves_in_the_shape_of_no_parameter_get_a_shard_axis(self):
    flat = optax.GradientTransformation(
        lambda p: jax.tree.map(jnp.ravel, p), lambda u, s, _: (u, s)
    )
    tx = shard_update(flat, AXIS, assume_elementwise=True)
    params, mesh = {'w': jnp.ones((3, 8))}, modes.mesh()

    state = st.init_state(tx, params, mesh)

    self.assertEqual(state.inner_state['w'].shape, (8, 3))
    # The slices of different groups do not form one array.
    grouped = shard_update(COPY, AXIS, groups=EVEN)
    kept = st.init_state(grouped, params, mesh).inner_state
    self.assertEqual(kept['w'].shape, (8, 3, 4))
    with self.assertRaisesRegex(ValueError, r'shape \(.*\) instead of'):
      st.unshard_state(state, tx, params, mesh)

  def test_one_state_may_have_slices_and_slices_of_groups(self):
    tx = optax.partition(
        {'one': shard_update(COPY, AXIS)}
        | {'groups': shard_update(COPY, AXIS, groups=EVEN)},
        {'a': 'one', 'b': 'groups'},
    )
    params = {'a': jnp.arange(24.0).reshape(3, 8), 'b': jnp.arange(8.0)}

    state = st.init_state(tx, params, modes.mesh()).inner_states

    one, groups = (state[k].inner_state.inner_state for k in ('one', 'groups'))
    np.testing.assert_array_equal(one['a'], params['a'])
    self.assertEqual(groups['b'].shape, (8, 4))

  @cases.parameters((1,), (1, 1))
  def test_slices_of_groups_may_have_one_element(self, *shape):
    tx, mesh = shard_update(COPY, AXIS, groups=EVEN), modes.mesh()
    params = jnp.full(shape, 7.0)

    state = st.init_state(tx, params, mesh)

    self.assertEqual(state.inner_state.shape, (8, *shape))
    # The first shard has the state of only one group.
    with self.assertRaisesRegex(ValueError, 'by `groups` cannot be unsharded'):
      st.unshard_state(state, tx, params, mesh)
    one, alone = modes.mesh(1), shard_update(COPY, AXIS, groups=[[0]])
    kept = st.init_state(alone, params, one)
    self.assertEqual(kept.inner_state.shape, shape)

  def test_a_group_of_one_shard_has_unsliced_leaves(self):
    params = {'a': jnp.ones(1), 'b': jnp.ones(8)}
    tx, mesh = shard_update(optax.adam(0.1), AXIS, groups=[[0]]), modes.mesh(1)

    def steps(params):
      state, grads = tx.init(params), st.per_shard(params, AXIS)
      state = tx.update(grads, state, params)[1]
      return tx.update(grads, state, params)[0]

    specs = {'in_specs': P(), 'out_specs': P(AXIS)}
    updates = jax.jit(jax.shard_map(steps, mesh=mesh, **specs))(params)

    chex.assert_trees_all_equal_shapes(updates, params)

  @cases.parameters(((1, 8), (8,)), ((5,), (2, 4)))
  def test_per_shard_leaves_are_not_slices(self, shape, sizes):
    axes = ('host', 'core')[: len(sizes)]

    def row(_):
      own = jnp.zeros((1,) * len(shape)) + lax.axis_index(axes)
      return st.per_shard(own, axes)

    def init(params):
      return jax.tree.map(row, params)

    rows = optax.GradientTransformation(init, lambda u, s, _: (u, s))
    mesh = jax.make_mesh(sizes, axes, (AxisType.Auto,) * len(sizes))

    state = st.init_state(rows, jnp.ones(shape), mesh)

    np.testing.assert_array_equal(state.ravel(), range(8))
    self.assertEqual(state.shape, (8, 1)[: len(shape)])

  def test_state_is_sharded_like_state_shardings(self):
    mesh = jax.make_mesh((8,), (AXIS,), (AxisType.Auto,))
    shapes = (16, 24), (3, 16), (8,), (2, 5, 8), ()
    params = [jnp.zeros(shape) for shape in shapes]
    adam = optax.adam(0.1)

    state = st.init_state(shard_update(adam, AXIS), params, mesh)

    shardings = jax.tree.leaves(st.state_shardings(adam, params, mesh))
    for x, sharding in zip(jax.tree.leaves(state), shardings, strict=True):
      self.assertTrue(x.sharding.is_equivalent_to(sharding, x.ndim))


class AxesTest(parameterized.TestCase):
  """Several axes, and parameters that are sharded already."""

  def mesh(self):
    return jax.make_mesh((2, 4), ('host', 'core'), (AxisType.Auto,) * 2)

  def test_reduces_and_slices_over_several_axes(self):
    axes, adam = modes.HOSTS[::-1], optax.adam(0.1)
    whole = optax.chain(cross_shard_mean(axes), adam)

    assert_trains_alike(shard_update(adam, axes), whole, 'hosts')

  HOST, CORE = ('host', 'core'), ('core', 'host')

  @cases.parameters(
      # The dimension that the parts of the parameter have, and that fits.
      ('host', (8, 16), P('core'), P(('core', 'host')), None),
      ('host', (4, 6), P('core'), P('core', 'host'), None),
      ('host', (3, 16), P(None, 'core'), P(None, CORE), None),
      ('host', (6, 16), P(None, 'core'), P('host', 'core'), None),
      # In the order of the mesh.
      (CORE, (16,), P(), P(CORE), None),
      (HOST, (8, 16), P(), P(*CORE), None),
      (HOST, (3, 16), P(), P(None, CORE), None),
      # Padded a little.
      (HOST, (31, 34), P(), P(*CORE), (32, 34)),
      # Rows, where dimensions would be padded more.
      (HOST, (2, 5), P(), P(None, CORE), (1, 16)),
      (HOST, (6, 3, 2), P(), P(None, None, CORE), (1, 1, 40)),
  )
  def test_each_axis_divides_a_dimension_if_it_can(self, axes, shape, *specs):
    in_specs, spec, kept = specs
    tx = shard_update(COPY, axes)
    params = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)

    state = st.init_state(tx, params, self.mesh(), in_specs=in_specs)[0]

    self.assertEqual(state.sharding.spec, spec)
    self.assertEqual(state.shape, kept or shape)
    if state.shape[0] == 1:
      whole = np.ravel(state)[: params.size].reshape(shape)
    else:
      whole = np.asarray(state)[tuple(map(slice, shape))]
    np.testing.assert_array_equal(whole, params)

  def test_gradients_that_are_already_reduced_are_not_communicated(self):
    mesh = modes.mesh()
    tx = shard_update(optax.sgd(1.0), AXIS, if_reduced='mean')

    @jax.jit
    @functools.partial(jax.shard_map, mesh=mesh, in_specs=P(), out_specs=P())
    def step(grads):
      return tx.update(grads, tx.init(grads), grads)[0]

    grads = jnp.arange(20.0)
    updates = step(grads)

    np.testing.assert_array_equal(updates, -grads)
    report = st.monitoring.communication_report(step, grads)
    self.assertEqual([c.primitive for c in report.collectives], ['all_gather'])


class RefusalTest(parameterized.TestCase):
  """Found while tracing."""

  @cases.parameters(
      (optax.lamb(0.1),),
      (optax.adafactor(0.1),),
      (optax.contrib.muon(0.1),),
      (optax.clip_by_global_norm(1.0),),
      (optax.add_noise(0.1, 0.5, jax.random.key(0)),),
      (optax.apply_if_finite(optax.sgd(0.1), 3),),
  )
  def test_refuses_transformations_that_combine_elements(self, inner):
    tx = shard_update(inner, AXIS)
    params = {'w': jnp.ones((4, 6)), 'b': jnp.ones(6)}
    st.init_state(tx, params, modes.mesh())

    message = 'must be element-wise.*`contrib.owned_update`, clip by'
    with self.assertRaisesRegex(ValueError, message):
      first_step(tx, params)

  def test_refuses_at_init_a_state_whose_tree_depends_on_shapes(self):
    def init(params):
      return {k: jnp.zeros(p.shape) for k, p in params.items() if p.size > 8}

    inner = optax.GradientTransformation(init, optax.identity().update)
    tx = shard_update(inner, AXIS)

    with self.assertRaisesRegex(ValueError, 'its state depends on the shapes'):
      st.init_state(tx, {'w': jnp.ones(16)}, modes.mesh())

  @cases.parameters('error', 'inner tree', 'no slices')
  def test_refuses_states_that_depend_on_the_number_of_shards(self, kind):
    def init(params):
      number = lax.axis_size(AXIS)
      if kind == 'error':
        jnp.zeros(number).reshape(SHARDS)
      return (jax.tree.map(jnp.copy, params),) * number

    tx = optax.chain(optax.GradientTransformation(init, COPY.update))
    sliced = shard_update(tx if kind == 'inner tree' else COPY, AXIS)
    tx = sliced if kind == 'inner tree' else optax.chain(tx, sliced)
    if kind == 'no slices':

      def init_fn(params):
        one = lax.axis_size(AXIS) == 1
        return (COPY if one else sliced).init(params)

      tx = optax.GradientTransformation(init_fn, sliced.update)

    message = (
        'error on a mesh with one' if kind == 'error' else 'tree .* depends on'
    )
    for fn in st.state_specs, st.init_state:
      with self.assertRaisesRegex(ValueError, message):
        fn(tx, jnp.ones(16), modes.mesh())

  @cases.parameters(
      # It squeezes dimensions of one element, of which slices have more.
      ('shard_map', by_leaf(jnp.vectorize(lambda u: 2 * u + u))),
      # One vector of all leaves: no leaf of its state has the shape of another.
      ('vmap', optax.flatten(optax.adam(0.1))),
      fast='shard_map',
  )
  def test_assume_elementwise_turns_off_the_check(self, mode, inner):
    with self.assertRaisesRegex(ValueError, 'set `assume_elementwise=True`'):
      train({'tx': shard_update(inner, AXIS)}, mode)

    unchecked = shard_update(inner, AXIS, assume_elementwise=True)
    assert_trains_alike(unchecked, averaged(inner), mode)

  def test_checks_each_tree_of_parameters(self):
    summed = by_leaf(lambda u: u / jnp.sum(u) if jnp.ndim(u) > 1 else u)
    tx = shard_update(summed, AXIS)
    first_step(tx, jnp.ones(9))

    with self.assertRaisesRegex(ValueError, 'must be element-wise'):
      first_step(tx, jnp.ones((3, 5)))

  def test_closed_over_values_may_differ_between_calls(self):
    factors = [2.0]
    tx = shard_update(by_leaf(lambda x: x * factors[0]), AXIS)

    for factor in 2.0, 3.0:
      factors[0] = factor
      step = jax.vmap(lambda x: tx.update(x, tx.init(x))[0], axis_name=AXIS)
      actual = jax.jit(step)(jnp.ones((SHARDS, 9)))
      np.testing.assert_array_equal(actual, factor)

  def test_refuses_in_update_transformations_with_extra_arguments(self):
    tx = shard_update(optax.polyak_sgd(), AXIS)

    def step(params):
      grads = st.per_shard(params, AXIS)
      state = tx.init(params)
      return tx.update(grads, state, params, value=jnp.float32(1))[0]

    step = jax.shard_map(step, mesh=modes.mesh(), in_specs=P(), out_specs=P())
    with self.assertRaisesRegex(ValueError, 'must be element-wise'):
      jax.eval_shape(step, jnp.ones(16))

  @cases.parameters(True, False)
  def test_refuses_arguments_that_differ_between_shards(self, is_argument):
    def update(updates, state, params=None, *, value, **extra_args):
      del extra_args
      return updates * value + 0.1 * params, state

    inner = optax.identity()._replace(update=update)
    tx = shard_update(optax.GradientTransformationExtraArgs(*inner), AXIS)

    def step(params, own):
      grads = st.per_shard(jnp.ones(16), AXIS)
      state = tx.init(params)
      # A check with another argument does not count.
      tx.update(grads, state, params, value=1.0)
      value = own if is_argument else 1.0
      params = params if is_argument else params + own
      return tx.update(grads, state, params, value=value)[0]

    mapped = modes.map_shards('shard_map', step)
    with self.assertRaisesRegex(ValueError, 'shards have different values'):
      jax.eval_shape(mapped, np.ones(16, 'f'), np.ones(8, 'f'))

  @cases.product(
      mesh=((AxisType.Auto, True), (AxisType.Explicit, False)),
      call=('init', 'update'),
  )
  def test_refuses_a_partly_mapped_mesh(self, mesh, call):
    kind, check_vma = mesh
    tx = shard_update(optax.identity(), AXIS)
    state = st.ShardUpdateState(optax.EmptyState())
    given = () if call == 'init' else (state,)

    step = jax.shard_map(
        lambda params: getattr(tx, call)(params, *given),
        mesh=jax.make_mesh((4, 2), (AXIS, 'model'), (kind, kind)),
        in_specs=P(),
        out_specs=P(),
        axis_names={AXIS},
        check_vma=check_vma,
    )
    with self.assertRaisesRegex(ValueError, r"not mapped, \('model',\)"):
      jax.eval_shape(step, np.ones(16, 'f'))

  @cases.parameters(
      ({'if_reduced': 'guess'}, ValueError, '`if_reduced` must be'),
      (
          {'if_reduced': 'mean', 'reduction': 'sum'},
          *(ValueError, "if_reduced='mean'.* needs `reduction='mean'`"),
      ),
      ({'assume_elementwise': 1}, TypeError, '`assume_.* a boolean, got 1'),
      ({'groups': 'ab'}, TypeError, '`groups` must be'),
  )
  def test_refuses_wrong_arguments(self, kwargs, error, message):
    with self.assertRaisesRegex(error, message):
      shard_update(optax.sgd(0.1), AXIS, **kwargs)
