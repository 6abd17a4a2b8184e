"""Tests of the warning about deadlocks."""

import functools

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
from shard_transforms import guard
from shard_transforms import tower_reduce
from shard_transforms.monitoring import track_divergence

AXIS = modes.AXIS
# Modes in which types do not prevent most deadlocks.
UNCHECKED = 'shard_map_unchecked'
HALVES = [[0, 1, 2, 3], [4, 5, 6, 7]]
# Pairs of shards from the two halves.
PAIRS = [[i, i + 4] for i in range(4)]
QUARTERS = [[0, 1], [2, 3], [4, 5], [6, 7]]
RING = [(i, (i + 1) % 8) for i in range(8)]
# Eight shards with five examples of three features each.
EXAMPLES = jax.ShapeDtypeStruct((8, 5, 3), jnp.float32)
PARAMS = jax.ShapeDtypeStruct((3,), jnp.float32)

psum = functools.partial(lax.psum, axis_name=AXIS)
pmean = functools.partial(lax.pmean, axis_name=AXIS)
gather = functools.partial(lax.all_gather, axis_name=AXIS)
index = functools.partial(lax.axis_index, AXIS)
sgd = optax.sgd(0.1)
update_in_slices = st.shard_update(optax.adam(0.1), AXIS)


def mean_of(inner, **kwargs):
  return optax.chain(cross_shard_mean(AXIS, **kwargs), inner)


def warnings(fn, *shared, mode=UNCHECKED):
  """Returns the warnings for `fn(*shared, x)` of a shard with examples `x`."""
  mapped = modes.map_shards(mode, lambda shared, x: fn(*shared, x))
  return st.monitoring.communication_report(mapped, shared, EXAMPLES).warnings


def step(tx, **extra_args):

  def fn(params, state, x):
    def loss(params, x):
      return jnp.mean((x @ params - 1) ** 2)

    grads = st.value_and_grad(loss, AXIS)(params, x)[1]
    updates, state = tx.update(grads, state, params, **extra_args)
    return optax.apply_updates(params, updates), state

  return fn


def report_on_step(mode, tx, **extra_args):
  """Reports on a step with documented placement of parameters and state."""
  fn = step(tx, **extra_args)
  if mode.startswith('pmap'):
    copies = jax.ShapeDtypeStruct((8, *PARAMS.shape), PARAMS.dtype)
    state = jax.eval_shape(jax.pmap(tx.init, AXIS), copies)
    mapped, params, x = jax.pmap(fn, AXIS), copies, EXAMPLES
    if mode == 'pmap':
      mapped, params = jax.pmap(fn, AXIS, in_axes=(None, 0, 0)), PARAMS
  else:
    mesh = modes.mesh()
    specs = st.state_specs(tx, PARAMS, mesh)
    params, state = PARAMS, st.init_state(tx, PARAMS, mesh)
    x = jax.ShapeDtypeStruct((40, 3), jnp.float32)
    mapped = jax.shard_map(
        fn,
        mesh=mesh,
        in_specs=(P(), specs, P(AXIS)),
        out_specs=(P(), specs),
        check_vma=mode == 'shard_map',
    )
  return st.monitoring.communication_report(mapped, params, state, x)


def if_positive(send, other=lambda x: x):
  """Returns a function that communicates if the local sum is positive."""
  return lambda x: lax.cond(jnp.sum(x) > 0, send, other, x)


def decided(by, send):
  """Returns a function that communicates if `by` is true."""
  return lambda x: lax.cond(by(x), send, lambda x: x, x)


def first(x):
  return gather(x)[0]


def positive_in_halves(x):
  return jnp.sum(gather(x, axis_index_groups=HALVES)) > 0


def permute(x):
  return lax.ppermute(x, AXIS, RING)


def received_part(x):
  parts = st.per_shard(jnp.stack([x] * 8), AXIS)
  return lax.all_to_all(parts, AXIS, 0, 0)[0]


def send_in_loop(x):
  return lax.scan(lambda c, _: (permute(c), None), x, length=3)[0]


def until_small(x, send):
  """Halves `x` until it is small on this shard."""
  return lax.while_loop(lambda x: jnp.sum(x) > 1, lambda x: send(x) / 2, x)


def second_iteration(x):
  """Decides in the second iteration by a per-shard value of the first."""

  def body(carry, x):
    previous_x, _ = carry
    return (x, if_positive(permute)(previous_x)), None

  ones = st.per_shard(jnp.ones(3, jnp.float32), AXIS)
  return lax.scan(body, (ones, ones), x)[0]


