"""Estimates of steps: their operations, memory, and bounds of their time."""

import functools
from types import SimpleNamespace
from unittest import mock

from absl.testing import parameterized
import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np
import optax

import cases
import modes
import shard_transforms as st
from shard_transforms import monitoring
from shard_transforms._src.monitoring import step_estimate

AXIS = modes.AXIS
# A flop takes 1 s, a byte of memory 10, a sent byte 100 or 200, between slices
# 5000; there are 1,000 bytes.
CHIP = monitoring.Chip(
    flops=1.0,
    memory_bytes=1000,
    memory_bandwidth=1 / 10,
    link_bandwidth=1 / 100,
    axis_bandwidth=1 / 200,
    network_bandwidth=1 / 5000,
)


def shaped(*shape, spec=P(), mesh=None, dtype=jnp.float32):
  mesh = modes.mesh() if mesh is None else mesh
  sharding = jax.NamedSharding(mesh, spec)
  return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


def mapped(fn, *specs):
  return jax.jit(
      jax.shard_map(fn, mesh=modes.mesh(), in_specs=specs, out_specs=P(AXIS))
  )


W, X = shaped(5, 5), shaped(24, 5, spec=P(AXIS))
STACK = shaped(7, 5, 5)
BATCHED = shaped(8, 3, 5), shaped(8, 5, 4)
IMAGES, KERNEL = shaped(16, 10, 10, 4), shaped(3, 3, 4, 6)
EXPERTS, SIZES = shaped(4, 5, 7), shaped(4, dtype=jnp.int32)


def layers(x, w):
  return lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0]


def loss_and_grad(w, x):
  return jax.value_and_grad(lambda w: jnp.sum(jnp.tanh(x @ w)))(w)


def rematerialized(w, x):
  loss = jax.checkpoint(lambda w: jnp.sum(jnp.tanh(jnp.tanh(x @ w) @ w)))
  return jax.grad(loss)(w)


def either(x, w):
  return lax.cond(x[0, 0] > 0, lambda: x @ w @ w, lambda: x @ w)


def convolve(x, w, stride=1, padding='SAME', dilation=1, groups=1):
  return lax.conv_general_dilated(
      x,
      w,
      (stride, stride),
      padding,
      rhs_dilation=(dilation, dilation),
      dimension_numbers=('NHWC', 'HWIO', 'NHWC'),
      feature_group_count=groups,
  )


def convolve_and_grad(x, w, **options):
  def loss(x, w):
    return jnp.sum(convolve(x, w, padding='VALID', **options) ** 2)

  return jax.grad(loss, (0, 1))(x, w)


def of_experts(x, w, sizes):
  def loss(x, w):
    return jnp.sum(lax.ragged_dot(x, w, sizes) ** 2)

  return jax.grad(loss, (0, 1))(x, w)


