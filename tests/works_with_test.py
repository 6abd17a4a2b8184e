"""Tests of wrappers of Optax inside and around transformations.

`ROWS` is the table of `docs/composing.md`: each wrapper of Optax inside and
around each transformation, and the result.
"""

import collections
from collections.abc import Callable
import pathlib
from typing import Any, NamedTuple

from absl.testing import parameterized
import chex
import jax
from jax import lax
import numpy as np
import optax

import cases
import harness
import modes
import shard_transforms

AXIS = modes.AXIS
SHARDS, STEPS, TOWERS, FEATURES, OUTPUTS = 4, 4, 2, 5, 3
DOCUMENT = pathlib.Path(__file__).parents[1] / 'docs' / 'composing.md'

# The largest difference that rounding makes in any of these tests is 6e-7.
TOLERANCE = dict(rtol=2e-6, atol=2e-6)
MOMENTUM = optax.sgd(0.1, momentum=0.9)
MEAN = shard_transforms.cross_shard_mean(AXIS)


def batches_of(name, calls=STEPS, *, even=False, broken=False):
  """Returns batches [shards, calls, ...] of targets and weights.

  Args:
    name: The row whose parameters are trained.
    calls: How many batches each shard has.
    even: Whether all have one number of examples.
    broken: Whether an input of one shard in one call is NaN.
  """
  rng = np.random.default_rng(1)
  lead = SHARDS, calls
  weight = rng.integers(1, 5, lead) ** (not even)
  targets = jax.tree.map(
      lambda x: rng.normal(size=(*lead, *x.shape)),
      trained(initial_params(name)),
  )
  if broken:
    targets['w'][3, 2, 0, 0] = np.nan
  return jax.tree.map(np.float32, {'targets': targets, 'weight': weight})


def merged(batches, towers=1):
  """Returns batches [shards, steps * towers, ...] as those of one device."""

  def merge(x):
    x = np.moveaxis(x, 0, 1)
    return x.reshape(-1, towers * SHARDS, *x.shape[2:])

  weight = merge(batches['weight'])
  share = weight / weight.sum(1, keepdims=True)
  targets = jax.tree.map(
      lambda x: np.einsum('sn...,sn->s...', merge(x), share), batches['targets']
  )
  return {'targets': targets, 'weight': weight.sum(1)}


def assert_same(actual, expected):
  chex.assert_trees_all_equal_shapes_and_dtypes(actual, expected)
  chex.assert_trees_all_close(actual, expected, **TOLERANCE)


def mean(inner):
  return optax.chain(MEAN, inner)


def shard_update(inner):
  return shard_transforms.shard_update(inner, AXIS)


def tower_reduce(inner):
  return shard_transforms.tower_reduce(TOWERS, mean(inner), axis_name=AXIS)


def drop_stale(inner):
  return shard_transforms.drop_stale(1, mean(inner), axis_name=AXIS)


# Where a wrapper goes, with what makes the transformation that it is in or
# around.
INSIDE = {
    'after `cross_shard_mean`': mean,
    'in `shard_update`': shard_update,
    'in `tower_reduce`': tower_reduce,
    'in `drop_stale`': drop_stale,
}
AROUND = {
    'around `cross_shard_mean`': mean,
    'around `shard_update`': shard_update,
    'around `tower_reduce`': tower_reduce,
    'around `drop_stale`': drop_stale,
}
PLACES = INSIDE | AROUND

# Errors, by their class and the words to search for.
REFUSALS = {
    'ours: elements': (ValueError, 'must be element-wise'),
    'ours: reduced': (ValueError, 'must be per shard over'),
    'ours: tree': (ValueError, 'do not have the tree of the state'),
    'JAX: types': (TypeError, 'must have equal'),
    'Optax: arguments': (TypeError, 'got an unexpected keyword argument'),
}
TRAINS = ('yes', 'no weights', 'even only', 'differs', 'diverges', 'hangs')


