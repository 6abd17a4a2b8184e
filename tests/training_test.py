"""Tests that several shards train like one device with a larger batch.

Each job of `JOBS` trains a small network over shards, with the gradient taken
inside the mapped function, and compares the parameters after each step with
plain JAX and Optax on one device. Single transformations with arbitrary
gradients are rows of `contract_test.py`.
"""

import functools
from typing import Any, Literal, NamedTuple

from absl.testing import parameterized
import chex
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np
import optax
import pytest

import cases
import harness
import modes
import shard_transforms
from shard_transforms import cross_shard_mean
from shard_transforms import drop_stale
from shard_transforms import tower_reduce

AXIS, HOSTS = modes.AXIS, modes.HOSTS
SHARDS, STEPS, TOWERS, BATCH, FEATURES, HIDDEN = 8, 6, 3, 4, 5, 7
MOMENTUM = optax.sgd(0.1, momentum=0.9)
# With a tiny `eps`, Adam would hide a wrong scale of the gradient, and turn
# rounding into differences where an element of it is near zero. Some of the
# steps are clipped.
CLIPPED_ADAM = optax.chain(
    optax.clip_by_global_norm(4.0), optax.adam(0.05, eps=1e-2)
)
ALL = (tuple(range(SHARDS)),)
GROUPS = ((0, 3, 2, 6), (1, 4, 5, 7))


def initial_params():
  rng = np.random.default_rng(0)

  def normal(*shape):
    return np.asarray(rng.normal(size=shape), np.float32)

  return {
      'hidden': {'w': normal(FEATURES, HIDDEN), 'b': normal(HIDDEN)},
      'out': {'w': normal(HIDDEN) / 2, 'b': normal()},
  }


def uneven_batches():
  """Returns batches [shards, steps, towers, ...] of 0 to `BATCH` examples.

  The rest of each is padding. In two steps, either all gradients are stale or
  none is.
  """
  rng = np.random.default_rng(1)
  lead = (SHARDS, STEPS, TOWERS)
  inputs = rng.normal(size=(*lead, BATCH, FEATURES))
  lengths = rng.integers(0, BATCH + 1, lead)
  # The loss and the gradient of a batch without examples are NaN.
  lengths[1] = 0
  fresh = rng.integers(0, 2, lead) > 0
  fresh[:, 2], fresh[:, 4] = False, True
  return {
      'inputs': inputs.astype(np.float32),
      'labels': np.float32(2 * np.sin(inputs.sum(-1)) + inputs[..., 0]),
      'counts': np.float32(np.arange(BATCH) < lengths[..., None]),
      'fresh': fresh,
  }


def num_examples(batch):
  return jnp.sum(batch['counts'], axis=-1)


def loss(params, batch):
  hidden = batch['inputs'] @ params['hidden']['w'] + params['hidden']['b'][None]
  outputs = jnp.tanh(hidden) @ params['out']['w'] + params['out']['b'][None]
  errors = batch['counts'] * (outputs - batch['labels']) ** 2
  return jnp.sum(errors) / num_examples(batch)


def mean(inner, **options):
  return optax.chain(cross_shard_mean(AXIS, **options), inner)


class Job(NamedTuple):
  """A training.

  Attributes:
    tx: What trains over shards.
    single: The transformation on one device.
    towers: How the towers of a step arrive; 'one' is only the first.
    stale: Whether gradients that are not fresh are dropped.
    groups: Which shards train together.
    axes: The axes of the mesh.
    weighted: Whether batches are uneven, and `update` receives weights.
  """

  tx: Any
  single: Any = MOMENTUM
  towers: Literal['one', 'in turn', 'stacked'] = 'one'
  stale: bool = False
  groups: tuple[tuple[int, ...], ...] = ALL
  axes: Any = AXIS
  weighted: bool = True


JOBS = {
    'mean': Job(mean(MOMENTUM)),
    'groups': Job(mean(MOMENTUM, groups=GROUPS), groups=GROUPS),
    'stacked': Job(
        shard_transforms.reduce_stacked_towers(TOWERS, mean(MOMENTUM)),
        towers='stacked',
    ),
    'drop_stale': Job(
        drop_stale(1, mean(MOMENTUM), axis_name=AXIS), stale=True
    ),
    'groups of towers': Job(
        tower_reduce(TOWERS, mean(MOMENTUM, groups=GROUPS), axis_name=AXIS),
        towers='in turn',
        groups=GROUPS,
    ),
    'all together': Job(
        tower_reduce(
            TOWERS,
            drop_stale(2, mean(CLIPPED_ADAM), axis_name=AXIS),
            axis_name=AXIS,
        ),
        CLIPPED_ADAM,
        towers='in turn',
    ),
    'two axes': Job(optax.chain(cross_shard_mean(HOSTS), MOMENTUM), axes=HOSTS),
    'an axis after another': Job(
        optax.chain(*map(cross_shard_mean, HOSTS), MOMENTUM),
        axes=HOSTS,
        weighted=False,
    ),
}
# Jobs whose parts are in other jobs run in few modes. The parameters of groups
# differ between shards, which needs a mapped step.
SOME_MODES = {
    'mean': ('shard_map', *modes.PLAIN),
    'groups': ('shard_map',),
    'groups of towers': modes.MAPPED,
    'drop_stale': ('shard_map', *modes.PLAIN),
    'two axes': ('hosts', *modes.PLAIN),
    'an axis after another': ('hosts', *modes.PLAIN),
}
FAST_MODES = ('shard_map', 'hosts', 'jit')
EACH = [
    (name, mode) for name in JOBS for mode in SOME_MODES.get(name, modes.NAMES)
]


