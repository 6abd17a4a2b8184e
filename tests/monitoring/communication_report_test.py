"""Tests of reports on traced programs: transformations and primitives."""

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
import shard_transforms as st
from shard_transforms import cross_shard_mean
from shard_transforms import drop_stale
from shard_transforms import shard_update
from shard_transforms import tower_reduce
from shard_transforms.monitoring import Collective
from shard_transforms.monitoring import CommunicationReport
from shard_transforms.monitoring import communication_report

AXIS = modes.AXIS
# Ways to report on a program of 8 shards.
WAYS = ('pmap', 'shard_map', 'axis_sizes')

# Leaves of 4,160 and 32 bytes, which are packed, and of 200,000, which is not.
GRADS = {
    'w': jax.ShapeDtypeStruct((10, 104), jnp.float32),
    'b': jax.ShapeDtypeStruct((8,), jnp.float32),
    'e': jax.ShapeDtypeStruct((50_000,), jnp.float32),
}
GRADS_BYTES = 204_192
TOWERS = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct((3, *x.shape), x.dtype), GRADS
)
SCALAR = jax.ShapeDtypeStruct((), jnp.float32)
HITS = jax.ShapeDtypeStruct((), jnp.bool_)
STEP = jax.ShapeDtypeStruct((), jnp.int32)
EVEN = [[0, 2, 4, 6], [1, 3, 5, 7]]


def all_reduce(x, n=8):
  """The cost of the all-reduce of `x` bytes, `R(x)` in the formulas."""
  return 2 * (n - 1) / n * x


def scatter(x, n=8):
  """The cost of a reduce-scatter of, or all-gather to `x` bytes, `S(x)`."""
  return (n - 1) / n * x


def report_on(way, fn, *own):
  """Reports on a function of the trees of a shard, on 8 shards."""
  if way == 'axis_sizes':
    return communication_report(fn, *own, axis_sizes={AXIS: 8})
  stacked = jax.tree.map(
      lambda x: jax.ShapeDtypeStruct((8, *x.shape), x.dtype), own
  )
  mapped = modes.map_shards(way, lambda _, own: fn(*own))
  return communication_report(mapped, 0.0, stacked)


def update_with(tx, *names, **static):
  """Returns a function of updates, and values of extra arguments."""

  def fn(grads, *values):
    given = static | dict(zip(names, values, strict=True))
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), grads)
    return tx.update(grads, tx.init(zeros), **given)[0]

  return fn


def split(report):
  """Returns the unconditional and the conditional bytes."""
  sent = {False: 0.0, True: 0.0}
  for collective in report.collectives:
    sent[collective.conditional] += collective.sent_bytes
  return sent[False], sent[True]


def halve(updates, params=None):
  del params
  return jax.tree.map(lambda u: u.astype(jnp.bfloat16), updates)


def weighted_mean(tree, weight):
  return st.shard_mean(tree, AXIS, weight=weight)


def whole_step(x, tokens):
  inner = optax.chain(cross_shard_mean(AXIS), optax.sgd(0.1))
  inner = tower_reduce(4, inner, axis_name=AXIS)
  tx = drop_stale(2, inner, axis_name=AXIS)

  def loss(params, x):
    return jnp.mean((x @ params['w'] + params['b'][None]) ** 2)

  params = {'w': jnp.zeros((3, 5), x.dtype), 'b': jnp.zeros(5, x.dtype)}
  value, grads = st.value_and_grad(loss, AXIS)(params, x)
  updates, _ = tx.update(
      grads, tx.init(params), params, local_step=0, weight=tokens
  )
  return weighted_mean(value, tokens), updates


def of_grads(tx, *names, **static):
  values = [STEP if name == 'local_step' else SCALAR for name in names]
  return update_with(tx, *names, **static), (GRADS, *values)


