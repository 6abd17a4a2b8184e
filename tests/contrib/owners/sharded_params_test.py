"""`owned_update` of parameters that are sharded: trains as one device."""

from typing import Any, NamedTuple

from absl.testing import parameterized
import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import AxisType
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np
import optax
import pytest

import cases
import modes
import shard_transforms as st
from shard_transforms import contrib
from shard_transforms import monitoring

AXIS, MODEL = modes.AXIS, 'model'
STEPS = 3
ROWS, COLUMNS = P(AXIS), P(None, MODEL)
MATRIX = optax.contrib.MuonDimensionNumbers(-2, -1)


def matrices(number, spec, shape=(16, 24), name='w'):
  """Returns the shape and the spec of some matrices, by name."""
  return {f'{name}{i}': (shape, spec) for i in range(number)}


FSDP = {
    **matrices(9, ROWS),
    **matrices(3, P(None, AXIS), (12, 8), 'v'),
    **matrices(2, ROWS, (16,), 'b'),
    'alone': ((8, 40), ROWS),
    'gain': ((5,), P()),
}
TENSOR_PARALLEL = {
    **matrices(3, COLUMNS),
    **matrices(2, P(MODEL), name='r'),
    **matrices(2, P(), name='whole'),
    'bias': ((24,), P(MODEL)),
}
BOTH = {
    **matrices(2, P(AXIS, MODEL)),
    **matrices(2, P(MODEL, AXIS), name='swapped'),
    **matrices(2, P((AXIS, MODEL)), name='rows'),
    **matrices(9, P(), name='whole'),
    **matrices(3, COLUMNS, name='columns'),
}
LAYERS = {
    'up': ((3, 16, 24), P(None, AXIS)),
    'down': ((3, 24, 16), P(None, None, (AXIS, MODEL))),
    'experts': ((4, 16, 24), P(AXIS, None, MODEL)),
    'apart': ((8, 16, 24), P((AXIS, MODEL))),
    'whole': ((11, 16, 24), P()),
    'plain': ((16, 24), P(MODEL)),
}


class Case(NamedTuple):
  """A training.

  Attributes:
    leaves: Shapes and specs by name.
    inner: The optimizer, also of one device.
    sizes: The sizes of the axes of the mesh.
    options: Of `owned_update`.
  """

  leaves: dict[str, Any]
  inner: optax.GradientTransformation
  sizes: tuple[int, ...] = (4, 2)
  options: dict[str, Any] = {}

  @property
  def mesh(self):
    return mesh_of(self.sizes)

  @property
  def specs(self):
    return {name: spec for name, (_, spec) in self.leaves.items()}

  def params(self, seed=0):
    rng = np.random.default_rng(seed)
    return {
        name: rng.normal(size=shape).astype(np.float32)
        for name, (shape, _) in self.leaves.items()
    }

  def tx(self, **options):
    options = {'if_sliced': 'sum', **self.options, **options}
    return contrib.owned_update(
        self.inner, AXIS, param_specs=self.specs, **options
    )


def mesh_of(sizes, kind=AxisType.Auto):
  axes = (AXIS, MODEL)[: len(sizes)]
  devices = jax.devices()[: int(np.prod(sizes))]
  return jax.make_mesh(sizes, axes, (kind,) * len(sizes), devices=devices)


def muon(**kwargs):
  return optax.contrib.muon(0.02, **kwargs)


def muon_of_layers():
  numbers = dict.fromkeys(LAYERS, MATRIX)
  return muon(muon_weight_dimension_numbers=numbers)


CASES = {
    'FSDP': Case(FSDP, muon(), (8,)),
    'FSDP, decay': Case(FSDP, muon(weight_decay=0.1), (8,)),
    'FSDP, LAMB': Case(FSDP, optax.lamb(0.02), (8,)),
    'FSDP, Adafactor': Case(
        FSDP, optax.adafactor(0.02, min_dim_size_to_factor=8), (8,)
    ),
    'FSDP, other programs': Case(
        FSDP,
        optax.chain(
            optax.masked(
                optax.add_decayed_weights(0.1),
                lambda params: {name: name in 'w1w2v0' for name in params},
            ),
            optax.lars(0.1),
        ),
        (8,),
    ),
    'tensor parallel': Case(TENSOR_PARALLEL, muon()),
    'tensor parallel, LAMB': Case(TENSOR_PARALLEL, optax.lamb(0.02)),
    'both': Case(BOTH, muon(weight_decay=0.1)),
    'layers': Case(LAYERS, muon_of_layers(), options={'whole_dims': 2}),
    # Its coefficients are read by this leaf alone, and belong to no layer.
    'one leaf of layers': Case(
        {'w': ((8, 16, 24), P(None, AXIS))},
        muon(muon_weight_dimension_numbers={'w': MATRIX}),
        options={'whole_dims': 2},
    ),
    'sum': Case(FSDP, optax.lars(0.1), (8,), {'reduction': 'sum'}),
}


