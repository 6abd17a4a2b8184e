import csv
import pathlib
import tempfile

from absl.testing import parameterized
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np
import optax
import tensorboardX
from tensorboardX.proto import event_pb2

import cases
import declared_state
import modes
import shard_transforms
from shard_transforms import asynchronous
from shard_transforms.monitoring import metrics

AXIS = modes.AXIS
SHARDS = 8


def towers_of_guard():
  inner = optax.chain(
      shard_transforms.cross_shard_mean(AXIS),
      optax.inject_hyperparams(optax.sgd)(learning_rate=0.5),
  )
  guard = shard_transforms.guard(inner, AXIS, on_bad='exclude')
  return shard_transforms.tower_reduce(2, guard, axis_name=AXIS)


def after_three_towers(tx, params, own):
  """Returns the state; shard 5 had a bad first tower, weights are 1 to 8."""
  state = tx.init(params)
  weight = 1.0 + own
  for tower in range(3):
    bad = jnp.where((own == 5) & (tower == 0), jnp.nan, 1.0)
    update = shard_transforms.per_shard(bad * jnp.ones(3), AXIS)
    _, state = tx.update(update, state, params, weight=weight)
  return state


EXPECTED = {
    'tower_reduce/tower': 1,
    'tower_reduce/total_weight': 36.0,
    'guard/num_updates': 1,
    'guard/skipped_count': 0,
    'guard/consecutive_skipped': 0,
    'guard/bad_shard_count': 1,
    'guard/last_bad_step': 0,
    'hyperparams/learning_rate': 0.5,
}


def plain(found):
  """Returns the metrics as numbers."""
  return {name: np.asarray(x).item() for name, x in found.items()}


def trained_state():
  """Returns the state of a chain after an update."""
  sgd = optax.inject_hyperparams(optax.sgd)(learning_rate=0.25)
  tx = shard_transforms.drop_stale(0, sgd)
  state = tx.init(jnp.zeros(2))
  return tx.update(jnp.ones(2), state, local_step=0)[1]


