"""Property-based tests for arbitrary weights, orders, scales, ages and trees.

Compilation dominates the time. If only values are drawn, one program of fixed
shapes runs for all examples.
"""

import dataclasses
import functools
import os
from typing import Any, Literal, NamedTuple

from absl.testing import parameterized
import chex
import hypothesis
from hypothesis import strategies
from hypothesis.extra import numpy as arrays
import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np
import optax
import pytest

import cases
import modes
import shard_transforms
from shard_transforms import clip_by_global_norm
from shard_transforms import cross_shard_mean
from shard_transforms import cross_shard_sum
from shard_transforms import drop_stale
from shard_transforms import guard
from shard_transforms import reduce_stacked_towers
from shard_transforms import shard_update
from shard_transforms import tower_reduce
from shard_transforms.contrib import master_weights
from shard_transforms.contrib import scale_by_staleness
from shard_transforms.monitoring import track_divergence

# Without a database too, Hypothesis keeps notes in the current folder.
hypothesis.configuration.set_hypothesis_home_dir(os.devnull)

AXIS = modes.AXIS
SHARDS, TOKENS, FEATURES, CALLS = 4, 7, 5, 10
TOWERS = 2  # Of which a mean is exact.
INT32 = np.iinfo(np.int32)

SEEDS = strategies.integers(0, 2**16)


def examples(number: int) -> hypothesis.settings:
  """Returns settings under which every run draws the same examples."""
  return hypothesis.settings(
      max_examples=number,
      derandomize=True,
      deadline=None,
      database=None,
      # A busy machine is not a failure.
      suppress_health_check=[hypothesis.HealthCheck.too_slow],
  )


def each(shape, elements, dtype=np.int64):
  """Returns a strategy for arrays whose elements are drawn one by one."""
  fill = strategies.nothing()
  return arrays.arrays(dtype, shape, elements=elements, fill=fill)


def mean_of(inner: optax.GradientTransformation) -> Any:
  return optax.chain(cross_shard_mean(AXIS), inner)


def towers_of(inner: optax.GradientTransformation, **options: str) -> Any:
  return tower_reduce(TOWERS, inner, axis_name=AXIS, **options)


def mean_loss(w, x, y, num_tokens):
  """Returns the mean over a tower's tokens, where it has none 0 / 0."""
  # Data rather than errors are masked, so that the gradient is NaN there too.
  is_token = jnp.arange(TOKENS) < num_tokens
  x, y = jnp.where(is_token[:, None], x, 0), jnp.where(is_token, y, 0)
  return jnp.sum((x @ w - y) ** 2) / num_tokens


@functools.cache
def token_step(order):
  """Returns the update of a step over towers, 'in turn' or 'stacked'."""
  grad = shard_transforms.value_and_grad(mean_loss, AXIS)
  inner = mean_of(optax.identity())

  def in_turn(w, towers):
    tx = towers_of(inner)

    def tower(state, batch):
      _, grads = grad(w, *batch)
      updates, state = tx.update(grads, state, w, weight=batch[-1])
      return state, updates

    return lax.scan(tower, tx.init(w), towers)[1][-1]

  def stacked(w, towers):
    tx = reduce_stacked_towers(TOWERS, inner)
    _, grads = jax.vmap(grad, (None, 0, 0, 0))(w, *towers)
    return tx.update(grads, tx.init(w), w, weight=towers[-1])[0]

  step = in_turn if order == 'in turn' else stacked
  return modes.map_shards('shard_map', step, SHARDS)


def token_mean(w, x, y, num_tokens):
  """Returns the mean gradient over all tokens of all towers, in float64."""
  counted = np.arange(TOKENS) < num_tokens[..., None]
  x, y = np.float64(x[counted]), np.float64(y[counted])
  return 2 * x.T @ (x @ w - y) / max(len(x), 1)


class Row(NamedTuple):
  """A transformation whose result is a multiple of the mean.

  Attributes:
    tx: The transformation.
    towers: How the towers of a step arrive.
    factor: The result divided by the mean over all shards and towers.
    degree: A factor c of all weights changes the result by c**degree.
    stale: Whether it takes a local step.
  """

  tx: optax.GradientTransformationExtraArgs
  towers: Literal['one', 'in turn', 'stacked'] = 'one'
  factor: float = 1.0
  degree: int = 0
  stale: bool = False


