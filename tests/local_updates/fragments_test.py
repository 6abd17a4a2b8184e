from absl.testing import parameterized
import jax
import jax.numpy as jnp
import numpy as np
import optax

import cases
from shard_transforms._src.local_updates import rounds

TREE = {
    'a': jnp.ones((4, 4)),
    'b': jnp.ones(9),
    'c': None,
    'd': [jnp.ones(8, jnp.bfloat16), jnp.ones(5), jnp.ones(0)],
}


class FragmentsTest(parameterized.TestCase):

  @cases.parameters(
      (1, (0, 0, 0, 0, 0)),
      (2, (0, 1, 1, 1, 0)),
      (5, (0, 1, 3, 2, 4)),
      ({'a': 1, 'b': 0, 'c': 0, 'd': 1}, (1, 0, 1, 1, 1)),
      ({'a': 'x', 'b': 'w', 'c': None, 'd': ['w', 'x', 'y']}, (1, 0, 0, 1, 2)),
  )
  def test_divides_leaves(self, given, want):
    fragments = rounds.as_fragments(given)

    self.assertEqual(fragments.of_leaves(TREE), want)

  def test_joins_what_it_splits(self):
    fragments = rounds.as_fragments(3)

    parts = fragments.split(TREE)
    joined = fragments.join(parts, TREE)

    self.assertLen(parts, 3)
    self.assertIsInstance(parts[1]['a'], optax.MaskedNode)
    self.assertEqual(jax.tree.structure(joined), jax.tree.structure(TREE))
    for found, leaf in zip(*map(jax.tree.leaves, (joined, TREE)), strict=True):
      self.assertIs(found, leaf)

  @cases.parameters(
      (0, ValueError, '`fragments` must be at least 1, got 0'),
      (True, TypeError, '`fragments` must be an integer, got True'),
      (1.5, TypeError, '`fragments` must be an integer, got 1.5'),
      ('all', TypeError, "`fragments` must be an integer, got 'all'"),
      (None, TypeError, '`fragments` must be an integer, got None'),
      ({'a': 1, 'b': 'x'}, TypeError, 'labels that are all strings or all'),
      ({'a': 0.5}, TypeError, 'an integer, or a tree of labels'),
      ({}, TypeError, 'a tree of labels .* got {}'),
      (np.ones(2), TypeError, '`fragments` must be an integer'),
  )
  def test_refuses_what_says_nothing(self, given, error, message):
    with self.assertRaisesRegex(error, message):
      rounds.as_fragments(given)

  @cases.parameters(
      (6, 'must be at most the number of leaves, 5, got 6'),
      ({'a': 0, 'b': 1}, 'must have the tree of the parameters'),
      ({'a': 0, 'b': None, 'c': 0, 'd': 1}, r"each leaf, got None at \['b'\]"),
  )
  def test_refuses_what_does_not_fit_the_tree(self, given, message):
    fragments = rounds.as_fragments(given)

    with self.assertRaisesRegex(ValueError, message):
      fragments.of_leaves(TREE)
