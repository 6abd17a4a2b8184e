import itertools

from absl.testing import parameterized
import chex
import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np
import optax

import modes
import shard_transforms
from shard_transforms import clip_by_global_norm
from shard_transforms import global_norm

AXIS = modes.AXIS
SHARDS = 8


def mesh():
  return jax.make_mesh((4, 2), (AXIS, 'model'))


def on_mesh(fn, specs, check_vma=True, out_specs=P()):
  """Maps a function of trees over a mesh of two axes."""

  def call(tree):
    tree = jax.tree.map(
        lambda x, spec: jax.device_put(x, NamedSharding(mesh(), spec)),
        tree,
        specs,
    )
    mapped = jax.shard_map(
        fn,
        mesh=mesh(),
        in_specs=(specs,),
        out_specs=out_specs,
        check_vma=check_vma,
    )
    return jax.jit(mapped)(tree)

  return call


def tree_of(dtype=np.float32):
  rng = np.random.default_rng(0)
  tree = {'a': (8, 3), 'b': (2, 4), 'c': (5,), 's': ()}
  return {k: np.asarray(rng.normal(size=v), dtype) for k, v in tree.items()}


def norm_of(tree):
  leaves = [np.ravel(x) for x in jax.tree.leaves(tree)]
  return np.linalg.norm(np.concatenate(leaves))


# Every mix of leaves that are whole or sliced over one axis, another, or both.
MIXES = [
    dict(a=a, b=b, c=P(), s=P())
    for a, b in itertools.product(
        (P(), P(AXIS), P('model'), P((AXIS, 'model')), P(None, None)),
        (P(), P(None, AXIS), P('model', AXIS)),
    )
]