# Deadlocks that tracked types do not prevent.
HANGS = {
    'cond': if_positive(first),
    'all_send_but_one': lambda x: lax.switch(
        jnp.argmax(x[0]), [permute, lambda x: x, first], x
    ),
    'scatter': if_positive(
        lambda x: lax.psum_scatter(jnp.tile(x, (8, 1)), AXIS, tiled=True)
    ),
    'all_to_all': if_positive(received_part),
    'part_of_an_equal_array': lambda x: if_positive(first)(
        received_part(psum(x))
    ),
    'in_scan': lambda x: lax.map(if_positive(permute), x),
    'of_scan': if_positive(send_in_loop),
    'second_iteration': second_iteration,
    'scanned_result': lambda x: if_positive(permute)(
        lax.scan(lambda c, y: (c, y), x, x)[1]
    ),
    'nested': if_positive(lambda x: lax.cond(True, first, lambda x: x, x)),
    'while': lambda x: until_small(x, permute),
    'condition_of_while': lambda x: lax.while_loop(
        lambda x: jnp.sum(x + first(x)) > 1, lambda x: x / 2, x
    ),
    'iterations_of_while': lambda x: lax.cond(
        lax.while_loop(lambda n: n < x[0, 0], lambda n: n + 1, 0.0) > 3,
        first,
        lambda x: x,
        x,
    ),
    'bound_of_loop': lambda x: lax.fori_loop(
        0, jnp.argmax(x[0]), lambda _, x: permute(x), x
    ),
    'nested_choices': lambda x: lax.cond(
        lax.cond(x[0, 0] > 0, lambda: 1.0, lambda: 2.0) > 1,
        first,
        lambda x: x,
        x,
    ),
    'index': decided(lambda x: index() < 4, first),
    'moved': decided(lambda x: jnp.sum(permute(x)) > 0, first),
    'added_to_an_equal_array': decided(
        lambda x: jnp.sum(psum(x) + x) > 0, first
    ),
    'groups': if_positive(lambda x: gather(x, axis_index_groups=HALVES)[0]),
    'decided_in_groups': decided(positive_in_halves, first),
    'decided_in_other_groups': decided(
        positive_in_halves, lambda x: gather(x, axis_index_groups=PAIRS)[0]
    ),
    'in_a_solver': lambda x: lax.custom_linear_solve(
        lambda y: 2 * y,
        x,
        lambda _, y: lax.cond(index() < 4, permute, lambda y: y, y),
    ),
}

# Equal decisions, and branches in which no shard waits.
FINE = {
    'reduced': lambda x: lax.cond(psum(jnp.sum(x)) > 0, psum, pmean, x),
    'smallest': decided(
        lambda x: lax.pmin(jnp.isfinite(x).all().astype(int), AXIS) > 0, first
    ),
    'gathered': decided(lambda x: jnp.sum(gather(x)) > 0, first),
    'broadcast': decided(
        lambda x: jnp.sum(lax.pbroadcast(x, (AXIS,), np.int32(0))) > 0, first
    ),
    'sends_nothing': if_positive(jnp.sin),
    'loop_sends_nothing': lambda x: until_small(x, jnp.sin) + psum(x),
    # The collectives match, with mixed operands.
    'each_branch_sends': if_positive(first, permute),
    'condition_reduces': lambda x: lax.while_loop(
        lambda x: psum(jnp.sum(x)) > 1, permute, x
    ),
    'beside_a_local_array': lambda x: lax.cond(
        lax.optimization_barrier((jnp.sum(psum(x)), x))[0] > 0,
        first,
        lambda x: x,
        x,
    ),
    'no_local_numbers': decided(
        lambda x: jnp.sum(jnp.zeros_like(x)) > 0, first
    ),
    # Each half decides separately.
    'group': decided(
        lambda x: index() < 4, lambda x: gather(x, axis_index_groups=HALVES)[0]
    ),
    'groups_of_one': if_positive(
        lambda x: gather(x, axis_index_groups=[[i] for i in range(8)])[0]
    ),
    'reduced_in_groups': decided(
        positive_in_halves, lambda x: gather(x, axis_index_groups=HALVES)[0]
    ),
    'reduced_in_larger_groups': decided(
        positive_in_halves, lambda x: gather(x, axis_index_groups=QUARTERS)[0]
    ),
    'reduced_in_groups_in_a_solver': lambda x: if_positive(permute)(
        lax.custom_linear_solve(
            lambda y: 2 * y,
            x,
            lambda _, y: psum(y, axis_index_groups=HALVES) / 8,
        )
    ),
    'reduced_in_a_solver': lambda x: if_positive(permute)(
        lax.custom_linear_solve(lambda y: 2 * y, x, lambda _, y: pmean(y) / 2)
    ),
}