class OperationsTest(parameterized.TestCase):

  @cases.parameters(
      # 24 rows are 3 for each device.
      (jnp.matmul, (X, W), 2 * 3 * 5 * 5),
      (mapped(jnp.matmul, P(AXIS), P()), (X, W), 2 * 3 * 5 * 5),
      (mapped(layers, P(AXIS), P()), (X, STACK), 7 * 2 * 3 * 5 * 5),
      (layers, (X, STACK), 7 * 2 * 3 * 5 * 5),
      # Forward, and the gradient of the weights.
      (loss_and_grad, (W, X), 2 * 2 * 3 * 5 * 5),
      # Two products forward, two recomputed, and three backward.
      (rematerialized, (W, X), 7 * 2 * 3 * 5 * 5),
      (either, (X, W), 2 * 2 * 3 * 5 * 5),
      (jnp.matmul, BATCHED, 2 * 3 * 5 * 4),
      # In each direction, 3 products for each of 10 pixels, but for one at each
      # edge, where a third one would be with padding.
      (convolve, (IMAGES, KERNEL), 2 * 2 * 28 * 28 * 6 * 4),
      # Those forward, and as many for each gradient.
      (convolve_and_grad, (IMAGES, KERNEL), 3 * 2 * 2 * 24 * 24 * 6 * 4),
      (
          functools.partial(convolve_and_grad, stride=2),
          *((IMAGES, KERNEL), 3 * 2 * 2 * 12 * 12 * 6 * 4),
      ),
      (
          functools.partial(convolve_and_grad, dilation=2),
          *((IMAGES, KERNEL), 3 * 2 * 2 * 18 * 18 * 6 * 4),
      ),
      (
          functools.partial(convolve_and_grad, groups=2),
          *((IMAGES, shaped(3, 3, 2, 6)), 3 * 2 * 2 * 24 * 24 * 6 * 2),
      ),
      # Each of 24 rows is of one expert.
      (of_experts, (X, EXPERTS, SIZES), 3 * 2 * 3 * 5 * 7),
  )
  def test_matrix_products_count(self, fn, args, flops):
    estimate = monitoring.estimate_step(fn, *args, chip=CHIP)

    self.assertEqual(estimate.flops, flops)
    self.assertEqual(estimate.compute_seconds, flops)
    self.assertEqual(estimate.num_devices, 8)

  def test_auto_axes_divide_the_operations(self):
    auto = (jax.sharding.AxisType.Auto,) * 2
    mesh = jax.make_mesh((4, 2), (AXIS, 'model'), auto)
    x = shaped(24, 5, spec=P(AXIS), mesh=mesh)
    w = shaped(5, 14, spec=P(None, 'model'), mesh=mesh)
    step = jax.shard_map(
        jnp.matmul,
        mesh=mesh,
        in_specs=(P(AXIS), P()),
        out_specs=P(AXIS),
        axis_names={AXIS},
    )

    estimate = monitoring.estimate_step(jax.jit(step), x, w, chip=CHIP)

    self.assertEqual(estimate.flops, 2 * 6 * 5 * 7)

  @cases.parameters((np.ones,), (jnp.ones,))
  def test_devices_are_those_of_the_program(self, ones):
    # The arrays are on the host, or on one device.
    step = mapped(jnp.matmul, P(AXIS), P())
    x, w = ones((24, 5), jnp.float32), ones((5, 5), jnp.float32)

    estimate = monitoring.estimate_step(step, x, w, chip=CHIP)

    self.assertEqual(estimate.num_devices, 8)
    self.assertEqual(estimate.flops, 2 * 3 * 5 * 5)

  def test_arguments_may_be_static(self):
    @functools.partial(jax.jit, static_argnums=1, static_argnames='kind')
    def step(x, num_products, kind):
      return [x @ x.T for _ in range(num_products if kind == 'all' else 0)]

    estimate = monitoring.estimate_step(step, X, 3, kind='all', chip=CHIP)

    self.assertEqual(estimate.flops, 3 * 2 * 24 * 3 * 5)


class TimesTest(parameterized.TestCase):

  def estimate(self, *collectives, flops=0.0, **memory):
    sizes = dict.fromkeys(
        (
            'argument_size_in_bytes',
            'output_size_in_bytes',
            'temp_size_in_bytes',
            'alias_size_in_bytes',
            'generated_code_size_in_bytes',
        ),
        0,
    )
    memory = SimpleNamespace(**(sizes | memory))
    report = monitoring.CommunicationReport(collectives, memory=memory)
    return monitoring.StepEstimate(CHIP, 8, flops, report)

  def sum_over(self, num_shards, num_slices=1):
    return monitoring.Collective(
        'psum', 'float32', 40, (AXIS,), num_shards, num_slices=num_slices
    )

  def test_bounds_are_the_longest_and_the_sum(self):
    estimate = self.estimate(
        self.sum_over(8),
        flops=100.0,
        argument_size_in_bytes=30,
        output_size_in_bytes=20,
    )

    self.assertEqual(estimate.compute_seconds, 100)
    self.assertEqual(estimate.memory_seconds, 500)
    # 70 bytes, over all links or those of an axis.
    self.assertEqual(estimate.send_seconds, (7_000, 14_000))
    self.assertEqual(estimate.seconds, (7_000, 14_600))

  @cases.parameters(
      (2, 2, 40 * 5000), (8, 2, 70 * 1250), (1000, 2, 79.92 * 100)
  )
  def test_devices_of_a_slice_share_the_network(self, shards, slices, seconds):
    estimate = self.estimate(self.sum_over(shards, slices)).send_seconds

    self.assertAlmostEqual(estimate[0], seconds)
    self.assertAlmostEqual(estimate[1], seconds)

  @cases.parameters(
      # XLA reports the peak of what is needed at the same time.
      (500, 500 + 20),
      # A peak above the sum, none, and one that does not include arguments.
      (900, 400 + 50 - 40 + 300 + 20),
      (0, 400 + 50 - 40 + 300 + 20),
      (300, 400 + 50 - 40 + 300 + 20),
  )
  def test_memory_is_the_peak_if_xla_reports_it(self, peak, expected):
    estimate = self.estimate(
        argument_size_in_bytes=400,
        output_size_in_bytes=50,
        alias_size_in_bytes=40,
        temp_size_in_bytes=300,
        generated_code_size_in_bytes=20,
        peak_memory_in_bytes=peak,
    )

    self.assertEqual(estimate.memory_bytes, expected)

  @cases.parameters((999, True), (1000, True), (1001, False))
  def test_memory_includes_arguments_results_and_temporaries(
      self, num_bytes, fits
  ):
    estimate = self.estimate(
        argument_size_in_bytes=num_bytes - 60,
        output_size_in_bytes=50,
        # Of donated arguments.
        alias_size_in_bytes=40,
        temp_size_in_bytes=30,
        generated_code_size_in_bytes=20,
    )

    self.assertEqual(estimate.memory_bytes, num_bytes)
    self.assertEqual(estimate.fits, fits)
    words = 'fits: ' if fits else 'does not fit: '
    self.assertStartsWith(str(estimate), words)

  @cases.parameters(
      # As XLA says when it refuses a larger program; NVIDIA's own number.
      ('TPU v5 lite', 15.75),
      ('TPU v6 lite', 31.25),
      ('NVIDIA H100 80GB HBM3', 79.1),
  )
  def test_fits_if_xla_compiles_the_step(self, kind, gibibytes):
    chip = step_estimate.CHIPS[kind]
    num_bytes = int(gibibytes * 2**30)
    memory = self.estimate(argument_size_in_bytes=num_bytes).report

    estimate = monitoring.StepEstimate(chip, 8, 0.0, memory)

    self.assertTrue(estimate.fits)
    self.assertIn(f'{gibibytes:.2f} of', str(estimate))

  def test_a_step_without_collectives_does_not_send(self):
    self.assertEqual(self.estimate().seconds, (0, 0))


