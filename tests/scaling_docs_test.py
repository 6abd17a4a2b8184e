"""Tests of the tables of `docs/measurements.md` by `benchmarks/plan.py`."""

import collections
import importlib.util
import pathlib
import re
import shlex
import subprocess
import sys

from absl.testing import parameterized
import jax
import jax.numpy as jnp
import optax
import pytest

import cases
import shard_transforms

ROOT = pathlib.Path(__file__).parents[1]
DOCS = ROOT / 'docs' / 'measurements.md'
SHAPE = (64_000,)


def commands():
  """Returns the arguments of the commands that the page shows."""
  lines = DOCS.read_text(encoding='utf-8').splitlines()
  start = '.venv/bin/python benchmarks/plan.py'
  return [line.removeprefix(start) for line in lines if line.startswith(start)]


def plan():
  """Returns the module that the commands run."""
  sys.path.insert(0, str(ROOT / 'benchmarks'))
  try:
    spec = importlib.util.spec_from_file_location(
        'plan', ROOT / 'benchmarks' / 'plan.py'
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
  finally:
    sys.path.pop(0)


PLAN = plan()


def sent(tx, num_slow, num_fast):
  """Returns the bytes that a step sends, by the axes that carry them."""
  grads = jax.ShapeDtypeStruct(SHAPE, jnp.float32)
  report = shard_transforms.monitoring.communication_report(
      lambda grads: tx.update(grads, tx.init(grads), grads)[0],
      grads,
      axis_sizes={'slow': num_slow, 'fast': num_fast},
  )
  of_axes = collections.Counter()
  for collective in report.collectives:
    of_axes[collective.axes] += collective.sent_bytes
  return of_axes


class ScalingDocsTest(parameterized.TestCase):

  @pytest.mark.slow
  def test_tables_equal_the_output_of_the_commands(self):
    printed = set()
    for command in commands():
      run = subprocess.run(
          [sys.executable, 'benchmarks/plan.py', *shlex.split(command)],
          cwd=ROOT,
          capture_output=True,
          text=True,
          check=True,
          timeout=60,
      )
      printed.update(run.stdout.splitlines())

    text = DOCS.read_text(encoding='utf-8')
    traffic = re.findall(r'^\| [\d,]+ \|.*$', text, re.M)
    self.assertLen(traffic, 3)
    # Gigabytes with and without `shard_update`, as stated on its page.
    for row in (*traffic, '| 8 | 16 | 9 |'):
      self.assertIn(row, printed)

  @cases.parameters((8, 8), (4, 2), (64, 8))
  def test_a_step_sends_the_planned_bytes(self, *sizes):
    axes = ('slow', 'fast')
    num_bytes, num_shards = 4 * SHAPE[0], sizes[0] * sizes[1]

    flat = sent(shard_transforms.cross_shard_mean(axes), *sizes)
    levels = sent(shard_transforms.shard_update(optax.sgd(0.1), axes), *sizes)

    planned = PLAN.flat(num_bytes, num_shards, sizes[1])
    both = planned.fast_bytes + planned.slow_bytes
    self.assertAlmostEqual(flat['slow', 'fast'], both)
    planned = PLAN.by_levels(num_bytes, num_shards, sizes[1])
    self.assertAlmostEqual(levels['fast',], planned.fast_bytes)
    self.assertAlmostEqual(levels['slow',], planned.slow_bytes)