class Row(NamedTuple):
  """A wrapper, and the result in each place.

  Attributes:
    wrap: Takes a transformation; gives the wrapper around it.
    inside: One of `TRAINS` or `REFUSALS`, or one for each place of `INSIDE`:
      under checked `jax.shard_map`, and after a slash, if that differs,
      elsewhere.
    around: The same for `AROUND`.
    broken: Whether its purpose is gradients that are not finite.
    split: Whether it needs more than one leaf.
  """

  wrap: Callable[[Any], Any]
  inside: str | tuple[str, ...] = 'yes'
  around: str | tuple[str, ...] = '-'
  broken: bool = False
  split: bool = False

  def cells(self, where):
    cells = getattr(self, where)
    return (cells,) * len(INSIDE) if isinstance(cells, str) else cells


def is_even(step):
  return step % 2 == 0


def then(link):
  return lambda inner: optax.chain(link, inner)


def skipping(inner):
  skip = optax.skip_not_finite
  return optax.MultiSteps(inner, 2, should_skip_update_fn=skip)


def injected(inner):
  def scaled(factor):
    return optax.chain(inner, optax.scale(factor))

  return optax.inject_hyperparams(scaled)(factor=0.5)


def partition(inner):
  by_label = {'decay': optax.chain(inner, optax.scale(0.5)), 'no decay': inner}
  return optax.partition(by_label, {'w': 'decay', 'b': 'no decay'})


def freezing(inner):
  by_label = {'train': inner, 'frozen': optax.set_to_zero()}
  return optax.partition(by_label, {'w': 'train', 'b': 'frozen'})


YES = 'yes'
NOT_IN_SLICES = ('yes', 'ours: elements', 'yes', 'yes')
NOT_FORWARDED = (*('no weights',) * 3, 'Optax: arguments')

ROWS = {
    '`MultiSteps`': Row(
        lambda x: optax.MultiSteps(x, 2), YES, 'ours: reduced / even only'
    ),
    '`MultiSteps` with `skip_not_finite`': Row(
        skipping, NOT_IN_SLICES, 'ours: reduced / hangs', broken=True
    ),
    '`apply_if_finite`': Row(
        lambda x: optax.apply_if_finite(x, 3),
        NOT_IN_SLICES,
        'JAX: types / hangs',
        broken=True,
    ),
    '`lookahead`': Row(
        lambda x: optax.lookahead(x, 2, 0.5),
        ('yes', 'ours: elements', 'ours: tree', 'yes'),
        NOT_FORWARDED,
    ),
    '`contrib.schedule_free`': Row(
        lambda x: optax.contrib.schedule_free(x, 0.1, b1=0.9), YES, YES
    ),
    '`conditionally_mask`': Row(
        lambda x: optax.conditionally_mask(x, is_even), YES, 'JAX: types / yes'
    ),
    '`conditionally_transform`': Row(
        lambda x: optax.conditionally_transform(x, is_even),
        YES,
        'JAX: types / diverges',
    ),
    '`masked`, for some leaves': Row(
        lambda x: optax.masked(x, {'w': True, 'b': False}),
        YES,
        'JAX: types / diverges',
        split=True,
    ),
    '`partition`': Row(partition, YES, YES, split=True),
    '`partition`, with `set_to_zero` for some leaves': Row(
        freezing, YES, 'JAX: types / yes', split=True
    ),
    '`inject_hyperparams`': Row(injected, YES, YES),
    '`flatten`': Row(optax.flatten, NOT_IN_SLICES, YES, split=True),
    '`contrib.split_real_and_imaginary`': Row(
        optax.contrib.split_real_and_imaginary, YES, NOT_FORWARDED
    ),
    '`clip_by_global_norm`, then': Row(
        then(optax.clip_by_global_norm(0.5)), NOT_IN_SLICES, 'differs'
    ),
    '`ema`, then': Row(then(optax.ema(0.9)), YES, 'JAX: types / even only'),
    '`apply_every`, then': Row(
        then(optax.apply_every(2)), YES, 'JAX: types / even only'
    ),
    '`adamw`': Row(lambda _: optax.adamw(0.1, eps=1e-2)),
    '`contrib.schedule_free_adamw`': Row(
        lambda _: optax.contrib.schedule_free_adamw(0.1, eps=1e-2)
    ),
    '`contrib.muon`': Row(lambda _: optax.contrib.muon(0.1), NOT_IN_SLICES),
}


