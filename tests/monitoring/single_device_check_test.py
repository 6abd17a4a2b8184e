"""Tests of `assert_trains_as_one_device`."""

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

AXIS = modes.AXIS
SHARDS = 4
MEAN = st.cross_shard_mean(AXIS)
CLIP = optax.clip_by_global_norm(1.0)
ADAM = optax.adam(0.1, eps=1e-3)

RNG = np.random.default_rng(0)
ROWS = 24
# The rows of the first shard are large, and shards have 1 to 4 valid rows of 6.
SCALE = np.where(np.arange(ROWS) < 6, 9, 1)[:, None]
BATCH = {
    'x': (RNG.normal(size=(ROWS, 4)) * SCALE).astype(np.float32),
    'row': np.arange(ROWS),
    'real': (np.arange(ROWS) % 6 <= np.arange(ROWS) // 6).astype(np.float32),
}
PARAMS = {'w': np.full(4, 0.5, np.float32), 'b': np.zeros((), np.float32)}


def errors(params, x):
  return (x @ params['w'] + params['b'] - x.sum(axis=1)) ** 2


def mean_loss(params, batch):
  return errors(params, batch['x']).mean()


def summed_loss(params, batch):
  return errors(params, batch['x']).sum()


def own_statistics_loss(params, batch):
  return errors(
      params, batch['x'] / (batch['x'].std(axis=0, keepdims=True) + 1e-3)
  ).mean()


def shared_statistics_loss(params, batch):
  squares = st.shard_mean(
      jnp.mean(batch['x'] ** 2, axis=0, keepdims=True), AXIS
  )
  return errors(params, batch['x'] / (jnp.sqrt(squares) + 1e-3)).mean()


def key_of_shard_loss(params, batch):
  key = jax.random.fold_in(jax.random.key(0), lax.axis_index(AXIS))
  keep = jax.random.bernoulli(key, 0.5, batch['x'].shape)
  return errors(params, batch['x'] * keep).mean()


def key_of_row_loss(params, batch):
  def keep(row):
    key = jax.random.fold_in(jax.random.key(0), row)
    return jax.random.bernoulli(key, 0.5, (4,))

  return errors(params, batch['x'] * jax.vmap(keep)(batch['row'])).mean()


def masked_loss(params, batch):
  real = batch['real']
  return jnp.sum(real * errors(params, batch['x'])) / real.sum()


def noisy(key_of):
  """Adds noise after the mean."""

  def update(updates, state, params=None, **extra_args):
    del params, extra_args
    key = key_of(jax.random.key(1))
    noise = jax.random.normal(key, (4,))
    return updates | {'w': updates['w'] + noise}, state

  return optax.GradientTransformation(lambda _: (), update)


def by_shard(key):
  return jax.random.fold_in(key, lax.axis_index(AXIS))


def run_of(mode, loss, tx, weight_of=None):
  """Returns a `run` that takes one step in one mode."""
  tx = optax.with_extra_args_support(tx)

  def step(params, batch):
    weight = None if weight_of is None else weight_of(batch)
    value, grads = st.value_and_grad(loss, AXIS)(params, batch)
    updates, _ = tx.update(grads, tx.init(params), params, weight=weight)
    mean = st.shard_mean((value, grads), AXIS, weight=weight)
    statistics = {'largest': lax.pmax(batch['x'].max(), AXIS)}
    return {
        'statistics': statistics,
        'update': updates,
        **dict(zip(('loss', 'gradient'), mean, strict=True)),
    }

  def run(num_shards):
    batch = jax.tree.map(
        lambda x: np.reshape(x, (num_shards, -1, *x.shape[1:])), BATCH
    )
    return modes.map_shards(mode, step, num_shards)(PARAMS, batch)

  return run


def plain_run_of(mode, loss, tx):
  """Returns a `run` that takes one step under plain `jax.jit`."""

  def run(num_shards):
    mesh = modes.plain_mesh(mode, num_shards)
    bound = st.on_mesh(tx, mesh)

    @jax.jit
    def step(params, state, batch):
      value, grads = st.value_and_grad(loss, AXIS)(params, batch)
      updates, _ = bound.update(grads, state, params)
      gradient = jax.tree.map(lambda x: x.mean(0), grads.tree)
      return {'loss': value, 'gradient': gradient, 'update': updates}

    with jax.set_mesh(mesh):
      params = modes.place(PARAMS, mesh)
      batch = modes.place(BATCH, mesh, AXIS)
      return step(params, bound.init(params), batch)

  return run


def real_rows(batch):
  return batch['real'].sum()


SOUND = {
    'mean and clip': (mean_loss, optax.chain(MEAN, CLIP, ADAM)),
    'shared statistics': (shared_statistics_loss, optax.chain(MEAN, ADAM)),
    'key of row': (key_of_row_loss, optax.chain(MEAN, ADAM)),
    'weight': (masked_loss, optax.chain(MEAN, ADAM), real_rows),
    'noise of one key': (mean_loss, optax.chain(MEAN, noisy(lambda x: x))),
    'sharded': (mean_loss, st.shard_update(ADAM, AXIS)),
    'sum': (summed_loss, st.cross_shard_sum(AXIS)),
}
# Loss, transformation, weight, the first part that differs, and a cause.
WRONG = {
    'no mean': (mean_loss, optax.chain(CLIP, ADAM), None, 'update', 'missing'),
    'clip': (mean_loss, optax.chain(CLIP, MEAN), None, 'update', 'clipping'),
    'signs': (
        *(mean_loss, optax.chain(optax.scale_by_sign(), MEAN), None),
        *('update', 'signs'),
    ),
    'summed loss': (summed_loss, MEAN, None, 'loss', 'is a sum over examples'),
    'own statistics': (own_statistics_loss, MEAN, None, 'loss', 'batch stat'),
    'key of shard': (key_of_shard_loss, MEAN, None, 'loss', 'random keys that'),
    'no weight': (masked_loss, MEAN, None, 'loss', 'that are not passed'),
    'noise': (
        mean_loss,
        optax.chain(MEAN, noisy(by_shard)),
        None,
        'update',
        'keys',
    ),
}


def message_of(run, num_shards=SHARDS, **options):
  try:
    monitoring.assert_trains_as_one_device(run, num_shards, **options)
  except AssertionError as error:
    return str(error)
  return None


def returning(one, several=None):
  several = one if several is None else several
  return lambda num_shards: one if num_shards == 1 else several


ONES = np.ones(3)
FLAGS = np.array([1, 0, 1]), np.array([1, 1, 1])
# A part, its values on one device and on several, and words of the message.
DIFFERENT = (
    ('gradient', ONES, 8 * ONES, ['8 times that of one', 'which JAX sums']),
    ('gradient', ONES, ONES / 8, ['0.125 times that of one device']),
    ('gradient', *FLAGS, ['before its gradient']),
    ('statistics', *FLAGS, ['inside the model']),
    ('update', 0 * ONES, ONES, ['update: relative difference inf']),
    (
        'loss',
        np.ones(()),
        np.array(np.nan),
        ['difference nan', 'in a later step'],
    ),
    ('update', np.array([1 + 1j]), np.array([1.0]), ['update']),
    (
        *('update', np.array([3 + 4j]), np.array([3 - 1j])),
        ['update: relative difference 1'],
    ),
    *(
        ('update', *(x.astype(dtype) for x in FLAGS), ['update'])
        for dtype in (np.int32, jnp.bfloat16, np.bool_)
    ),
)


LOSS = ({'loss': 1.0},)
OTHER_SHAPES = r'the shape \(2,\) for one shard and \(8,\) for several'
ERRORS = (
    (((),), {}, TypeError, 'must return a mapping .* got tuple'),
    (({'los': 1},), {}, ValueError, r"some of the keys \['loss', .*\['los'\]"),
    (({'loss': 1.0}, {'update': 1.0}), {}, ValueError, 'same tree for any num'),
    (
        *(({'update': np.ones(2)}, {'update': np.ones(8)}), {}),
        *(ValueError, OTHER_SHAPES),
    ),
    (({'loss': np.nan},), {}, ValueError, 'not finite: nan at loss'),
    (LOSS, dict(num_shards=2.0), TypeError, '`num_shards` must be an integer'),
    (LOSS, dict(num_shards=1), ValueError, '`num_shards` must be at least 2'),
    (LOSS, dict(rtol=0), ValueError, '`rtol` must be positive'),
)


class OneDeviceTest(parameterized.TestCase):

  @cases.parameters(
      *SOUND,
      fast=['mean and clip', 'shared statistics', 'key of row', 'sharded'],
  )
  def test_sound_training_passes(self, name):
    # The sum of the gradients is the gradient of the summed loss.
    loss, tx, *weight_of = SOUND[name]
    run = run_of('shard_map', loss, tx, *weight_of)
    if name == 'sum':
      results, run = run, lambda n: {'update': results(n)['update']}

    self.assertIsNone(message_of(run))

  @cases.product(
      name=('mean and clip', 'shared statistics', 'key of row', 'sharded'),
      mode=modes.PLAIN,
      fast='jit',
  )
  def test_sound_training_passes_under_plain_jit(self, name, mode):
    self.assertIsNone(message_of(plain_run_of(mode, *SOUND[name])))

  @cases.parameters(
      'clip',
      'signs',
      'summed loss',
      'own statistics',
      'key of shard',
      fast=['clip', 'key of shard'],
  )
  def test_detects_silent_mistakes_under_plain_jit(self, name):
    loss, tx, _, part, cause = WRONG[name]

    message = message_of(plain_run_of('jit_explicit', loss, tx))

    self.assertRegex(message, f'(?s){part}.*{cause}')

  @cases.parameters(*WRONG, fast=set(WRONG) - {'noise', 'clip', 'signs'})
  def test_detects_silent_mistakes(self, name):
    loss, tx, weight_of, part, cause = WRONG[name]

    message = message_of(run_of('shard_map', loss, tx, weight_of))

    differences, _, causes = message.partition(
        '\nUsual causes of the first difference: '
    )
    self.assertStartsWith(
        differences, f'{SHARDS} shards do not train like one device'
    )
    self.assertStartsWith(differences.splitlines()[1].strip(), part)
    self.assertIn(cause, causes)

  @cases.parameters(*DIFFERENT)
  def test_reports_differences(self, part, one, several, words):
    message = message_of(returning({part: one}, {part: several}), 8)

    self.assertContainsInOrder(words, message)

  def test_detects_a_copy_that_differs(self):
    def run(num_shards):
      mapped = jax.shard_map(
          lambda x: x + (lax.axis_index(AXIS) == 2),
          mesh=modes.mesh(num_shards),
          in_specs=P(),
          out_specs=P(),
          check_vma=False,
      )
      return {'update': jax.jit(mapped)(np.ones(3, np.float32))}

    words = 'update: relative difference 0.5, 2 different values in 4 copies'
    self.assertIn(words, message_of(run))

  @cases.parameters(*modes.UNTRACKED_MODES)
  def test_copies_must_have_equal_bits(self, mode):
    # Without a reduction, gradients of equal signs give nearly equal first
    # updates under Adam.
    def step(params, shift):
      grads = jax.tree.map(lambda x: x + 1 + shift.sum(), params)
      return {'update': ADAM.update(grads, ADAM.init(params), params)[0]}

    def run(num_shards):
      shifts = jnp.arange(SHARDS, dtype=jnp.float32).reshape(num_shards, -1)
      return modes.map_shards(mode, step, num_shards)({'w': ONES}, shifts / 100)

    message = message_of(run)

    self.assertContainsInOrder(
        [
            "copies of a result differ from each other in\n  update['w']: rel",
            '4 different values in 4 copies\n',
            'a missing reduction',
            'a metric that is not reduced',
            'state that differs',
        ],
        message,
    )

  def test_ignores_rounding_of_a_small_leaf(self):
    one = {'gradient': {'large': np.ones(3), 'b': np.array([1e-9, 0])}}
    two = {'gradient': {'large': np.ones(3), 'b': np.array([0, -1e-9])}}

    self.assertIsNone(message_of(returning(one, two)))
    self.assertIn("gradient['b']", message_of(returning(one, two), rtol=1e-7))

  def test_an_empty_tree_agrees(self):
    self.assertIsNone(message_of(returning({'loss': 1.0, 'statistics': {}})))

  @cases.parameters(*ERRORS)
  def test_refuses_call(self, results, options, error, words):
    options = {'num_shards': SHARDS} | options

    with self.assertRaisesRegex(error, words):
      monitoring.assert_trains_as_one_device(returning(*results), **options)
