from absl.testing import parameterized
import chex
import jax.numpy as jnp
import numpy as np

import cases
from shard_transforms import facade

GRADS = np.float32([3, 0]), np.float32([[4]])


class ClipByGlobalNormTest(parameterized.TestCase):

  def assert_close(self, actual, expected):
    chex.assert_trees_all_close(actual, expected, rtol=1e-6, strict=True)

  @cases.parameters((1.0, 0.2), (2.5, 0.5), (5.0, 1.0), (7.0, 1.0))
  def test_scales_to_the_norm_and_returns_the_one_before(
      self, clip_norm, scale
  ):
    clipped, norm = facade.clip_by_global_norm(GRADS, clip_norm)

    self.assert_close(clipped, [scale * g for g in map(jnp.asarray, GRADS)])
    self.assert_close(norm, jnp.float32(5))

  def test_leaves_smaller_gradients_alone(self):
    grads = np.random.default_rng(0).normal(size=(2, 3)).astype(np.float32)

    clipped, _ = facade.clip_by_global_norm(list(grads), 100.0)

    chex.assert_trees_all_equal(
        clipped, [jnp.asarray(g) for g in grads], strict=True
    )

  def test_none_stays_in_its_place(self):
    first, second = GRADS

    clipped, norm = facade.clip_by_global_norm([None, first, None, second], 2.5)

    self.assertEqual([c is None for c in clipped], [True, False, True, False])
    self.assert_close(
        clipped[1::2], [jnp.float32([1.5, 0]), jnp.float32([[2]])]
    )
    self.assert_close(norm, jnp.float32(5))

  def test_zeros_stay_zeros(self):
    clipped, norm = facade.clip_by_global_norm([np.zeros(2, np.float32)], 1.0)

    self.assert_close((clipped, norm), ([jnp.zeros(2)], jnp.float32(0)))

  def test_takes_variables_and_tracers(self):
    with facade.Graph().as_default():
      variable = facade.Variable(3.0)

    clipped, norm = facade.function(
        lambda x: facade.clip_by_global_norm((variable, x), x / 2)
    )(4.0)

    self.assert_close(
        (clipped, norm),
        ([jnp.float32(1.2), jnp.float32(1.6)], jnp.float32(5)),
    )

  @cases.parameters((5.0, 0.2), (0.5, 1.0))
  def test_takes_a_norm_that_is_known(self, norm, scale):
    clipped, used = facade.clip_by_global_norm([3.0, None], 1.0, norm, 'name')

    self.assert_close(
        (clipped, used),
        ([jnp.float32(3 * scale), None], jnp.float32(norm)),
    )

  @cases.parameters(
      'text', 3.0, (np.float32([3, 4]),), ({'w': 1.0},), (iter([1.0]),)
  )
  def test_needs_a_sequence(self, given):
    with self.assertRaisesRegex(TypeError, '`t_list` must be a sequence'):
      facade.clip_by_global_norm(given, 1.0)

  @cases.parameters(3, True, 1j, (np.int32([3, 4]),))
  def test_needs_floating_point_numbers(self, given):
    for use_norm in None, 5.0:
      with self.assertRaisesRegex(TypeError, '`t_list` must hold.* at 2'):
        facade.clip_by_global_norm([3.0, None, given], 1.0, use_norm)

  def test_goes_between_gradients_and_their_application(self):
    with facade.Graph().as_default():
      w = facade.Variable([3.0, 4.0])
      opt = facade.GradientDescentOptimizer(1.0)
      grads, variables = zip(
          *opt.compute_gradients(lambda: jnp.sum(w * w) / 2), strict=True
      )
      clipped, _ = facade.clip_by_global_norm(grads, 1.0)

      opt.apply_gradients(zip(clipped, variables, strict=True))

    self.assert_close(w.value(), jnp.float32([2.4, 3.2]))


class ClipByNormTest(parameterized.TestCase):

  @cases.parameters((2.5, 0.5), (5.0, 1.0), (7.0, 1.0))
  def test_scales_to_the_norm(self, clip_norm, scale):
    x = np.float32([[3, 0], [0, 4]])

    clipped = facade.clip_by_norm(x, clip_norm, name='clipped')

    chex.assert_trees_all_close(clipped, scale * jnp.asarray(x), strict=True)

  @cases.parameters((0, [3, 4]), ([1], [3, 4]), ((0, 1), [5, 5]))
  def test_takes_norms_over_axes(self, axes, norms):
    x = jnp.float32([[3, 0], [0, 4]])

    clipped = facade.clip_by_norm(x, 2.0, axes)

    expected = x * (2 / jnp.float32(norms)[None])
    chex.assert_trees_all_close(clipped, expected, strict=True)

  def test_zeros_stay_zeros(self):
    self.assertEqual(float(facade.clip_by_norm(0.0, 1.0)), 0)

  def test_clips_each_gradient_by_itself(self):
    with facade.Graph().as_default():
      w, b = facade.Variable(1.0), facade.Variable(2.0)

    pairs = [(jnp.float32(3), w), (None, b), (jnp.float32(0.5), b)]
    found = facade.clip_gradient_norms(iter(pairs), 1.0)

    self.assertEqual(found, [(1.0, w), (None, b), (0.5, b)])


class ClipByValueTest(parameterized.TestCase):

  def test_limits_elements(self):
    clipped = facade.clip_by_value(
        np.float32([-3, 0.5, 4]), -1.0, jnp.full(3, 2.0)
    )

    chex.assert_trees_all_equal(clipped, jnp.float32([-1, 0.5, 2]), strict=True)


class GlobalNormTest(parameterized.TestCase):

  def test_is_that_of_all_elements(self):
    norm = facade.global_norm([*GRADS, None], name='norm')

    chex.assert_trees_all_equal(norm, jnp.float32(5), strict=True)

  def test_takes_what_is_clipped(self):
    with self.assertRaisesRegex(TypeError, '`t_list` must be a sequence'):
      facade.global_norm(3.0)


class ClipGradientsByNormTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.enterContext(facade.Graph().as_default())
    self.w = facade.Variable([3.0, 4.0], name='w')

  def test_clips_by_the_global_norm(self):
    opt = facade.clip_gradients_by_norm(facade.MomentumOptimizer(1.0, 0.9), 1.0)
    step = facade.get_or_create_global_step()

    opt.minimize(lambda: jnp.sum(self.w * self.w) / 2, step)

    chex.assert_trees_all_close(self.w.value(), jnp.float32([2.4, 3.2]))
    self.assertEqual(int(step), 1)
    self.assertEqual(opt.get_name(), 'ClipByNormMomentum')
    self.assertEqual(opt.get_slot_names(), ['momentum'])
    slot = opt.get_slot(self.w, 'momentum')
    self.assertEqual(opt.variables(), [slot])

  def test_wraps_optimizers_alone(self):
    with self.assertRaisesRegex(TypeError, '`optimizer` must be an optimizer'):
      facade.clip_gradients_by_norm(3.0, 1.0)