def outcomes(name, mode):
  """Returns the result of a wrapper in each place, under a mode."""
  cells = ROWS[name].cells('inside') + ROWS[name].cells('around')
  checked = mode == 'shard_map'
  words = [cell.split(' / ')[0 if checked else -1] for cell in cells]
  return dict(zip(PLACES, words, strict=True))


def initial_params(name):
  rng = np.random.default_rng(0)
  params = {'w': rng.normal(size=(FEATURES, OUTPUTS)).astype(np.float32)}
  if ROWS[name].split:
    params['b'] = params['w'][0]
  if 'imaginary' in name:
    params['w'] = params['w'] * np.complex64(1 + 2j)
  if 'lookahead' in name:
    return optax.LookaheadParams.init_synced(params)
  return params


def trained(params):
  return getattr(params, 'fast', params)


def trainer(tx, *, weighted, local_step):
  """Returns a function of parameters and batches: parameters by call."""

  def step(carry, batch):
    params, state = carry
    grads = jax.tree.map(lambda p, x: p - x, trained(params), batch['targets'])
    extra_args = {'weight': batch['weight']} if weighted else {}
    if local_step:
      extra_args['local_step'] = STEPS * TOWERS
    updates, state = tx.update(grads, state, params, **extra_args)
    params = optax.apply_updates(params, updates)
    return (params, state), params

  def train(params, batches):
    return lax.scan(step, (params, tx.init(params)), batches)[1]

  return train


class Job(NamedTuple):
  """A training to compare with that of one device.

  Attributes:
    name: The row of the wrapper.
    label: Its place.
    weighted: Whether batches are uneven, and `update` receives weights.
    broken: Whether an input is NaN.
  """

  name: str
  label: str
  weighted: bool = True
  broken: bool = False

  @property
  def tx(self):
    """The function of each shard."""
    make, wrap = PLACES[self.label], ROWS[self.name].wrap
    is_inside = self.label in INSIDE
    return make(wrap(MOMENTUM)) if is_inside else wrap(make(MOMENTUM))

  @property
  def takes_local_step(self):
    return 'drop_stale' in self.label

  @property
  def collects(self):
    """Whether one device, too, has towers still to be collected."""
    return self.label == 'around `tower_reduce`'

  @property
  def towers(self):
    """How many calls are one step of one device."""
    return TOWERS if self.label == 'in `tower_reduce`' else 1

  def trainer(self):
    return trainer(
        self.tx, weighted=self.weighted, local_step=self.takes_local_step
    )

  def batches(self):
    calls = TOWERS * STEPS if 'tower' in self.label else STEPS
    return batches_of(
        self.name, calls, even=not self.weighted, broken=self.broken
    )


def train_on_shards(mode, jobs):
  """Returns parameters by shard and step, for each job."""
  fns = [job.trainer() for job in jobs]

  # One program for all jobs compiles several times as fast.
  def train(params, batches):
    return [fn(*args) for fn, *args in zip(fns, params, batches, strict=True)]

  histories = modes.map_shards(mode, train, SHARDS)(
      [initial_params(job.name) for job in jobs],
      [job.batches() for job in jobs],
  )
  params_of_jobs = {}
  for job, params in zip(jobs, jax.device_get(histories), strict=True):
    last = slice(job.towers - 1, None, job.towers)
    params_of_jobs[job] = jax.tree.map(lambda x, i=last: x[:, i], params)
  return params_of_jobs