class MetricsTest(parameterized.TestCase):

  @cases.parameters(*modes.MODES)
  def test_tells_the_same_inside_of_a_mapped_function_and_outside(self, mode):
    tx = towers_of_guard()

    def fn(params, own):
      state = after_three_towers(tx, params, own)
      return state, metrics(state, axis_name=AXIS)

    mapped = modes.map_shards(mode, fn)
    state, inside = mapped(jnp.zeros(3), jnp.arange(8.0))

    for shard in range(SHARDS):
      of_shard = {name: x[shard] for name, x in inside.items()}
      self.assertEqual(plain(of_shard), EXPECTED)
    # Each shard has a copy of what is the same on all, as of `jax.pmap`.
    self.assertEqual(plain(metrics(state)), EXPECTED)
    self.assertEqual(plain(jax.jit(metrics)(state)), EXPECTED)

  def test_types_tell_the_axis_where_jax_tracks_them(self):
    tx = towers_of_guard()

    def fn(own):
      return metrics(after_three_towers(tx, jnp.zeros(3), own[0]))

    mapped = jax.shard_map(
        fn, mesh=modes.mesh(), in_specs=P(AXIS), out_specs=P()
    )

    self.assertEqual(plain(jax.jit(mapped)(jnp.arange(8.0))), EXPECTED)

  def test_numbers_of_sharded_state_are_scalars_in_one_program(self):
    mesh = modes.mesh()
    state = shard_transforms.init_state(towers_of_guard(), jnp.ones(3), mesh)

    compiled = jax.jit(metrics).lower(state).compile()

    self.assertEqual(compiled(state)['guard/last_bad_step'], -1)
    self.assertLess(compiled.memory_analysis().output_size_in_bytes, 256)

  @cases.parameters('pmap', 'shard_map_unchecked')
  def test_asks_for_the_axis_where_types_do_not_tell(self, mode):
    tx = towers_of_guard()
    mapped = modes.map_shards(mode, lambda params, _: metrics(tx.init(params)))

    with self.assertRaisesRegex(
        ValueError, "`axis_name` of `metrics` .*'tower_reduce/total_weight'"
    ):
      mapped(jnp.zeros(3), jnp.arange(8.0))

  @cases.parameters(*modes.MODES)
  def test_what_is_not_kept_per_shard_is_not_summed(self, mode):
    tx = shard_transforms.tower_reduce(2)

    def fn(params, _):
      _, state = tx.update(params, tx.init(params), params)
      return metrics(state, axis_name=AXIS)

    found = modes.map_shards(mode, fn)(jnp.zeros(3), jnp.arange(8.0))

    np.testing.assert_array_equal(
        found['tower_reduce/total_weight'], np.ones(8)
    )

  def test_refuses_an_axis_that_is_not_bound(self):
    with self.assertRaisesRegex(NameError, "`metrics` needs .* 'data'"):
      metrics(optax.EmptyState(), axis_name=AXIS)

  def test_finds_states_wherever_they_are(self):
    drop = shard_transforms.drop_stale(0)
    partition = optax.partition(
        {'a': drop, 'b': optax.masked(drop, {'w': True, 'v': False})},
        {'w': 'b', 'v': 'a'},
    )
    tx = optax.apply_if_finite(
        optax.chain(optax.adam(0.1), partition, optax.MultiSteps(drop, 3)), 2
    )
    state = {'step': 1, 'opt_state': tx.init({'w': jnp.zeros(2), 'v': 1.0})}

    found = metrics(state, prefix='train/')

    self.assertEqual(
        [name for name in found if 'global_step' in name],
        [
            'train/drop_stale/global_step',
            'train/drop_stale_2/global_step',
            'train/drop_stale_3/global_step',
        ],
    )
    self.assertContainsSubset(
        {
            'train/apply_if_finite/notfinite_count',
            'train/apply_if_finite/total_notfinite',
            'train/multi_steps/mini_step',
            'train/multi_steps/gradient_step',
        },
        found,
    )

  def test_every_state_tells_of_itself(self):
    params = jnp.zeros(2)
    inner = optax.chain(
        shard_transforms.scale_by_staleness('inverse'),
        shard_transforms.monitoring.track_divergence(AXIS),
    )
    tx = shard_transforms.guard(inner, max_stds=3.0, window=4)

    found = metrics(tx.init(params))

    self.assertEqual(found['norm_window/last_mean'], 0)
    self.assertEqual(found['scale_by_staleness/global_step'], 0)
    self.assertEqual(found['divergence/diverged_count'], 0)

  def test_tells_nothing_of_other_states(self):
    self.assertEmpty(metrics(optax.adam(0.1).init(jnp.zeros(2))))

  def test_outlives_a_state_that_is_donated(self):
    state = trained_state()

    found = metrics(state)
    jax.jit(lambda s: jax.tree.map(lambda x: x + 1, s), donate_argnums=0)(state)

    self.assertTrue(state.global_step.is_deleted())
    self.assertEqual(found['drop_stale/global_step'], 1)
    self.assertEqual(found['hyperparams/learning_rate'], 0.25)

  def test_asks_states_from_outside_of_the_library(self):
    tx = declared_state.tally(shard_transforms.drop_stale(0), AXIS)
    mesh = modes.mesh()
    state = shard_transforms.init_state(tx, jnp.ones(2), mesh)
    numbers = np.arange(8)
    state = state._replace(
        seen=numbers, rate=np.float32(numbers), least=numbers, most=numbers
    )

    self.assertEqual(
        plain(metrics(state)),
        {
            'tally/seen': 28,
            'tally/rate': 3.5,
            'tally/least': 0,
            'tally/most': 7,
            'drop_stale/global_step': 0,
            'drop_stale/stale_count': 0,
            'drop_stale/stale_shard_count': 0,
            'drop_stale/stale_fraction': 0,
        },
    )

  def test_reads_the_report_of_asynchronous_training(self):
    report = asynchronous.Report(
        global_step=30, num_dropped=10, metrics={'loss': 0.5}
    )

    found = plain(metrics(report))

    self.assertEqual(found['report/num_dropped'], 10)
    self.assertEqual(found['report/metrics/loss'], 0.5)


class LoggerTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.folder = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))

  def test_tensorboard_gets_a_curve_of_each_number(self):
    with tensorboardX.SummaryWriter(str(self.folder)) as writer:
      for name, value in metrics(trained_state(), prefix='train/').items():
        writer.add_scalar(name, float(value), 7)

    (path,) = self.folder.iterdir()
    found = dict(read_scalars(path))
    self.assertEqual(found['train/drop_stale/global_step'], (7, 1.0))
    self.assertEqual(found['train/hyperparams/learning_rate'], (7, 0.25))

  def test_a_csv_gets_a_row_a_step(self):
    path = self.folder / 'metrics.csv'
    found = metrics(trained_state())
    with path.open('w', newline='') as file:
      writer = csv.DictWriter(file, ['step', *found])
      writer.writeheader()
      writer.writerow({'step': 7, **plain(found)})

    with path.open(newline='') as file:
      (row,) = csv.DictReader(file)
    self.assertEqual(row['step'], '7')
    self.assertEqual(row['hyperparams/learning_rate'], '0.25')


def read_scalars(path):
  """Yields the name, the step and the value of each scalar in a file."""
  with path.open('rb') as file:
    while header := file.read(12):
      event = event_pb2.Event.FromString(
          file.read(int.from_bytes(header[:8], 'little'))
      )
      file.read(4)
      for value in event.summary.value:
        yield value.tag, (event.step, value.simple_value)
