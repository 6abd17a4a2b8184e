import tempfile

from flax import serialization
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint

import cases
import facade_cases
from shard_transforms import facade


class ValuesTest(facade_cases.GraphTest):

  def setUp(self):
    super().setUp()
    rng = np.random.default_rng(0)
    facade.Variable(rng.normal(size=3).astype(np.float32), name='w')
    facade.Variable(rng.normal(size=2), name='h', dtype=jnp.bfloat16)
    facade.Variable(np.float32('nan'), name='nan')
    facade.get_or_create_global_step().assign(7)
    self.variables = facade.global_variables()
    self.saved = facade.get_values(self.variables)

  def clear(self):
    for variable in self.variables:
      variable.assign(jnp.zeros_like(variable))

  def assert_restored(self):
    self.assert_equal(facade.get_values(self.variables), self.saved)

  def test_have_the_names_of_variables(self):
    self.assertEqual(list(self.saved), ['w', 'h', 'nan', 'global_step'])
    self.assert_equal(self.saved['global_step'], jnp.int32(7))

  def test_are_restored(self):
    self.clear()

    facade.set_values(self.variables, self.saved)

    self.assert_restored()

  def test_are_restored_from_the_bytes_of_flax(self):
    saved = serialization.to_bytes(self.saved)
    self.clear()

    facade.set_values(self.variables, serialization.msgpack_restore(saved))

    self.assert_restored()

  def test_are_restored_from_a_checkpoint_of_orbax(self):
    target = jax.tree.map(
        orbax.checkpoint.utils.to_shape_dtype_struct, self.saved
    )
    with (
        tempfile.TemporaryDirectory() as folder,
        orbax.checkpoint.StandardCheckpointer() as checkpointer,
    ):
      checkpointer.save(f'{folder}/saved', self.saved)
      checkpointer.wait_until_finished()
      self.clear()

      facade.set_values(
          self.variables, checkpointer.restore(f'{folder}/saved', target)
      )

    self.assert_restored()

  def test_take_another_dtype_that_loses_nothing(self):
    facade.set_values(self.variables, self.saved | {'global_step': np.int64(9)})

    self.assert_holds(facade.get_global_step(), np.int32(9))

  @cases.parameters(
      ({'other': 1.0}, "'other'"),
      ({'w': np.ones(2, np.float32)}, r"'w:0' must have the shape \(3,\)"),
      ({'w': np.ones((2, 3), np.float32)}, r'\(3,\), got \(2, 3\)'),
      ({'w': np.full(3, 0.1)}, "'w:0' must fit float32"),
      ({'global_step': 0.5}, "'global_step:0' must fit int32"),
      ({'global_step': np.int64(2**40)}, "'global_step:0' must fit int32"),
  )
  def test_that_do_not_fit_change_nothing(self, wrong, message):
    values = jax.tree.map(jnp.zeros_like, self.saved) | wrong

    with self.assertRaisesRegex(ValueError, message):
      facade.set_values(self.variables, values)

    self.assert_restored()

  def test_that_lack_a_name_change_nothing(self):
    values = jax.tree.map(jnp.zeros_like, self.saved)
    del values['h']

    with self.assertRaisesRegex(ValueError, r"\['h'\].*build"):
      facade.set_values(self.variables, values)

    self.assert_restored()
