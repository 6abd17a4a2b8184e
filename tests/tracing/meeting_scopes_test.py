from absl.testing import parameterized

import cases
from shard_transforms._src.tracing import meeting_scopes


class MeetingScopesTest(parameterized.TestCase):

  @cases.parameters((3, 20, (3, 20)), (0, None, (0, 1)))
  def test_reads_what_it_writes(self, number, every, want):
    scope = f'step/{meeting_scopes.scope(number, every)}/gate'

    self.assertEqual(meeting_scopes.parse(scope), want)

  def test_finds_no_meeting_elsewhere(self):
    self.assertIsNone(meeting_scopes.parse('cross_shard_mean/gate'))
