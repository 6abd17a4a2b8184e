"""Tests of `power_sgd` against NumPy and PyTorch, sketches and resizing."""

import json
import pathlib

from absl.testing import parameterized
import chex
import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

import cases
import compressions
import modes
import shard_transforms as st
from shard_transforms.contrib import compression

AXIS = modes.AXIS
zeros = compressions.zeros
TAPE = pathlib.Path(__file__).with_name('power_sgd_hook.json')


def in_numpy(data, sketch, weight=None):
  """Returns the results and residuals of a reference in float64.

  Args:
    data: Matrices [shards, steps, n, m].
    sketch: The first one, [m, r].
    weight: Weights [shards, steps], or `None`.
  """
  data = np.asarray(data, np.float64)
  num_shards, steps = data.shape[:2]
  weight = np.ones((num_shards, steps)) if weight is None else weight
  residual = np.zeros((num_shards, *data.shape[2:]))
  results = []
  for t in range(steps):
    w = weight[:, t].astype(np.float64)
    factor = w * num_shards / (w.sum() or 1)
    counts = (w > 0)[:, None, None]
    matrices = np.where(counts, factor[:, None, None] * data[:, t], 0)
    matrices = np.where(counts, matrices + residual, 0)
    left, _ = np.linalg.qr(matrices.mean(0) @ sketch)
    rights = matrices.transpose(0, 2, 1) @ left
    sketch = rights.mean(0) if w.any() else sketch
    results.append(left @ rights.mean(0).T)
    rest = matrices - left @ rights.transpose(0, 2, 1)
    residual = np.where(counts, rest, residual)
  return np.stack(results), residual


def first_sketches(params, *txs):
  """Returns the initial sketches for each transformation."""
  init = jax.vmap(
      lambda _: [tx.init(params).sketch for tx in txs], axis_name=AXIS
  )
  return jax.tree.map(lambda x: np.asarray(x)[0, 0], jax.jit(init)(zeros(2)))


