import functools
from unittest import mock

from absl.testing import parameterized
import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np
import optax

import cases
import modes
import shard_transforms

AXIS = modes.AXIS
# Ways to have a program of 8 shards, and so to ask for a report on it.
WAYS = (*modes.PARALLEL_MODES, 'axis_sizes')

# In bytes, 4,000 and 32, which are packed, and 200,000, which is not.
GRADS = {
    'w': jax.ShapeDtypeStruct((10, 100), jnp.float32),
    'b': jax.ShapeDtypeStruct((8,), jnp.float32),
    'e': jax.ShapeDtypeStruct((50_000,), jnp.float32),
}
GRADS_BYTES = 204_032
SCALAR = jax.ShapeDtypeStruct((), jnp.float32)
STEP = jax.ShapeDtypeStruct((), jnp.int32)
EVEN = [[0, 2, 4, 6], [1, 3, 5, 7]]


def all_reduce(x, n=8):
  """The cost of the all-reduce of `x` bytes, `R(x)` in the formulas."""
  return 2 * (n - 1) / n * x


def scatter(x, n=8):
  """That of a reduce-scatter of or an all-gather to `x` bytes, `S(x)`."""
  return (n - 1) / n * x


def report_on(way, fn, *own):
  """Reports on a function of a shard's own trees, on 8 shards."""
  if way == 'axis_sizes':
    return shard_transforms.monitoring.wire_report(
        fn, *own, axis_sizes={AXIS: 8}
    )
  stacked = jax.tree.map(
      lambda x: jax.ShapeDtypeStruct((8, *x.shape), x.dtype), own
  )
  mapped = modes.map_shards(way, lambda _, own: fn(*own))
  return shard_transforms.monitoring.wire_report(mapped, 0.0, stacked)


def update_with(tx, **extra_args):
  """Returns a function of updates, and maybe values of extra arguments."""

  def fn(grads, *values):
    given = dict(zip(extra_args, values, strict=True))
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), grads)
    return tx.update(grads, tx.init(zeros), **given)[0]

  return fn


def _sends(x):
  return lax.psum(x, AXIS)


def split(report):
  """Returns the bytes that are always sent, and those that may be."""
  sent = {False: 0.0, True: 0.0}
  for collective in report.collectives:
    sent[collective.conditional] += collective.sent_bytes
  return sent[False], sent[True]