IDENTITY, SGD = optax.identity(), optax.sgd(0.5)
# A new transformation is a new row.
ROWS = {
    'cross_shard_sum': Row(cross_shard_sum(AXIS), factor=SHARDS, degree=1),
    'tower_reduce to a sum': Row(
        towers_of(mean_of(IDENTITY), reduction='sum'),
        'in turn',
        factor=TOWERS,
        degree=1,
    ),
    'tower_reduce of drop_stale of shard_update': Row(
        towers_of(drop_stale(0, shard_update(SGD, AXIS), axis_name=AXIS)),
        'in turn',
        factor=-0.5,
        stale=True,
    ),
    'reduce_stacked_towers': Row(
        reduce_stacked_towers(TOWERS, mean_of(IDENTITY)), 'stacked'
    ),
    'drop_stale of scale_by_staleness': Row(
        drop_stale(
            1,
            scale_by_staleness(
                'exponential', mean_of(IDENTITY), rate=1.0, axis_name=AXIS
            ),
            axis_name=AXIS,
        ),
        stale=True,
    ),
    'guard': Row(
        guard(
            mean_of(SGD),
            AXIS,
            on_bad='exclude',
            spikes=shard_transforms.SpikeRule(max_stds=3.0),
        ),
        factor=-0.5,
    ),
    'guard of shard_update of clip_by_global_norm': Row(
        guard(
            shard_update(
                optax.chain(clip_by_global_norm(1e6, AXIS, specs=P(AXIS)), SGD),
                AXIS,
            ),
            AXIS,
        ),
        factor=-0.5,
    ),
    'tower_reduce of shard_update of master_weights': Row(
        towers_of(shard_update(master_weights(SGD), AXIS)),
        'in turn',
        factor=-0.5,
    ),
    'clip_by_global_norm of track_divergence': Row(
        optax.chain(mean_of(clip_by_global_norm(1e6)), track_divergence(AXIS))
    ),
}


def at(tree, index):
  return jax.tree.map(lambda x: x[index], tree)


def updates_of_rows(params, inputs):
  """Returns the results of each row for the towers of a shard."""
  updates, weights, local_steps = inputs
  results = {}
  for name, row in ROWS.items():
    state = row.tx.init(params)
    calls = {'one': [0], 'in turn': range(TOWERS), 'stacked': [slice(None)]}
    for i in calls[row.towers]:
      extra_args = {} if weights is None else {'weight': weights[i]}
      if row.stale:
        extra_args['local_step'] = local_steps[i]
      results[name], state = row.tx.update(
          at(updates, i), state, params, **extra_args
      )
    if row.stale:
      counted = optax.tree_utils.tree_get(state, 'DropStaleState')
      results[f'counters of {name}'] = counted._replace(inner_state=())
  return results


# Zero, or with room for a power of two that leaves all products normal.
WEIGHTS = strategies.just(0.0) | strategies.floats(2**-10, 2**10, width=32)
MAX_POWER = 70


@functools.cache
def weighted_step():
  step = modes.map_shards('shard_map', updates_of_rows, SHARDS)
  params = jax.tree.map(lambda x: np.zeros_like(x[0, 0]), draw_updates(0))
  return functools.partial(step, params)


def draw_updates(seed):
  """Returns updates [shards, towers, ...] of two dtypes."""
  rng = np.random.default_rng(seed)
  lead = SHARDS, TOWERS
  return {
      'kernel': rng.normal(size=(*lead, 2, FEATURES)).astype(np.float32),
      'bias': rng.normal(size=lead).astype(np.float32),
      'half': rng.normal(size=(*lead, FEATURES)).astype(jnp.bfloat16),
  }


