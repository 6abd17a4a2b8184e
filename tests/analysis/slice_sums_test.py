"""Tests of the warning about sums over slices."""

from absl.testing import parameterized
import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np
import optax

import cases
import shard_transforms as st
from shard_transforms.monitoring import communication_report

PARAMS = {
    'up': np.ones((4, 8), np.float32),
    'down': np.ones((8, 4), np.float32),
}
CUT = {'up': P(None, 'model'), 'down': P('model')}
# Transformations after the mean.
CORRECT = {
    'sgd': optax.sgd(0.1, momentum=0.9),
    'adamw': optax.adamw(0.1),
    'clip over shards': st.clip_by_global_norm(1.0, 'model'),
}
SUMMING_OVER_SLICES = {
    'clip': optax.clip_by_global_norm(1.0),
    'lamb': optax.lamb(0.1),
    'clip of each leaf': optax.clip_by_block_rms(1.0),
}
GATES = (
    lambda tx: tx,
    lambda tx: st.guard(tx, 'data'),
    # These sums are per shard along both axes.
    lambda tx: st.tower_reduce(2, tx, axis_name='data'),
)


def loss_fn(params, x):
  y = lax.psum(jax.nn.relu(x @ params['up']) @ params['down'], 'model')
  # Scaling the gradient by a sum over the rows of this shard is correct.
  return jnp.sqrt(jnp.mean((y - x) ** 2))


def warnings_of(tx, gate=lambda tx: tx):
  tx = gate(optax.chain(st.cross_shard_mean('data'), tx))
  auto = (jax.sharding.AxisType.Auto,) * 2
  mesh = jax.make_mesh((4, 2), ('data', 'model'), auto)
  specs = st.state_specs(tx, PARAMS, mesh, in_specs=CUT)

  @jax.shard_map(
      mesh=mesh, in_specs=(CUT, specs, P('data')), out_specs=(CUT, specs, P())
  )
  def step(params, state, x):
    loss, grads = st.value_and_grad(loss_fn, 'data')(params, x)
    updates, state = tx.update(grads, state, params)
    params = optax.apply_updates(params, updates)
    return params, state, st.shard_mean(loss, 'data')

  params = jax.eval_shape(lambda: PARAMS)
  state = st.init_state(tx, params, mesh, in_specs=CUT)
  x = jax.ShapeDtypeStruct((8, 4), np.float32)
  return communication_report(step, params, state, x).warnings


class SliceSumsTest(parameterized.TestCase):

  @cases.parameters(*SUMMING_OVER_SLICES)
  def test_warns_about_sums_over_slices(self, name):
    for gate in GATES:
      (warning,) = warnings_of(SUMMING_OVER_SLICES[name], gate)

      self.assertContainsInOrder(
          ["slice along 'model'", "clip_by_global_norm(max_norm, 'model')"],
          warning,
      )

  @cases.parameters(*CORRECT)
  def test_does_not_warn_about_correct_transformations(self, name):
    for gate in GATES:
      self.assertEmpty(warnings_of(CORRECT[name], gate))
