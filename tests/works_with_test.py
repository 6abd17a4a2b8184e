"""Wrappers of Optax inside and around what this library has.

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
  """Returns batches [shards, calls, ...]: where each shard wants to go.

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
      lambda x: np.einsum('sn...,sn->s...', merge(x), share),
      batches['targets'],
  )
  return {'targets': targets, 'weight': weight.sum(1)}


def assert_same(actual, expected):
  chex.assert_trees_all_equal_shapes_and_dtypes(actual, expected)
  chex.assert_trees_all_close(actual, expected, **TOLERANCE)


def wrapped_momentum(wrap):
  return wrap(MOMENTUM)


class Place(NamedTuple):
  """Where a wrapper goes.

  Attributes:
    sharded: Takes the wrapper, a function of a transformation; gives what each
      shard runs.
    alone: The same for what one device runs.
    towers: How many calls are one step of that device.
    takes_local_step: Whether `update` requires a local step.
  """

  sharded: Callable[[Any], Any]
  alone: Callable[[Any], Any] = wrapped_momentum
  towers: int = 1
  takes_local_step: bool = False


def shard_update(inner):
  return shard_transforms.shard_update(inner, AXIS)


def tower_reduce(inner):
  inner = optax.chain(MEAN, inner)
  return shard_transforms.tower_reduce(TOWERS, inner, axis_name=AXIS)


def drop_stale(inner):
  inner = optax.chain(MEAN, inner)
  return shard_transforms.drop_stale(1, inner, axis_name=AXIS)


def collect_alone(inner):
  return shard_transforms.tower_reduce(TOWERS, inner)


INSIDE = {
    'after `cross_shard_mean`': Place(
        lambda wrap: optax.chain(MEAN, wrap(MOMENTUM))
    ),
    'in `shard_update`': Place(lambda wrap: shard_update(wrap(MOMENTUM))),
    'in `tower_reduce`': Place(
        lambda wrap: tower_reduce(wrap(MOMENTUM)), towers=TOWERS
    ),
    'in `drop_stale`': Place(
        lambda wrap: drop_stale(wrap(MOMENTUM)), takes_local_step=True
    ),
}
AROUND = {
    'around `cross_shard_mean`': Place(
        lambda wrap: wrap(optax.chain(MEAN, MOMENTUM))
    ),
    'around `shard_update`': Place(lambda wrap: wrap(shard_update(MOMENTUM))),
    'around `tower_reduce`': Place(
        lambda wrap: wrap(tower_reduce(MOMENTUM)),
        alone=lambda wrap: wrap(collect_alone(MOMENTUM)),
    ),
    'around `drop_stale`': Place(
        lambda wrap: wrap(drop_stale(MOMENTUM)), takes_local_step=True
    ),
}
PLACES = INSIDE | AROUND


class Refusal(NamedTuple):
  """An error, by its class and the words to search for."""

  kind: type[Exception]
  words: str


ARGUMENTS = Refusal(TypeError, 'got an unexpected keyword argument')
REFUSALS = {
    'ours: elements': Refusal(ValueError, 'must treat each element'),
    'ours: reduced': Refusal(ValueError, 'must be per shard over'),
    'ours: tree': Refusal(ValueError, 'must have the tree that its state was'),
    'JAX: types': Refusal(TypeError, 'must have equal'),
    'Optax: arguments': ARGUMENTS,
}
TRAINS = ('yes', 'no weights', 'even only', 'differs', 'diverges', 'hangs')


class Row(NamedTuple):
  """A wrapper, and the result in each place.

  Attributes:
    wrap: Takes a transformation; gives the wrapper around it.
    inside: For each place of `INSIDE`, one of `TRAINS` or `REFUSALS`: under
      checked `jax.shard_map`, and after a slash, if that differs, elsewhere.
    around: The same for `AROUND`.
    broken: Whether it is there for gradients that are not finite.
    split: Whether it needs more than one leaf.
  """

  wrap: Callable[[Any], Any]
  inside: tuple[str, ...]
  around: tuple[str, ...] = ('-',) * len(AROUND)
  broken: bool = False
  split: bool = False


def is_even(step):
  return step % 2 == 0


def injected(inner):
  def scaled(factor):
    return optax.chain(inner, optax.scale(factor))

  return optax.inject_hyperparams(scaled)(factor=0.5)


YES = ('yes',) * 4
CUT = ('yes', 'ours: elements', 'yes', 'yes')
NOT_FORWARDED = (*('no weights',) * 3, 'Optax: arguments')

