"""The effect of rules is tested with the functions that use them."""

from absl.testing import absltest

from shard_transforms.state_rules import MetricRule
from shard_transforms.state_rules import ResizeRule


class ResizeRuleTest(absltest.TestCase):

  def test_keeps_by_default(self):
    self.assertEqual(ResizeRule(), ResizeRule('keep'))

  def test_refuses_an_unknown_kind(self):
    with self.assertRaisesRegex(ValueError, "`kind` must be one of .*'median'"):
      ResizeRule('median')


class MetricRuleTest(absltest.TestCase):

  def test_is_the_same_on_all_shards_by_default(self):
    self.assertEqual(MetricRule(), MetricRule('same'))

  def test_refuses_an_unknown_kind(self):
    with self.assertRaisesRegex(ValueError, "`kind` must be one of .*'median'"):
      MetricRule('median')