def place(tree, specs, mesh):
  return jax.tree.map(
      lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec)), tree, specs
  )


def gradients_of_shards(grads, specs, reduction):
  """Returns the gradients of a shard: those of slices are summed."""
  number = lax.axis_size(AXIS)
  mine = 2 * (1 + lax.axis_index(AXIS)) / (number + 1)

  def of_shard(g, spec):
    is_sliced = AXIS in jax.tree.leaves(tuple(spec))
    if reduction == 'sum':
      return g if is_sliced else g * mine / number
    return g * number if is_sliced else g * mine

  return jax.tree.map(of_shard, grads, specs)


def train(case):
  """Returns parameters and state after some steps, of shards and one device."""
  tx, mesh, specs = case.tx(), case.mesh, case.specs
  params = case.params()
  own = place(params, specs, mesh)
  of_state = st.state_specs(tx, own, mesh, in_specs=specs)
  state = st.init_state(tx, own, mesh, in_specs=specs)
  reduction = case.options.get('reduction', 'mean')

  @jax.jit
  @jax.shard_map(
      mesh=mesh, in_specs=(specs, of_state, specs), out_specs=(specs, of_state)
  )
  def step(params, state, grads):
    grads = gradients_of_shards(grads, specs, reduction)
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state

  @jax.jit
  def alone(params, state, grads):
    updates, state = case.inner.update(grads, state, params)
    return optax.apply_updates(params, updates), state

  one, kept = params, case.inner.init(params)
  for i in range(1, 1 + STEPS):
    own, state = step(own, state, place(case.params(i), specs, mesh))
    one, kept = alone(one, kept, case.params(i))
  return own, state, one, kept


def assert_close(found, expected, tolerance=2e-6):
  found, expected = jax.device_get((found, expected))
  assert jax.tree.structure(found) == jax.tree.structure(expected)
  for x, y in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
    np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance)