ROWS = {
    '`MultiSteps`': Row(
        lambda inner: optax.MultiSteps(inner, 2),
        YES,
        ('ours: reduced / even only',) * 4,
    ),
    '`MultiSteps` with `skip_not_finite`': Row(
        lambda inner: optax.MultiSteps(
            inner, 2, should_skip_update_fn=optax.skip_not_finite
        ),
        CUT,
        ('ours: reduced / hangs',) * 4,
        broken=True,
    ),
    '`apply_if_finite`': Row(
        lambda inner: optax.apply_if_finite(inner, 3),
        CUT,
        ('JAX: types / hangs',) * 4,
        broken=True,
    ),
    '`lookahead`': Row(
        lambda inner: optax.lookahead(inner, 2, 0.5),
        ('yes', 'ours: elements', 'ours: tree', 'yes'),
        NOT_FORWARDED,
    ),
    '`contrib.schedule_free`': Row(
        lambda inner: optax.contrib.schedule_free(inner, 0.1, b1=0.9), YES, YES
    ),
    '`conditionally_mask`': Row(
        lambda inner: optax.conditionally_mask(inner, is_even),
        YES,
        ('JAX: types / yes',) * 4,
    ),
    '`conditionally_transform`': Row(
        lambda inner: optax.conditionally_transform(inner, is_even),
        YES,
        ('JAX: types / diverges',) * 4,
    ),
    '`masked`, for some leaves': Row(
        lambda inner: optax.masked(inner, {'w': True, 'b': False}),
        YES,
        ('JAX: types / diverges',) * 4,
        split=True,
    ),
    '`partition`': Row(
        lambda inner: optax.partition(
            {'decay': optax.chain(inner, optax.scale(0.5)), 'no decay': inner},
            {'w': 'decay', 'b': 'no decay'},
        ),
        YES,
        YES,
        split=True,
    ),
    '`inject_hyperparams`': Row(injected, YES, YES),
    '`flatten`': Row(optax.flatten, CUT, YES, split=True),
    '`contrib.split_real_and_imaginary`': Row(
        optax.contrib.split_real_and_imaginary, YES, NOT_FORWARDED
    ),
    '`clip_by_global_norm`, then': Row(
        lambda inner: optax.chain(optax.clip_by_global_norm(0.5), inner),
        CUT,
        ('differs',) * 4,
    ),
    '`ema`, then': Row(
        lambda inner: optax.chain(optax.ema(0.9), inner),
        YES,
        ('JAX: types / even only',) * 4,
    ),
    '`apply_every`, then': Row(
        lambda inner: optax.chain(optax.apply_every(2), inner),
        YES,
        ('JAX: types / even only',) * 4,
    ),
    '`adamw`': Row(lambda inner: optax.adamw(0.1, eps=1e-2), YES),
    '`contrib.schedule_free_adamw`': Row(
        lambda inner: optax.contrib.schedule_free_adamw(0.1, eps=1e-2), YES
    ),
    '`contrib.muon`': Row(lambda inner: optax.contrib.muon(0.1), CUT),
}


def outcomes(name, mode):
  """Returns the result of a wrapper in each place, under a mode."""
  cells = (*ROWS[name].inside, *ROWS[name].around)
  checked = mode == 'shard_map'
  found = [cell.split(' / ')[0 if checked else -1] for cell in cells]
  return dict(zip(PLACES, found, strict=True))


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


def shards(name, label, *, weighted):
  """Returns the training of each shard, for a wrapper in a place."""
  place = PLACES[label]
  return trainer(
      place.sharded(ROWS[name].wrap),
      weighted=weighted,
      local_step=place.takes_local_step,
  )


class Job(NamedTuple):
  """A training to compare with that of one device.

  Attributes:
    name: The row of the wrapper.
    label: Its place.
    weighted: Whether batches are uneven, and weights are handed in.
    broken: Whether an input is NaN.
  """

  name: str
  label: str
  weighted: bool
  broken: bool = False

  def batches(self):
    calls = TOWERS * STEPS if 'tower' in self.label else STEPS
    return batches_of(
        self.name, calls, even=not self.weighted, broken=self.broken
    )


def train_on_shards(mode, jobs):
  """Returns parameters by shard and step, for each job."""
  fns = [shards(job.name, job.label, weighted=job.weighted) for job in jobs]

  # One program for all of them compiles several times as fast.
  def train(params, batches):
    return [fn(*given) for fn, *given in zip(fns, params, batches, strict=True)]

  histories = modes.map_shards(mode, train, SHARDS)(
      [initial_params(job.name) for job in jobs],
      [job.batches() for job in jobs],
  )
  found = {}
  for job, params in zip(jobs, jax.device_get(histories), strict=True):
    towers = PLACES[job.label].towers
    last = slice(towers - 1, None, towers)
    found[job] = jax.tree.map(lambda x, i=last: x[:, i], params)
  return found


def train_alone(jobs):
  """Returns parameters by step of one device, for each job."""
  # In most places it is the same training, of other batches.
  alike = collections.defaultdict(list)
  for job in jobs:
    place = PLACES[job.label]
    # Where towers are still to be collected, weights are.
    weighted = job.weighted and place.alone is not wrapped_momentum
    alike[job.name, place.alone, weighted].append(job)

  def train(batches):
    return [
        jax.vmap(
            trainer(
                alone(ROWS[name].wrap), weighted=weighted, local_step=False
            ),
            (None, 0),
        )(initial_params(name), own)
        for (name, alone, weighted), own in zip(alike, batches, strict=True)
    ]

  batches = [
      jax.tree.map(
          lambda *xs: np.float32(xs),
          *(merged(job.batches(), PLACES[job.label].towers) for job in each),
      )
      for each in alike.values()
  ]
  histories = jax.device_get(jax.jit(train)(batches))
  return {
      job: jax.tree.map(lambda x, i=i: x[i], history)
      for each, history in zip(alike.values(), histories, strict=True)
      for i, job in enumerate(each)
  }