def train_on_one_device(jobs):
  """Returns parameters by step of one device, for each job."""
  # In most places it is the same training, of other batches.
  jobs_of_training = collections.defaultdict(list)
  for job in jobs:
    # Where towers are still to be collected, weights are.
    jobs_of_training[
        job.name, job.collects, job.weighted and job.collects
    ].append(job)

  def train_one(name, collects, weighted, batches):
    inner = MOMENTUM
    if collects:
      inner = shard_transforms.tower_reduce(TOWERS, MOMENTUM)
    tx = ROWS[name].wrap(inner)
    train = trainer(tx, weighted=weighted, local_step=False)
    return jax.vmap(train, (None, 0))(initial_params(name), batches)

  def train(batches):
    pairs = zip(jobs_of_training, batches, strict=True)
    return [train_one(*key, batch) for key, batch in pairs]

  batches = [
      jax.tree.map(
          lambda *xs: np.float32(xs),
          *(merged(job.batches(), job.towers) for job in each),
      )
      for each in jobs_of_training.values()
  ]
  histories = jax.device_get(jax.jit(train)(batches))
  return {
      job: jax.tree.map(lambda x, i=i: x[i], history)
      for each, history in zip(
          jobs_of_training.values(), histories, strict=True
      )
      for i, job in enumerate(each)
  }


def jobs_of(name, mode):
  """Returns trainings with a row, and the documented result of each.

  In a mode other than checked `jax.shard_map`, only those with another result.
  """
  jobs, checked = {}, outcomes(name, 'shard_map')
  for label, outcome in outcomes(name, mode).items():
    is_new = mode == 'shard_map' or outcome != checked[label]
    if outcome in TRAINS and is_new:
      broken = ROWS[name].broken and outcome == 'yes'
      weighted = outcome in ('yes', 'differs', 'diverges')
      jobs[Job(name, label, weighted, broken)] = outcome
    if outcome == 'even only' and label == 'around `cross_shard_mean`':
      jobs[Job(name, label, True)] = 'differs'
  return jobs


def trees_differ(tree, other_tree):
  pairs = zip(jax.tree.leaves(tree), jax.tree.leaves(other_tree), strict=True)
  return any(
      np.abs(np.asarray(x) - np.asarray(y)).max() > 1e-3 for x, y in pairs
  )


class ComposingTest(parameterized.TestCase):

  # Inside, the results do not depend on the mode.
  @cases.parameters(
      ('inside', 'shard_map'),
      ('around', 'shard_map'),
      ('around', 'vmap'),
      fast='around_shard_map',
  )
  def test_trains_like_one_device_where_documented(self, where, mode):
    places = {'inside': INSIDE, 'around': AROUND}[where]
    jobs = {
        job: outcome
        for name in ROWS
        for job, outcome in jobs_of(name, mode).items()
        if job.label in places
    }

    params_of_jobs = train_on_shards(mode, list(jobs))
    params_on_one_device = train_on_one_device(list(jobs))

    for job, outcome in jobs.items():
      with self.subTest(job):
        expected = harness.on_each_shard(params_on_one_device[job], SHARDS)
        self.check(outcome, params_of_jobs[job], expected)

  def check(self, outcome, actual, expected):
    if outcome in ('differs', 'diverges'):
      first = jax.tree.map(lambda x: x[:1].repeat(SHARDS, 0), actual)
      self.assertEqual(trees_differ(actual, first), outcome == 'diverges')
      self.assertTrue(trees_differ(actual, expected))
    else:
      assert_same(actual, expected)

  @cases.parameters(*ROWS)
  def test_refuses_where_documented(self, name):
    for label, outcome in outcomes(name, 'shard_map').items():
      refused = 'Optax: arguments' if outcome == 'no weights' else outcome
      if refused not in REFUSALS:
        continue
      with self.subTest(label):
        fn = Job(name, label).trainer()
        train = modes.map_shards('shard_map', fn, SHARDS)
        with self.assertRaisesRegex(*REFUSALS[refused]):
          jax.eval_shape(train, initial_params(name), batches_of(name))

  @cases.parameters(
      *ROWS,
      fast=[
          '`MultiSteps`',
          '`apply_if_finite`',
          '`conditionally_mask`',
          '`adamw`',
      ],
  )
  def test_shards_decide_differently_where_a_deadlock_is_documented(self, name):
    # The inner transformation has no collective.
    for label, outcome in outcomes(name, 'pmap').items():
      if outcome not in TRAINS or label in INSIDE:
        continue
      with self.subTest(label):
        job = Job(name, label)
        extra_args = {'local_step': 0} if job.takes_local_step else {}
        self.assertEqual(can_hang(name, job.tx, extra_args), outcome == 'hangs')