MEAN = cross_shard_mean(AXIS)
GROUPS = cross_shard_mean(AXIS, groups=EVEN)
R, S = all_reduce, scatter
# A function, its arguments on a shard, its unconditional and conditional bytes,
# and the number of its collectives.
LIBRARY = {
    'mean': (*of_grads(MEAN), (R(GRADS_BYTES), 0), 2),
    'mean, weight': (*of_grads(MEAN, 'weight'), (R(GRADS_BYTES + 4), 0), 3),
    'groups': (*of_grads(GROUPS), (2 * S(GRADS_BYTES, 4), 0), 4),
    # The weight is padded to one element per shard of the group.
    'groups, weight': (
        *of_grads(GROUPS, 'weight'),
        *((2 * S(GRADS_BYTES + 16, 4), 0), 6),
    ),
    'groups, padded': (
        *(update_with(GROUPS), (jax.ShapeDtypeStruct((7,), jnp.float32),)),
        *((2 * S(32, 4), 0), 2),
    ),
    'shard_update': (
        *of_grads(shard_update(optax.adam(0.1), AXIS)),
        *((2 * S(GRADS_BYTES), 0), 4),
    ),
    # The results of `inner` have half of the bytes.
    'shard_update, halved': (
        update_with(shard_update(optax.stateless(halve), AXIS), 'weight'),
        (jax.ShapeDtypeStruct((50_000,), jnp.float32), SCALAR),
        *((S(200_000) + S(100_000) + R(4), 0), 3),
    ),
    'shard_mean, weight': (
        *(weighted_mean, ([SCALAR, HITS], SCALAR)),
        *((R(12), 0), 2),
    ),
    'tower_reduce': (
        *of_grads(
            tower_reduce(4, optax.chain(MEAN, optax.adam(1)), axis_name=AXIS)
        ),
        *((0, R(GRADS_BYTES)), 2),
    ),
    # One more element indicates whether there is any weight.
    'tower_reduce, weight': (
        *of_grads(tower_reduce(4, MEAN, axis_name=AXIS), 'weight'),
        *((0, R(GRADS_BYTES + 4 + 4)), 4),
    ),
    'tower_reduce of one': (
        *of_grads(tower_reduce(1, MEAN, axis_name=AXIS)),
        *((R(GRADS_BYTES), 0), 2),
    ),
    # The weight and the staleness first, then weighted updates; no branch.
    'drop_stale': (
        *of_grads(drop_stale(2, MEAN, axis_name=AXIS), 'local_step'),
        *((R(8) + R(GRADS_BYTES + 4), 0), 4),
    ),
    'reduce_stacked_towers of mean': (
        *(update_with(st.reduce_stacked_towers(3, MEAN)), (TOWERS,)),
        *((R(GRADS_BYTES), 0), 2),
    ),
    # In each call the decision, the loss and its weight; once per window
    # gradients.
    'a whole step': (
        *(whole_step, (jax.ShapeDtypeStruct((2, 3), jnp.float32), SCALAR)),
        *((R(8 + 4 + 4), R(80 + 4 + 4)), 6),
    ),
}


class LibraryTest(parameterized.TestCase):
  """The wire cost of each transformation, as formulas."""

  @cases.parameters(*LIBRARY)
  def test_sends_the_bytes_of_the_formula(self, name):
    fn, own, sent, num_collectives = LIBRARY[name]

    report = report_on('shard_map', fn, *own)

    self.assertEqual(split(report), sent)
    self.assertEqual(report.num_collectives, num_collectives)
    self.assertEmpty(report.warnings)

  def test_vmap_does_not_communicate(self):
    fn, own, *_ = LIBRARY['drop_stale']

    self.assertEqual(report_on('vmap', fn, *own), CommunicationReport(()))

  def test_reports_the_scope_and_the_axes(self):
    report = report_on('shard_map', update_with(MEAN), GRADS)

    for collective in report.collectives:
      self.assertEqual(collective.scope, 'cross_shard_mean')
      self.assertEqual(collective.axes, (AXIS,))

  def test_cross_shard_between_processes_sends_one_buffer(self):
    with mock.patch.object(jax.distributed, 'is_initialized', lambda: True):
      report = report_on('shard_map', update_with(MEAN), GRADS)

    self.assertEqual(report.total_bytes, all_reduce(GRADS_BYTES))
    self.assertEqual(report.num_collectives, 1)

  @cases.parameters((('host', 'core'), 8), ('core', 4), (('host',), 2))
  def test_cross_shard_over_several_axes(self, axis_name, num_shards):
    report = communication_report(
        update_with(cross_shard_mean(axis_name)),
        GRADS,
        axis_sizes={'host': 2, 'core': 4},
    )

    self.assertEqual(report.total_bytes, all_reduce(GRADS_BYTES, num_shards))
    for collective in report.collectives:
      self.assertEqual(collective.num_shards, num_shards)

  def test_cross_shard_of_reduced_updates(self):
    tx = cross_shard_mean(AXIS, if_reduced='mean')
    mapped = modes.map_shards('shard_map', lambda g, _: update_with(tx)(g))

    report = communication_report(mapped, GRADS, np.zeros(8, np.float32))

    self.assertEqual(report, CommunicationReport(()))