class ValuesTest(parameterized.TestCase):
  """Properties of values."""

  @cases.parameters('in turn', 'stacked')
  @hypothesis.given(
      num_tokens=each((SHARDS, TOWERS), strategies.integers(0, TOKENS)),
      seed=SEEDS,
  )
  @examples(20)
  def test_mean_does_not_depend_on_the_split_of_tokens(
      self, towers, num_tokens, seed
  ):
    rng = np.random.default_rng(seed)
    w = rng.normal(size=FEATURES).astype(np.float32)
    lead = SHARDS, TOWERS, TOKENS
    x = rng.normal(size=(*lead, FEATURES)).astype(np.float32)
    y = rng.normal(size=lead).astype(np.float32)

    updates = token_step(towers)(w, (x, y, num_tokens.astype(np.int32)))

    expected = token_mean(w, x, y, num_tokens)
    np.testing.assert_allclose(
        updates, np.tile(expected, (SHARDS, 1)), rtol=1e-4, atol=1e-5
    )

  @hypothesis.given(
      order=strategies.permutations(range(SHARDS)),
      weights=each((SHARDS, TOWERS), strategies.integers(0, 9)),
      local_steps=each((SHARDS, TOWERS), strategies.integers(-1, 1)),
      seed=SEEDS,
  )
  @examples(20)
  def test_the_order_of_shards_changes_only_rounding(
      self, order, weights, local_steps, seed
  ):
    step = weighted_step()
    inputs = draw_updates(seed), np.float32(weights), np.int32(local_steps)

    def assert_close(actual, expected):
      if not jnp.issubdtype(actual.dtype, jnp.inexact):
        np.testing.assert_array_equal(actual, expected)
        return
      rtol = 2 * float(jnp.finfo(actual.dtype).eps)
      actual, expected = np.float64(actual), np.float64(expected)
      np.testing.assert_allclose(actual, expected, rtol, atol=1e-4)

    permuted = step(at(inputs, np.array(order)))

    jax.tree.map(assert_close, permuted, step(inputs))

  @hypothesis.given(
      power=strategies.integers(-MAX_POWER, MAX_POWER),
      weights=each((SHARDS, TOWERS), WEIGHTS, np.float32),
      seed=SEEDS,
  )
  @examples(20)
  def test_scaling_all_weights_by_a_power_of_two_is_exact(
      self, power, weights, seed
  ):
    step = weighted_step()
    updates = draw_updates(seed)
    local_steps = np.zeros((SHARDS, TOWERS), np.int32)

    scaled = step((updates, np.ldexp(weights, power), local_steps))

    expected = jax.device_get(step((updates, weights, local_steps)))
    for name, row in ROWS.items():
      factor = 2.0 ** (power * row.degree)
      expected[name] = jax.tree.map(
          lambda x, f=factor: x * x.dtype.type(f), expected[name]
      )
    chex.assert_trees_all_equal(jax.device_get(scaled), expected, strict=True)


def model_of_drop_stale(staleness, calls):
  """Yields results of calls, lists of (local step, weight, update) by shard."""
  global_step = stale_count = stale_shard_count = velocity = 0
  for call in calls:
    fresh = [global_step - step <= staleness for step, _, _ in call]
    counted = [
        w * u for ok, (_, w, u) in zip(fresh, call, strict=True) if ok and w
    ]
    if counted:
      global_step, velocity = global_step + 1, velocity / 2 + sum(counted)
    elif not all(fresh):
      stale_count += 1
    stale_shard_count += fresh.count(False)
    update = -velocity if counted else 0
    yield update, global_step, stale_count, stale_shard_count


@functools.cache
def stale_step(staleness, over_shards):
  """Returns a function of calls, of a single stream or of shards."""
  inner = optax.sgd(1.0, momentum=0.5)
  tx = drop_stale(staleness, inner)
  if over_shards:
    # A sum, because a mean of any number of shards is not exact.
    inner = optax.chain(cross_shard_sum(AXIS), inner)
    tx = drop_stale(staleness, inner, axis_name=AXIS)

  def run(_, calls):
    def one_call(state, call):
      local_step, weight, update = call
      update, state = tx.update(
          update, state, local_step=local_step, weight=weight
      )
      return state, (update, *state[:3])

    return lax.scan(one_call, tx.init(jnp.float32(0)), calls)[1]

  if over_shards:
    return modes.map_shards('shard_map', run, SHARDS)
  return jax.jit(run)


def local_steps_of(ages):
  """Returns steps [..., calls] that are as old if no call is dropped."""
  steps = np.arange(CALLS) - ages
  return np.clip(steps, INT32.min, INT32.max).astype(np.int32)


AGES = strategies.sampled_from([*range(-2, 8), 2**40, -(2**40)])


