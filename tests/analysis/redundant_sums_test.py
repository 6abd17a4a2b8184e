"""Tests of the warning about redundant sums."""

import functools

from absl.testing import parameterized
import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import optax

import cases
import modes
import shard_transforms as st

VECTOR = jax.ShapeDtypeStruct((5,), jnp.float32)
BATCHES = jax.ShapeDtypeStruct((4, 5), jnp.float32)

psum = functools.partial(lax.psum, axis_name='data')
pmean = functools.partial(lax.pmean, axis_name='data')


def _warnings(fn, *args):
  return st.monitoring.communication_report(
      fn, *args, axis_sizes={'data': 8}
  ).warnings


def _in_cond(x):
  return lax.cond(True, pmean, lambda x: x, x)


def _in_scan(x):
  return lax.scan(lambda c, _: (c, pmean(x)), 0.0, length=3)[1]


def _over_rows(x):
  return lax.map(pmean, jnp.stack([x, x]))


def _twice_under_jit(x):
  return jax.jit(pmean)(jax.jit(pmean)(x))


class ReducedTwiceTest(parameterized.TestCase):

  @cases.parameters(
      lambda x: pmean(pmean(x)),
      lambda x: psum(psum(x)),
      lambda x: pmean((-2 * psum(x) / 3).astype(jnp.bfloat16)),
      lambda x: pmean(jnp.reshape(psum(x), (5, 1))[::-1].T),
      lambda x: pmean(psum(x) - psum(x * x)),
      lambda x: psum(jnp.concatenate([psum(x), psum(x * x)])),
      lambda x: psum(lax.split(psum(x), (2, 3))[1]),
      lambda x: lax.psum_scatter(psum(jnp.tile(x, (8, 1))), 'data'),
      lambda x: _in_cond(psum(x)),
      lambda x: _in_scan(psum(x)),
      lambda x: psum(_in_scan(x)),
      lambda x: psum(lax.scan(lambda c, y: (pmean(y), None), 0.0, x)[0]),
      _twice_under_jit,
  )
  def test_warns(self, fn):
    (warning,) = _warnings(fn, VECTOR)

    self.assertRegex(
        warning,
        "^`(psum|reduce_scatter)` sums over 'data' values that were already"
        ' summed over it: reduce them only once.$',
    )

  @cases.parameters('mean', 'sum')
  def test_warns_where_types_are_not_tracked(self, kind):
    factory = getattr(st, f'cross_shard_{kind}')
    inner = optax.chain(factory('data'), optax.sgd(0.1))
    tx = st.drop_stale(0, inner)

    def step(grads):
      grads = jax.tree.map(pmean, grads)
      return tx.update(grads, tx.init(grads), local_step=0)[0]

    warnings = _warnings(step, {'w': VECTOR, 'b': BATCHES})

    self.assertLen(warnings, 1)
    self.assertIn(f"`psum` in 'cross_shard_{kind}' sums over", warnings[0])

  def test_warns_where_jax_has_summed_the_gradient(self):
    def step(w, x):
      return pmean(jax.grad(lambda w: jnp.sum(w * x))(w))

    mapped = jax.shard_map(
        step, mesh=modes.mesh(), in_specs=(P(), P('data')), out_specs=P()
    )
    x = jax.ShapeDtypeStruct((40,), jnp.float32)
    report = st.monitoring.communication_report(mapped, VECTOR, x)

    self.assertLen(report.warnings, 1)
    self.assertIn(
        "over 'data' values that were already summed", report.warnings[0]
    )

  def test_reports_the_axes_that_are_reduced_twice(self):
    report = st.monitoring.communication_report(
        lambda x: lax.psum(lax.psum(x, ('host', 'data')), ('data', 'core')),
        VECTOR,
        axis_sizes={'host': 2, 'data': 2, 'core': 2},
    )

    (warning,) = report.warnings
    self.assertStartsWith(warning, "`psum` sums over 'data' values")

  def test_tracks_the_axes_of_all_sums(self):
    def fn(x):
      return lax.psum(lax.psum(lax.psum(x, 'host'), 'core'), 'host')

    report = st.monitoring.communication_report(
        fn, VECTOR, axis_sizes={'host': 2, 'core': 2}
    )

    self.assertLen(report.warnings, 1)

  def test_reports_equal_warnings_once(self):
    (warning,) = _warnings(
        lambda *xs: pmean(pmean(xs)), VECTOR, VECTOR, BATCHES
    )

    self.assertEndsWith(warning, 'them only once. (3 arrays.)')

  @cases.parameters(
      pmean,
      # Only one of the summands is a sum.
      lambda x: psum(1 / psum(x)),
      lambda x: psum(psum(x) + 1),
      # A sum over another axis.
      lambda x: lax.psum(pmean(x), 'model'),
      # A combination with per-shard values.
      lambda x: psum(psum(x) * x),
      lambda x: psum(psum(x) + x),
      lambda x: psum(jnp.concatenate([psum(x), x])),
      lambda x: psum((x - pmean(x)) ** 2),
      lambda x: psum(psum(x)[lax.axis_index('data')]),
      # The gradient through a sum in an unchecked map.
      jax.grad(lambda x: jnp.sum(pmean(x))),
      lambda x: pmean(jax.grad(lambda w: pmean(jnp.sum(w * x)))(x)),
      lambda x: pmean(jax.grad(lambda b: pmean(jnp.sum(b + x)))(x)),
      jax.grad(lambda x: -jnp.log(psum(jnp.sum(jnp.exp(x))))),
      # A sum of sums over groups.
      lambda x: psum(lax.psum(x, 'data', axis_index_groups=[[0, 1], [2, 3]])),
      # The number of shards, and other reductions.
      lambda x: psum(jnp.ones(5)) + pmean(x),
      lambda x: psum(lax.pmax(x, 'data')),
      lambda x: lax.pmax(psum(x), 'data'),
      lambda x: lax.all_gather(lax.psum_scatter(x[:4], 'data'), 'data'),
      lambda x: lax.scan(lambda c, _: (psum(c * x), None), psum(x), length=3),
      lambda x: lax.scan(lambda c, _: (psum(c) * x, None), psum(x), length=3),
      lambda x: psum(lax.scan(lambda c, _: (c, pmean(c) * c), x, length=3)[1]),
      lambda x: psum(lax.scan(lambda c, y: (y, pmean(y)), 0.0, x)[0]),
      lambda x: lax.while_loop(lambda c: c[0] < 1, psum, psum(x)),
  )
  def test_does_not_warn_about_correct_sums(self, fn):
    report = st.monitoring.communication_report(
        fn, VECTOR, axis_sizes={'data': 4, 'model': 2}
    )

    self.assertEmpty(report.warnings)
    self.assertGreater(report.num_collectives, 0)