class GlobalNormTest(parameterized.TestCase):

  @parameterized.product(mix=[*range(len(MIXES))], check_vma=(True, False))
  def test_is_that_of_the_whole_for_every_mix(self, mix, check_vma):
    tree, specs = tree_of(), MIXES[mix]
    axes = (AXIS, 'model')
    norm = on_mesh(
        lambda tree: global_norm(
            tree, axes, sharded=None if check_vma else specs
        ),
        specs,
        check_vma,
    )

    actual = norm(tree)

    np.testing.assert_allclose(actual, norm_of(tree), rtol=1e-6)

  def test_types_and_specs_may_both_be_given(self):
    tree, specs = tree_of(), dict(MIXES[2])
    norm = on_mesh(
        lambda tree: global_norm(tree, (AXIS, 'model'), sharded=specs), specs
    )

    np.testing.assert_allclose(norm(tree), norm_of(tree), rtol=1e-6)

  @parameterized.parameters(*modes.MODES)
  def test_without_an_axis_it_is_the_shards_own(self, mode):
    x = np.arange(16.0, dtype=np.float32).reshape(SHARDS, 2)

    norms = modes.map_shards(mode, lambda _, x: global_norm(x))(0.0, x)

    np.testing.assert_allclose(norms, np.linalg.norm(x, axis=1), rtol=1e-6)

  @parameterized.parameters(*modes.MODES)
  def test_joins_slices_in_every_mode(self, mode):
    x = np.arange(16.0, dtype=np.float32).reshape(SHARDS, 2)

    def fn(whole, x):
      tree = {'sliced': x, 'whole': whole, 'scalar': whole[0]}
      specs = {'sliced': P(AXIS), 'whole': P(), 'scalar': P(AXIS)}
      return global_norm(tree, AXIS, sharded=specs)

    norms = modes.map_shards(mode, fn)(jnp.array([3.0, 4.0]), x)

    expected = (np.sum(x**2) + 25 + 9) ** 0.5
    np.testing.assert_allclose(norms, [expected] * SHARDS, rtol=1e-6)

  def test_leaves_of_all_kinds(self):
    tree = {
        'half': jnp.full(1000, 100, jnp.float16),
        'complex': jnp.array([3 + 4j]),
        'none': None,
        'masked': optax.MaskedNode(),
        'empty': jnp.ones((0, 3)),
        'float0': np.zeros(3, jax.dtypes.float0),
    }

    norm = global_norm(tree)

    # The square of a half would overflow, as would their sum.
    np.testing.assert_allclose(norm, (1000 * 1e4 + 25) ** 0.5, rtol=1e-6)
    self.assertEqual(norm.dtype, jnp.float32)

  @parameterized.parameters(({},), ([],), (None,))
  def test_of_nothing_is_zero(self, tree):
    chex.assert_trees_all_equal(global_norm(tree), jnp.float32(0), strict=True)

  def test_is_the_same_on_all_shards(self):
    specs = MIXES[1]

    def fn(tree):
      norm = global_norm(tree, (AXIS, 'model'))
      shard_transforms.assert_reduced(norm, (AXIS, 'model'))
      return norm

    self.assertEqual(on_mesh(fn, specs)(tree_of()).shape, ())

  def test_sends_one_number_for_each_way_of_slicing(self):
    tree = {'a': jnp.ones(6), 'b': jnp.ones(7), 'c': jnp.ones(8)}

    report = shard_transforms.wire_report(
        lambda tree: global_norm(
            tree, AXIS, sharded={'a': P(AXIS), 'b': P(AXIS), 'c': P()}
        ),
        tree,
        axis_sizes={AXIS: SHARDS},
    )

    (sent,) = report.collectives
    self.assertEqual((sent.payload_bytes, sent.scope), (4, 'global_norm'))

  @parameterized.parameters(
      (
          dict(axis_name=AXIS),
          '`sharded` of .* must say which leaves .* not track',
      ),
      (dict(sharded=P(AXIS)), '`sharded` of .* must come with `axis_name`'),
  )
  def test_does_not_guess(self, kwargs, message):
    def fn(_, x):
      return global_norm(x, **kwargs)

    with self.assertRaisesRegex(ValueError, message):
      modes.map_shards('pmap', fn)(0.0, jnp.ones((SHARDS, 2)))

  @parameterized.parameters(True, False)
  def test_refuses_specs_that_the_types_contradict(self, sliced):
    def fn(whole, own):
      leaf, spec = (own, P()) if sliced else (whole, P(AXIS))
      return global_norm({'w': leaf}, AXIS, sharded=spec)

    with self.assertRaisesRegex(ValueError, r"as the types .* \['w'\] \[2\]"):
      modes.map_shards('shard_map', fn)(jnp.ones(2), jnp.ones((SHARDS, 2)))

  def test_refuses_specs_of_another_tree(self):
    def fn(_, x):
      return global_norm({'w': x}, AXIS, sharded={'v': P(AXIS)})

    with self.assertRaisesRegex(ValueError, 'key|structure'):
      modes.map_shards('pmap', fn)(0.0, jnp.ones((SHARDS, 2)))

  def test_refuses_a_sum_that_is_pending(self):
    def fn(shared, own):
      reduced = lax.pcast(shared, AXIS, to='reduced')
      grads = jax.grad(lambda w: jnp.sum(w * own))(reduced)
      return global_norm(grads, AXIS)

    with self.assertRaisesRegex(ValueError, 'typed unreduced'):
      modes.map_shards('shard_map', fn)(jnp.ones(2), jnp.ones((SHARDS, 2)))

  def test_refuses_integers_and_unbound_axes(self):
    with self.assertRaisesRegex(TypeError, '`global_norm` must be real'):
      global_norm(jnp.arange(3))
    with self.assertRaisesRegex(NameError, '`global_norm` needs the mapped'):
      global_norm(jnp.ones(3), 'nowhere')


