from absl.testing import absltest
import jax
import jax.numpy as jnp
import optax

from shard_transforms._src.state import param_leaves

PARAMS = {'a': {'w': jnp.ones((2, 3)), 'v': jnp.ones(4)}, 'b': (jnp.ones(5),)}


def shapes(leaf, param, name):
  return name, jnp.shape(leaf), jnp.shape(param)


NAMES = {'a': {'w': 'w', 'v': 'v'}, 'b': ('b',)}


class MapWithParamsTest(absltest.TestCase):

  def test_gives_each_leaf_its_parameter(self):
    tx = optax.adam(0.1)

    mapped = param_leaves.map_with_params(
        tx, shapes, tx.init(PARAMS), PARAMS, NAMES
    )

    expected = {
        'a': {'w': ('w', (2, 3), (2, 3)), 'v': ('v', (4,), (4,))},
        'b': (('b', (5,), (5,)),),
    }
    self.assertEqual(mapped[0].mu, expected)
    self.assertEqual(mapped[0].count.shape, ())

  def test_takes_several_leaves_of_a_parameter(self):
    def init(params):
      return jax.tree.map(lambda p: (jnp.ones(7), [jnp.zeros_like(p)]), params)

    tx = optax.GradientTransformation(init, optax.identity().update)

    mapped = param_leaves.map_with_params(
        tx, shapes, tx.init(PARAMS), PARAMS, NAMES
    )

    self.assertEqual(
        mapped['a']['w'], (('w', (7,), (2, 3)), [('w', (2, 3), (2, 3))])
    )
    self.assertEqual(mapped['b'], ((('b', (7,), (5,)), [('b', (5,), (5,))]),))

  def test_keeps_what_is_masked(self):
    tx = optax.masked(optax.trace(0.9), {'a': False, 'b': True})

    mapped = param_leaves.map_with_params(
        tx, shapes, tx.init(PARAMS), PARAMS, NAMES
    )

    trace = mapped.inner_state.trace
    self.assertEqual(trace['a'], optax.MaskedNode())
    self.assertEqual(trace['b'], (('b', (5,), (5,)),))

  def test_takes_parameters_of_one_leaf_and_none(self):
    tx = optax.trace(0.9)
    one = jnp.ones(3)

    mapped = param_leaves.map_with_params(tx, shapes, tx.init(one), one, 'x')
    none = param_leaves.map_with_params(
        tx, shapes, tx.init({'a': None}), {'a': None}, {'a': None}
    )

    self.assertEqual(mapped.trace, ('x', (3,), (3,)))
    self.assertEqual(none.trace, {'a': None})