class LostTest(parameterized.TestCase):
  """Extra arguments that Optax drops in silence."""

  def test_chain_around_a_gate_drops_weights(self):
    names = '`lookahead`', '`contrib.split_real_and_imaginary`'
    wraps = {name: ROWS[name].wrap for name in names}
    wraps['`MultiSteps`'] = lambda tx: optax.MultiSteps(
        tx, 1
    ).gradient_transformation()
    params = {name: initial_params(name) for name in wraps}

    def train(params, batches):
      def trained(name, weighted):
        tx = optax.chain(wraps[name](optax.chain(MEAN, MOMENTUM)))
        fn = trainer(tx, weighted=weighted, local_step=False)
        return fn(params[name], batches)

      return [{name: trained(name, w) for name in wraps} for w in (True, False)]

    with_and_without = modes.map_shards('vmap', train, SHARDS)(
        params, batches_of('`lookahead`')
    )

    chex.assert_trees_all_equal(*with_and_without, strict=True)


class SilentTest(parameterized.TestCase):
  """Claims of the document outside of its tables."""

  def test_deadlocks_with_groups_are_not_refused(self):
    mean = shard_transforms.cross_shard_mean(AXIS, groups=[[0, 1], [2, 3]])
    tx = optax.apply_if_finite(optax.chain(mean, MOMENTUM), 3)

    def fn(params, x):
      params = shard_transforms.per_shard(params, AXIS)
      updates = jax.tree.map(lambda p: p * x, params)
      return tx.update(updates, tx.init(params), params)[0]

    name = '`apply_if_finite`'
    self.assertTrue(can_hang(name, tx, {}))
    mapped = modes.map_shards('shard_map', fn, SHARDS)
    jax.eval_shape(mapped, initial_params(name), np.ones(SHARDS, np.float32))


def can_hang(name, tx, extra_args):
  """Whether a collective under a predicate that differs is found."""

  def fn(params, updates):
    return tx.update(updates, tx.init(params), params, **extra_args)

  params = initial_params(name)
  updates = jax.tree.map(
      lambda x: jax.ShapeDtypeStruct((SHARDS, *x.shape), x.dtype),
      trained(params),
  )
  mapped = modes.map_shards('pmap', fn, SHARDS)
  report = shard_transforms.monitoring.communication_report(
      mapped, params, updates
  )
  return any(
      'under a predicate that differs between shards' in text
      for text in report.warnings
  )


def lines(header, rows):
  """Returns a Markdown table as lines."""
  first, *rest = ('| ' + ' | '.join(row) + ' |' for row in (header, *rows))
  return [first, '|---' * len(header) + '|', *rest]


class DocumentTest(parameterized.TestCase):

  @cases.parameters('inside', 'around')
  def test_documented_tables_are_tested(self, where):
    places = {'inside': INSIDE, 'around': AROUND}[where]
    names = collections.defaultdict(list)
    for name, row in ROWS.items():
      names[row.cells(where)].append(name)
    rows = [('; '.join(names[x]), *x) for x in names if x[0] != '-']

    table = lines(('of Optax', *places), rows)
    self.assertIn('\n\n' + '\n'.join(table) + '\n\n', DOCUMENT.read_text())

  def test_documented_refusals_are_tested(self):
    rows = [
        (name, f'`{error.__name__}`', f'“{words} …”')
        for name, (error, words) in REFUSALS.items()
    ]

    table = lines(('word', 'error', 'what it says'), rows)
    self.assertIn('\n\n' + '\n'.join(table) + '\n\n', DOCUMENT.read_text())

  def test_every_word_of_the_tables_is_explained(self):
    text = DOCUMENT.read_text()
    for word in TRAINS:
      self.assertIn(f'\n- **{word}**: ', text)
