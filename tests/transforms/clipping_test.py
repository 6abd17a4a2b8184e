"""`clip_by_global_norm`: Optax's bits, slices, and inside `shard_update`."""

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
from shard_transforms import clip_by_global_norm
from sliced_trees import norm_of
from sliced_trees import on_mesh
from sliced_trees import tree_of

AXIS = modes.AXIS
SHARDS = 8


class ClipTest(parameterized.TestCase):

  def test_is_that_of_optax_to_the_bit(self):
    tree = tree_of()

    @jax.jit
    def clipped(tree):
      state = optax.EmptyState()
      return [
          [tx(max_norm).update(tree, state)[0] for max_norm in (0.5, 1e3)]
          for tx in (clip_by_global_norm, optax.clip_by_global_norm)
      ]

    chex.assert_trees_all_equal(*clipped(tree), strict=True)

  @cases.parameters(True, False)
  def test_clips_slices_by_the_norm_of_the_whole(self, check_vma):
    # Of leaves that are whole, and sliced over one axis and both.
    specs = {'a': P(AXIS), 'b': P('model', AXIS), 'c': P(), 's': P()}
    tree = tree_of()
    sharded = None if check_vma else specs
    tx = clip_by_global_norm(1.0, (AXIS, 'model'), specs=sharded)
    clip = on_mesh(
        lambda tree: tx.update(tree, tx.init(tree))[0], specs, check_vma, specs
    )

    updates = clip(tree)

    expected = jax.tree.map(lambda x: x / norm_of(tree), tree)
    chex.assert_trees_all_close(updates, expected, rtol=1e-6)
    self.assertLessEqual(norm_of(updates), 1 + 1e-6)

  def test_keeps_dtypes(self):
    tree = {
        'half': jnp.full(4, 3, jnp.bfloat16),
        'complex': jnp.full(2, 3 + 4j),
        'none': None,
        'float0': np.zeros(3, jax.dtypes.float0),
    }
    tx = clip_by_global_norm(1.0)

    updates, _ = tx.update(tree, tx.init(tree))

    chex.assert_trees_all_equal_shapes_and_dtypes(updates, tree)

  @cases.parameters(
      ([0.0, 0.0], [0.0, 0.0]),
      ([np.inf, 1.0], [np.nan, 0.0]),
      ([np.nan, 1.0], [np.nan, np.nan]),
  )
  def test_knows_norms_that_are_zero_or_not_finite(self, updates, expected):
    tx = clip_by_global_norm(1.0)

    updates, _ = tx.update(jnp.array(updates), tx.init(updates))

    np.testing.assert_array_equal(updates, expected)

  def test_the_limit_may_be_a_hyperparameter(self):
    tx = optax.inject_hyperparams(clip_by_global_norm)(
        max_norm=optax.constant_schedule(0.5)
    )

    updates, _ = tx.update(jnp.array([3.0, 4.0]), tx.init(jnp.zeros(2)))

    np.testing.assert_allclose(updates, [0.3, 0.4], rtol=1e-6)

  def test_refuses_to_make_whole_leaves_differ(self):
    tx = clip_by_global_norm(1.0)
    specs = {'a': P('model'), 'b': P(), 'c': P(), 's': P()}
    clip = on_mesh(lambda tree: tx.update(tree, tx.init(tree))[0], specs)

    with self.assertRaisesRegex(ValueError, r"over the axes \['model'\]"):
      clip(tree_of())

  @cases.product(
      caller=('clip_by_global_norm', 'global_norm'), check=(True, False)
  )
  def test_refuses_specs_of_an_axis_that_is_not_named(self, caller, check):
    specs = {'a': P('model'), 'b': P(), 'c': P(), 's': P()}
    sharded = specs | {'a': P('model', AXIS)}
    tx = clip_by_global_norm(1.0, 'model', specs=sharded)

    def fn(tree):
      if caller == 'global_norm':
        return st.global_norm(tree, 'model', specs=sharded)
      return tx.update(tree, tx.init(tree))[0]['c']

    with self.assertRaisesRegex(
        ValueError,
        rf"`axis_name` of `{caller}` .* not contain \['data'\]"
        r".* Write `axis_name=\('model', 'data'\)`",
    ):
      on_mesh(fn, specs, check)(tree_of())

  def test_refuses_leaves_that_vary_over_an_axis_that_is_not_named(self):
    tx = clip_by_global_norm(1.0, 'model')
    specs = {'a': P('model'), 'b': P(None, AXIS), 'c': P(), 's': P()}
    clip = on_mesh(lambda tree: tx.update(tree, tx.init(tree))[0]['c'], specs)

    with self.assertRaisesRegex(ValueError, r"over the axes \['data'\], so"):
      clip(tree_of())

  @cases.parameters(
      (np.nan, ValueError, '`max_norm` must be positive, got nan'),
      (None, TypeError, '`max_norm` must be a real number, got None'),
  )
  def test_refuses_a_limit_that_is_none(self, max_norm, error, message):
    with self.assertRaisesRegex(error, message):
      clip_by_global_norm(max_norm)


