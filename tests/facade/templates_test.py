from absl.testing import parameterized

from shard_transforms.facade import templates


class TemplateTest(parameterized.TestCase):

  def make(self, *kinds):
    return [templates.persistent(kind, object) for kind in kinds]

  def test_each_call_finds_what_the_first_has_made(self):
    template = templates.Template()

    with templates.call_of(template):
      first = self.make('adam', 'adam', 'sgd')
    with templates.call_of(template):
      # The order between kinds is free.
      sgd, *adams = self.make('sgd', 'adam', 'adam', 'adam')

    self.assertEqual([*adams[:2], sgd], first)
    self.assertLen({*first, *adams}, 4)

  def test_without_one_all_is_new(self):
    self.assertIsNot(*self.make('adam', 'adam'))

  def test_templates_share_nothing(self):
    made = []
    for _ in range(2):
      with templates.call_of(templates.Template()):
        made += self.make('adam')

    self.assertIsNot(*made)

  def test_nested_calls_count_by_themselves(self):
    outer, inner = templates.Template(), templates.Template()

    def call():
      with templates.call_of(outer):
        before = self.make('adam')
        with templates.call_of(inner):
          inside = self.make('adam')
        return before + inside + self.make('adam')

    first, second = call(), call()

    self.assertEqual(first, second)
    self.assertLen(set(first), 3)

  def test_ends_with_an_exception(self):
    template = templates.Template()
    with self.assertRaises(KeyError), templates.call_of(template):
      raise KeyError

    self.assertIsNot(*self.make('adam', 'adam'))

  def test_a_template_inside_a_template_is_found_again(self):
    template = templates.Template()

    def call():
      with templates.call_of(template):
        return templates.subtemplate()

    self.assertIsInstance(call(), templates.Template)
    self.assertIs(call(), call())
    self.assertIsNone(templates.subtemplate())

  def test_a_call_without_one_can_make_nothing(self):
    with templates.call_of(None):
      self.assertIsNone(templates.subtemplate())
      with self.assertRaisesRegex(ValueError, 'start anew at each call'):
        self.make('adam')