class StepTest(parameterized.TestCase):

  def test_a_step_is_estimated_as_it_is_compiled(self):
    mesh = modes.mesh()
    tx = optax.chain(st.cross_shard_mean(AXIS), optax.adam(0.1))
    state = st.init_state(tx, W, mesh)

    def loss_fn(w, x):
      return jnp.mean(jnp.tanh(x @ w))

    def step(w, state, x):
      grads = st.value_and_grad(loss_fn, AXIS)(w, x)[1]
      updates, state = tx.update(grads, state, w)
      return optax.apply_updates(w, updates), state

    step = jax.jit(
        jax.shard_map(
            step, mesh=mesh, in_specs=(P(), P(), P(AXIS)), out_specs=P()
        ),
        donate_argnums=(0, 1),
    )
    estimate = monitoring.estimate_step(step, W, state, X, chip=CHIP)

    report = monitoring.communication_report(step, W, state, X, compiled=True)
    self.assertEqual(estimate.report.total_bytes, report.total_bytes)
    self.assertGreater(report.total_bytes, 0)
    self.assertEqual(estimate.flops, 2 * 2 * 3 * 5 * 5)
    # Parameters, two moments and the batch of a device.
    self.assertGreaterEqual(estimate.memory_bytes, 4 * (3 * 25 + 3 * 5))
    self.assertRegex(str(estimate), r'step: .* to .* ms, not calibrated\n')

  @cases.parameters(
      ({'fn': 3}, TypeError, '`fn` must be the function of a step, got 3'),
      (
          {'fn': jax.jit(jnp.sin).lower(1.0)},
          *(TypeError, 'loops cannot be counted in a compiled program'),
      ),
      ({'fn': jax.jit(jnp.sin).trace(1.0)}, TypeError, '`fn` must be the fun'),
      ({'chip': (1, 2)}, TypeError, '`chip` must be a `Chip`'),
      (
          {'chip': CHIP._replace(flops=0)},
          *(ValueError, '`chip` must have positive numbers'),
      ),
      (
          {'chip': None},
          ValueError,
          "data sheet of 'cpu'.*TPU v5 lite.* `chip=",
      ),
      ({'x': 3.0}, ValueError, 'do not have devices.* with a `sharding`'),
  )
  def test_refuses(self, change, error, words):
    arguments = {'fn': jnp.sin, 'x': X, 'chip': CHIP, **change}
    fn, x = arguments.pop('fn'), arguments.pop('x')

    with self.assertRaisesRegex(error, words):
      monitoring.estimate_step(fn, x, **arguments)

  def test_explains_that_xla_refuses_steps_that_do_not_fit(self):
    error = jax.errors.JaxRuntimeError('RESOURCE_EXHAUSTED: Ran out of memory.')

    with (
        mock.patch.object(jax.stages.Lowered, 'compile', side_effect=error),
        self.assertRaisesRegex(ValueError, 'does not fit .*`donate_argnums`'),
    ):
      monitoring.estimate_step(jnp.sin, X, chip=CHIP)