# A vector of 24 floats on each of 8 shards.
VECTOR = jax.ShapeDtypeStruct((24,), jnp.float32)
RING = [(i, (i + 1) % 8) for i in range(8)]


def _sum_later(x):
  w = lax.pcast(jnp.ones(24, x.dtype), AXIS, to='reduced')
  return lax.psum(jax.grad(lambda w: jnp.sum(w * x))(w), AXIS)


def _scatter_later(x):
  w = lax.pcast(jnp.ones(24, x.dtype), AXIS, to='reduced')
  grad = jax.grad(lambda w: jnp.sum(w * x))(w)
  return lax.psum_scatter(grad, AXIS, tiled=True)


class PrimitiveTest(parameterized.TestCase):
  """The costs of JAX's collectives, computed by hand."""

  @cases.parameters(
      (lambda x: lax.psum(x, AXIS), 'psum', 168),
      (lambda x: lax.pmean(x, AXIS), 'psum', 168),
      (lambda x: lax.pmax(x, AXIS), 'pmax', 168),
      (lambda x: lax.pmin(x, (AXIS,)), 'pmin', 168),
      (lambda x: lax.psum_scatter(x, AXIS, tiled=True), 'reduce_scatter', 84),
      (lambda x: lax.all_gather(x, AXIS), 'all_gather', 672),
      (lambda x: lax.all_to_all(x, AXIS, 0, 0, tiled=True), 'all_to_all', 84),
      (lambda x: lax.ppermute(x, AXIS, RING), 'ppermute', 96),
  )
  def test_costs_are_those_of_a_ring(self, fn, primitive, sent_bytes):
    expected = Collective(primitive, 'float32', 96, (AXIS,), 8)

    for way in WAYS:
      report = report_on(way, fn, VECTOR)

      self.assertEqual(report.collectives, (expected,))
      self.assertEqual(report.total_bytes, sent_bytes)

  @cases.parameters(
      (lambda x: lax.all_gather(x, AXIS, to='invarying'), 'all_gather', 672),
      (lambda x: lax.all_gather(x, AXIS, to='reduced'), 'all_gather', 672),
      (_sum_later, 'psum', 168),
      (_scatter_later, 'reduce_scatter', 84),
  )
  def test_costs_do_not_depend_on_tracked_types(
      self, fn, primitive, sent_bytes
  ):
    report = report_on(
        'shard_map', lambda x: jax.typeof(fn(x)) and jnp.sum(x), VECTOR
    )

    (collective,) = report.collectives
    self.assertEqual(collective.primitive, primitive)
    self.assertEqual(collective.sent_bytes, sent_bytes)

  def test_reports_the_sum_that_jax_adds_to_a_gradient(self):
    def fn(w, x):
      return jax.grad(lambda w: jnp.sum(w * x))(w)

    mapped = modes.map_shards('shard_map', fn)
    x = jax.ShapeDtypeStruct((8, 24), jnp.float32)
    report = communication_report(mapped, VECTOR, x)

    self.assertEqual((report.total_bytes, report.num_collectives), (168, 1))

  @cases.parameters(
      ([[0, 1], [2, 3], [4, 5], [6, 7]], 2),
      ([[0, 1], [2, 3, 4, 5, 6, 7]], 6),
      ([[i] for i in range(8)], 1),
  )
  def test_costs_are_those_of_the_largest_group(self, groups, n):
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

  def test_sums_over_array_axes_before_communicating(self):
    def fn(x):
      def reduce(row):
        return lax.psum(row, ('rows', AXIS))

      return jax.vmap(reduce, axis_name='rows')(x.reshape(4, 6))

    report = report_on('axis_sizes', fn, VECTOR)

    self.assertEqual(report.total_bytes, all_reduce(24))

  def test_ignores_operations_without_communication(self):
    def fn(x):
      x = x + lax.axis_index(AXIS) + lax.axis_size(AXIS) + lax.psum(1, AXIS)
      return jax.vmap(lambda x: lax.psum(x, 'own'), axis_name='own')(x)

    # Where types are tracked, JAX does not have axes of `jax.vmap`.
    for way in ('pmap', 'shard_map_unchecked', 'axis_sizes'):
      report = report_on(way, fn, VECTOR)

      self.assertEqual(report, CommunicationReport(()), way)