class LibraryTest(parameterized.TestCase):
  """The wire cost of each transformation, as formulas."""

  def assert_sends(self, report, total_bytes, num_collectives):
    self.assertAlmostEqual(report.total_bytes, total_bytes, places=6)
    self.assertEqual(report.num_collectives, num_collectives)
    self.assertEmpty(report.warnings)

  @cases.product(way=WAYS, kind=('mean', 'sum'))
  def test_cross_shard(self, way, kind):
    tx = getattr(shard_transforms, f'cross_shard_{kind}')(AXIS)

    report = report_on(way, update_with(tx), GRADS)

    self.assert_sends(report, all_reduce(GRADS_BYTES), 2)
    for collective in report.collectives:
      self.assertEqual(collective.scope, f'cross_shard_{kind}')
      self.assertEqual(collective.axes, (AXIS,))

  @cases.parameters(*WAYS)
  def test_cross_shard_between_processes_sends_one_buffer(self, way):
    tx = shard_transforms.cross_shard_mean(AXIS)

    with mock.patch.object(jax, 'process_count', return_value=2):
      report = report_on(way, update_with(tx), GRADS)

    self.assert_sends(report, all_reduce(GRADS_BYTES), 1)

  @cases.product(way=WAYS, kind=('mean', 'sum'))
  def test_cross_shard_with_weight(self, way, kind):
    tx = getattr(shard_transforms, f'cross_shard_{kind}')(AXIS)

    report = report_on(way, update_with(tx, weight=SCALAR), GRADS, SCALAR)

    # The weight, and the largest weight for a mean.
    numbers = 2 if kind == 'mean' else 1
    self.assert_sends(
        report, all_reduce(GRADS_BYTES + 4 * numbers), 2 + numbers
    )

  @cases.product(way=WAYS, dtype=('bfloat16', 'float16'))
  def test_cross_shard_with_few_bits_sends_float32(self, way, dtype):
    tx = shard_transforms.cross_shard_mean(AXIS)
    grads = jax.ShapeDtypeStruct((1000,), dtype)

    report = report_on(way, update_with(tx), grads)

    self.assert_sends(report, all_reduce(4000), 1)
    self.assertEqual(report.collectives[0].dtype, 'float32')

  @cases.product(way=WAYS, weighted=(cases.Repeated(False), True))
  def test_cross_shard_with_groups(self, way, weighted):
    tx = shard_transforms.cross_shard_mean(AXIS, groups=EVEN)
    given = {'weight': SCALAR} if weighted else {}

    report = report_on(way, update_with(tx, **given), GRADS, *given.values())

    # The weight is padded to one number for each shard of the group.
    reduced = GRADS_BYTES + (16 if weighted else 0)
    largest = all_reduce(4) if weighted else 0
    self.assert_sends(
        report, 2 * scatter(reduced, n=4) + largest, 7 if weighted else 4
    )

  @cases.parameters(*WAYS)
  def test_cross_shard_with_groups_pads(self, way):
    tx = shard_transforms.cross_shard_mean(AXIS, groups=EVEN)
    grads = jax.ShapeDtypeStruct((7,), jnp.float32)

    report = report_on(way, update_with(tx), grads)

    self.assert_sends(report, 2 * scatter(32, n=4), 2)
    names = [collective.primitive for collective in report.collectives]
    self.assertEqual(names, ['reduce_scatter', 'all_gather'])

  @cases.product(
      way=('shard_map', cases.Repeated('shard_map_unchecked'), 'axis_sizes'),
      axes=((('host', 'core'), 8), ('core', 4), (('host',), 2)),
  )
  def test_cross_shard_over_several_axes(self, way, axes):
    axis_name, num_shards = axes
    tx = shard_transforms.cross_shard_mean(axis_name)

    report = _report_on_mesh(way, update_with(tx), GRADS)

    self.assert_sends(report, all_reduce(GRADS_BYTES, num_shards), 2)
    for collective in report.collectives:
      self.assertEqual(collective.num_shards, num_shards)

  @cases.parameters(*WAYS)
  def test_shard_update(self, way):
    tx = shard_transforms.shard_update(optax.adam(0.1), AXIS)

    report = report_on(way, update_with(tx), GRADS)

    self.assert_sends(report, 2 * scatter(GRADS_BYTES), 4)

  @cases.parameters(*WAYS)
  def test_shard_update_gathers_what_inner_gives(self, way):
    def halve(updates, params=None):
      del params
      return jax.tree.map(lambda u: u.astype(jnp.bfloat16), updates)

    tx = shard_transforms.shard_update(optax.stateless(halve), AXIS)
    grads = jax.ShapeDtypeStruct((50_000,), jnp.float32)

    report = report_on(way, update_with(tx, weight=SCALAR), grads, SCALAR)

    total = scatter(200_000) + scatter(100_000) + all_reduce(4 + 4)
    self.assert_sends(report, total, 4)

  @cases.parameters(*WAYS)
  def test_tower_reduce_of_shard_update_sends_once_a_window(self, way):
    inner = shard_transforms.shard_update(optax.adam(0.1), AXIS)
    tx = shard_transforms.tower_reduce(4, inner, axis_name=AXIS)

    report = report_on(way, update_with(tx), GRADS)

    self.assertEqual(split(report), (0, 2 * scatter(GRADS_BYTES)))

  def test_cross_shard_of_what_is_reduced(self):
    tx = shard_transforms.cross_shard_mean(AXIS, on_invariant='averaged')
    mapped = modes.map_shards('shard_map', lambda g, _: update_with(tx)(g))

    report = shard_transforms.monitoring.wire_report(
        mapped, GRADS, np.zeros(8, np.float32)
    )

    self.assert_sends(report, 0, 0)

  @cases.product(way=WAYS, weighted=(cases.Repeated(False), True))
  def test_shard_mean(self, way, weighted):
    mean = functools.partial(shard_transforms.shard_mean, axis_name=AXIS)
    hits = jax.ShapeDtypeStruct((), jnp.bool_)

    if weighted:

      def fn(tree, weight):
        return mean(tree, weight=weight)

      report = report_on(way, fn, [SCALAR, hits], SCALAR)
    else:
      report = report_on(way, mean, [SCALAR, hits])

    total = all_reduce(16 if weighted else 8)
    self.assert_sends(report, total, 3 if weighted else 1)
    self.assertEqual(report.collectives[0].scope, 'shard_mean')

  @cases.parameters(*WAYS)
  def test_tower_reduce(self, way):
    inner = optax.chain(shard_transforms.cross_shard_mean(AXIS), optax.adam(1))
    tx = shard_transforms.tower_reduce(4, inner, axis_name=AXIS)

    report = report_on(way, update_with(tx), GRADS)

    self.assert_sends(report, all_reduce(GRADS_BYTES), 2)
    self.assertEqual(split(report)[0], 0)

  @cases.parameters(*WAYS)
  def test_tower_reduce_with_weight(self, way):
    inner = shard_transforms.cross_shard_mean(AXIS)
    tx = shard_transforms.tower_reduce(4, inner, axis_name=AXIS)

    report = report_on(way, update_with(tx, weight=SCALAR), GRADS, SCALAR)

    # One number tells whether there is any weight, two scale and divide.
    self.assert_sends(report, all_reduce(GRADS_BYTES + 4 + 4 + 4), 5)
    self.assertEqual(split(report)[0], 0)

  @cases.parameters(*WAYS)
  def test_tower_reduce_of_one_tower(self, way):
    inner = shard_transforms.cross_shard_mean(AXIS)
    tx = shard_transforms.tower_reduce(1, inner, axis_name=AXIS)

    report = report_on(way, update_with(tx), GRADS)

    self.assertEqual(split(report), (all_reduce(GRADS_BYTES), 0))

  @cases.parameters(*WAYS)
  def test_tower_reduce_without_axis_name(self, way):
    tx = optax.chain(
        shard_transforms.cross_shard_mean(AXIS),
        shard_transforms.tower_reduce(4, optax.adam(1)),
    )

    report = report_on(way, update_with(tx), GRADS)

    self.assertEqual(split(report), (all_reduce(GRADS_BYTES), 0))

  @cases.parameters(*WAYS)
  def test_drop_stale(self, way):
    inner = shard_transforms.cross_shard_mean(AXIS)
    tx = shard_transforms.drop_stale(2, inner, axis_name=AXIS)

    report = report_on(way, update_with(tx, local_step=STEP), GRADS, STEP)

    # The weight and the lateness first, then updates of weights; no branch.
    sent = all_reduce(8) + all_reduce(GRADS_BYTES + 4)
    self.assert_sends(report, sent, 4)
    self.assertEqual(split(report), (sent, 0))

  @cases.parameters(*WAYS)
  def test_drop_stale_without_axis_name(self, way):
    inner = shard_transforms.cross_shard_mean(AXIS)
    tx = shard_transforms.drop_stale(2, inner)

    def fn(grads):
      return tx.update(grads, tx.init(grads), local_step=0)[0]

    report = report_on(way, fn, GRADS)

    self.assertEqual(split(report), (all_reduce(GRADS_BYTES), 0))

  @cases.product(way=WAYS, reduced=(cases.Repeated(False), True))
  def test_reduce_towers(self, way, reduced):
    inner = shard_transforms.cross_shard_mean(AXIS) if reduced else None
    tx = shard_transforms.reduce_towers(3, inner)
    towers = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct((3, *x.shape), x.dtype), GRADS
    )

    report = report_on(way, update_with(tx), towers)

    expected = (all_reduce(GRADS_BYTES), 2) if reduced else (0, 0)
    self.assert_sends(report, *expected)

  @cases.parameters(*WAYS)
  def test_a_whole_step(self, way):
    inner = optax.chain(shard_transforms.cross_shard_mean(AXIS), optax.sgd(0.1))
    inner = shard_transforms.tower_reduce(4, inner, axis_name=AXIS)
    tx = shard_transforms.drop_stale(2, inner, axis_name=AXIS)

    def loss(params, x):
      return jnp.mean((x @ params['w'] + params['b'][None]) ** 2)

    def fn(x, tokens):
      params = {'w': jnp.zeros((3, 5)), 'b': jnp.zeros(5)}
      grad = shard_transforms.value_and_grad(loss, AXIS)
      value, grads = grad(params, x)
      updates, _ = tx.update(
          grads, tx.init(params), params, local_step=0, weight=tokens
      )
      return shard_transforms.shard_mean(value, AXIS, weight=tokens), updates

    x = jax.ShapeDtypeStruct((2, 3), jnp.float32)
    report = report_on(way, fn, x, SCALAR)

    # Always: the decision, the loss with its weight and the largest. Once a
    # window: gradients, the total weight twice, and the largest.
    self.assertEqual(
        split(report), (all_reduce(8 + 4 + 4 + 4), all_reduce(80 + 4 + 4 + 4))
    )
    self.assertEmpty(report.warnings)

  def test_nothing_is_sent_under_vmap(self):
    inner = shard_transforms.cross_shard_mean(AXIS)
    tx = shard_transforms.drop_stale(2, inner, axis_name=AXIS)

    report = report_on('vmap', update_with(tx, local_step=STEP), GRADS, STEP)

    self.assertEqual(report, shard_transforms.monitoring.WireReport(()))


