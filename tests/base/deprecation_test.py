"""Tests of warnings about deprecated names."""

import types
import warnings

from absl.testing import parameterized

from shard_transforms._src.base import deprecation


class DeprecationTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.module = types.ModuleType('xml')
    self.module.__getattr__ = deprecation.module_getattr(
        'xml',
        {'old': ('`old` is deprecated: use `new`.', len)},
        lazy_modules=['sax'],
    )

  def test_warns_at_the_line_that_uses_the_name(self):
    with warnings.catch_warnings(record=True) as caught:
      warnings.simplefilter('always')
      value = self.module.old

    self.assertIs(value, len)
    (warning,) = caught
    self.assertIs(warning.category, DeprecationWarning)
    self.assertEqual(str(warning.message), '`old` is deprecated: use `new`.')
    self.assertEqual(warning.filename, __file__)

  def test_imports_a_lazy_module(self):
    self.assertEqual(self.module.sax.__name__, 'xml.sax')

  def test_refuses_other_names(self):
    with self.assertRaisesRegex(AttributeError, "'xml' has no .* 'other'"):
      _ = self.module.other
