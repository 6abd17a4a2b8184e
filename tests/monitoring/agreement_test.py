from absl.testing import parameterized
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import cases
import modes
import shard_transforms
from shard_transforms import monitoring

AXIS = modes.AXIS


class AgreementTest(parameterized.TestCase):

  @cases.parameters(*modes.MODES)
  def test_is_the_cosine_with_the_mean(self, mode):
    tx = monitoring.track_agreement(AXIS, decay=0.5)
    rng = np.random.default_rng(0)
    updates = {
        'a': rng.normal(size=(8, 2, 5)).astype('float32'),
        'c': rng.normal(size=(8, 2, 3, 2)).astype('float32').view('complex64'),
    }
    updates['c'] = updates['c'][..., 0]
    weight = np.float32([1, 1, 2, 1, 0, 1, 1, 1])

    def fn(params, own):
      state = tx.init(params)
      for step in range(2):
        update = jax.tree.map(lambda x, i=step: x[i], own[0])
        update = shard_transforms.per_shard(update, AXIS)
        _, state = tx.update(update, state, params, weight=own[1])
      return state

    params = jax.tree.map(lambda x: np.zeros_like(x[0, 0]), updates)
    state = modes.map_shards(mode, fn)(params, (updates, weight))

    expected = np.ones(8)
    for step in range(2):
      u = np.concatenate(
          [
              updates['a'][:, step],
              updates['c'][:, step].real,
              updates['c'][:, step].imag,
          ],
          axis=1,
      )
      mean = weight @ u / weight.sum()
      cosine = u @ mean / np.linalg.norm(u, axis=1) / np.linalg.norm(mean)
      expected = np.where(weight > 0, (expected + cosine) / 2, expected)
    np.testing.assert_allclose(state.cosine[:, 0], expected, rtol=1e-5)
    np.testing.assert_allclose(
        state.least_cosine, [expected.min()] * 8, rtol=1e-5
    )
    np.testing.assert_array_equal(state.least_shard, [expected.argmin()] * 8)

  @pytest.mark.slow
  def test_finds_the_shard_with_shuffled_labels(self):
    # Its import takes seconds.
    from sklearn import datasets

    images, labels = datasets.load_digits(return_X_y=True)
    images, labels = np.float32(images[:1024] / 16), labels[:1024]
    images = images.reshape(8, 128, 64)
    labels = labels.reshape(8, 128).copy()
    labels[5] = np.random.default_rng(0).permutation(labels[5])
    tx = optax.chain(monitoring.track_agreement(AXIS), optax.sgd(0.2))

    def loss(w, x, y):
      losses = optax.softmax_cross_entropy_with_integer_labels(x @ w, y)
      return losses.mean()

    def train(w, own):
      def step(carry, _):
        w, state = carry
        grads = shard_transforms.value_and_grad(loss, AXIS)(w, *own)[1]
        updates, state = tx.update(grads, state, w)
        return (optax.apply_updates(w, updates), state), None

      return jax.lax.scan(step, (w, tx.init(w)), length=30)[0][1]

    mapped = modes.map_shards('shard_map', train)
    state = mapped(jnp.zeros([64, 10]), (images, labels))

    found = monitoring.metrics(state)
    self.assertEqual(found['agreement/least_shard'], 5)
    others = np.delete(np.asarray(state[0].cosine).ravel(), 5)
    self.assertLess(found['agreement/least_cosine'], others.min() - 0.2)

  @pytest.mark.slow
  def test_passes_over_what_is_not_finite_and_zero_is_across(self):
    tx = monitoring.track_agreement(AXIS, decay=0.5)

    def cosine(update):
      return tx.update(update, tx.init(update))[1].cosine[0]

    found = jax.vmap(cosine, axis_name=AXIS)
    np.testing.assert_array_equal(
        found(jnp.array([[jnp.nan], [1.0]])), [1.0, 1.0]
    )
    np.testing.assert_array_equal(found(jnp.array([[0.0], [1.0]])), [0.5, 1.0])

  def test_each_shard_sends_two_numbers(self):
    grads = jax.ShapeDtypeStruct((1024,), jnp.float32)

    def sent(tx):
      return monitoring.wire_report(
          lambda u: tx.update(u, tx.init(u))[0], grads, axis_sizes={AXIS: 8}
      ).total_bytes

    mean = shard_transforms.cross_shard_mean(AXIS)
    self.assertEqual(sent(monitoring.track_agreement(AXIS)), sent(mean) + 8 * 7)

  def test_a_merged_shard_has_the_worse_part(self):
    tx = monitoring.track_agreement(AXIS)
    params = jnp.zeros(3)
    state = shard_transforms.init_state(tx, params, modes.mesh(4))
    state = state._replace(
        cosine=np.float32([0.8, 0.9, 0.7, 0.2]), least_shard=np.int32(3)
    )

    fewer, more = (
        shard_transforms.resize_state(state, tx, params, modes.mesh(n))
        for n in (2, 8)
    )

    np.testing.assert_array_equal(fewer.cosine, np.float32([0.8, 0.2]))
    np.testing.assert_array_equal(np.sort(more.cosine)[4:], np.ones(4))
    self.assertEqual((fewer.least_shard, more.least_shard), (-1, -1))