class MappedTest(parameterized.TestCase):

  @cases.parameters(*CASES, fast='tensor_parallel')
  def test_trains_as_one_device_and_saves_its_state(self, name):
    case = CASES[name]
    tx, mesh, specs = case.tx(), case.mesh, case.specs

    params, state, expected, kept = train(case)

    assert_close(params, expected)
    full = st.unshard_state(state, tx, params, mesh, in_specs=specs)
    assert_close(full.inner_state, kept)
    # The state of a checkpoint, on fewer devices.
    sizes = (4,) if len(case.sizes) == 1 else (2, 2)
    mesh, saved = mesh_of(sizes), jax.device_get(full)
    placed = st.shard_state(saved, tx, params, mesh, in_specs=specs)
    resized = st.resize_state(state, tx, params, mesh, in_specs=specs)
    for x in placed, resized:
      again = st.unshard_state(x, tx, params, mesh, in_specs=specs)
      jax.tree.map(np.testing.assert_array_equal, again, saved)

  def test_what_is_sliced_is_exchanged_alone(self):
    case = Case(matrices(8, ROWS), muon(), (8,))
    params, mesh, specs = case.params(), case.mesh, case.specs
    whole = 8 * 16 * 24 * 4

    def sent(**options):
      tx = case._replace(**options).tx()
      of_state = st.state_specs(tx, params, mesh, in_specs=specs)
      mapped = jax.shard_map(
          tx.update,
          mesh=mesh,
          in_specs=(specs, of_state, specs),
          out_specs=(specs, of_state),
      )
      state = st.init_state(tx, params, mesh, in_specs=specs)
      return monitoring.communication_report(
          mapped, params, state, params
      ).total_bytes

    # Each shard sends 7/8 of what it holds, there and back; and parameters,
    # where `inner` reads them.
    self.assertEqual(sent(), 2 * 7 / 8 * whole / 8)
    decay = muon(weight_decay=0.1)
    self.assertEqual(sent(inner=decay), 3 * 7 / 8 * whole / 8)

  @cases.parameters('vmap', 'shard_map_unchecked', fast='vmap')
  def test_trains_so_where_types_are_not_tracked(self, mode):
    case = Case(matrices(3, P(AXIS), (8, 6)), muon(weight_decay=0.1), (4,))
    tx, params, grads = case.tx(if_sliced='mean'), *map(case.params, (0, 1))

    def one_shard(_, own):
      params, grads = own
      return tx.update(grads, tx.init(params), params)[0]

    def rows(tree):
      return jax.tree.map(lambda x: x.reshape(4, 2, 6), tree)

    found = modes.map_shards(mode, one_shard, 4)((), rows((params, grads)))

    inner = case.inner
    expected, _ = inner.update(grads, inner.init(params), params)
    assert_close(found, rows(expected))

  @cases.parameters(
      # Each owner takes its branch, or adds up its own rows.
      (
          optax.masked(
              optax.add_decayed_weights(0.1),
              lambda params: {name: name == 'w0' for name in params},
          ),
      )
      * 2,
      (
          st.clip_by_global_norm(0.1, (AXIS, MODEL)),
          st.clip_by_global_norm(0.1),
      ),
  )
  def test_reduces_over_an_axis_after_one_that_slices(self, inner, alone):
    case = Case(matrices(4, ROWS), inner)
    params, grads = map(case.params, (0, 1))
    tx = contrib.owned_update(
        inner, (AXIS, MODEL), param_specs=ROWS, if_sliced='mean'
    )

    @jax.jit
    @jax.shard_map(mesh=case.mesh, in_specs=ROWS, out_specs=ROWS)
    def update(params, grads):
      own = st.per_shard(grads, MODEL)
      return tx.update(own, tx.init(params), params)[0]

    found = update(params, grads)

    expected, _ = alone.update(grads, alone.init(params), params)
    assert_close(found, expected)

  def test_takes_empty_slices_and_slices_of_integers(self):
    params = {'w': np.ones((16, 8), 'f'), 'empty': np.ones((0, 8), 'f')}
    specs = {'w': ROWS, 'empty': P(None, AXIS)}
    decay = optax.masked(
        optax.add_decayed_weights(0.5), {'w': True, 'empty': True, 'n': False}
    )
    in_specs = {**specs, 'n': ROWS}
    tx = contrib.owned_update(
        decay, AXIS, param_specs=in_specs, if_sliced='mean'
    )

    @jax.jit
    @jax.shard_map(mesh=modes.mesh(), in_specs=(in_specs,), out_specs=specs)
    def update(params):
      grads = {**params, 'n': np.zeros(1, jax.dtypes.float0)}
      updates, _ = tx.update(grads, tx.init(params), params)
      assert updates.pop('n').dtype == jax.dtypes.float0
      return updates

    found = update({**params, 'n': np.arange(8)})

    assert_close(found, {name: 1.5 * x for name, x in params.items()})

  @pytest.mark.thorough
  def test_gradients_of_a_loss_that_gathers(self):
    case = Case(matrices(5, ROWS, (16, 16)), muon(), (8,))
    x = np.random.default_rng(3).normal(size=(32, 16)).astype(np.float32)
    mesh, specs, tx = case.mesh, case.specs, case.tx()

    def loss(params, x, whole=lambda w: w):
      for w in params.values():
        x = x + jnp.tanh(x @ whole(w))
      return jnp.mean(x**2)

    @jax.jit
    @jax.shard_map(mesh=mesh, in_specs=(specs, P(AXIS)), out_specs=specs)
    def update(params, x):
      def gather(w):
        return lax.all_gather(w, AXIS, tiled=True)

      grads = jax.grad(loss)(params, x, gather)
      return tx.update(grads, tx.init(params), params)[0]

    params = case.params()
    found = update(place(params, specs, mesh), x)

    grads = jax.jit(jax.grad(loss))(params, x)
    inner = case.inner
    expected = jax.jit(inner.update)(grads, inner.init(params), params)[0]
    assert_close(found, expected, 1e-5)

  @cases.parameters(('lars', 'standard'), ('sgd', 'strict'), fast='sgd_strict')
  def test_takes_gradients_of_several_dtypes(self, name, promotion):
    inner = getattr(optax, name)(0.1)
    case = Case(matrices(9, ROWS, (16, 6)), inner, (8,))
    tx, mesh, specs = case.tx(if_sliced='mean'), case.mesh, case.specs
    params, grads = case.params(), case.params(1)
    grads['w1'] = jnp.asarray(grads['w1'], jnp.bfloat16)

    @jax.jit
    @jax.shard_map(mesh=mesh, in_specs=(specs, specs), out_specs=specs)
    def update(params, grads):
      return tx.update(grads, tx.init(params), params)[0]

    with jax.numpy_dtype_promotion(promotion):
      found = update(params, grads)

    expected, _ = inner.update(grads, inner.init(params), params)
    self.assertEqual(found['w1'].dtype, expected['w1'].dtype)
    assert_close(found, jax.device_get(expected))