def _report_on_mesh(way, fn, own):
  """Reports on a function of a shard's own tree, on 2 hosts of 4 cores."""
  if way == 'axis_sizes':
    sizes = {'host': 2, 'core': 4}
    return shard_transforms.monitoring.wire_report(fn, own, axis_sizes=sizes)
  spec = P(('host', 'core'))

  def one_shard(own):
    out = fn(jax.tree.map(lambda x: x[0], own))
    # Types differ over the axes that are not reduced.
    return jax.tree.map(lambda x: x[None], out)

  mapped = jax.shard_map(
      one_shard,
      mesh=jax.make_mesh(
          (2, 4), ('host', 'core'), (jax.sharding.AxisType.Auto,) * 2
      ),
      in_specs=spec,
      out_specs=spec,
      check_vma=way == 'shard_map',
  )
  stacked = jax.tree.map(
      lambda x: jax.ShapeDtypeStruct((8, *x.shape), x.dtype), own
  )
  return shard_transforms.monitoring.wire_report(mapped, stacked)


# A vector of 24 floats on each of 8 shards.
VECTOR = jax.ShapeDtypeStruct((24,), jnp.float32)
RING = [(i, (i + 1) % 8) for i in range(8)]


def _sum_later(x):
  w = lax.pcast(jnp.ones(24), AXIS, to='reduced')
  return lax.psum(jax.grad(lambda w: jnp.sum(w * x))(w), AXIS)