def pmax(x):
  return lax.pmax(x, AXIS)


def nested_scans(x):
  def outer(carry, _):
    carry = lax.scan(lambda c, _: (pmax(c), None), carry, length=5)[0]
    return lax.ppermute(carry, AXIS, RING), None

  return lax.scan(outer, x, length=3)[0]


def branches(dearest):
  arms = [lambda x: x, lambda x: pmax(pmax(x))]
  arms.insert(dearest, lambda x: lax.all_gather(x, AXIS)[0])
  return lambda x: lax.pmin(lax.switch(x[0].astype(int), arms, x), AXIS)


def a_while_in_a_branch_in_a_scan(x):
  def turn(carry, _):
    loop = functools.partial(lax.while_loop, lambda x: x[0] < 9, pmax)
    return lax.cond(carry[0] > 0, loop, lambda x: x, carry), None

  return lax.scan(turn, x, length=3)[0]


DEAREST = [('all_gather', 1, True, False), ('pmin', 1, False, False)]
# The collectives: their number, whether conditional, and in a `while` loop.
FLOWS = (
    (nested_scans, [('pmax', 15, False, False), ('ppermute', 3, False, False)]),
    (
        lambda x: lax.fori_loop(0, 7, lambda _, x: pmax(x), x),
        [('pmax', 7, False, False)],
    ),
    (branches(0), DEAREST),
    (branches(2), DEAREST),
    (
        lambda x: lax.while_loop(lambda x: lax.psum(x[0], AXIS) < 9, pmax, x),
        [('psum', 1, False, True), ('pmax', 1, False, True)],
    ),
    (a_while_in_a_branch_in_a_scan, [('pmax', 3, True, True)]),
    # The jaxprs of other primitives run once.
    (
        lambda x: lax.custom_linear_solve(
            lambda x: 2 * pmax(x), x, lambda _, x: x / 2
        ),
        [('pmax', 1, False, False)],
    ),
    # A loop of at most one iteration, in any scope, is a branch.
    (
        lambda x: lax.while_loop(
            lambda c: c[0], lambda c: (c[0] & False, pmax(c[1])), (x[0] > 0, x)
        )[1],
        [('pmax', 1, False, True)],
    ),
    (
        lambda x: lax.while_loop(
            lambda c: c[0], lambda c: (False, pmax(c[1])), (x[0] > 0, x)
        )[1],
        [('pmax', 1, True, False)],
    ),
)


class ControlFlowTest(parameterized.TestCase):

  @cases.parameters(*FLOWS)
  def test_counts_iterations_and_branches(self, fn, expected):
    report = report_on('axis_sizes', fn, VECTOR)

    found = [
        (c.primitive, c.times, c.conditional, c.in_while)
        for c in report.collectives
    ]
    self.assertCountEqual(found, expected)


