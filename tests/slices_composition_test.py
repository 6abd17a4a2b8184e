"""Tests of the table of transformations of slices over a model axis."""

import functools
import pathlib

from absl.testing import parameterized
import chex
import jax
from jax import lax
from jax.sharding import AxisType
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np
import optax
import pytest

import cases
import modes
import shard_transforms as st

pytestmark = pytest.mark.slow
AXIS, MODEL = modes.AXIS, 'model'
SHARDS, STEPS = 4, 4
DOCUMENT = pathlib.Path(__file__).parents[1] / 'docs' / 'composing.md'
# How leaves are sharded over `MODEL`, if some of them are whole.
MIXED = {'w': P(None, MODEL), 'v': P(MODEL), 'b': P()}
SLICES = {'w': P(None, MODEL), 'v': P(MODEL)}
SHAPES = {'w': (8, 6), 'v': (12, 4), 'b': (5,)}
ADAM = optax.adam(0.1, eps=1e-2)
MEAN = st.cross_shard_mean(AXIS)


def without_specs(tx):
  """Returns a function of specs that ignores them."""
  return lambda specs: tx


def then_adam(*links):
  return without_specs(optax.chain(*links, ADAM))


def clipped(axes, specs=None):
  clip = st.clip_by_global_norm(0.5, axes, specs=specs)
  return optax.chain(clip, ADAM)


def sliced_again(specs):
  """Returns the specs of slices over `MODEL` that are sliced over `AXIS`."""
  if specs is None:
    return None
  # A norm depends on the axes, and not on the dimensions.
  return {k: P((AXIS, *filter(None, spec))) for k, spec in specs.items()}


# Functions of the argument `specs`, which may be `None`.
ROWS = {
    '`cross_shard_mean` or `_sum`, also of `reproducible`, then Adam': [
        then_adam(MEAN),
        then_adam(st.cross_shard_sum(AXIS)),
        then_adam(st.contrib.reproducible.cross_shard_mean(AXIS)),
    ],
    "`clip_by_global_norm(c, 'model')`": [
        lambda specs: optax.chain(MEAN, clipped(MODEL, specs))
    ],
    "`guard(tx, 'data')`": [
        lambda specs: st.guard(optax.chain(MEAN, ADAM), AXIS, specs=specs),
        lambda specs: st.guard(
            optax.chain(MEAN, ADAM),
            AXIS,
            on_bad='exclude',
            specs=specs,
        ),
    ],
    "`shard_update(adam, 'data')`": [
        without_specs(st.shard_update(ADAM, AXIS))
    ],
    "`shard_update` of `clip_by_global_norm(c, ('data', 'model'))`": [
        lambda specs: st.shard_update(
            clipped((AXIS, MODEL), sliced_again(specs)), AXIS
        )
    ],
    '`tower_reduce`, `drop_stale`, `scale_by_staleness`': [
        without_specs(
            st.tower_reduce(2, then_adam(MEAN)(None), axis_name=AXIS)
        ),
        without_specs(st.drop_stale(8, then_adam(MEAN)(None), axis_name=AXIS)),
        without_specs(
            st.contrib.scale_by_staleness(
                'inverse', then_adam(MEAN)(None), axis_name=AXIS
            )
        ),
    ],
    '`compensate_delay`, `delay_updates`': [
        then_adam(st.contrib.compensate_delay(0.1, axis_name=AXIS), MEAN),
        then_adam(MEAN, st.contrib.delay_updates(1)),
    ],
    '`compressed_mean`, `coordinate_median`, `trimmed_mean`, `majority_vote`': [
        then_adam(
            st.contrib.compression.compressed_mean(
                AXIS, st.contrib.compression.cast('bfloat16'), min_elements=1
            )
        ),
        then_adam(st.contrib.coordinate_median(AXIS)),
        then_adam(st.contrib.trimmed_mean(AXIS, 1)),
        then_adam(st.contrib.majority_vote(AXIS)),
    ],
    '`adasum`': [then_adam(st.contrib.adasum(AXIS))],
    '`adamw`, `lion`, `rmsprop`, `ema`, `MultiSteps` of Optax': [
        without_specs(optax.chain(MEAN, optax.adamw(0.1, eps=1e-2))),
        without_specs(optax.chain(MEAN, optax.lion(0.1))),
        without_specs(optax.chain(MEAN, optax.rmsprop(0.1, eps=1e-2))),
        then_adam(MEAN, optax.ema(0.9)),
        without_specs(
            optax.chain(
                MEAN, optax.MultiSteps(ADAM, 2).gradient_transformation()
            )
        ),
    ],
    '`clip_by_global_norm` of Optax': [
        then_adam(MEAN, optax.clip_by_global_norm(0.5))
    ],
    '`apply_if_finite` of Optax': [
        without_specs(optax.chain(MEAN, optax.apply_if_finite(ADAM, 3)))
    ],
    '`clip_by_block_rms`, `lamb`, `lars`, `contrib.muon` of Optax': [
        then_adam(MEAN, optax.clip_by_block_rms(0.1)),
        without_specs(optax.chain(MEAN, optax.lamb(0.1))),
        without_specs(optax.chain(MEAN, optax.lars(0.1))),
        without_specs(optax.chain(MEAN, optax.contrib.muon(0.1))),
    ],
}
WITH_NAN = "`guard(tx, 'data')`", '`apply_if_finite` of Optax'
# How `jax.shard_map` is called, and which leaves are slices.
COLUMNS = {
    'types are tracked': (MIXED, True),
    'the same, if all leaves are slices': (SLICES, True),
    '`check_vma=False`': (MIXED, False),
}


