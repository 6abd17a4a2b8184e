import weakref

from absl.testing import absltest
import jax
import jax.numpy as jnp
import numpy as np

from shard_transforms._src.base import gradient_origins


class GradientOriginsTest(absltest.TestCase):

  def test_knows_the_very_arrays(self):
    params = {'a': jnp.ones(3), 'b': jnp.ones(3)}
    gradient = jax.tree.map(jnp.copy, params)

    gradient_origins.note(gradient, params)

    def is_taken_at(gradient, origin):
      return gradient_origins.is_taken_at(gradient, origin)

    self.assertTrue(is_taken_at(gradient['a'], params['a']))
    self.assertTrue(is_taken_at(gradient['b'], params['b']))
    self.assertFalse(is_taken_at(gradient['a'], params['b']))
    self.assertFalse(is_taken_at(gradient['a'] + 1, params['a']))
    self.assertFalse(is_taken_at(params['a'], gradient['a']))

  def test_says_nothing_of_what_was_taken_at_two_places(self):
    gradient, first, second = (np.ones(3) for _ in range(3))

    for origin in (first, first, second, first):
      gradient_origins.note(gradient, origin)

    for origin in (first, second):
      self.assertFalse(gradient_origins.is_taken_at(gradient, origin))

  def test_keeps_nothing_alive(self):
    gradient, origin = np.ones(3), np.ones(3)
    gradient_origins.note(gradient, origin)
    gone = weakref.ref(gradient), weakref.ref(origin)

    del origin
    self.assertIsNone(gone[1]())
    self.assertFalse(gradient_origins.is_taken_at(gradient, None))
    del gradient
    self.assertIsNone(gone[0]())

  def test_passes_over_what_it_cannot_know(self):
    array = np.ones(3)

    gradient_origins.note(1.5, 2.5)
    gradient_origins.note([array], [array, array])

    self.assertFalse(gradient_origins.is_taken_at(1.5, 2.5))
    self.assertFalse(gradient_origins.is_taken_at(array, array))