class ProgramTest(parameterized.TestCase):

  @cases.parameters(*HANGS)
  def test_warns(self, name):
    texts = warnings(HANGS[name], mode='shard_map')

    self.assertNotEmpty(texts)
    for warning in texts:
      self.assertIn("over 'data' under a predicate", warning)
      self.assertIn('deadlocks', warning)

  @cases.parameters(*FINE)
  def test_does_not_warn_about_correct_programs(self, name):
    self.assertEmpty(warnings(FINE[name]))

  def test_reports_the_scope_and_a_cure(self):
    def fn(x):
      with jax.named_scope('outer'):
        x = jax.named_scope('inner')(if_positive(psum))(x)
        return until_small(x, psum)

    cond, loop = warnings(fn, mode='pmap')

    self.assertEqual(
        cond,
        "`cond` in 'outer/inner' runs `psum` over 'data' under a predicate"
        ' that differs between shards, which deadlocks: reduce the decision'
        ' first, as `guard` does, or decide after the reduction.',
    )
    self.assertStartsWith(loop, "`while` in 'outer' runs `psum` over 'data'")

  def test_replicated_arguments_do_not_differ(self):
    def fn(shared, x):
      return lax.cond(shared[0] > 0, psum, lambda x: x, x)

    for mode in 'pmap', UNCHECKED:
      self.assertEmpty(warnings(fn, PARAMS, mode=mode))

  def test_a_scalar_per_shard_may_be_a_copy(self):
    def fn(_, counter_and_x):
      counter, x = counter_and_x
      return lax.cond(counter > 0, psum, lambda x: x, x)

    for mode in 'pmap', UNCHECKED:
      counters = jax.ShapeDtypeStruct((8,), jnp.int32)
      mapped = modes.map_shards(mode, fn)

      report = st.monitoring.communication_report(
          mapped, 0.0, (counters, EXAMPLES)
      )

      self.assertNotEmpty(report.collectives)
      self.assertEmpty(report.warnings)

  def test_one_shard_does_not_deadlock(self):
    mapped = modes.map_shards('pmap', lambda _, x: if_positive(psum)(x), 1)
    x = jax.ShapeDtypeStruct((1, 5), jnp.float32)

    self.assertEmpty(
        st.monitoring.communication_report(mapped, 0.0, x).warnings
    )


def _on_mesh(fn, *specs, out_specs=P()):
  """Returns a function of arrays of shape [4, 8], on 2 hosts of 4 cores."""
  auto = (jax.sharding.AxisType.Auto,) * 2
  mesh = jax.sharding.AbstractMesh((2, 4), ('host', 'core'), axis_types=auto)
  return jax.shard_map(
      fn, mesh=mesh, in_specs=specs, out_specs=out_specs, check_vma=False
  )


class AxesTest(parameterized.TestCase):

  def warnings(self, fn):
    x = jax.ShapeDtypeStruct((4, 8), jnp.float32)
    return st.monitoring.communication_report(fn, x).warnings

  @cases.parameters(
      (P('host'), 'core', None),
      (P('host'), 'host', "'host'"),
      (P('host'), ('host', 'core'), "'host'"),
      (P(None, ('host', 'core')), ('host', 'core'), "'host', 'core'"),
      (P('core', 'host'), 'core', "'core'"),
      (P(), ('host', 'core'), None),
  )
  def test_reports_the_axes_of_the_decision(self, spec, axes, named):
    fn = if_positive(lambda x: lax.psum(x, axes))

    texts = self.warnings(_on_mesh(fn, spec, out_specs=spec))

    if named is None:
      self.assertEmpty(texts)
    else:
      (warning,) = texts
      self.assertIn(f'runs `psum` over {named} under', warning)

  def test_a_sum_over_one_axis_does_not_affect_the_other(self):
    def fn(x):
      decision = jnp.sum(lax.psum(x, 'core')) > 0
      return lax.cond(
          decision, lambda x: lax.psum(x, ('host', 'core')), lambda x: x, x
      )

    (warning,) = self.warnings(_on_mesh(fn, P('host', 'core')))

    self.assertIn("over 'host' under", warning)

  def test_functions_of_all_slices_do_not_differ(self):
    choose = _on_mesh(
        lambda flag, x: lax.cond(
            flag[0, 0] > 0, lambda x: lax.psum(x, 'host'), lambda x: x, x
        ),
        *(P(), P('host')),
    )
    double = _on_mesh(lambda x: 2 * x, P('host'), out_specs=P('host'))

    self.assertEmpty(self.warnings(lambda x: choose(x, x)))
    self.assertEmpty(self.warnings(lambda x: choose(double(x), x)))
    self.assertEmpty(self.warnings(lambda x: choose(-double(x), x)))
    self.assertEmpty(
        self.warnings(
            lambda x: lax.cond(
                jnp.sum(double(x)) > 0, lambda: choose(x, x), lambda: x[:2]
            )
        )
    )

  def test_slices_of_replicated_arrays_differ(self):
    mean = _on_mesh(lambda x: lax.pmean(x, 'host'), P('host'))
    choose = _on_mesh(if_positive(lambda x: lax.psum(x, 'host')), P('host'))

    self.assertLen(self.warnings(lambda x: choose(mean(x))), 1)