class ShardUpdateTest(parameterized.TestCase):

  # Types tell what is sliced, where they are tracked.
  @cases.parameters((1, P(AXIS)), (3, P(AXIS)), (3, None), fast='3_None')
  def test_clips_inside_by_the_norm_of_the_whole(self, num_shards, sharded):
    params = {'w': jnp.ones((3, 5)), 'b': jnp.ones(2), 's': jnp.ones(())}
    clip = clip_by_global_norm(1.0, AXIS, specs=sharded)
    tx = st.shard_update(optax.chain(clip, optax.adam(0.1, eps=1.0)), AXIS)
    whole = optax.chain(
        st.cross_shard_mean(AXIS),
        optax.clip_by_global_norm(1.0),
        optax.adam(0.1, eps=1.0),
    )

    def fn(params, x):
      grads = jax.tree.map(lambda p: p * x, params)
      grads = st.per_shard(grads, AXIS)
      results = []
      for t in tx, whole:
        _, state = t.update(grads, t.init(params), params)
        results.append(t.update(grads, state, params)[0])
      return results

    mapped = modes.map_shards('shard_map', fn, num_shards)
    actual, expected = mapped(params, jnp.arange(1.0, num_shards + 1))

    chex.assert_trees_all_close(actual, expected, rtol=1e-5)

  @cases.parameters(
      # Of the moments it is not known what is behind their last element.
      (lambda: optax.chain(optax.adam(0.1), clip_by_global_norm(1.0, AXIS)),),
      (lambda: clip_by_global_norm(1.0),),
  )
  def test_refuses_a_norm_that_it_does_not_know(self, inner):
    tx = st.shard_update(inner(), AXIS)

    def step(params):
      grads = st.per_shard(params, AXIS)
      return tx.update(grads, tx.init(params), params)[0]

    mapped = jax.shard_map(step, mesh=modes.mesh(), in_specs=P(), out_specs=P())
    with self.assertRaisesRegex(ValueError, 'several elements|slice of one'):
      jax.eval_shape(mapped, jnp.ones(3))

  @cases.parameters('psum of leaves', 'pmean', 'psum of sums')
  def test_refuses_a_norm_by_hand(self, kind):
    # A scalar is not cut, so that a sum over shards counts it once for each.
    def update(updates, params):
      del params
      squares = jax.tree.map(lambda u: jnp.sum(u**2), updates)
      if kind == 'psum of leaves':
        squares = lax.psum(squares, AXIS)
      elif kind == 'pmean':
        squares = lax.pmean(squares, AXIS)
      else:
        squares = lax.psum(squares['w'] + squares['s'], AXIS), 0.0
      norm = jnp.sqrt(sum(jax.tree.leaves(squares)))
      return jax.tree.map(lambda u: u / norm, updates)

    tx = st.shard_update(optax.stateless(update), AXIS)
    params = {'w': jnp.ones(5), 's': jnp.ones(())}

    def fn(params, x):
      updates = jax.tree.map(lambda p: p * x, params)
      updates = st.per_shard(updates, AXIS)
      return tx.update(updates, tx.init(params), params)[0]

    with self.assertRaisesRegex(ValueError, 'must be element-wise'):
      jax.eval_shape(modes.map_shards('vmap', fn), params, jnp.ones(SHARDS))

  @cases.parameters(True, False)
  def test_counts_parameters_that_are_sharded_over_other_axes(self, check_vma):
    specs = {'a': P('model'), 'b': P()}
    # Inside, slices over the mapped axis are of what the other has left.
    sharded = {'a': P((AXIS, 'model')), 'b': P(AXIS)}
    clip = clip_by_global_norm(1.0, (AXIS, 'model'), specs=sharded)
    tx = st.shard_update(optax.chain(clip, optax.sgd(-1.0)), AXIS)
    tree = {'a': np.arange(1.0, 7, dtype=np.float32), 'b': np.ones(3, 'f')}

    def fn(tree):
      updates = st.per_shard(tree, AXIS)
      return tx.update(updates, tx.init(tree), tree)[0]

    updates = on_mesh(fn, specs, check_vma, specs)(tree)

    expected = jax.tree.map(lambda x: x / norm_of(tree), tree)
    chex.assert_trees_all_close(updates, expected, rtol=1e-6)

  def test_refuses_it_in_groups(self):
    tx = st.shard_update(
        optax.chain(clip_by_global_norm(1.0, AXIS), optax.sgd(1.0)),
        AXIS,
        groups=[[0, 1, 2, 3], [4, 5, 6, 7]],
    )

    def fn(params, x):
      params = st.per_shard(params, AXIS)
      return tx.update(x, tx.init(params), params)[0]

    with self.assertRaisesRegex(ValueError, 'may combine several elements'):
      modes.map_shards('shard_map', fn)(jnp.zeros(3), jnp.ones((SHARDS, 3)))
