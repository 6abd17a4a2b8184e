"""Tests of the table of gradient accumulation in `docs/measurements.md`."""

from collections.abc import Callable
import functools
import pathlib
import re
from typing import Any, NamedTuple

from absl.testing import parameterized
import chex
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np
import optax

import cases
import shard_transforms
from shard_transforms import monitoring

PAGE = pathlib.Path(__file__).parents[1] / 'docs/measurements.md'
TOWERS, WIDTH, HIDDEN, WINDOWS = 4, 16, 64, 2
RNG = np.random.default_rng(0)
X = RNG.normal(size=(WINDOWS, TOWERS * 64, WIDTH)).astype(np.float32)
PARAMS = {
    'up': RNG.normal(size=(WIDTH, HIDDEN)).astype(np.float32) / 4,
    'down': RNG.normal(size=(HIDDEN, WIDTH)).astype(np.float32) / 8,
    'bias': np.zeros(WIDTH, np.float32),
}
REPLICATED = dict.fromkeys(PARAMS, P())
FSDP = {'up': P('data'), 'down': P(None, 'data'), 'bias': P()}
TENSOR = {'up': P(None, 'model'), 'down': P('model'), 'bias': P()}
BOTH = {'up': P('data', 'model'), 'down': P('model', 'data'), 'bias': P()}
ADAM = optax.adam(1e-2, eps=1e-3)


def loss_fn(params, x):
  hidden = jax.nn.relu(x @ params['up'])
  return jnp.mean((hidden @ params['down'] + params['bias'][None] - x) ** 2)


def apply(tx, grads, state, params):
  updates, state = tx.update(grads, state, params)
  return optax.apply_updates(params, updates), state


def scanned(params, state, x):
  """A step by `lax.scan`, as it is written without this library."""

  def tower(total, x):
    return jax.tree.map(jnp.add, total, jax.grad(loss_fn)(params, x)), None

  zeros = jax.tree.map(jnp.zeros_like, params)
  total, _ = jax.lax.scan(tower, zeros, x)
  grads = jax.tree.map(lambda x: x / TOWERS, total)
  return apply(ADAM, grads, state, params)


def in_calls(tx):
  def step(params, state, x):
    return apply(tx, jax.grad(loss_fn)(params, x), state, params)

  return step


def accumulated(specs, num_towers=None):
  def step(params, state, x):
    grad_fn = shard_transforms.accumulated_value_and_grad(
        loss_fn, 'data', num_towers, param_specs=specs
    )
    _, grads = grad_fn(params, x)
    return apply(ADAM, grads, state, params)

  return step


def make_mesh(specs, kind='Auto'):
  sizes = (4, 2) if specs in (TENSOR, BOTH) else (8,)
  kinds = (getattr(jax.sharding.AxisType, kind),) * len(sizes)
  return jax.make_mesh(sizes, ('data', 'model')[: len(sizes)], kinds)


class Way(NamedTuple):
  """A row: a program of a window, or of one micro-batch of it.

  Attributes:
    step: Takes parameters, a state and micro-batches.
    specs: How the parameters are sharded.
    kind: The type of the axes of the mesh.
    tx: What makes the state.
    in_calls: Whether `step` takes one micro-batch.
    is_flat: Whether it receives all rows together and splits them.
    zero: Whether the state is sharded by `state_shardings`.
  """

  step: Callable[..., Any]
  specs: Any = REPLICATED
  kind: str = 'Auto'
  tx: Any = ADAM
  in_calls: bool = False
  is_flat: bool = False
  zero: bool = False


def reducing(inner, specs, scans):
  """`tower_reduce` in a scan or one call a tower."""
  tx = shard_transforms.tower_reduce(TOWERS, inner, axis_name='data')
  grad_fn = shard_transforms.value_and_grad(loss_fn, 'data')

  def tower(carry, x):
    params, state = carry
    _, grads = grad_fn(params, x)
    return apply(tx, grads, state, params), None

  def shard(params, state, x):
    if scans:
      return jax.lax.scan(tower, (params, state), x)[0]
    return tower((params, state), x)[0]

  def by_shard_map(params, state, x):
    state_specs = shard_transforms.state_specs(tx, params, make_mesh(specs))
    return jax.shard_map(
        shard,
        axis_names={'data'},
        in_specs=(P(), state_specs, P(None, 'data') if scans else P('data')),
        out_specs=(P(), state_specs),
    )(params, state, x)

  return Way(by_shard_map, specs, tx=tx, in_calls=not scans)