def _scatter_later(x):
  w = lax.pcast(jnp.ones(24), AXIS, to='reduced')
  grad = jax.grad(lambda w: jnp.sum(w * x))(w)
  return lax.psum_scatter(grad, AXIS, tiled=True)


class PrimitiveTest(parameterized.TestCase):
  """What each of JAX's collectives costs, by hand."""

  @cases.product(
      way=WAYS,
      case=(
          (lambda x: lax.psum(x, AXIS), 'psum', 168),
          (lambda x: lax.pmean(x, AXIS), 'psum', 168),
          (lambda x: lax.pmax(x, AXIS), 'pmax', 168),
          (lambda x: lax.pmin(x, (AXIS,)), 'pmin', 168),
          (
              lambda x: lax.psum_scatter(x, AXIS, tiled=True),
              'reduce_scatter',
              84,
          ),
          (lambda x: lax.all_gather(x, AXIS), 'all_gather', 672),
          (
              lambda x: lax.all_to_all(x, AXIS, 0, 0, tiled=True),
              'all_to_all',
              84,
          ),
          (lambda x: lax.ppermute(x, AXIS, RING), 'ppermute', 96),
      ),
  )
  def test_costs_what_the_ring_sends(self, way, case):
    fn, primitive, sent_bytes = case

    report = report_on(way, fn, VECTOR)

    expected = shard_transforms.monitoring.Collective(
        primitive, 'float32', 96, (AXIS,), 8
    )
    self.assertEqual(report.collectives, (expected,))
    self.assertEqual(report.total_bytes, sent_bytes)

  @cases.parameters(
      (lambda x: lax.all_gather(x, AXIS, to='invarying'), 'all_gather', 672),
      (lambda x: lax.all_gather(x, AXIS, to='reduced'), 'all_gather', 672),
      (_sum_later, 'psum', 168),
      (_scatter_later, 'reduce_scatter', 84),
  )
  def test_costs_the_same_where_types_are_tracked(
      self, fn, primitive, sent_bytes
  ):
    report = report_on(
        'shard_map', lambda x: jax.typeof(fn(x)) and jnp.sum(x), VECTOR
    )

    (collective,) = report.collectives
    self.assertEqual(collective.primitive, primitive)
    self.assertEqual(collective.sent_bytes, sent_bytes)

  def test_finds_the_sum_that_jax_adds_to_a_gradient(self):
    def fn(w, x):
      return jax.grad(lambda w: jnp.sum(w * x))(w)

    mapped = modes.map_shards('shard_map', fn)
    x = jax.ShapeDtypeStruct((8, 24), jnp.float32)
    report = shard_transforms.monitoring.wire_report(mapped, VECTOR, x)

    self.assertEqual((report.total_bytes, report.num_collectives), (168, 1))

  @cases.parameters(
      ([[0, 1], [2, 3], [4, 5], [6, 7]], 2),
      ([[0, 1], [2, 3, 4, 5, 6, 7]], 6),
      ([[i] for i in range(8)], 1),
  )
  def test_costs_what_the_ring_of_the_largest_group_sends(self, groups, n):
    def fn(x):
      return lax.psum(x, AXIS, axis_index_groups=groups)

    report = report_on('pmap', fn, VECTOR)

    self.assertEqual(report.total_bytes, all_reduce(96, n))

  @cases.parameters(
      ('bfloat16', 48), ('complex64', 192), ('int8', 24), ('bool', 24)
  )
  def test_counts_the_bytes_of_the_dtype(self, dtype, payload_bytes):
    report = report_on(
        'axis_sizes',
        lambda x: lax.all_gather(x, AXIS),
        jax.ShapeDtypeStruct((24,), dtype),
    )

    (collective,) = report.collectives
    self.assertEqual(collective.dtype, dtype)
    self.assertEqual(collective.payload_bytes, payload_bytes)

  def test_sums_axes_of_an_array_before_it_sends(self):
    def fn(x):
      def reduce(row):
        return lax.psum(row, ('rows', AXIS))

      return jax.vmap(reduce, axis_name='rows')(x.reshape(4, 6))

    report = report_on('axis_sizes', fn, VECTOR)

    self.assertEqual(report.total_bytes, all_reduce(24))

  def test_does_not_count_what_sends_nothing(self):
    def fn(x):
      x = x + lax.axis_index(AXIS) + lax.axis_size(AXIS) + lax.psum(1, AXIS)
      return jax.vmap(lambda x: lax.psum(x, 'own'), axis_name='own')(x)

    # JAX has no axes of `jax.vmap` where types are tracked.
    for way in ('pmap', 'shard_map_unchecked', 'axis_sizes'):
      report = report_on(way, fn, VECTOR)

      self.assertEqual(report, shard_transforms.monitoring.WireReport(()), way)


