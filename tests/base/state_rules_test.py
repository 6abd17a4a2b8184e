"""What rules do is in the tests of `resize_state` and `check_health`."""

from absl.testing import absltest

from shard_transforms.state_rules import ResizeRule


class ResizeRuleTest(absltest.TestCase):

  def test_keeps_by_default(self):
    self.assertEqual(ResizeRule(), ResizeRule('keep'))

  def test_refuses_an_unknown_kind(self):
    with self.assertRaisesRegex(ValueError, "`kind` must be one of .*'median'"):
      ResizeRule('median')
