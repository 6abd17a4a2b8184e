"""Tests of the table of nested staleness transformations."""

import pathlib

from absl.testing import parameterized
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np
import optax

import cases
import modes
import shard_transforms as st
from shard_transforms.contrib import scale_by_staleness

AXIS = modes.AXIS
DOCUMENT = pathlib.Path(__file__).parents[1] / 'docs' / 'composing.md'
PARAMS = {'w': jnp.linspace(-1, 1, 5), 'b': jnp.float32(2)}
SGD = optax.sgd(0.1, momentum=0.9)

# Functions that put a transformation before another one. `None` comes last.
ROWS = {
    '`scale_by_staleness` with `inner`': lambda inner: scale_by_staleness(
        'inverse', inner, axis_name=AXIS
    ),
    '`scale_by_staleness`, then': lambda inner: optax.chain(
        scale_by_staleness('inverse'), inner
    ),
    '`compensate_delay`, then': lambda inner: optax.chain(
        st.contrib.compensate_delay(2.0, decay=0.95, axis_name=AXIS), inner
    ),
    '`delay_updates` before the reduction': lambda inner: optax.chain(
        st.contrib.delay_updates(1, axis_name=AXIS), inner
    ),
    '`delay_updates` after the reduction': None,
}
PLACES = {
    'in `drop_stale`': lambda tx: st.drop_stale(8, tx, axis_name=AXIS),
    'in `guard`': lambda tx: st.guard(tx, AXIS),
    'in `tower_reduce`': lambda tx: st.tower_reduce(2, tx, axis_name=AXIS),
    'in `shard_update`': lambda tx: st.shard_update(tx, AXIS),
}


def build(row, place):
  is_cut = 'shard_update' in place
  mean = optax.identity() if is_cut else st.cross_shard_mean(AXIS)
  if ROWS[row] is None:
    return PLACES[place](optax.chain(mean, st.contrib.delay_updates(1), SGD))
  return PLACES[place](ROWS[row](optax.chain(mean, SGD)))


def trace(tx, **extra_args):
  """Traces two steps, of gradients that are taken inside."""

  def loss(params, x):
    return jnp.sum(params['w'] * x) + params['b']

  def shard(params, x):
    state = tx.init(params)
    for _ in range(2):
      _, grads = st.value_and_grad(loss, AXIS)(params, x)
      updates, state = tx.update(grads, state, params, **extra_args)
    return updates

  mapped = modes.map_shards('shard_map', shard)
  return jax.eval_shape(mapped, PARAMS, jnp.ones((8, 5)))


def outcome(row, place):
  tx = build(row, place)
  extra_args = {'local_step': 0, 'read_params': PARAMS}
  words = 'yes'
  try:
    trace(tx, **extra_args)
    words = 'no weights'
    trace(tx, weight=2.0, **extra_args)
  except ValueError:
    return 'refused' if words == 'yes' else words
  return 'yes'


class CompositionTest(parameterized.TestCase):

  @cases.parameters(
      *ROWS,
      fast=[
          '`scale_by_staleness`, then',
          '`delay_updates` before the reduction',
          '`delay_updates` after the reduction',
      ],
  )
  def test_the_table_is_correct(self, row):
    outcomes = [outcome(row, place) for place in PLACES]

    line = '| ' + ' | '.join([row, *outcomes]) + ' |'
    self.assertIn(f'\n{line}\n', DOCUMENT.read_text())


class PlainJitTest(parameterized.TestCase):
  """Without a mapping, where gradients are global."""

  @cases.product(
      tx=(
          scale_by_staleness(lambda age: 1.0 + 0 * age),
          st.contrib.compensate_delay(2.0, decay=0.95),
          st.contrib.delay_updates(1),
      )
  )
  def test_preserves_sharding(self, tx):
    mesh = jax.make_mesh((8,), (AXIS,), (jax.sharding.AxisType.Auto,))
    sharding = jax.NamedSharding(mesh, P(None, AXIS))
    params = np.arange(16.0, dtype=np.float32).reshape(2, 8)

    def step(params):
      state = tx.init(params)
      extra_args = {'local_step': -1, 'read_params': params}
      for _ in range(2):
        updates, state = tx.update(params, state, params, **extra_args)
      return updates

    with jax.set_mesh(mesh):
      updates = jax.jit(step)(jax.device_put(params, sharding))

    self.assertTrue(updates.sharding.is_equivalent_to(sharding, 2))
    np.testing.assert_array_equal(updates, params)
