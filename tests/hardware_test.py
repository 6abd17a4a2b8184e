"""What XLA makes of training steps for TPUs and GPUs that are not here.

Nothing runs on them: each test reads a program that `benchmarks/hardware.py`
has compiled, in a process of its own for each topology.
"""

import functools
import json
import os
import pathlib
import re
import subprocess
import sys

from absl.testing import parameterized
import jax
import pytest

import cases

ROOT = pathlib.Path(__file__).parents[1]
TPU, GPU = 'v5e:2x4', 'h100:1x8'
# Eight matrices of 1024 x 1024 float32.
PARAMS_MB = 8 * 4 * 1024**2 / 1e6
# A ring of 8 sends 7/8 for the sum and 7/8 for all parts, and the loss.
SENT = 2 * 7 / 8 * 8 * 4 * 1024**2 + 7
GATES = 'guard, skip', 'guard, exclude', 'drop_stale', 'drop_stale(guard)'
CASES = (
    'by hand',
    'by hand, ZeRO-1',
    'cross_shard_mean',
    *GATES,
    'tower_reduce(4)',
    'shard_update',
    'reproducible.mean',
    'owned_update(muon)',
)
# A compiler that is not installed is told on standard output.
MEASURE = """
import collections, json, sys
import hardware, topology

def facts(case):
  found = hardware.measure(case, hardware.shapes_of('matrices'), mesh)
  payload = collections.Counter()
  for c in found.report.collectives:
    payload[c.primitive] += c.times * c.payload_bytes
  return {
      **found._asdict(),
      'sent': found.report.total_bytes,
      'count': found.report.merged.num_collectives,
      'payload': payload,
      'report': str(found.report),
  }

try:
  devices = topology.devices(sys.argv[1])
except ModuleNotFoundError as error:
  print(json.dumps(str(error)))
  sys.exit()
mesh = topology.mesh(sys.argv[1], {'data': len(devices)})
print(json.dumps({case: facts(case) for case in sys.argv[2:]}))
"""
PAGE = ROOT / 'docs' / 'compile_for_hardware.md'
pytestmark = [pytest.mark.hardware, pytest.mark.slow]


def run(code, *arguments):
  """Runs a program that may import the benchmarks; returns what it prints."""
  kept = {k: v for k, v in os.environ.items() if not k.startswith('JAX_')}
  done = subprocess.run(
      [sys.executable, '-c', code, *arguments],
      env={**kept, 'XLA_FLAGS': '', 'PYTHONPATH': str(ROOT / 'benchmarks')},
      capture_output=True,
      text=True,
      timeout=600,
  )
  if done.returncode:
    raise RuntimeError(done.stderr[-3000:])
  return done.stdout


@functools.cache
def measured(name):
  return json.loads(run(MEASURE, name, *CASES))


def facts(name, case):
  found = measured(name)
  if isinstance(found, str):
    pytest.skip(found)
  return found[case]


class HardwareTest(parameterized.TestCase):

  @cases.parameters(TPU, GPU)
  def test_mean_is_what_one_writes_by_hand(self, name):
    by_hand, found = facts(name, 'by hand'), facts(name, 'cross_shard_mean')

    self.assertEqual(found['count'], by_hand['count'])
    self.assertEqual(found['sent'], SENT)
    self.assertAlmostEqual(found['temporary'], by_hand['temporary'], delta=0.1)
    self.assertLess(found['code'], by_hand['code'] + 0.1)
    if name == TPU:
      self.assertEqual(found['count'], 1)

  @cases.product(name=(TPU, GPU), gate=GATES)
  def test_gate_selects(self, name, gate):
    plain, found = facts(name, 'by hand'), facts(name, gate)

    self.assertEqual(found['branches'], 0)
    self.assertEqual(found['loops'], 0)
    self.assertEqual(found['count'], plain['count'])
    self.assertLess(found['temporary'] - plain['temporary'], 0.1 * PARAMS_MB)

  @cases.parameters(TPU, GPU)
  def test_window_ends_in_a_loop(self, name):
    plain, found = facts(name, 'by hand'), facts(name, 'tower_reduce(4)')

    self.assertEqual((found['branches'], found['loops']), (0, 1))
    # A branch would copy the state.
    extra = found['temporary'] - plain['temporary']
    self.assertLess(extra, 1.2 * PARAMS_MB)

  @cases.parameters(
      (TPU, 'by hand, ZeRO-1'),
      (GPU, 'by hand, ZeRO-1'),
      (TPU, 'shard_update'),
      (GPU, 'shard_update'),
      (TPU, 'owned_update(muon)'),
      (GPU, 'owned_update(muon)'),
  )
  def test_slices_are_summed_by_reduce_scatters(self, name, case):
    found = facts(name, case)

    scattered = found['payload']['reduce_scatter'] / 1e6
    self.assertGreater(scattered, 0.99 * PARAMS_MB)
    self.assertLess(found['sent'], 1.001 * SENT)

  @cases.product(name=(TPU, GPU), case=('by hand, ZeRO-1', 'reproducible.mean'))
  def test_report_counts_each_byte_once(self, name, case):
    found = facts(name, case)

    # Asynchronous parts of a collective stand in the text of a TPU as often.
    self.assertAlmostEqual(found['sent'], SENT, delta=32)


class SetUpTest(parameterized.TestCase):

  @cases.parameters(
      ("'v9:2x4', {'data': 8}", "must be a TPU slice .* got 'v9:2x4'"),
      ("'v5e', {'data': 8}", "must be a TPU slice .* got 'v5e'"),
      ("'v5e:2x4', {'data': 7}", 'must multiply to the 8 devices'),
      ("'h100:8', {'data': 8}", "h100:1x8 .* got 'h100:8'"),
  )
  def test_refuses_what_is_not_there(self, arguments, message):
    facts(TPU if 'v' in arguments else GPU, 'by hand')
    code = f'import topology\ntopology.mesh({arguments})'

    with self.assertRaisesRegex(RuntimeError, f'ValueError: .*{message}'):
      run(code)

  @cases.parameters(TPU, GPU)
  def test_says_what_to_install(self, name):
    # Of another version than any there is, or not at all.
    code = (
        'import importlib.metadata, topology\n'
        f'importlib.metadata.version = lambda name: "0.0.1"\n'
        f'topology.devices({name!r})'
    )

    with self.assertRaisesRegex(
        RuntimeError, r'ImportError: .* got 0\.0\.1\. Install it by: pip inst'
    ):
      run(code)

  def test_refuses_arrays_on_devices_that_are_not_here(self):
    facts(TPU, 'by hand')
    code = (
        'import topology, jax, optax, shard_transforms as st\n'
        "mesh = topology.mesh('v5e:2x4', {'data': 8})\n"
        'st.init_state(optax.adam(0.1), jax.numpy.ones(8), mesh)'
    )

    with self.assertRaisesRegex(RuntimeError, '`params` must be shapes'):
      run(code)

  def test_recipe_of_the_page_prints_what_is_shown(self):
    facts(TPU, 'by hand')
    text = PAGE.read_text(encoding='utf-8')
    blocks = re.findall(r'^```python\n(.*?)^```', text, re.M | re.S)
    shown = re.findall(r'^```text\n(.*?)^```', text, re.M | re.S)

    code = '\n'.join(blocks)
    printed = run(f'exec(compile({code!r}, "step.py", "exec"))')
    if jax.__version_info__[:2] == (0, 10):
      self.assertEqual(printed, ''.join(shown))
