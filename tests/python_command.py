"""How tests start Python, and the examples as users do."""

import os
import pathlib
import subprocess
import sys

# Warnings are errors.
STRICT = (sys.executable, '-W', 'error')
EXAMPLES = pathlib.Path(__file__).parents[1] / 'examples'
# With it, the examples have their data, but not all of scikit-learn, which
# takes a process as long to import as it trains in a test.
QUICK = {'PYTHONPATH': str(pathlib.Path(__file__).parent / 'quick')}


def run_example(name, *flags, cwd=None, **env):
  """Runs an example to its end; without flags, with all of scikit-learn."""
  outer = {k: v for k, v in os.environ.items() if k != 'JAX_NUM_CPU_DEVICES'}
  return subprocess.run(
      [*STRICT, EXAMPLES / f'{name}.py', *flags],
      cwd=cwd,
      env=outer | (QUICK if flags else {}) | env,
      capture_output=True,
      text=True,
      timeout=600,
  )
