import math
import unittest

from shard_transforms._src.asynchronous import options as options_lib

GIVEN = {
    'num_updates': 10,
    'staleness': 2,
    'pace': True,
    'patience': 4,
    'save_every': 5,
    'on_drop': 'again',
    'max_attempts': 3,
    'weight': None,
}


class OptionsTest(unittest.TestCase):

  def test_staleness_of_none_is_any_age(self):
    options = options_lib.checked(**GIVEN | {'staleness': None})

    self.assertEqual(options.staleness, math.inf)

  def test_others_are_kept(self):
    options = options_lib.checked(**GIVEN)

    self.assertEqual(vars(options), GIVEN)
