"""Clipping of TensorFlow 1: by the global norm, by each norm, by values."""

import jax.numpy as jnp
import numpy as np
import pytest

import cases
import graphs
from shard_transforms import facade
from shard_transforms.facade import tf

GRADS = np.float32([3, 0]), np.float32([[4]])


class ClippingTest(graphs.GraphTest):

  @cases.parameters((1.0, 0.2), (2.5, 0.5), (5.0, 1.0), (7.0, 1.0))
  def test_scales_to_the_global_norm(self, clip_norm, scale):
    grads_and_none = [None, GRADS[0], None, GRADS[1]]

    clipped, norm = tf.clip_by_global_norm(grads_and_none, clip_norm)

    grads = [
        None if g is None else jnp.asarray(scale * g) for g in grads_and_none
    ]
    self.assert_close((clipped, norm), (grads, jnp.float32(5)))
    if scale == 1.0:
      self.assert_equal(clipped, grads)
    self.assert_equal(
        tf.global_norm(grads_and_none, name='norm'), jnp.float32(5)
    )
    # Of each by itself:
    x = np.float32([[3, 0], [0, 4]])
    by_norm = tf.clip_by_norm(x, clip_norm, name='clipped')
    self.assert_close(by_norm, scale * jnp.asarray(x))

  @cases.parameters((5.0, 0.2), (0.5, 1.0))
  def test_accepts_a_precomputed_norm(self, norm, scale):
    grads_and_none = [np.float32(3), None]

    clipped, used = tf.clip_by_global_norm(
        grads_and_none, 1.0, np.float32(norm), 'name'
    )

    self.assert_close(
        (clipped, used), ([jnp.float32(3 * scale), None], jnp.float32(norm))
    )

  @pytest.mark.thorough
  def test_a_nonfinite_norm_gives_nan(self):
    for norm, grad in ((None, np.inf), (None, 3e20), (np.inf, 1.0)):
      grads_and_none = [np.float32([grad, 1]), None, jnp.bfloat16(2)]

      clipped, _ = tf.clip_by_global_norm(grads_and_none, 1.0, norm)

      nan = [jnp.full(2, jnp.nan), None, jnp.bfloat16(jnp.nan)]
      self.assert_equal(clipped, nan)
    w = tf.Variable([1.0, 2.0], name='w')
    opt = tf.contrib.estimator.clip_gradients_by_norm(
        tf.train.MomentumOptimizer(0.1, 0.9), 1.0
    )
    opt.minimize(lambda: jnp.sum(w * np.float32([3e20, 4e20])))
    self.assert_holds(w, jnp.full(2, jnp.nan))

  def test_zeros_stay_zeros(self):
    clipped, norm = tf.clip_by_global_norm((np.float32(0),), 1.0)

    self.assert_equal((clipped, norm), ([jnp.float32(0)], jnp.float32(0)))
    self.assertEqual(float(tf.clip_by_norm(0.0, 1.0)), 0)

  def test_takes_variables_and_tracers(self):
    variable = tf.Variable(3.0)

    clipped, norm = facade.function(
        lambda x: tf.clip_by_global_norm((variable, x), x / 2)
    )(np.float32(4))

    self.assert_close(
        (clipped, norm), ([jnp.float32(1.2), jnp.float32(1.6)], jnp.float32(5))
    )

  @cases.parameters((0, [3, 4]), ([1], [3, 4]), ((0, 1), [5, 5]))
  def test_clips_by_norms_over_axes(self, axes, norms):
    x = jnp.float32([[3, 0], [0, 4]])

    clipped = tf.clip_by_norm(x, 2.0, axes)

    self.assert_close(clipped, x * (2 / jnp.float32(norms)[None]))

  def test_clips_each_gradient_separately(self):
    w, b = tf.Variable(1.0), tf.Variable(2.0)

    pairs = [(jnp.float32(3), w), (None, b), (jnp.float32(0.5), b)]
    actual = tf.contrib.training.clip_gradient_norms(iter(pairs), 1.0)

    self.assertEqual(actual, [(1.0, w), (None, b), (0.5, b)])

  def test_limits_elements(self):
    clipped = tf.clip_by_value(np.float32([-3, 0.5, 4]), -1.0, jnp.full(3, 2.0))

    self.assert_equal(clipped, jnp.float32([-1, 0.5, 2]))

  def test_an_element_at_a_limit_has_the_full_gradient(self):
    w = tf.Variable([-2.0, -1.0, 0.0, 2.0, 3.0])

    [grad] = tf.gradients(lambda: tf.clip_by_value(w, -1.0, 2.0), [w])

    self.assert_equal(grad, jnp.float32([0, 1, 1, 1, 0]))

  def test_an_optimizer_clips_by_the_global_norm(self):
    w = tf.Variable([3.0, 4.0], name='w')
    inner = facade.TowerOptimizer(tf.train.MomentumOptimizer(1.0, 0.9))
    opt = tf.contrib.estimator.clip_gradients_by_norm(inner, 1.0)
    step = tf.train.get_or_create_global_step()

    opt.minimize(lambda: jnp.sum(w * w) / 2, step)

    self.assert_close(w.value(), jnp.float32([2.4, 3.2]))
    self.assertEqual(int(step), 1)
    self.assertEqual(opt.get_name(), 'ClipByNormMomentum')
    self.assertEqual(opt.variables(), [opt.get_slot(w, 'momentum')])