def batches_of(job):
  """Returns the batches [shards, calls, ...] of a job."""
  batches = uneven_batches()
  if not job.weighted:
    batches['counts'] = np.ones_like(batches['counts'])
  if job.towers == 'one':
    return jax.tree.map(lambda x: x[:, :, 0], batches)
  if job.towers == 'stacked':
    return batches
  return jax.tree.map(
      lambda x: x.reshape(SHARDS, STEPS * TOWERS, *x.shape[3:]), batches
  )


def extra_args_of(job, state, batch):
  extra = {'weight': num_examples(batch)} if job.weighted else {}
  step = optax.tree_utils.tree_get(state, 'global_step')
  if step is None:
    return extra
  age = jnp.where(batch['fresh'], 1, 2) if job.stale else 0
  return extra | {'local_step': step - age}


@functools.partial(jax.jit, static_argnums=0)
def step_on_one_device(tx, params, state, batch):
  updates, state = tx.update(jax.grad(loss)(params, batch), state, params)
  return optax.apply_updates(params, updates), state


@functools.cache
def one_device(name, group):
  """Returns the parameters after each step with the batches of some shards.

  A step without any example changes nothing.
  """
  job = JOBS[name]
  batches = jax.tree.map(lambda x: x[list(group)], batches_of(job))
  if job.towers == 'in turn':
    batches = jax.tree.map(
        lambda x: x.reshape(len(group), STEPS, TOWERS, *x.shape[2:]), batches
    )
  if job.stale:
    batches['counts'] *= batches['fresh'][..., None]
  rows = {'inputs': (FEATURES,), 'labels': (), 'counts': ()}
  merged = {
      k: batches[k].swapaxes(0, 1).reshape(STEPS, -1, *shape)
      for k, shape in rows.items()
  }

  params, history = initial_params(), []
  state = job.single.init(params)
  for i in range(STEPS):
    batch = jax.tree.map(lambda x, i=i: x[i], merged)
    if batch['counts'].any():
      params, state = step_on_one_device(job.single, params, state, batch)
    history.append(params)
  return jax.tree.map(lambda *xs: np.stack(xs), *history)


def assert_same(actual, expected):
  chex.assert_trees_all_equal_shapes_and_dtypes(actual, expected)
  # The largest difference that rounding makes in any of these tests is 4e-7.
  chex.assert_trees_all_close(actual, expected, rtol=1e-6, atol=1e-6)


class TrainingTest(parameterized.TestCase):

  @cases.parameters(EACH, fast=FAST_MODES)
  def test_trains_as_one_device(self, name, mode):
    job = JOBS[name]

    params = harness.train(
        job.tx,
        initial_params(),
        batches_of(job),
        mode,
        grad=harness.gradient(loss, job.axes, job.towers == 'stacked'),
        extra_args=functools.partial(extra_args_of, job),
        per_shard_params=job.groups != ALL,
        axes=job.axes,
    ).params

    for group in job.groups:
      actual = jax.tree.map(lambda x, g=group: x[list(g)], params)
      expected = one_device(name, group)
      if job.towers == 'in turn':
        before = jax.tree.map(
            lambda x, first: np.stack([first, *x[:-1]]),
            expected,
            initial_params(),
        )
        calls = [before] * (TOWERS - 1) + [expected]
        expected = jax.tree.map(
            lambda *xs: np.stack(xs, 1).reshape(-1, *xs[0].shape[1:]), *calls
        )
      assert_same(actual, harness.on_each_shard(expected, len(group)))

  @pytest.mark.thorough
  def test_trains_like_one_device_without_jit(self):
    tx, targets = mean(optax.sgd(0.1)), np.arange(SHARDS, dtype=np.float32)

    def train(params, targets):
      grads = harness.gradient(lambda w, x: (w - x) ** 2 / 2)(
          params, targets[0]
      )
      updates, _ = tx.update(grads, tx.init(params))
      return optax.apply_updates(params, updates)

    mapped = jax.shard_map(
        train, mesh=modes.mesh(), in_specs=(P(), P(AXIS)), out_specs=P()
    )
    trained = mapped(jnp.float32(0), targets)

    np.testing.assert_allclose(trained, 0.1 * targets.mean(), rtol=1e-6)