MEAN = optax.chain(shard_transforms.cross_shard_mean('data'), ADAM)
SHARD = shard_transforms.shard_update(ADAM, 'data')
STEPS = optax.with_extra_args_support(
    optax.MultiSteps(ADAM, TOWERS).gradient_transformation()
)
WAYS = {
    'plain `lax.scan`': Way(scanned),
    'plain `lax.scan`, FSDP': Way(scanned, FSDP),
    'plain `lax.scan`, tensor-parallel': Way(scanned, TENSOR),
    '`optax.MultiSteps`': Way(in_calls(STEPS), tx=STEPS, in_calls=True),
    'replicated': Way(accumulated(REPLICATED)),
    'replicated, rows not yet split': Way(
        accumulated(REPLICATED, TOWERS), is_flat=True
    ),
    'FSDP': Way(accumulated(FSDP), FSDP),
    'tensor-parallel': Way(accumulated(TENSOR), TENSOR),
    'FSDP and tensor-parallel': Way(accumulated(BOTH), BOTH),
    'ZeRO-1': Way(accumulated(REPLICATED), zero=True),
    'both, `Explicit`': Way(accumulated(None), BOTH, 'Explicit'),
}
for name, *arguments in (
    ('replicated', MEAN, REPLICATED),
    ('tensor-parallel', MEAN, TENSOR),
    ('ZeRO-1', SHARD, REPLICATED),
):
  WAYS[f'{name}, `shard_map`, a scan'] = reducing(*arguments, scans=True)
  WAYS[f'{name}, `shard_map`, calls'] = reducing(*arguments, scans=False)


def sent_in_a_window(way):
  """Trains; returns bytes over `data`, the parameters, and warnings."""
  mesh = make_mesh(way.specs, way.kind)
  shardings = {k: NamedSharding(mesh, v) for k, v in way.specs.items()}
  params = jax.device_put(PARAMS, shardings)
  with jax.set_mesh(mesh):
    state = shard_transforms.init_state(
        way.tx, params, mesh, in_specs=way.specs
    )
    if way.zero:
      of_state = shard_transforms.state_shardings(ADAM, params, mesh)
      state = jax.device_put(state, of_state)
    shardings_of_step = jax.tree.map(lambda x: x.sharding, (params, state))
    step = jax.jit(
        way.step, out_shardings=shardings_of_step, donate_argnums=(0, 1)
    )
    x, spec = X.reshape(WINDOWS, TOWERS, -1, WIDTH), P(None, 'data')
    if way.is_flat or way.in_calls:
      x, spec = X if way.is_flat else x.reshape(-1, *x.shape[2:]), P('data')
    batches = [jax.device_put(batch, NamedSharding(mesh, spec)) for batch in x]
    step = step.lower(params, state, batches[0]).compile()
    report = monitoring.communication_report(step)
    for batch in batches:
      # In JAX 0.10, calls that queue up on virtual devices can abort.
      params, state = jax.block_until_ready(step(params, state, batch))
  sent = reduced = 0
  for c in report.collectives:
    if 'data' in c.axes:
      # A window is closed once, in a scan by one of its turns.
      repeats = TOWERS if way.in_calls and not c.conditional else 1
      in_turn = c.conditional and not way.in_calls and c.times == TOWERS
      repeats /= TOWERS if in_turn else 1
      sent += repeats * c.sent_bytes
      if c.primitive in ('psum', 'reduce_scatter'):
        reduced += repeats * c.times * c.payload_bytes
  return round(sent), round(reduced), params, report.warnings


@functools.cache
def expected_params():
  """Returns the parameters of one device."""

  @jax.jit
  def train(params):
    state = ADAM.init(params)
    for x in X:
      grads = jax.grad(loss_fn)(params, x)
      params, state = apply(ADAM, grads, state, params)
    return params

  return jax.device_get(train(PARAMS))


def rows_of_the_page():
  """Returns the bytes of each row by its name."""
  table = PAGE.read_text('utf-8').partition('| where | sent |')[2]
  rows = re.findall(
      r'^\| (?:.+: )?(.+) \| ([\d,]+) \|$', table.partition('\n\n')[0], re.M
  )
  return {
      name: int(sent.replace(',', ''))
      for names, sent in rows
      for name in names.split('; ')
  }


class TableTest(parameterized.TestCase):

  def test_page_has_each_row(self):
    self.assertEqual(rows_of_the_page().keys(), WAYS.keys())

  @cases.parameters(
      *WAYS,
      fast=[
          'FSDP',
          'ZeRO-1',
          'replicated',
          'plain_lax_scan',
          'optax_MultiSteps',
      ],
  )
  def test_row_reduces_once_sends_the_stated_bytes_and_trains_correctly(
      self, way
  ):
    sent, reduced, params, warnings = sent_in_a_window(WAYS[way])

    chex.assert_trees_all_close(
        jax.device_get(params), expected_params(), rtol=1e-4, atol=1e-5
    )
    self.assertEqual(sent, rows_of_the_page()[way])
    size = sum(
        x.nbytes // (2 if 'model' in WAYS[way].specs[name] else 1)
        for name, x in PARAMS.items()
    )
    repeats, expected = 1, []
    if way.startswith(('plain', '`optax')):
      repeats, expected = TOWERS, ['accumulate on each shard and reduce once']
    if way == 'plain `lax.scan`, FSDP':
      # XLA for CPUs does not use reduce-scatters here.
      expected.append('summed whole, then cut')
    for warning, text in zip(warnings, expected, strict=True):
      self.assertIn(text, warning)
    # The loss, unless it is not used.
    self.assertIn(reduced - repeats * size, (0, 4))
