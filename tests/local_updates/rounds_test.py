from absl.testing import parameterized
import jax.numpy as jnp

import cases
from shard_transforms._src.local_updates import rounds as rounds_lib


def _of_round(rounds, length):
  """Returns in which steps each fragment is sent and taken over."""
  found = [rounds.at(jnp.int32(i)) for i in range(length)]

  def where(flags):
    return [i + 1 for i, flag in enumerate(flags) if flag]

  sends = [
      where(flags) for flags in zip(*(m.sends for m in found), strict=True)
  ]
  mixes = [
      where(flags) for flags in zip(*(m.mixes for m in found), strict=True)
  ]
  return sends, mixes, where(m.is_last for m in found)


class RoundsTest(parameterized.TestCase):

  @cases.parameters(
      (5, 0, 1, [[5]], [[5]], 5),
      (5, 2, 1, [[3]], [[5]], 5),
      (6, 1, 2, [[2], [5]], [[3], [6]], 6),
      (7, 1, 3, [[2], [4], [6]], [[3], [5], [7]], 7),
      # All but the last of a round of fewer steps than fragments share them.
      (2, 0, 3, [[1], [2], [2]], [[1], [2], [2]], 2),
  )
  def test_meets_in_steps_of_a_round(
      self, every, delay, num, sends, mixes, last
  ):
    rounds = rounds_lib.Rounds(every, delay, num)

    self.assertEqual(_of_round(rounds, last), (sends, mixes, [last]))

  def test_a_round_that_became_shorter_still_ends_with_a_meeting(self):
    rounds = rounds_lib.Rounds(10, 0, 1)

    met = [bool(rounds.at(jnp.int32(i)).sends[0]) for i in range(15, 20)]

    self.assertEqual(met, [False] * 4 + [True])

  @cases.parameters(
      (0, 0, 1, ValueError, '`every` must be at least 1, got 0'),
      (2.0, 0, 1, TypeError, '`every` must be an integer, got 2.0'),
      (True, 0, 1, TypeError, '`every` must be an integer, got True'),
      (lambda r: r + 3, 0, 1, TypeError, '`every` must be an integer'),
      (1, 1, 1, ValueError, '`delay` .* less than .* 1, got 1'),
      (5, -1, 1, ValueError, '`delay` must be at least 0, got -1'),
      (5, 0.5, 1, TypeError, '`delay` must be an integer, got 0.5'),
      (5, 5, 1, ValueError, '`delay` .* less than .* 5, got 5'),
      (6, 3, 2, ValueError, '`delay` .* less than .* 3, got 3'),
  )
  def test_refuses_rounds_that_do_not_work(
      self, every, delay, num, error, message
  ):
    with self.assertRaisesRegex(error, message):
      rounds_lib.Rounds(every, delay, num)