class ControlFlowTest(parameterized.TestCase):

  def test_counts_each_turn_of_nested_scans(self):
    def inner(carry, _):
      return lax.pmax(carry, AXIS), None

    def outer(carry, _):
      carry = lax.scan(inner, carry, length=5)[0]
      return lax.ppermute(carry, AXIS, RING), None

    report = report_on(
        'axis_sizes', lambda x: lax.scan(outer, x, length=3)[0], VECTOR
    )

    times = {c.primitive: c.times for c in report.collectives}
    self.assertEqual(times, {'pmax': 15, 'ppermute': 3})
    self.assertEqual(report.num_collectives, 18)
    self.assertEqual(report.total_bytes, 15 * all_reduce(96) + 3 * 96)

  def test_counts_each_turn_of_a_loop_of_known_length(self):
    def fn(x):
      return lax.fori_loop(0, 7, lambda _, x: lax.pmax(x, AXIS), x)

    report = report_on('axis_sizes', fn, VECTOR)

    self.assertEqual(report.num_collectives, 7)
    self.assertFalse(report.collectives[0].in_while)

  @cases.parameters(0, 1, 2)
  def test_counts_the_branch_that_sends_most(self, dearest):
    def gather(x):
      return lax.all_gather(x, AXIS)[0]

    branches = [lambda x: x, lambda x: lax.pmax(lax.pmax(x, AXIS), AXIS)]
    branches.insert(dearest, gather)

    report = report_on(
        'axis_sizes',
        lambda i, x: lax.pmin(lax.switch(i, branches, x), AXIS),
        STEP,
        VECTOR,
    )

    found = [(c.primitive, c.conditional) for c in report.collectives]
    self.assertEqual(found, [('all_gather', True), ('pmin', False)])
    self.assertIn(' <=1 ', str(report))

  def test_counts_one_turn_of_a_while_loop(self):
    def fn(x):
      return lax.while_loop(
          lambda x: lax.psum(x[0], AXIS) < 9, lambda x: lax.pmax(x, AXIS), x
      )

    report = report_on('axis_sizes', fn, VECTOR)

    found = {c.primitive: (c.times, c.in_while) for c in report.collectives}
    self.assertEqual(found, {'psum': (1, True), 'pmax': (1, True)})
    self.assertEqual(report.total_bytes, all_reduce(4) + all_reduce(96))
    self.assertIn(' >=1 ', str(report))

  def test_marks_reach_what_is_nested(self):
    def turn(carry, _):
      return (
          lax.cond(
              carry[0] > 0,
              lambda x: lax.while_loop(
                  lambda x: x[0] < 9, lambda x: lax.pmax(x, AXIS), x
              ),
              lambda x: x,
              carry,
          ),
          None,
      )

    report = report_on(
        'axis_sizes', lambda x: lax.scan(turn, x, length=3)[0], VECTOR
    )

    (collective,) = report.collectives
    self.assertEqual(collective.times, 3)
    self.assertTrue(collective.conditional and collective.in_while)

  def test_runs_the_programs_of_other_primitives_once(self):
    def fn(x):
      def matvec(x):
        return 2 * lax.pmax(x, AXIS)

      return lax.custom_linear_solve(matvec, x, lambda _, x: x / 2)

    report = report_on('axis_sizes', fn, VECTOR)

    self.assertEqual(report.num_collectives, 1)


