from absl.testing import parameterized
import chex
import jax
import jax.numpy as jnp
import numpy as np

import cases
import modes
from shard_transforms._src.base import axes as axes_lib
from shard_transforms._src.base import states

AXES = (modes.AXIS,)


class KeptTest(parameterized.TestCase):

  @cases.parameters(*modes.MODES)
  def test_gives_back_what_it_has_stored(self, mode):
    def fn(shared, x):
      stored = states.store(x, AXES)
      return (
          states.own(stored, AXES, 'caller'),
          stored,
          states.store(shared, AXES),
      )

    x = np.arange(16.0, dtype=np.float32).reshape(8, 2)
    own, stored, shared = modes.map_shards(mode, fn)(jnp.zeros(3), x)

    np.testing.assert_array_equal(own, x)
    np.testing.assert_array_equal(stored, x[:, None])
    np.testing.assert_array_equal(shared, np.zeros((8, 1, 3)))

  def test_marks_what_is_stored_as_varying(self):
    def fn(shared, x):
      stored = jax.typeof(states.store(shared, AXES))
      self.assertEqual(stored.manual_axis_type.varying, {modes.AXIS})
      return x

    modes.map_shards('shard_map', fn)(jnp.zeros(3), jnp.zeros(8))

  def test_keeps_changes_of_shape_apart_from_arithmetic(self):
    def fn(kept, x):
      total = states.own(kept, AXES, 'caller') + x
      return states.store(total, AXES)

    types = jnp.zeros((1, 3)), jnp.zeros(3)
    jaxpr = jax.make_jaxpr(fn, axis_env=[(modes.AXIS, 1)])(*types).jaxpr
    steps = [eqn.primitive.name for eqn in jaxpr.eqns]
    # XLA of JAX 0.10 drops barriers before it fuses.
    barriers = ['optimization_barrier'] * axes_lib.fuses_up_to_barriers()
    expected = ['squeeze', *barriers, 'add', *barriers]
    self.assertEqual(steps[: len(expected)], expected)

    if barriers:
      step = jax.vmap(fn, axis_name=modes.AXIS)
      compiled = jax.jit(step, donate_argnums=0).lower(
          *(x[None] for x in types)
      )
      self.assertNotIn(' copy(', compiled.compile().as_text())

  def test_leaves_what_is_the_same_on_all_shards(self):
    x = jnp.zeros(3)

    self.assertIs(states.store(x, ()), x)
    self.assertIs(states.own(x, (), 'caller'), x)
    self.assertIsNone(states.store(None, AXES))

  @cases.parameters(((),), ((3,),), ((8, 1),))
  def test_refuses_what_has_no_leading_axis(self, shape):
    message = r'State of `caller` .* length 1 on each shard.*`.*state_specs`'
    with self.assertRaisesRegex(ValueError, message):
      states.own(jnp.zeros(shape), AXES, 'caller')

  def test_refuses_what_would_be_kept_as_if_it_were_the_same(self):
    def fn(shared, x):
      before = {'a': shared}
      states.check_kept(before, {'a': 2 * shared}, 'caller')
      states.check_kept({'a': x}, {'a': 2 * x}, 'caller')
      with self.assertRaisesRegex(
          ValueError,
          r"`axis_name` of `caller` must name \['data'\].* at \['a'\], but is"
          ' kept as if it were the same',
      ):
        states.check_kept(before, {'a': shared + x}, 'caller')
      return x

    mapped = modes.map_shards('shard_map', fn)
    jax.eval_shape(mapped, jnp.zeros(3), jnp.zeros((8, 3)))


class CountersTest(parameterized.TestCase):

  @cases.parameters(
      (0, 1, 1),
      (5, 0, 5),
      (5, 3.0, 8),
      (5, np.True_, 6),
      (5, False, 5),
      (states.MAX_COUNT - 1, 1, states.MAX_COUNT),
      (states.MAX_COUNT, 1, states.MAX_COUNT),
      (states.MAX_COUNT - 2, 8, states.MAX_COUNT),
  )
  def test_counts_up_to_the_largest_int32(self, counter, number, expected):
    counted = states.count(jnp.int32(counter), jnp.asarray(number))

    chex.assert_trees_all_equal(counted, jnp.int32(expected), strict=True)
