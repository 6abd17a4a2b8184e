"""HSDP: parameters sharded over one axis, and summed over another at the end.

Each way trains as one device, and sends over the slow axis once a window.
"""

from absl.testing import parameterized
import chex
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
import shard_transforms as st

pytestmark = pytest.mark.slow
TOWERS, WINDOWS = 4, 2
CUT = {'w': P(None, 'fsdp'), 'v': P('fsdp'), 'b': P()}
ROWS = P(None, ('data', 'fsdp'))
ADAM = optax.adam(0.01, eps=1e-3)
MEAN = optax.chain(st.cross_shard_mean('data'), ADAM)


def mesh():
  return jax.make_mesh((2, 4), ('data', 'fsdp'), (AxisType.Auto,) * 2)


def initial_params():
  rng = np.random.default_rng(0)
  return {
      'w': rng.normal(size=(16, 32)).astype(np.float32) / 4,
      'v': rng.normal(size=(32, 8)).astype(np.float32) / 6,
      'b': np.zeros(8, np.float32),
  }


def windows():
  """Returns windows of micro-batches, [windows, towers, rows, features]."""
  rng = np.random.default_rng(1)
  return rng.normal(size=(WINDOWS, TOWERS, 32, 16)).astype(np.float32)


def loss_fn(params, x):
  hidden = jnp.tanh(x @ params['w'])
  return jnp.mean((hidden @ params['v'] + params['b'][None] - 1) ** 2)


def loss_of_slices(params, x):
  whole = {
      'w': lax.all_gather(params['w'], 'fsdp', axis=1, tiled=True),
      'v': lax.all_gather(params['v'], 'fsdp', tiled=True),
      'b': params['b'],
  }
  return lax.pmean(loss_fn(whole, x), 'fsdp')


def collected(inner):
  return st.tower_reduce(TOWERS, inner, axis_name='data')


def in_turn(grad_fn, tx):
  """Returns a step that hands the micro-batches of a window to `tx`."""

  def step(params, state, window):
    def micro_step(carry, x):
      params, state = carry
      _, grads = grad_fn(params, x)
      updates, state = tx.update(grads, state, params)
      return (optax.apply_updates(params, updates), state), None

    return lax.scan(micro_step, (params, state), window)[0]

  return step


def mapped(inner, params):
  """Maps all axes."""
  tx = collected(inner)
  specs = st.state_specs(tx, params, mesh(), in_specs=CUT)
  step = jax.shard_map(
      in_turn(st.value_and_grad(loss_of_slices, 'data'), tx),
      mesh=mesh(),
      in_specs=(CUT, specs, ROWS),
      out_specs=(CUT, specs),
  )
  return step, st.init_state(tx, params, mesh(), in_specs=CUT)


def automatic(inner, params):
  """Leaves the sharded parameters to the compiler."""
  tx = collected(inner)
  specs = st.state_specs(tx, params, mesh())
  step = jax.shard_map(
      in_turn(st.value_and_grad(loss_fn, 'data'), tx),
      mesh=mesh(),
      axis_names={'data'},
      in_specs=(P(), specs, P(None, 'data')),
      out_specs=(P(), specs),
  )
  return step, st.init_state(tx, params, mesh(), in_specs=CUT)


def plain(inner, params):
  """Takes the gradients of the shards under plain `jax.jit`."""
  tx = st.on_mesh(collected(inner), mesh(), in_specs=CUT)
  grad_fn = st.value_and_grad(loss_fn, 'data', mesh=mesh())
  return in_turn(grad_fn, tx), tx.init(params)


def in_one_call(inner, params):
  """Takes the gradient of a window in one call."""
  grad_fn = st.accumulated_value_and_grad(
      loss_fn, 'data', param_specs=CUT, mesh=mesh()
  )

  def step(params, state, window):
    _, grads = grad_fn(params, window)
    updates, state = inner.update(grads, state, params)
    return optax.apply_updates(params, updates), state

  return step, st.init_state(inner, params, mesh(), in_specs=CUT)


ZERO = st.shard_update(ADAM, 'data')
CLIP = st.clip_by_global_norm(0.5, ('data', 'fsdp'))
CLIPPED_ZERO = st.guard(
    st.shard_update(optax.chain(CLIP, ADAM), 'data'), 'data'
)
WAYS = {
    'mapped': (mapped, MEAN),
    'mapped, ZeRO-1': (mapped, ZERO),
    'mapped, clipped and guarded ZeRO-1': (mapped, CLIPPED_ZERO),
    'automatic': (automatic, MEAN),
    'plain jit': (plain, MEAN),
    'plain jit, ZeRO-1': (plain, ZERO),
    'accumulated': (in_one_call, ADAM),
}


def on_one_device(tx):
  params = initial_params()
  state = tx.init(params)
  for window in windows():
    grads = jax.grad(loss_fn)(params, window.reshape(-1, 16))
    updates, state = tx.update(grads, state, params)
    params = optax.apply_updates(params, updates)
  return params


def place(tree, specs):
  specs = jax.tree.broadcast(specs, tree)
  return jax.device_put(
      tree, jax.tree.map(lambda spec: NamedSharding(mesh(), spec), specs)
  )


class HsdpTest(parameterized.TestCase):

  @cases.parameters(*WAYS)
  def test_trains_as_one_device(self, way):
    build, inner = WAYS[way]
    links = [optax.clip_by_global_norm(0.5)] if 'clipped' in way else []
    expected = on_one_device(optax.chain(*links, ADAM))
    params = place(initial_params(), CUT)

    step, state = build(inner, params)
    jitted = jax.jit(step)
    window = place(windows()[0], ROWS)
    report = st.monitoring.communication_report(
        jitted.lower(params, state, window).compile()
    )
    for window in windows():
      params, state = jax.block_until_ready(
          jitted(params, state, place(window, ROWS))
      )

    chex.assert_trees_all_close(params, expected, rtol=1e-5, atol=1e-6)
    self.assertEqual(params['v'].sharding.spec, P('fsdp'))
    sent = sum(
        c.sent_bytes / (TOWERS if c.conditional else 1)
        for c in report.collectives
        if 'data' in c.axes
    )
    # A ring of two sends each element of a slice once: a quarter of the
    # matrices, the bias, and a few scalars.
    of_slices = 4 * (16 * 32 // 4 + 32 * 8 // 4 + 8)
    self.assertBetween(sent, 0.9 * of_slices, 1.15 * of_slices)

  def test_refuses_a_mean_over_both_axes(self):
    both = ('data', 'fsdp')
    inner = optax.chain(st.cross_shard_mean(both), ADAM)
    params = place(initial_params(), CUT)
    step, state = mapped(inner, params)

    with self.assertRaisesRegex(ValueError, "must be per shard over 'fsdp'"):
      jax.eval_shape(step, params, state, place(windows()[0], ROWS))