class PlainJitTest(parameterized.TestCase):

  @cases.product(
      name=('FSDP, decay', 'tensor parallel', 'layers'),
      kind=('jit', 'jit_explicit'),
      fast='tensor_parallel_jit',
  )
  def test_takes_the_gradient_of_the_whole_batch(self, name, kind):
    case = CASES[name]
    mesh, specs = mesh_of(case.sizes, modes.PLAIN[kind]), case.specs
    tx = case.tx(if_sliced='mean', if_reduced='mean')
    tx = st.on_mesh(tx, mesh, in_specs=specs)
    params, grads = case.params(), case.params(1)

    own, mine = (place(tree, specs, mesh) for tree in (params, grads))
    with jax.set_mesh(mesh):
      updates, state = jax.jit(tx.update)(mine, tx.init(own), own)

    inner = case.inner
    expected, kept = jax.jit(inner.update)(grads, inner.init(params), params)
    assert_close(updates, expected)
    for x, y in zip(*map(jax.tree.leaves, (updates, own)), strict=True):
      self.assertTrue(x.sharding.is_equivalent_to(y.sharding, x.ndim))
    full = st.unshard_state(state, tx, own, mesh, in_specs=specs)
    assert_close(full.inner_state, kept)

  @pytest.mark.thorough
  def test_takes_stacked_gradients_of_slices_over_another_axis(self):
    case = CASES['tensor parallel']
    mesh, specs = case.mesh, case.specs
    tx = st.on_mesh(case.tx(), mesh, in_specs=specs)
    params, grads = case.params(), [case.params(i) for i in range(1, 5)]
    stack = jax.tree.map(lambda *x: np.stack(x), *grads)

    updates, _ = jax.jit(tx.update)(
        st.Stacked(stack, (AXIS,)), tx.init(params), params
    )

    inner, mean = case.inner, jax.tree.map(lambda x: x.mean(0), stack)
    expected, _ = jax.jit(inner.update)(mean, inner.init(params), params)
    assert_close(updates, expected)

  def test_refuses_to_reduce_what_is_reduced(self):
    case = CASES['tensor parallel']
    tx = st.on_mesh(case.tx(), case.mesh, in_specs=case.specs)
    params = case.params()

    with self.assertRaisesRegex(ValueError, 'must be per shard over'):
      tx.update(params, tx.init(params), params)


def started(specs, in_specs, shape=(16, 24), **options):
  tx = contrib.owned_update(muon(), AXIS, param_specs=specs, **options)
  params = {'v': jnp.ones(shape), 'w': jnp.ones(shape)}
  return st.init_state(tx, params, modes.mesh(), in_specs=in_specs)


def times_squared_norm(update):
  dims = list(range(update.ndim))
  return update * jnp.einsum(update, dims, update, dims, [])


COMBINING_LAYERS = {
    'lamb': optax.lamb(0.1),
    'lars': optax.lars(0.1),
    'adafactor': optax.adafactor(0.1),
    'branch': optax.conditionally_transform(optax.lamb(0.1), lambda i: i < 9),
    'contraction': optax.stateless_with_tree_map(
        lambda update, _: times_squared_norm(update)
    ),
}