class PowerSGDTest(parameterized.TestCase):

  @cases.parameters((8, False), (3, True), fast='3_True')
  def test_equals_the_reference_in_numpy(self, num_shards, weighted):
    tx = compression.power_sgd(AXIS, 2)
    params = {
        'w': zeros(12, 20),
        'conv': zeros(3, 4, 10, dtype=jnp.bfloat16),
        'b': zeros(20),
        'small': zeros(2, 2),
    }
    data = compressions.make_data(num_shards, 9, params)
    w = None
    if weighted:
      w = np.random.default_rng(1).choice([0, 0.5, 1, 7], (num_shards, 9))
      w = w.astype(np.float32)
      w[0] = 1
      w[:, 4] = 0

    updates, state = compressions.run(
        {'power_sgd': tx}, 'shard_map', data, params, w
    )['power_sgd']

    sketch = first_sketches(params, tx)[0]['w'].astype(np.float64)
    results, residual = in_numpy(data['w'], sketch, w)
    np.testing.assert_allclose(updates['w'][0], results, atol=3e-5)
    np.testing.assert_allclose(state.residual['w'][:, 0], residual, atol=3e-4)
    if w is None:
      norms = np.linalg.norm(data['w'][:, -1], axis=(1, 2))
      np.testing.assert_allclose(state.update_norm['w'][:, 0], norms, rtol=1e-5)
    for leaf, values in updates.items():
      self.assertEqual(values.dtype, data[leaf].dtype)
      bits = values.view(np.uint8)
      np.testing.assert_array_equal(bits, np.stack([bits[0]] * num_shards))
    share = np.ones((num_shards, 9)) if w is None else w
    share = share / np.maximum(share.sum(0), 0.5)
    for leaf in ('b', 'small'):
      mean = np.einsum('nt,nt...->t...', share, data[leaf])
      np.testing.assert_allclose(updates[leaf][0], mean, atol=1e-5)
    # Results and residuals add up for leaves with three axes and of 16 bits.
    conv = np.asarray(data['conv'], np.float64)
    means = np.einsum('nt,nt...->t...', share, conv)
    total = np.asarray(updates['conv'][0], np.float64).sum(0)
    total += np.asarray(state.residual['conv'], np.float64)[:, 0].mean(0)
    np.testing.assert_allclose(total, means.sum(0), atol=0.1)

  @cases.parameters(8, 9)
  def test_a_mean_of_the_rank_is_exact_without_residual(self, rank):
    # Above rank 8, the factors are multiplied by a matrix product.
    rng = np.random.default_rng(0)
    left, right = rng.normal(size=(24, rank)), rng.normal(size=(rank, 25))
    own = np.float32(np.stack([left @ right, 3 * left @ right]))
    tx = compression.power_sgd(AXIS, rank, min_ratio=1)

    def fn(own):
      mean, state = tx.update(own, tx.init(own))
      return mean, state.residual[0]

    mean, rest = jax.jit(jax.vmap(fn, axis_name=AXIS))(own)

    np.testing.assert_allclose(mean, np.stack(2 * [own.mean(0)]), atol=1e-4)
    np.testing.assert_allclose(rest, np.zeros_like(own), atol=1e-4)

  def test_equals_the_hook_of_pytorch(self):
    # Recorded from two processes over gloo after two uncompressed steps: the
    # gradients of each process, their mean, and the residuals and right factors
    # after each step.
    tape = json.loads(TAPE.read_text())
    shapes = {k: tuple(shape) for k, shape in tape['shapes'].items()}
    first, *steps = tape['steps']
    tx = compression.power_sgd(AXIS, tape['rank'], min_ratio=1)

    def arrays(values, lead=()):
      return {
          k: np.reshape(np.float32(x), (*lead, *shapes[k]))
          for k, x in values.items()
      }

    residual = {k: x[:, None] for k, x in arrays(first['errors'], [2]).items()}
    sketch = {
        k: np.reshape(np.float32(x), (1, shapes[k][1], tape['rank']))
        for k, x in first['sketch'].items()
    }
    grads = [arrays(step['grads'], [2]) for step in steps]
    grads = jax.tree.map(lambda *x: np.stack(x, axis=1), *grads)

    def shard(residual, grads):
      # The hook also keeps residuals of uncompressed leaves.
      state = tx.init({k: zeros(*shape) for k, shape in shapes.items()})
      state = state._replace(
          residual=residual | {'vector': None}, sketch=sketch
      )

      def step(state, grads):
        updates, state = tx.update(grads, state)
        return state, updates

      return lax.scan(step, state, grads)[1]

    del residual['vector']
    sketch['vector'] = None
    means = jax.jit(jax.vmap(shard, axis_name=AXIS))(residual, grads)

    expected = [arrays(step['mean']) for step in steps]
    expected = jax.tree.map(lambda *x: np.stack(x), *expected)
    for name, mean in expected.items():
      np.testing.assert_allclose(means[name][0], mean, atol=2e-5)

  @cases.parameters(1e-18, 1e30)
  def test_is_exact_for_fixed_matrices_of_the_rank(self, scale):
    rng = np.random.default_rng(0)
    left, right = rng.normal(size=(8, 12, 3)), rng.normal(size=(3, 20))
    fixed = (scale * left @ right).astype(np.float32)
    data = {'w': np.repeat(fixed[:, None], 4, axis=1)}
    params = {'w': zeros(12, 20)}
    some = {'power_sgd': compression.power_sgd(AXIS, 3, min_ratio=1)}

    updates, state = compressions.run(some, 'vmap', data, params)['power_sgd']

    mean = fixed.astype(np.float64).mean(0)
    for step in (0, 3):
      error = updates['w'][0, step] - mean
      self.assertLess(np.abs(error).max(), 1e-5 * scale)
    # The residuals of the shards cancel.
    held = state.residual['w'].astype(np.float64).mean(0)
    self.assertLess(np.abs(held).max(), 1e-4 * scale)

  def test_warmup_and_full_rank_are_the_plain_mean(self):
    params = {'w': zeros(12, 20), 'b': zeros(20)}
    data = compressions.make_data(8, 3, params)
    transformations = {
        'mean': st.cross_shard_mean(AXIS),
        'warmup': compression.power_sgd(AXIS, 2, warmup_steps=3),
        'rank': compression.power_sgd(AXIS, 12, min_ratio=1),
    }

    found = compressions.run(transformations, 'shard_map', data, params)

    mean, _ = found.pop('mean')
    for updates, _ in found.values():
      chex.assert_trees_all_equal(updates, mean, strict=True)
    self.assertEmpty(jax.tree.leaves(found['rank'][1].residual))

  def test_compresses_matrices_with_a_sufficient_ratio(self):
    shapes = {'least': (8, 8), 'less': (8, 7), 'row': (64,), 'empty': (0, 0)}
    params = {name: zeros(*shape) for name, shape in shapes.items()}
    params['complex'] = zeros(8, 8, dtype=np.complex64)
    tx = compression.power_sgd(AXIS, 2, min_ratio=2)

    init = jax.vmap(lambda _: tx.init(params), axis_name=AXIS)
    state = jax.eval_shape(init, zeros(2))

    held = {name for name, x in state.residual.items() if x is not None}
    self.assertEqual(held, {'least'})

  def test_sketches_differ_between_leaves_and_seeds(self):
    params = {'a': zeros(12, 20), 'b': zeros(12, 20)}
    txs = [compression.power_sgd(AXIS, 2, seed=seed) for seed in (0, 1)]

    found = jax.tree.leaves(first_sketches(params, *txs))

    self.assertLen({sketch.tobytes() for sketch in found}, 4)

  def test_nothing_is_lost_across_numbers_of_shards(self):
    tx = compression.power_sgd(AXIS, 2)
    params = {'w': zeros(12, 20), 'b': zeros(20)}
    state = st.init_state(tx, params, modes.mesh(8))
    results, means = 0, 0

    for seed, num_shards in enumerate((8, 3, 1)):
      mesh = modes.mesh(num_shards)
      data = compressions.make_data(num_shards, 4, params, seed)
      state = st.resize_state(state, tx, params, mesh)
      updates, state = compressions.go_on(tx, params, mesh, state, data)
      results += np.asarray(updates['w'], np.float64).sum(0)
      means += np.asarray(data['w'], np.float64).mean(0).sum(0)
      held = np.asarray(state.residual['w'], np.float64).mean(0)
      np.testing.assert_allclose(results + held, means, atol=3e-5)

    np.testing.assert_array_equal(state.residual['w'], 0)

  @cases.parameters(
      (dict(rank=0), ValueError, '`rank` must be at least 1, got 0'),
      (dict(rank=1.0), TypeError, '`rank` must be an integer'),
      (dict(min_ratio=0.5), ValueError, '`min_ratio` must be at least 1'),
      (dict(warmup_steps=-1), ValueError, '`warmup_steps` must be at least 0'),
  )
  def test_refuses_wrong_options(self, options, error, message):
    options = {'rank': 1, **options}
    with self.assertRaisesRegex(error, message):
      compression.power_sgd(AXIS, **options)

  def test_refuses_a_state_of_another_rank(self):
    params = {'w': zeros(12, 20)}

    def shard(params, grads):
      state = compression.power_sgd(AXIS, 1).init(params)
      return compression.power_sgd(AXIS, 2).update(grads, state)

    mapped = jax.vmap(shard, (None, 0), axis_name=AXIS)
    with self.assertRaisesRegex(ValueError, 'another `rank` or `min_ratio`'):
      jax.eval_shape(mapped, params, {'w': np.zeros((8, 12, 20), np.float32)})