def jobs_of(name, mode):
  """Returns what the table says about each training under a mode."""
  jobs, checked = {}, outcomes(name, 'shard_map')
  for label, outcome in outcomes(name, mode).items():
    # Under another mode, what the table says otherwise.
    is_new = mode == 'shard_map' or outcome != checked[label]
    if outcome in TRAINS and is_new:
      broken = ROWS[name].broken and outcome == 'yes'
      weighted = outcome in ('yes', 'differs', 'diverges')
      jobs[Job(name, label, weighted, broken)] = outcome
    if outcome == 'even only' and label == 'around `cross_shard_mean`':
      jobs[Job(name, label, True)] = 'differs'
  return jobs


def trees_differ(some, other):
  pairs = zip(jax.tree.leaves(some), jax.tree.leaves(other), strict=True)
  return any(
      np.abs(np.asarray(x) - np.asarray(y)).max() > 1e-3 for x, y in pairs
  )


class ComposingTest(parameterized.TestCase):

  @cases.product(mode=('shard_map', 'vmap'), part=range(2))
  def test_trains_as_one_device_where_the_table_says_so(self, mode, part):
    jobs = {}
    for name in list(ROWS)[part::2]:
      jobs |= jobs_of(name, mode)

    found, alone = train_on_shards(mode, list(jobs)), train_alone(list(jobs))

    for job, outcome in jobs.items():
      with self.subTest(job):
        expected = harness.on_each_shard(alone[job], SHARDS)
        self.check(outcome, found[job], expected)

  def check(self, outcome, actual, expected):
    if outcome in ('differs', 'diverges'):
      first = jax.tree.map(lambda x: x[:1].repeat(SHARDS, 0), actual)
      self.assertEqual(trees_differ(actual, first), outcome == 'diverges')
      self.assertTrue(trees_differ(actual, expected))
    else:
      assert_same(actual, expected)

  @cases.parameters(*ROWS)
  def test_refuses_where_the_table_says_so(self, name):
    for label, outcome in outcomes(name, 'shard_map').items():
      refusal = ARGUMENTS if outcome == 'no weights' else REFUSALS.get(outcome)
      if refusal is None:
        continue
      with self.subTest(label):
        fn = shards(name, label, weighted=True)
        train = modes.map_shards('shard_map', fn, SHARDS)
        with self.assertRaisesRegex(refusal.kind, refusal.words):
          jax.eval_shape(train, initial_params(name), batches_of(name))

  @cases.parameters(*ROWS)
  def test_shards_decide_alone_where_the_table_says_that_it_hangs(self, name):
    # What is inside has no collective.
    for label, outcome in outcomes(name, 'pmap').items():
      if outcome not in TRAINS or label in INSIDE:
        continue
      with self.subTest(label):
        place = PLACES[label]
        tx = place.sharded(ROWS[name].wrap)
        extra_args = {'local_step': 0} if place.takes_local_step else {}
        self.assertEqual(can_hang(name, tx, extra_args), outcome == 'hangs')


class LostTest(parameterized.TestCase):
  """Extra arguments that Optax drops in silence."""

  def test_chain_around_it_loses_weights(self):
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

    found = modes.map_shards('vmap', train, SHARDS)(
        params, batches_of('`lookahead`')
    )

    chex.assert_trees_all_equal(*found, strict=True)


class SilentTest(parameterized.TestCase):
  """What the document says beside its tables."""

  def test_nothing_refuses_what_hangs_with_groups(self):
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
  report = shard_transforms.monitoring.wire_report(mapped, params, updates)
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
  def test_tables_of_the_document_are_those_that_are_tested(self, where):
    places = {'inside': INSIDE, 'around': AROUND}[where]
    names = collections.defaultdict(list)
    for name, row in ROWS.items():
      names[getattr(row, where)].append(name)
    rows = [('; '.join(names[x]), *x) for x in names if x[0] != '-']

    table = lines(('of Optax', *places), rows)
    self.assertIn('\n\n' + '\n'.join(table) + '\n\n', DOCUMENT.read_text())

  def test_refusals_of_the_document_are_those_that_are_tested(self):
    rows = [
        (name, f'`{refusal.kind.__name__}`', f'“{refusal.words} …”')
        for name, refusal in REFUSALS.items()
    ]

    table = lines(('word', 'error', 'what it says'), rows)
    self.assertIn('\n\n' + '\n'.join(table) + '\n\n', DOCUMENT.read_text())

  def test_every_word_of_the_tables_is_explained(self):
    text = DOCUMENT.read_text()
    for word in TRAINS:
      self.assertIn(f'\n- **{word}**: ', text)