class DropStaleTest(parameterized.TestCase):
  """`drop_stale` against a model in plain Python."""

  @cases.parameters(0, 2, INT32.max, -INT32.max)
  @hypothesis.given(ages=each(CALLS, AGES), seed=SEEDS)
  @examples(60)
  def test_one_stream_equals_the_model(self, staleness, ages, seed):
    updates = np.random.default_rng(seed).integers(-8, 9, CALLS)
    local_steps, weights = local_steps_of(ages), np.ones(CALLS, np.float32)
    calls = local_steps, weights, updates.astype(np.float32)

    history = stale_step(staleness, False)(0.0, calls)

    by_call = np.stack(calls, -1).astype(np.float64)[:, None]
    expected = model_of_drop_stale(staleness, by_call.tolist())
    np.testing.assert_array_equal(np.stack(history, -1), list(expected))

  @cases.parameters(0, 2)
  @hypothesis.given(
      ages=each((SHARDS, CALLS), AGES),
      weights=each((SHARDS, CALLS), strategies.integers(0, 2)),
      seed=SEEDS,
  )
  @examples(15)
  def test_shards_equal_the_model(self, staleness, ages, weights, seed):
    updates = np.random.default_rng(seed).integers(-8, 9, (SHARDS, CALLS))
    # Values without a weight must not count.
    updates = np.where(weights > 0, updates, np.nan).astype(np.float32)
    calls = local_steps_of(ages), weights.astype(np.float32), updates

    history = stale_step(staleness, True)(0.0, calls)

    by_call = np.stack(calls, -1).astype(np.float64).swapaxes(0, 1)
    expected = list(model_of_drop_stale(staleness, by_call.tolist()))
    np.testing.assert_array_equal(np.stack(history, -1), [expected] * SHARDS)


class Pair(NamedTuple):
  """Two trees.

  Attributes:
    left: The one.
    right: The other.
  """

  left: Any
  right: Any


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=['kernel', 'bias'],
    meta_fields=['name'],
)
@dataclasses.dataclass
class Layer:
  """Two trees, and a name that is none.

  Attributes:
    kernel: The one.
    bias: The other.
    name: What JAX does not see.
  """

  kernel: Any
  bias: Any
  name: str = 'layer'


@chex.dataclass
class Block:
  """One tree, in a dataclass of chex.

  Attributes:
    inside: The tree.
  """

  inside: Any


# The first mode is drawn most often: `shard_map` tracks types.
ANY_MODE = strategies.sampled_from(modes.MAPPED[2:] + modes.MAPPED[:2])
LENGTHS = strategies.sampled_from([2, 3, 5, 1, 0])
SHAPES = strategies.lists(LENGTHS, max_size=4).map(tuple)
DTYPES = strategies.sampled_from([jnp.float32, jnp.bfloat16, jnp.float16])
LEAVES = strategies.builds(jax.ShapeDtypeStruct, SHAPES, DTYPES)


def nodes(trees):
  """Returns a strategy for containers of `trees`, possibly empty."""
  several = strategies.lists(trees, max_size=4)
  keys = strategies.sampled_from(['a', 'b', 'c', 'd'])
  return strategies.one_of(
      strategies.dictionaries(keys, trees, max_size=4),
      several,
      several.map(tuple),
      strategies.builds(Pair, trees, trees),
      strategies.builds(Layer, trees, trees),
      strategies.builds(Block, inside=several),
  )


# Most leaves are arrays.
TREES = strategies.recursive(
    strategies.one_of(LEAVES, LEAVES, LEAVES, strategies.none()),
    nodes,
    max_leaves=8,
)


def expected_of_rows(updates):
  """Returns the results of each row for unweighted updates, in NumPy."""

  def mean(row, x):
    counted = x[:, :1] if row.towers == 'one' else x
    mean = row.factor * np.float64(counted).mean((0, 1))
    return np.broadcast_to(mean, x[:, 0].shape).astype(x.dtype)

  return {
      name: jax.tree.map(functools.partial(mean, row), updates)
      for name, row in ROWS.items()
  }


class TreesTest(parameterized.TestCase):
  """Every transformation on trees of any kind, in a mode that is drawn too."""

  @hypothesis.given(tree=TREES, mode=ANY_MODE)
  @examples(10)
  @pytest.mark.slow
  def test_trees_reduce_exactly(self, tree, mode):
    # Their sums are exact in all dtypes, and their means are integers.
    rng = np.random.default_rng(0)
    updates = jax.tree.map(
        lambda x: (
            SHARDS * TOWERS * rng.integers(-2, 3, (SHARDS, TOWERS, *x.shape))
        ).astype(x.dtype),
        tree,
    )
    params = jax.tree.map(lambda x: np.zeros_like(x[0, 0]), updates)
    # A tree without leaves does not determine the number of shards.
    local_steps = np.zeros((SHARDS, TOWERS), np.int32)

    step = modes.map_shards(mode, updates_of_rows, SHARDS)
    actual = jax.device_get(step(params, (updates, None, local_steps)))

    actual = {name: actual[name] for name in ROWS}
    chex.assert_trees_all_equal(actual, expected_of_rows(updates), strict=True)