AROUND = {
    'apply_if_finite': lambda tx: optax.apply_if_finite(tx, 5),
    'skip_not_finite': lambda tx: optax.MultiSteps(
        tx, 2, should_skip_update_fn=optax.skip_not_finite
    ).gradient_transformation(),
}

# Reductions with their required extra arguments.
REDUCTIONS = {
    'cross_shard_mean': (mean_of(sgd), {}),
    'groups': (mean_of(sgd, groups=HALVES), {}),
    'shard_update': (update_in_slices, {}),
    'tower_reduce': (tower_reduce(2, mean_of(sgd), axis_name=AXIS), {}),
    'drop_stale': (
        drop_stale(2, mean_of(sgd), axis_name=AXIS),
        {'local_step': 0},
    ),
    'guard': (guard(mean_of(sgd), AXIS), {}),
}


EQUAL_DECISIONS = (
    (mean_of(optax.apply_if_finite(sgd, 5)), {}),
    (mean_of(optax.MultiSteps(sgd, 3).gradient_transformation()), {}),
    (tower_reduce(3, mean_of(sgd), axis_name=AXIS), {}),
    (drop_stale(1, mean_of(sgd), axis_name=AXIS), {'local_step': 0}),
    (guard(mean_of(sgd), AXIS, on_bad='exclude'), {'weight': 2.0}),
    (mean_of(guard(sgd)), {}),
    (mean_of(track_divergence(AXIS, every=3)), {}),
    # Tracked types prevent these.
    (optax.MultiSteps(mean_of(sgd), 3).gradient_transformation(), {}),
    (
        optax.transforms.conditionally_mask(
            mean_of(sgd), lambda step: step < 3
        ),
        {},
    ),
)


class TransformationTest(parameterized.TestCase):

  @cases.parameters(
      *(('apply_if_finite', name) for name in REDUCTIONS),
      ('skip_not_finite', 'cross_shard_mean'),
  )
  def test_warns_about_decisions_around_a_reduction(self, wrap, name):
    tx, extra_args = REDUCTIONS[name]
    tx = AROUND[wrap](tx)

    # Under `jax.pmap`, parameters may be replicated or copies.
    for mode in UNCHECKED, 'pmap', 'pmap_of_copies':
      texts = report_on_step(mode, tx, **extra_args).warnings

      self.assertNotEmpty(texts)
      for warning in texts:
        self.assertRegex(warning, "^`cond` .*runs `.*` over 'data' under a")

  def line_search_warnings(self, mode):
    tx = optax.lbfgs()

    def fn(params, x):
      def loss(params):
        return pmean(jnp.mean((x @ params - 1) ** 2))

      value, grad = jax.value_and_grad(loss)(params)
      grad = pmean(grad) if mode == UNCHECKED else grad
      extra_args = {'value': value, 'grad': grad, 'value_fn': loss}
      return tx.update(grad, tx.init(params), params, **extra_args)[0]

    return warnings(fn, PARAMS, mode=mode)

  def test_warns_about_a_line_search_with_local_gradients(self):
    # The search uses gradients of `value_fn`, which JAX sums only if it tracks
    # them.
    (warning,) = self.line_search_warnings(UNCHECKED)

    self.assertStartsWith(warning, '`while` ')
    self.assertEmpty(self.line_search_warnings('shard_map'))

  @cases.parameters(*EQUAL_DECISIONS)
  def test_equal_decisions_are_correct(self, tx, extra_args):
    for mode in UNCHECKED, 'pmap_of_copies':
      report = report_on_step(mode, tx, **extra_args)

      self.assertNotEmpty(report.collectives)
      self.assertEmpty(report.warnings)

  def test_gradient_through_a_mapped_branch_is_correct(self):
    def loss(params, x):
      local_loss = jnp.mean((x @ params) ** 2)
      return lax.cond(pmean(local_loss) > 1, pmean, lambda x: x, local_loss)

    mapped = modes.map_shards('shard_map_unchecked', loss)

    def fn(params, x):
      return jax.grad(lambda params: jnp.sum(mapped(params, x)))(params)

    report = st.monitoring.communication_report(fn, PARAMS, EXAMPLES)

    self.assertNotEmpty(report.collectives)
    self.assertEmpty(report.warnings)