class TracedReportTest(parameterized.TestCase):

  def test_reports_the_scopes(self):
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

  def test_supports_arrays_and_keyword_arguments(self):
    def fn(x, scale, *, shift):
      return {'y': lax.psum(x * scale + shift['by'], AXIS), 'none': None}

    report = communication_report(
        fn, np.ones(24, np.float32), 2.0, shift={'by': 1}, axis_sizes={AXIS: 8}
    )

    self.assertEqual(report.total_bytes, 168)

  @cases.parameters('pmap', 'shard_map', 'shard_map_unchecked')
  def test_works_inside_a_mapped_function(self, mode):
    reports = []

    def shard(_, x):
      def reduce(x):
        return lax.psum(x, AXIS)

      reports.append(communication_report(reduce, x))
      return x

    x = jax.ShapeDtypeStruct((8, 24), jnp.float32)
    jax.eval_shape(modes.map_shards(mode, shard), 0.0, x)

    self.assertEqual(reports[0].total_bytes, 168)

  def test_counts_the_local_part_of_an_argument(self):
    mapped = jax.shard_map(
        lambda x: lax.psum(x, AXIS),
        mesh=modes.mesh(),
        in_specs=P(AXIS),
        out_specs=P(),
    )

    report = communication_report(mapped, VECTOR)

    self.assertEqual(report.collectives[0].payload_bytes, 3 * 4)

  def test_does_not_run_the_function(self):
    ran = []

    def fn(x):
      jax.debug.callback(lambda: ran.append(True))
      return lax.psum(x, AXIS)

    report = report_on('shard_map', fn, VECTOR)
    jax.effects_barrier()

    self.assertEqual(report.num_collectives, 1)
    self.assertEmpty(ran)

  def test_prints_warnings(self):
    report = report_on(
        'axis_sizes', lambda x: lax.psum(lax.psum(x, AXIS), AXIS), VECTOR
    )

    (warning,) = report.warnings
    self.assertIn(f'warning: {warning}', str(report))

  @cases.parameters('pmap', 'shard_map_unchecked', 'axis_sizes')
  def test_warns_about_deadlocks_if_arguments_may_differ(self, way):
    inner = optax.chain(st.cross_shard_mean(AXIS), optax.sgd(0.1))
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
  """Tracing does not show collectives that the compiler adds."""

  def arguments(self, *shape, spec=P(AXIS)):
    kinds = (jax.sharding.AxisType.Auto,) * len(shape)
    self.mesh = jax.make_mesh(shape, (AXIS, 'model')[: len(shape)], kinds)
    sharding = jax.NamedSharding(self.mesh, spec)
    return jnp.ones((16, 16)), jax.device_put(jnp.ones((64, 16)), sharding)

  @cases.parameters('arrays', 'shapes', 'keywords')
  def test_warns_about_sharded_arguments_under_plain_jit(self, way):
    w, x = self.arguments(8)
    given, named = (w, x), {}
    if way == 'shapes':
      given = w, jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
    if way == 'keywords':
      given, named = (w,), {'x': x}

    report = communication_report(jax.jit(_square_grad), *given, **named)

    (warning,) = report.warnings
    self.assertRegex(
        warning,
        "Arguments are sharded over 'data', which the function does not map: a"
        ' traced program does not show.*with `compiled=True`',
    )
    self.assertEqual(str(report), f'nothing is sent\nwarning: {warning}')
    compiled = communication_report(jax.jit(_square_grad), w, x, compiled=True)
    self.assertEqual(compiled.num_collectives, 1)
    self.assertEmpty(compiled.warnings)

  @cases.parameters(False, True)
  def test_reports_auto_axes(self, in_scan):
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

    report = communication_report(repeat if in_scan else step, w, x)

    (warning,) = report.warnings
    self.assertStartsWith(warning, "Arguments are sharded over 'model', which")

  def test_does_not_warn_about_mapped_or_replicated_arguments(self):
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
      report = communication_report(fn, *args)

      self.assertEmpty(report.warnings)

    way = communication_report(_square_grad, w, x, axis_sizes={AXIS: 8})
    self.assertEmpty(way.warnings)


SIZE = '`axis_sizes` must be'
ERRORS = (
    (dict(fn=None), TypeError, '`fn` must be callable, got None.'),
    (
        *(dict(), NameError),
        '`fn` of `communication_report` uses an unbound name: .*unbound axis'
        ".* data.* pass its size, as in `axis_sizes={'data': 8}`.",
    ),
    (dict(axis_sizes={'model': 8}), NameError, 'pass its size, as in `axis_si'),
    (dict(compiled='no'), TypeError, "`compiled` must be a boolean, got 'no'"),
    (dict(axis_sizes='data'), TypeError, rf"{SIZE} a mapping such as \{{'data"),
    (dict(axis_sizes={AXIS: 8.0}), TypeError, f'{SIZE} an integer, got 8.0'),
    (
        *(dict(axis_sizes={AXIS: 0}), ValueError),
        f"{SIZE} at least 1, got 0 for 'data'",
    ),
)


class ErrorTest(parameterized.TestCase):

  @cases.parameters(*ERRORS)
  def test_refuses_call(self, given, error, words):
    given = {'fn': lambda x: lax.psum(x, AXIS)} | given

    with self.assertRaisesRegex(error, words):
      communication_report(given.pop('fn'), VECTOR, **given)