class WireReportTest(parameterized.TestCase):

  def test_names_the_scopes(self):
    @jax.jit
    @jax.named_scope('inner')
    def reduce(carry, x):
      return lax.pmax(carry + x, AXIS), None

    def fn(xs):
      with jax.named_scope('outer'):
        return lax.scan(reduce, 0.0, xs)[0]

    for way in WAYS:
      report = report_on(way, fn, VECTOR)

      self.assertEqual(report.collectives[0].scope, 'outer/inner', way)

  def test_takes_arrays_and_keyword_arguments(self):
    def fn(x, scale, *, shift):
      return {'y': lax.psum(x * scale + shift['by'], AXIS), 'none': None}

    report = shard_transforms.monitoring.wire_report(
        fn, np.ones(24, np.float32), 2.0, shift={'by': 1}, axis_sizes={AXIS: 8}
    )

    self.assertEqual(report.total_bytes, 168)

  def test_takes_keyword_arguments_of_a_mapped_function(self):
    mapped = jax.pmap(lambda x: lax.psum(x, AXIS), AXIS)
    x = jax.ShapeDtypeStruct((8, 24), jnp.float32)

    report = shard_transforms.monitoring.wire_report(
        lambda *, x: mapped(x), x=x
    )

    self.assertEqual(report.total_bytes, 168)

  def test_needs_no_devices_for_given_sizes(self):
    report = shard_transforms.monitoring.wire_report(
        lambda x: lax.psum(x, ('host', 'core')),
        VECTOR,
        axis_sizes={'host': 512, 'core': np.int64(128)},
    )

    self.assertEqual(report.total_bytes, all_reduce(96, 512 * 128))

  @cases.parameters(*modes.PARALLEL_MODES)
  def test_can_be_asked_for_inside_a_mapped_function(self, mode):
    reports = []

    def shard(_, x):
      def reduce(x):
        return lax.psum(x, AXIS)

      reports.append(shard_transforms.monitoring.wire_report(reduce, x))
      return x

    x = jax.ShapeDtypeStruct((8, 24), jnp.float32)
    jax.eval_shape(modes.map_shards(mode, shard), 0.0, x)

    self.assertEqual(reports[0].total_bytes, 168)

  def test_counts_what_a_shard_has_of_an_argument(self):
    mapped = jax.shard_map(
        lambda x: lax.psum(x, AXIS),
        mesh=modes.mesh(),
        in_specs=P(AXIS),
        out_specs=P(),
    )

    report = shard_transforms.monitoring.wire_report(mapped, VECTOR)

    self.assertEqual(report.collectives[0].payload_bytes, 3 * 4)

  def test_runs_nothing(self):
    ran = []

    def fn(x):
      jax.debug.callback(lambda: ran.append(True))
      return lax.psum(x, AXIS)

    report = report_on('shard_map', fn, VECTOR)
    jax.effects_barrier()

    self.assertEqual(report.num_collectives, 1)
    self.assertEmpty(ran)

  def test_reports_are_plain_data(self):
    def fn(x):
      return lax.psum(x, AXIS)

    first, second = (report_on('axis_sizes', fn, VECTOR) for _ in range(2))

    self.assertEqual(first, second)
    self.assertEqual(hash(first), hash(second))

  def test_warns_of_mistakes(self):
    report = report_on(
        'axis_sizes', lambda x: lax.psum(lax.psum(x, AXIS), AXIS), VECTOR
    )

    (warning,) = report.warnings
    self.assertIn(f'warning: {warning}', str(report))

  @cases.parameters('pmap', 'shard_map_unchecked', 'axis_sizes')
  def test_warns_of_what_hangs_where_it_is_known_what_differs(self, way):
    inner = optax.chain(shard_transforms.cross_shard_mean(AXIS), optax.sgd(0.1))
    tx = optax.apply_if_finite(inner, 5)

    report = report_on(way, update_with(tx), VECTOR)

    self.assertEqual(report.num_collectives, 1)
    if way == 'axis_sizes':
      self.assertEmpty(report.warnings)
    else:
      (warning,) = report.warnings
      self.assertStartsWith(warning, '`cond` runs `psum`')
      self.assertIn(f'warning: {warning}', str(report))


