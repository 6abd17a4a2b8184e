"""`global_norm` of trees with slices, and whether all elements are finite."""

from absl.testing import parameterized
import chex
import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np
import optax

import cases
import modes
import shard_transforms as st
from shard_transforms import global_norm
from shard_transforms._src.reduction import norms
from sliced_trees import MIXES
from sliced_trees import norm_of
from sliced_trees import on_mesh
from sliced_trees import tree_of

AXIS = modes.AXIS
SHARDS = 8


class GlobalNormTest(parameterized.TestCase):

  def test_is_that_of_the_whole_for_every_mix(self):
    tree = tree_of()
    norms = on_mesh(
        lambda trees: [global_norm(x, (AXIS, 'model')) for x in trees], MIXES
    )

    found = norms([tree] * len(MIXES))

    np.testing.assert_allclose(found, [norm_of(tree)] * len(MIXES), rtol=1e-6)

  def test_without_an_axis_it_is_the_shards_own(self):
    x = np.arange(16.0, dtype=np.float32).reshape(SHARDS, 2)

    norms = modes.map_shards('shard_map', lambda _, x: global_norm(x))(0.0, x)

    np.testing.assert_allclose(norms, np.linalg.norm(x, axis=1), rtol=1e-6)

  @cases.parameters(*modes.MAPPED)
  def test_joins_slices_in_every_mode(self, mode):
    x = np.arange(16.0, dtype=np.float32).reshape(SHARDS, 2)

    def fn(whole, x):
      tree = {'sliced': x, 'whole': whole, 'scalar': whole[0]}
      specs = {'sliced': P(AXIS), 'whole': P(), 'scalar': P(AXIS)}
      return global_norm(tree, AXIS, specs=specs)

    norms = modes.map_shards(mode, fn)(np.float32([3, 4]), x)

    expected = (np.sum(x**2) + 25 + 9) ** 0.5
    np.testing.assert_allclose(norms, [expected] * SHARDS, rtol=1e-6)

  def test_leaves_of_all_kinds(self):
    tree = {
        'half': np.full(1000, 100, np.float16),
        'complex': np.array([3 + 4j], np.complex64),
        'none': None,
        'masked': optax.MaskedNode(),
        'empty': np.ones((0, 3), np.float32),
    }
    none = np.zeros(3, jax.dtypes.float0)

    norm = jax.jit(lambda tree: global_norm(tree | {'float0': none}))(tree)

    # The square of a half would overflow, as would their sum.
    np.testing.assert_allclose(norm, (1000 * 1e4 + 25) ** 0.5, rtol=1e-6)
    self.assertEqual(norm.dtype, jnp.float32)

  @cases.parameters(({},), ([],), (None,))
  def test_of_nothing_is_zero(self, tree):
    chex.assert_trees_all_equal(global_norm(tree), jnp.float32(0), strict=True)

  def test_sends_one_number_for_each_way_of_slicing(self):
    sizes = {'a': 6, 'b': 7, 'c': 8}
    tree = {name: jnp.ones(n, jnp.float32) for name, n in sizes.items()}

    report = st.monitoring.communication_report(
        lambda tree: global_norm(
            tree, AXIS, specs={'a': P(AXIS), 'b': P(AXIS), 'c': P()}
        ),
        tree,
        axis_sizes={AXIS: SHARDS},
    )

    (sent,) = report.collectives
    self.assertEqual((sent.payload_bytes, sent.scope), (4, 'global_norm'))

  @cases.parameters(True, False)
  def test_refuses_specs_that_the_types_contradict(self, sliced):
    def fn(whole, own):
      leaf, spec = (own, P()) if sliced else (whole, P(AXIS))
      return global_norm({'w': leaf}, AXIS, specs=spec)

    with self.assertRaisesRegex(ValueError, r"with the types .* \['w'\] \[2\]"):
      modes.map_shards('shard_map', fn)(jnp.ones(2), jnp.ones((SHARDS, 2)))

  def test_refuses_a_sum_that_is_pending(self):
    def fn(shared, own):
      reduced = lax.pcast(shared, AXIS, to='reduced')
      grads = jax.grad(lambda w: jnp.sum(w * own))(reduced)
      return global_norm(grads, AXIS)

    with self.assertRaisesRegex(ValueError, 'typed unreduced'):
      modes.map_shards('shard_map', fn)(jnp.ones(2), jnp.ones((SHARDS, 2)))

  @cases.parameters(
      (np.int32, {}, TypeError, '`global_norm` must be real'),
      (float, {'axis_name': 'x'}, NameError, '`global_norm` needs the axis'),
      (
          float,
          {'axis_name': AXIS, 'specs': AXIS},
          TypeError,
          '`specs` of `global_norm` must be a `PartitionSpec`',
      ),
      (
          float,
          {'axis_name': AXIS},
          ValueError,
          'cannot infer .* not track',
      ),
      (float, {'specs': P(AXIS)}, ValueError, 'must come with `axis_name`'),
      (
          float,
          {'axis_name': AXIS, 'specs': {'v': P(AXIS)}},
          ValueError,
          'key|structure',
      ),
  )
  def test_does_not_guess(self, dtype, kwargs, error, message):
    def fn(_, x):
      return global_norm({'w': x}, **kwargs)

    with self.assertRaisesRegex(error, message):
      modes.map_shards('pmap', fn)(0.0, np.ones((SHARDS, 2), dtype))


class FiniteTest(parameterized.TestCase):

  def test_looks_at_each_element(self):
    none = np.zeros(3, jax.dtypes.float0)
    trees = [
        {},
        {'a': np.ones(3), 'b': None},
        {'a': np.ones((0, 2))},
        # Nor does the sum of several leaves overflow.
        [np.full(9, 1e38, 'f')] * 9,
        {'a': np.ones(3), 'b': np.array([1, np.nan])},
        {'a': np.array(-np.inf)},
        {'a': np.array([1, np.inf], jnp.bfloat16)},
        {'a': np.array([1, 1j * np.nan])},
    ]

    found = jax.jit(
        lambda trees: [norms.are_finite((x, none), ()) for x in trees]
    )(trees)

    self.assertEqual([*map(bool, found)], [True] * 4 + [False] * 4)

  @cases.parameters('bfloat16', 'float16', 'float32', 'float64', 'complex128')
  def test_judges_all_dtypes_and_no_sum_overflows(self, dtype):
    with jax.enable_x64(True):
      # So many that their sum is infinite in each dtype.
      rows = np.full((4, 1000), jnp.finfo(dtype).max, dtype)
      rows[1:3, 500] = np.nan, np.inf
      if dtype == 'complex128':
        rows[3, 500] = complex(1, np.inf)
      else:
        rows[3, 0] = -np.inf

      are_finite = jax.jit(jax.vmap(lambda x: norms.are_finite({'a': x}, ())))(
          rows
      )

    self.assertEqual(are_finite.tolist(), [True] + [False] * 3)
