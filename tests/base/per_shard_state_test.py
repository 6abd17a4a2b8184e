from absl.testing import parameterized
import jax
import jax.numpy as jnp
import numpy as np

import cases
import modes
from shard_transforms._src.base import axes as axes_lib
from shard_transforms._src.base import per_shard_state

AXES = (modes.AXIS,)


class KeptTest(parameterized.TestCase):

  @cases.parameters(*modes.MODES)
  def test_gives_back_what_it_has_stored(self, mode):
    def fn(shared, x):
      stored = per_shard_state.store(x, AXES)
      return (
          per_shard_state.own(stored, AXES, 'caller'),
          stored,
          per_shard_state.store(shared, AXES),
      )

    x = np.arange(16.0, dtype=np.float32).reshape(8, 2)
    own, stored, shared = modes.map_shards(mode, fn)(jnp.zeros(3), x)

    np.testing.assert_array_equal(own, x)
    np.testing.assert_array_equal(stored, x[:, None])
    np.testing.assert_array_equal(shared, np.zeros((8, 1, 3)))

  def test_marks_what_is_stored_as_varying(self):
    def fn(shared, x):
      stored = jax.typeof(per_shard_state.store(shared, AXES))
      self.assertEqual(stored.manual_axis_type.varying, {modes.AXIS})
      return x

    modes.map_shards('shard_map', fn)(jnp.zeros(3), jnp.zeros(8))

  def test_keeps_changes_of_shape_apart_from_arithmetic(self):
    def fn(kept, x):
      total = per_shard_state.own(kept, AXES, 'caller') + x
      return per_shard_state.store(total, AXES)

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

    self.assertIs(per_shard_state.store(x, ()), x)
    self.assertIs(per_shard_state.own(x, (), 'caller'), x)
    self.assertIsNone(per_shard_state.store(None, AXES))

  @cases.parameters(((),), ((3,),), ((8, 1),))
  def test_refuses_what_has_no_leading_axis(self, shape):
    message = r'State of `caller` .* length 1 on each shard.*`.*state_specs`'
    with self.assertRaisesRegex(ValueError, message):
      per_shard_state.own(jnp.zeros(shape), AXES, 'caller')

  def test_refuses_what_would_be_kept_as_if_it_were_the_same(self):
    def fn(shared, x):
      before = {'a': shared}
      per_shard_state.check_kept(before, {'a': 2 * shared}, 'caller')
      per_shard_state.check_kept({'a': x}, {'a': 2 * x}, 'caller')
      with self.assertRaisesRegex(
          ValueError,
          r"`axis_name` of `caller` must name \['data'\].* at \['a'\], but is"
          ' kept as if it were the same',
      ):
        per_shard_state.check_kept(before, {'a': shared + x}, 'caller')
      return x

    mapped = modes.map_shards('shard_map', fn)
    jax.eval_shape(mapped, jnp.zeros(3), jnp.zeros((8, 3)))