def data_of(specs, is_broken):
  """Returns parameters, and targets of the shards [steps, shards, ...]."""
  rng = np.random.default_rng(0)
  params = {k: rng.normal(size=SHAPES[k]).astype('f') for k in specs}
  targets = {
      k: rng.normal(size=(STEPS, SHARDS, *SHAPES[k])).astype('f') for k in specs
  }
  if is_broken:
    targets['w'][2, 1, 0, 0] = np.nan
  return params, targets


def trained(tx, specs, is_checked, is_broken):
  """Returns the parameters after some steps.

  Args:
    tx: The transformation.
    specs: How leaves are sharded over `MODEL`.
    is_checked: Whether JAX tracks types.
    is_broken: Whether an element of an update is NaN.
  """
  mesh = jax.make_mesh((SHARDS, 2), (AXIS, MODEL), (AxisType.Auto,) * 2)
  params, targets = data_of(specs, is_broken)
  state_specs = st.state_specs(tx, params, mesh, in_specs=specs)
  update = optax.with_extra_args_support(tx).update

  def shard(params, state, targets):
    def step(carry, target):
      params, state = carry
      grads = jax.tree.map(lambda p, x: p - x[0], params, target)
      updates, state = update(
          grads, state, params, local_step=STEPS, read_params=params
      )
      return (optax.apply_updates(params, updates), state), None

    return lax.scan(step, (params, state), targets)[0][0]

  mapped = jax.shard_map(
      shard,
      mesh=mesh,
      in_specs=(
          specs,
          state_specs,
          {k: P(None, AXIS, *x) for k, x in specs.items()},
      ),
      out_specs=specs,
      check_vma=is_checked,
  )
  params = {
      k: jax.device_put(x, NamedSharding(mesh, specs[k]))
      for k, x in params.items()
  }
  state = st.init_state(tx, params, mesh, in_specs=specs)
  return jax.device_get(jax.jit(mapped)(params, state, targets))


@functools.cache
def trained_on_whole_leaves(row, i, is_mixed):
  specs = dict.fromkeys(MIXED if is_mixed else SLICES, P())
  return trained(ROWS[row][i](None), specs, True, row in WITH_NAN)


def outcome(row, i, specs, is_checked):
  """Returns the word of the table for a transformation of a row."""
  expected = trained_on_whole_leaves(row, i, specs is MIXED)

  def word_with(argument):
    tx = ROWS[row][i](argument)
    try:
      params = trained(tx, specs, is_checked, row in WITH_NAN)
    except (TypeError, ValueError):
      return 'refused'
    try:
      chex.assert_trees_all_close(params, expected, rtol=1e-5, atol=1e-5)
    except AssertionError:
      return 'differs'
    return 'yes'

  word = word_with(None)
  if word == 'refused' and word_with(specs) == 'yes':
    return 'needs `specs=`'
  return word


class SlicesTest(parameterized.TestCase):

  # These have each word that is in a column.
  @cases.parameters(
      *ROWS,
      fast=[
          "`clip_by_global_norm(c, 'model')`",
          "`shard_update(adam, 'data')`",
          '`clip_by_global_norm` of Optax',
          '`apply_if_finite` of Optax',
      ],
  )
  def test_documented_row_is_correct(self, row):
    cells = []
    for specs, is_checked in COLUMNS.values():
      outcomes = {
          outcome(row, i, specs, is_checked) for i in range(len(ROWS[row]))
      }
      self.assertLen(outcomes, 1, f'Split the row: {outcomes}')
      cells += outcomes

    line = '| ' + ' | '.join([row, *cells]) + ' |'
    self.assertIn(f'\n{line}\n', DOCUMENT.read_text(encoding='utf-8'))

  def test_columns_are_those_of_the_document(self):
    header = '| with slices over `model` | ' + ' | '.join(COLUMNS) + ' |'
    self.assertIn(f'\n{header}\n', DOCUMENT.read_text(encoding='utf-8'))