def _square_grad(w, x):
  return jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w)


class ShardedArgumentTest(parameterized.TestCase):
  """Tracing does not show what the compiler adds for sharded arguments."""

  def arguments(self, *shape, spec=P(AXIS)):
    kinds = (jax.sharding.AxisType.Auto,) * len(shape)
    self.mesh = jax.make_mesh(shape, (AXIS, 'model')[: len(shape)], kinds)
    sharding = jax.NamedSharding(self.mesh, spec)
    return jnp.ones((16, 16)), jax.device_put(jnp.ones((64, 16)), sharding)

  @cases.parameters('arrays', 'shapes', 'keywords')
  def test_warns_of_what_plain_jit_hides(self, way):
    w, x = self.arguments(8)
    given, named = (w, x), {}
    if way == 'shapes':
      given = w, jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
    if way == 'keywords':
      given, named = (w,), {'x': x}

    report = shard_transforms.monitoring.wire_report(
        jax.jit(_square_grad), *given, **named
    )

    (warning,) = report.warnings
    self.assertRegex(
        warning,
        "Arguments are sharded over 'data', which the function does not map: a"
        ' traced program does not show.*by `compiled=True`',
    )
    self.assertEqual(str(report), f'nothing is sent\nwarning: {warning}')
    compiled = shard_transforms.monitoring.wire_report(
        jax.jit(_square_grad), w, x, compiled=True
    )
    self.assertEqual(compiled.num_collectives, 1)
    self.assertEmpty(compiled.warnings)

  @cases.parameters(False, True)
  def test_names_the_axes_that_are_left_to_the_compiler(self, in_scan):
    w, x = self.arguments(4, 2, spec=P('data', 'model'))
    step = jax.shard_map(
        lambda w, x: lax.pmean(_square_grad(w, x), AXIS),
        mesh=self.mesh,
        in_specs=(P(), P(AXIS)),
        out_specs=P(),
        axis_names={AXIS},
        check_vma=False,
    )

    def repeat(w, x):
      return lax.scan(lambda w, _: (step(w, x), ()), w, length=2)[0]

    report = shard_transforms.monitoring.wire_report(
        repeat if in_scan else step, w, x
    )

    (warning,) = report.warnings
    self.assertStartsWith(warning, "Arguments are sharded over 'model', which")

  def test_says_nothing_of_what_is_mapped_or_whole(self):
    w, x = self.arguments(8)
    step = jax.shard_map(
        lambda w, x: w + jnp.sum(x),
        mesh=self.mesh,
        in_specs=(P(), P(AXIS)),
        out_specs=P(AXIS),
    )
    for fn, args in (
        (step, (w, x)),
        (_square_grad, (w, jnp.ones((64, 16)))),
        (
            _square_grad,
            (w, jax.device_put(x, jax.NamedSharding(self.mesh, P()))),
        ),
    ):
      report = shard_transforms.monitoring.wire_report(fn, *args)

      self.assertEmpty(report.warnings)

    way = shard_transforms.monitoring.wire_report(
        _square_grad, w, x, axis_sizes={AXIS: 8}
    )
    self.assertEmpty(way.warnings)