class ClipTest(parameterized.TestCase):

  @parameterized.product(
      mode=modes.MODES, order=('before', 'after'), max_norm=(0.5, 2.0, 1e3)
  )
  def test_clips_before_or_after_the_reduction(self, mode, order, max_norm):
    x = np.random.default_rng(0).normal(size=(SHARDS, 5)).astype(np.float32)
    links = [
        clip_by_global_norm(max_norm),
        shard_transforms.cross_shard_mean(AXIS),
    ]
    tx = optax.chain(*(links if order == 'before' else links[::-1]))

    def fn(params, x):
      grads = shard_transforms.value_and_grad(jnp.vdot, AXIS)(params, x)[1]
      return tx.update(grads, tx.init(params), params)[0]

    updates = modes.map_shards(mode, fn)(jnp.zeros(5), x)

    def clip(x):
      norms = np.linalg.norm(x, axis=-1, keepdims=True)
      return x * np.minimum(1, max_norm / norms)

    expected = clip(x).mean(0) if order == 'before' else clip(x.mean(0))
    np.testing.assert_allclose(updates, [expected] * SHARDS, rtol=1e-5)

  @parameterized.parameters(0.5, 1e3)
  def test_is_that_of_optax_to_the_bit(self, max_norm):
    tree = tree_of()
    tx, expected = (
        fn(max_norm) for fn in (clip_by_global_norm, optax.clip_by_global_norm)
    )

    updates, _ = tx.update(tree, tx.init(tree))

    chex.assert_trees_all_equal(
        updates, expected.update(tree, expected.init(tree))[0], strict=True
    )

  @parameterized.product(
      mix=[*range(0, len(MIXES), 3)], check_vma=(True, False)
  )
  def test_clips_slices_by_the_norm_of_the_whole(self, mix, check_vma):
    tree, specs = tree_of(), MIXES[mix]
    sharded = None if check_vma else specs
    tx = clip_by_global_norm(1.0, (AXIS, 'model'), sharded=sharded)
    clip = on_mesh(
        lambda tree: tx.update(tree, tx.init(tree))[0], specs, check_vma, specs
    )

    updates = clip(tree)

    chex.assert_trees_all_close(
        updates, jax.tree.map(lambda x: x / norm_of(tree), tree), rtol=1e-6
    )
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

  @parameterized.parameters(
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

    with self.assertRaisesRegex(ValueError, r"must name \['model'\]"):
      clip(tree_of())

  @parameterized.parameters(
      (0.0, ValueError, '`max_norm` must be positive, got 0.0'),
      (-1, ValueError, '`max_norm` must be positive, got -1'),
      (np.nan, ValueError, '`max_norm` must be positive, got nan'),
      (None, TypeError, '`max_norm` must be a real number, got None'),
      (True, TypeError, '`max_norm` must be a real number, got True'),
      ([1.0], TypeError, '`max_norm` must be a real number'),
      (1j, TypeError, '`max_norm` must be a real number, got 1j'),
  )
  def test_refuses_a_limit_that_is_none(self, max_norm, error, message):
    with self.assertRaisesRegex(error, message):
      clip_by_global_norm(max_norm)


class ShardUpdateTest(parameterized.TestCase):

  @parameterized.product(mode=modes.MODES, num_shards=(1, 3, SHARDS))
  def test_clips_inside_by_the_norm_of_the_whole(self, mode, num_shards):
    params = {'w': jnp.ones((3, 5)), 'b': jnp.ones(2), 's': jnp.ones(())}
    clip = clip_by_global_norm(1.0, AXIS, sharded=P(AXIS))
    tx = shard_transforms.shard_update(
        optax.chain(clip, optax.adam(0.1, eps=1.0)), AXIS
    )
    whole = optax.chain(
        shard_transforms.cross_shard_mean(AXIS),
        optax.clip_by_global_norm(1.0),
        optax.adam(0.1, eps=1.0),
    )

    def fn(params, x):
      grads = jax.tree.map(lambda p: p * x, params)
      grads = shard_transforms.per_shard(grads, AXIS)
      results = []
      for t in tx, whole:
        _, state = t.update(grads, t.init(params), params)
        results.append(t.update(grads, state, params)[0])
      return results

    mapped = modes.map_shards(mode, fn, num_shards)
    actual, expected = mapped(params, jnp.arange(1.0, num_shards + 1))

    chex.assert_trees_all_close(actual, expected, rtol=1e-5)

  def test_types_tell_what_is_sliced(self):
    tx = shard_transforms.shard_update(
        optax.chain(clip_by_global_norm(1.0, AXIS), optax.sgd(-1.0)), AXIS
    )

    def fn(params, x):
      return tx.update(x, tx.init(params), params)[0]

    updates = modes.map_shards('shard_map', fn)(
        jnp.zeros(3), jnp.full((SHARDS, 3), 7.0)
    )

    np.testing.assert_allclose(updates, np.full((SHARDS, 3), 3**-0.5), 1e-6)

  def test_clips_twice(self):
    clip = clip_by_global_norm(1.0, AXIS)
    scaled = optax.chain(clip, optax.scale(3.0), clip, optax.sgd(-1.0))
    tx = shard_transforms.shard_update(scaled, AXIS)

    def fn(params, x):
      return tx.update(x, tx.init(params), params)[0]

    updates = modes.map_shards('shard_map', fn)(
        jnp.zeros(3), jnp.full((SHARDS, 3), 7.0)
    )

    np.testing.assert_allclose(updates, np.full((SHARDS, 3), 3**-0.5), 1e-6)

  @parameterized.parameters(
      # Of the moments it is not known what is behind their last element.
      (lambda: optax.chain(optax.adam(0.1), clip_by_global_norm(1.0, AXIS)),),
      (lambda: clip_by_global_norm(1.0),),
      (lambda: optax.clip_by_global_norm(1.0),),
  )
  def test_refuses_a_norm_that_it_does_not_know(self, inner):
    tx = shard_transforms.shard_update(inner(), AXIS)

    with self.assertRaisesRegex(ValueError, 'several of them together|part'):
      shard_transforms.init_state(tx, jnp.ones(3), modes.mesh())

  @parameterized.parameters('psum of leaves', 'pmean', 'psum of sums')
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

    tx = shard_transforms.shard_update(optax.stateless(update), AXIS)
    params = {'w': jnp.ones(5), 's': jnp.ones(())}

    def fn(params, x):
      updates = jax.tree.map(lambda p: p * x, params)
      updates = shard_transforms.per_shard(updates, AXIS)
      return tx.update(updates, tx.init(params), params)[0]

    with self.assertRaisesRegex(ValueError, 'must treat each element'):
      modes.map_shards('pmap', fn)(params, jnp.ones(SHARDS))

  @parameterized.parameters(True, False)
  def test_counts_parameters_that_are_sharded_over_another_axis(
      self, check_vma
  ):
    specs = {'a': P('model'), 'b': P()}
    # Inside, slices over the mapped axis are of what the other has left.
    sharded = {'a': P((AXIS, 'model')), 'b': P(AXIS)}
    clip = clip_by_global_norm(1.0, (AXIS, 'model'), sharded=sharded)
    tx = shard_transforms.shard_update(optax.chain(clip, optax.sgd(-1.0)), AXIS)
    tree = {
        'a': np.arange(1.0, 7, dtype=np.float32),
        'b': np.ones(3, 'float32'),
    }

    def fn(tree):
      updates = shard_transforms.per_shard(tree, AXIS)
      return tx.update(updates, tx.init(tree), tree)[0]

    updates = on_mesh(fn, specs, check_vma, specs)(tree)

    chex.assert_trees_all_close(
        updates, jax.tree.map(lambda x: x / norm_of(tree), tree), rtol=1e-6
    )

  def test_refuses_it_in_groups(self):
    tx = shard_transforms.shard_update(
        optax.chain(clip_by_global_norm(1.0, AXIS), optax.sgd(1.0)),
        AXIS,
        groups=[[0, 1, 2, 3], [4, 5, 6, 7]],
    )

    def fn(params, x):
      params = shard_transforms.per_shard(params, AXIS)
      return tx.update(x, tx.init(params), params)[0]

    with self.assertRaisesRegex(ValueError, 'several of them together'):
      modes.map_shards('shard_map', fn)(jnp.zeros(3), jnp.ones((SHARDS, 3)))
