"""Commands that start Python and the examples in tests."""

import os
import pathlib
import subprocess
import sys
import tempfile

from absl.testing import parameterized

EXAMPLES = pathlib.Path(__file__).parents[2] / 'examples'
# Warnings are errors.
STRICT = (sys.executable, '-W', 'error')
# With it, the examples have their data, but not all of scikit-learn, which
# takes a process as long to import as it trains in a test.
QUICK = {'PYTHONPATH': str(pathlib.Path(__file__).parent / 'quick')}


class ScriptTest(parameterized.TestCase):
  """A test of a script of the examples.

  Attributes:
    script: Its file.
    folder: The working folder.
  """

  script: str

  def setUp(self):
    super().setUp()
    self.folder = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))

  def run_script(self, *flags, **env):
    """Returns the finished process; without flags, with all of scikit-learn."""
    outer = {k: v for k, v in os.environ.items() if k != 'JAX_NUM_CPU_DEVICES'}
    return subprocess.run(
        [*STRICT, EXAMPLES / self.script, *flags],
        cwd=self.folder,
        env=outer | (QUICK if flags else {}) | env,
        capture_output=True,
        text=True,
        timeout=600,
    )

  def files(self):
    """Returns the files that were written."""
    paths = self.folder.rglob('*')
    return [p.relative_to(self.folder).as_posix() for p in paths if p.is_file()]