class RefusalTest(parameterized.TestCase):

  @cases.parameters(
      (P(), ROWS, {}, r'does not name \[.data.\], .*Pass the `PartitionSpec`s'),
      (ROWS, P(), {}, r'names \[.data.\], over which its type is invariant'),
      ({'v': ROWS}, ROWS, {}, '`param_specs` .* must have the tree of'),
      (P(AXIS, AXIS), ROWS, {}, 'name each axis once, got'),
      # Types do not tell which dimension is sliced.
      (
          P(None, AXIS),
          ROWS,
          {'if_sliced': 'sum'},
          r"got .*None, 'data'.* `in_specs` shards by .*Pass the same specs",
      ),
      (
          P(None, None, AXIS),
          P(),
          {},
          'at most one entry per dimension .*, got',
      ),
      (ROWS, ROWS, {}, "say what the gradients .*'sum' .*'mean'"),
  )
  def test_refuses_specs(self, specs, in_specs, options, message):
    with self.assertRaisesRegex(ValueError, message):
      started(specs, in_specs, **options)

  def test_refuses_specs_of_other_dimensions_under_plain_jit(self):
    case = Case(matrices(8, P(None, AXIS)), muon(), (8,))
    tx = st.on_mesh(case.tx(), case.mesh, in_specs=ROWS)

    with self.assertRaisesRegex(ValueError, 'Pass the same specs'):
      tx.init(case.params())

  @cases.parameters('sum', 'mean')
  def test_takes_what_the_refusal_names(self, if_sliced):
    state = started(ROWS, ROWS, if_sliced=if_sliced)

    self.assertLen(jax.tree.leaves(state.inner_state.stacks), 1)

  @cases.parameters(
      (
          lambda x: jnp.ones((16, 24), x.dtype),
          {},
          r'got \[16, 24\] instead of \[2, 24\]',
      ),
      (lambda x: x, {'weight': 1.0}, "`weight` .* set `reduction='sum'`"),
  )
  def test_refuses_updates(self, change, extra_args, message):
    case = Case(matrices(2, ROWS), muon(), (8,))
    tx = case.tx()

    def step(params):
      grads = jax.tree.map(change, params)
      grads = st.per_shard(grads, AXIS)
      return tx.update(grads, tx.init(params), params, **extra_args)[0]

    mapped = jax.shard_map(
        step, mesh=case.mesh, in_specs=(case.specs,), out_specs=case.specs
    )
    with self.assertRaisesRegex(ValueError, message):
      jax.eval_shape(mapped, case.params())

  @cases.parameters((ROWS, None), (P(), 1))
  def test_refuses_extra_args_of_slices_and_layers(self, spec, whole_dims):
    def weigh(updates, state, params=None, *, scale):
      return jax.tree.map(jnp.multiply, updates, scale), state

    inner = optax.GradientTransformationExtraArgs(lambda _: (), weigh)
    # A slice of one row would be broadcast.
    case = Case(matrices(2, spec, (8, 6)), inner, (8,))
    tx = case.tx(whole_dims=whole_dims)
    mapped = jax.shard_map(
        lambda x: tx.update(x, tx.init(x), x, scale=x)[0],
        mesh=case.mesh,
        in_specs=(case.specs,),
        out_specs=case.specs,
        check_vma=False,
    )

    with self.assertRaisesRegex(ValueError, 'The extra argument `scale`'):
      jax.eval_shape(mapped, case.params())

  def test_refuses_state_without_a_part_for_each_layer(self):
    count = optax.GradientTransformation(
        lambda params: jax.tree.map(lambda x: jnp.zeros(()), params),
        lambda u, s, p=None: (
            u,
            jax.tree.map(lambda s, u: s + u.ravel()[0], s, u),
        ),
    )
    tx = contrib.owned_update(count, AXIS, whole_dims=2)

    with self.assertRaisesRegex(ValueError, 'separate state for each'):
      st.init_state(tx, jnp.ones((8, 4, 4)), modes.mesh())

  @cases.parameters(*COMBINING_LAYERS)
  def test_refuses_what_combines_layers(self, name):
    inner, layers = COMBINING_LAYERS[name], jnp.ones((8, 4, 4))
    clipped = optax.chain(st.clip_by_global_norm(1.0, AXIS), optax.adam(0.1))

    def start(inner, params=layers, **options):
      tx = contrib.owned_update(inner, AXIS, whole_dims=2, **options)
      return st.init_state(tx, params, modes.mesh())

    with self.assertRaisesRegex(ValueError, 'combines all layers of a leaf by'):
      start(inner)
    start(inner, assume_leafwise=True)
    start(inner, {'v': layers[0], 'w': layers[0]})
    # Owners add up the squares of all layers.
    start(clipped)

  def test_refuses_updates_of_another_dtype_without_params(self):
    case = Case(matrices(8, P()), optax.trace(0.9), (8,))
    tx, params = case.tx(), case.params()

    def step(params, are_passed):
      grads = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
      grads = st.per_shard(grads, AXIS)
      state = tx.init(params)
      return tx.update(grads, state, params if are_passed else None)[0]

    def run(are_passed):
      mapped = jax.shard_map(
          lambda x: step(x, are_passed),
          mesh=case.mesh,
          in_specs=P(),
          out_specs=P(),
      )
      return jax.eval_shape(mapped, params)

    with self.assertRaisesRegex(ValueError, 'Pass `params` if the updates hav'):
      run(False)
    run(True)

  def test_refuses_equal_random_values_for_all_layers(self):
    noise = optax.add_noise(0.1, 0.5, jax.random.key(0))
    params = jnp.ones((8, 4, 4))

    st.init_state(contrib.owned_update(noise, AXIS), params, modes.mesh())
    with self.assertRaisesRegex(
        ValueError, 'the same for all layers of a leaf'
    ):
      tx = contrib.owned_update(noise, AXIS, whole_dims=2)
      st.init_state(tx, params, modes.mesh())
