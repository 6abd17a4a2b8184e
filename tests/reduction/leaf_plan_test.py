from absl.testing import parameterized
import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import cases
import modes
from shard_transforms._src.reduction import leaf_plan

AXES = ('host', 'core')


def find(make, averaged, check_vma=True):
  """Returns the route of `make(x)`, of an `x` that differs between shards."""
  found = []

  def fn(x):
    found.extend(leaf_plan.find([make(x)], AXES, averaged, 'caller'))
    return x

  mapped = jax.shard_map(
      fn,
      mesh=jax.make_mesh((2, 4), AXES, (AxisType.Auto,) * 2),
      in_specs=P(AXES),
      out_specs=P(AXES),
      check_vma=check_vma,
  )
  jax.eval_shape(mapped, jnp.zeros(8))
  return found[0]


class RoutesTest(parameterized.TestCase):

  @cases.parameters(False, True)
  def test_sends_what_differs_over_all_axes(self, averaged):
    route = find(lambda x: 2 * x, averaged)

    self.assertEqual(route, leaf_plan.Route(AXES, (), 8, 1))

  @cases.parameters((False, 8, 1), (True, 2, 4))
  def test_sends_nothing_over_an_axis_that_is_done(self, averaged, *scale):
    route = find(lambda x: lax.psum(x, 'core'), averaged)

    self.assertEqual(route, leaf_plan.Route(('host',), (), *scale))

  @cases.parameters((False, 8, 1), (True, 1, 8))
  def test_sends_nothing_of_what_is_done(self, averaged, *scale):
    route = find(lambda x: lax.psum(x, AXES), averaged)

    self.assertEqual(route, leaf_plan.Route((), (), *scale))

  def test_knows_a_sum_that_is_pending(self):
    route = find(lambda x: lax.pcast(x, 'core', to='unreduced'), averaged=False)

    self.assertEqual(route, leaf_plan.Route(('host',), ('core',), 8, 1))

  def test_sends_all_where_types_say_nothing(self):
    route = find(lambda x: lax.psum(x, AXES), averaged=True, check_vma=False)

    self.assertEqual(route, leaf_plan.Route(AXES, (), 8, 1))

  @cases.parameters(*modes.MODES)
  def test_names_who_needs_an_axis_that_is_not_bound(self, mode):
    def fn(_, x):
      return leaf_plan.find([x], ('other',), False, 'caller')

    with self.assertRaisesRegex(NameError, "`caller` needs .*'other'"):
      modes.map_shards(mode, fn)(0.0, jnp.zeros(8))
