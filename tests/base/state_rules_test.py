"""Tests of rules; `state/` and `monitoring/` test their effect."""

from typing import Any, NamedTuple

from absl.testing import parameterized

import cases
from shard_transforms._src.base import states
from shard_transforms.state_rules import Rule


class RuleTest(parameterized.TestCase):

  def test_default_rule_keeps_the_field(self):
    self.assertEqual(Rule(), Rule(resize='keep', metric=None))

  @cases.parameters(
      (dict(resize='median'), ValueError, "`resize` must be .*'median'"),
      (dict(metric='median'), ValueError, "`metric` must be .*'median'"),
      (dict(health_check='all'), TypeError, '`health_check` must be'),
      (dict(unshard=max), ValueError, '`unshard` and `shard` must be'),
      (dict(shard=max), ValueError, '`unshard` and `shard` must be'),
  )
  def test_refuses_invalid_arguments(self, kwargs, error, words):
    with self.assertRaisesRegex(error, words):
      Rule(**kwargs)


class TableTest(parameterized.TestCase):

  def test_a_field_called_rules_declares_nothing(self):
    class State(NamedTuple):
      rules: Any

    state = State({'rules': Rule()})

    self.assertFalse(states.declares(state))
    self.assertEqual(states.rules_of(state), {})