class ErrorTest(parameterized.TestCase):

  @cases.parameters(None, 3, 'step')
  def test_refuses_what_is_no_function(self, fn):
    with self.assertRaisesRegex(
        TypeError, f'`fn` must be a function, got {fn!r}.'
    ):
      shard_transforms.monitoring.wire_report(fn, VECTOR)

  @cases.parameters({}, {'axis_sizes': {'model': 8}})
  def test_explains_an_axis_that_is_not_bound(self, **given):
    with self.assertRaisesRegex(
        NameError,
        '`fn` of `wire_report` must find all names bound, got: .*unbound axis'
        ".* data.* give its size, as in `axis_sizes={'data': 8}`.",
    ):
      shard_transforms.monitoring.wire_report(
          lambda x: lax.psum(x, AXIS), VECTOR, **given
      )

  @cases.parameters('no', None, 1)
  def test_refuses_to_compile_unless_told_by_a_boolean(self, compiled):
    with self.assertRaisesRegex(
        TypeError, f'`compiled` must be a boolean, got {compiled!r}'
    ):
      shard_transforms.monitoring.wire_report(
          jnp.sin, VECTOR, compiled=compiled
      )

  @cases.parameters('data', 8, [[('data', 8)]], ({0: 8},), ({None: 8},))
  def test_refuses_sizes_that_are_no_mapping(self, axis_sizes):
    with self.assertRaisesRegex(
        TypeError, r"`axis_sizes` must be a mapping such as \{'data': 8\}, got"
    ):
      shard_transforms.monitoring.wire_report(
          jnp.sin, VECTOR, axis_sizes=axis_sizes
      )

  @cases.parameters(8.0, None, '8', True)
  def test_refuses_a_size_that_is_no_integer(self, size):
    with self.assertRaisesRegex(
        TypeError, f'`axis_sizes` must be an integer, got {size!r}'
    ):
      shard_transforms.monitoring.wire_report(
          jnp.sin, VECTOR, axis_sizes={AXIS: size}
      )

  @cases.parameters(0, -8)
  def test_refuses_a_size_that_is_too_small(self, size):
    with self.assertRaisesRegex(
        ValueError, f"`axis_sizes` must be at least 1, got {size} for 'data'"
    ):
      shard_transforms.monitoring.wire_report(
          jnp.sin, VECTOR, axis_sizes={AXIS: size}
      )
