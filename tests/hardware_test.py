"""Tests of training steps that are compiled for TPUs and GPUs.

Nothing runs on this hardware: each test reads a program that
`benchmarks/hardware.py` compiled, in one process per topology.
"""

import collections
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
TPU, GPU, POD = 'v5e:2x4', 'h100:1x8', 'v5e:16x16'
# Slices on whose only axis XLA has no reduce-scatter of one step.
SQUARES = 'v5e:4x4', 'v6e:4x4', 'v5p:2x2x4'
# Float32: eight matrices of 1024 x 1024, two of 8192 x 8192, and GPT-2 with one
# layer.
PARAMS_MB = 8 * 4 * 1024**2 / 1e6
MEGABYTES = {
    **dict.fromkeys(['matrices', 'stacked'], PARAMS_MB),
    'nine': 9 / 8 * PARAMS_MB,
    'layers': 12 * 4 * 2048**2 / 1e6,
    'large': 536.9,
    'gpt2': 185.9,
    'gpt2_50304': 186.0,
}
# Of an embedding of 50,257 rows, shards have columns, for which XLA for TPUs
# needs more temporary memory.
GPT2 = {'v5e:2x4': 'gpt2_50304', 'h100:1x8': 'gpt2'}
SHARDS = {TPU: 8, GPU: 8, POD: 256, **dict.fromkeys(SQUARES, 16)}
# A ring of 8 sends 7/8 for the sum and 7/8 for all parts, and the loss.
SENT = 2 * 7 / 8 * 8 * 4 * 1024**2 + 7
GATES = 'guard, skip', 'guard, exclude', 'drop_stale', 'drop_stale(guard)'
# These, under plain `jax.jit` on axes of both types, are what they are mapped.
BOTH_WAYS = (
    'cross_shard_mean',
    'guard, skip',
    'guard, exclude',
    'shard_update',
    'owned_update(muon)',
    'tower_reduce(4)',
)
# Types of axes do not depend on the chip, so XLA for TPUs, which takes longer,
# compiles one of them.
KINDS = {TPU: ('Explicit',), GPU: ('Auto', 'Explicit')}
PLAIN_JIT = {
    name: [f'{kind} jit, {case}' for kind in kinds for case in BOTH_WAYS]
    for name, kinds in KINDS.items()
}
WINDOWS = (
    'Explicit jit of 4 batches, cross_shard_mean',
    'Explicit jit of 4 batches, shard_update',
)
CASES = (
    *WINDOWS,
    'by hand',
    'by hand, ZeRO-1',
    'cross_shard_mean',
    *GATES,
    'tower_reduce(4)',
    'shard_update',
    'reproducible.cross_shard_mean',
    'owned_update(muon)',
    'stacked: owned_update(muon, whole_dims=2)',
)
OF_TPU = (
    'large: by hand',
    'large: guard, skip',
    'large: shard_update',
    'leaves: by hand',
    'gpt2: shard_update',
    'gpt2_50304: shard_update',
    'gpt2_50304 bfloat16: shard_update(master_weights)',
)
OF_GPU = (
    'layers: by hand',
    'layers: guard, skip',
    'large: by hand',
    'large: guard, skip',
    'gpt2: shard_update',
    'gpt2 bfloat16: shard_update(master_weights)',
)
# Of parameters that are sharded, and numbers of matrices that are not those of
# the shards.
OWNED = (
    'layers: sharded, owned_update(muon)',
    'gpt2_matrices: sharded, owned_update(muon)',
    'nine: owned_update(muon)',
    'layers: owned_update(muon)',
)
# The first sixty of a thousand.
SMALL = 'leaves: adasum', 'leaves: coordinate_median', 'leaves: majority_vote'
# On one axis of a square, and over the two axes of a pod.
OF_SQUARE = 'large: shard_update', 'large: by hand, ZeRO-1'
PROGRAMS = {
    TPU: (*CASES, *PLAIN_JIT[TPU], *OF_TPU, *OWNED[:1], *OWNED[2:], *SMALL),
    GPU: (*CASES, *PLAIN_JIT[GPU], *OF_GPU, *OWNED, *SMALL),
    POD: ('owned_update(muon)', 'large: shard_update'),
    **dict.fromkeys(SQUARES, OF_SQUARE),
    SQUARES[0]: (*OF_SQUARE, OWNED[1]),
}
# A missing compiler is reported on standard output.
MEASURE = """
import collections, functools, json, sys
import hardware, topology
import optax

# XLA for TPUs compiles each of the five iterations, for up to half a minute.
optax.contrib.muon = functools.partial(optax.contrib.muon, ns_steps=1)

def facts(case):
  *model, case = case.split(': ')
  (model,) = model or ['matrices']
  model, *dtype = model.split()
  shapes = hardware.shapes_of(model, *dtype)[:60]
  if model in ('gpt2', 'gpt2_50304'):
    # The position embedding, one layer of seven leaves, and the tokens.
    shapes = [*shapes[:8], shapes[-1]]
  # Products of many rows take XLA for TPUs as long as the rest.
  rows = 4 if 'owned_update' in case else hardware.rows_of(model)
  found = hardware.measure(case, shapes, mesh, rows)
  times, payload = collections.Counter(), collections.Counter()
  for c in found.report.collectives:
    times[c.primitive] += c.times
    payload[c.primitive] += c.times * c.payload_bytes
  return {
      **found._asdict(),
      'sent': found.report.total_bytes,
      'count': found.report.merged.num_collectives,
      'times': times,
      'payload': payload,
      'report': str(found.report),
  }

try:
  devices = topology.devices(sys.argv[1])
except ModuleNotFoundError as error:
  print(json.dumps(str(error)))
  sys.exit()
sizes = {'data': len(devices)}
if len(devices) == 256:
  sizes = {'data': 16, 'data1': 16}
mesh = topology.mesh(sys.argv[1], sizes)
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
      timeout=1800,
  )
  if done.returncode:
    raise RuntimeError(done.stderr[-3000:])
  return done.stdout


@functools.cache
def measured(name):
  return json.loads(run(MEASURE, name, *PROGRAMS[name]))


def facts(name, case):
  found = measured(name)
  if isinstance(found, str):
    pytest.skip(found)
  return found[case]


class HardwareTest(parameterized.TestCase):

  @cases.parameters(TPU, GPU)
  def test_mean_equals_a_handwritten_mean(self, name):
    by_hand, found = facts(name, 'by hand'), facts(name, 'cross_shard_mean')

    self.assertEqual(found['count'], by_hand['count'])
    self.assertEqual(found['sent'], SENT)
    self.assertAlmostEqual(found['temporary'], by_hand['temporary'], delta=0.1)
    self.assertLess(found['code'], by_hand['code'] + 0.1)
    if name == TPU:
      self.assertEqual(found['count'], 1)

  @cases.parameters(*((name, x) for name in PLAIN_JIT for x in PLAIN_JIT[name]))
  def test_plain_jit_equals_the_mapped_step(self, name, case):
    mapped = facts(name, case.partition(' jit, ')[2])
    found = facts(name, case)

    self.assertEqual(found['times'], mapped['times'])
    self.assertEqual(found['sent'], mapped['sent'])
    self.assertAlmostEqual(found['temporary'], mapped['temporary'], delta=0.1)
    self.assertAlmostEqual(found['code'], mapped['code'], delta=0.1)

  @cases.product(name=(TPU, GPU), case=WINDOWS)
  def test_a_window_of_stacked_gradients_is_reduced_once(self, name, case):
    found = facts(name, case)

    self.assertEqual(found['sent'], SENT)
    self.assertEqual(found['loops'], 1)

  @cases.product(name=(TPU, GPU), gate=GATES)
  def test_gate_selects(self, name, gate):
    plain, found = facts(name, 'by hand'), facts(name, gate)

    self.assertEqual(found['branches'], 0)
    self.assertEqual(found['loops'], 0)
    # On GPUs, `guard` counts the shards after the reduction of the gradients.
    is_late = name == GPU and gate == 'guard, skip'
    self.assertEqual(found['count'], plain['count'] + is_late)
    # To skip, it decides by reduced gradients, of which a few wait for others.
    most = 0.2 if gate == 'guard, skip' else 0.1
    extra = found['temporary'] - plain['temporary']
    self.assertLess(extra, most * PARAMS_MB)

  # XLA for TPUs takes minutes for `layers`.
  @cases.parameters((TPU, 'large'), (GPU, 'layers'), (GPU, 'large'))
  def test_guard_overlaps_reductions_with_the_backward_pass(self, name, model):
    by_hand = facts(name, f'{model}: by hand')
    found = facts(name, f'{model}: guard, skip')

    self.assertEqual(len(found['starts']), len(by_hand['starts']))
    starts = zip(found['starts'], by_hand['starts'], strict=True)
    for start, most in starts:
      self.assertLessEqual(start, most)

  def test_guard_frees_unreduced_gradients(self):
    found = facts(TPU, 'large: guard, skip')

    # The reduced gradients of both matrices wait for the decision.
    self.assertLess(found['temporary'], 550)

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
      (TPU, 'large: shard_update'),
      (TPU, 'gpt2: shard_update'),
      (TPU, 'gpt2_50304: shard_update'),
      (GPU, 'shard_update'),
      (GPU, 'gpt2: shard_update'),
      (POD, 'large: shard_update'),
      *((name, OF_SQUARE[0]) for name in SQUARES),
      (TPU, 'owned_update(muon)'),
      (GPU, 'owned_update(muon)'),
      (TPU, 'stacked: owned_update(muon, whole_dims=2)'),
      (GPU, 'stacked: owned_update(muon, whole_dims=2)'),
  )
  def test_slices_are_summed_by_reduce_scatters(self, name, case):
    found = facts(name, case)

    megabytes = MEGABYTES[case.split(': ')[0] if ': ' in case else 'matrices']
    scattered = found['payload']['reduce_scatter'] / 1e6
    self.assertGreater(scattered, 0.99 * megabytes)
    of_ring = 2 * (1 - 1 / SHARDS[name]) * megabytes
    # XLA sends a few rows of the embedding on for themselves.
    extra = 5 if 'gpt2' in case else 0
    self.assertLess(found['sent'] / 1e6, 1.001 * of_ring + extra)

  @cases.parameters(*SQUARES)
  def test_report_warns_of_a_sum_that_is_cut(self, name):
    found, by_hand = (facts(name, case) for case in OF_SQUARE)

    self.assertIn('summed whole, then cut', by_hand['report'])
    self.assertNotIn('summed whole', found['report'])
    self.assertLess(found['sent'], 0.7 * by_hand['sent'])

  @cases.parameters(
      # Megabytes of the matrices. For TPUs, those of four shapes are compiled
      # for the larger slice only.
      (TPU, OWNED[0], 12 * 4 * 2048**2 / 1e6),
      (GPU, OWNED[0], 12 * 4 * 2048**2 / 1e6),
      (GPU, OWNED[1], 144 * 4 * 768**2 / 1e6),
      (SQUARES[0], OWNED[1], 144 * 4 * 768**2 / 1e6),
  )
  def test_slices_are_exchanged_with_owners(self, name, case, megabytes):
    found = facts(name, case)

    # Each shard sends what it holds, there and back; 12 matrices of a shape go
    # to 16 owners.
    shards = SHARDS[name]
    self.assertEqual(set(found['times']), {'all_to_all'})
    of_all = 2 * (1 - 1 / shards) * megabytes / shards
    self.assertLess(found['sent'] / 1e6, 1.001 * 16 / 12 * of_all)
    self.assertEqual(found['branches'], 0)

  @cases.product(name=(TPU, GPU), case=OWNED[2:])
  def test_owners_send_little_padding(self, name, case):
    found = facts(name, case)

    of_ring = 2 * (1 - 1 / SHARDS[name]) * MEGABYTES[case.split(': ')[0]]
    self.assertLess(found['sent'] / 1e6, 1.1 * of_ring)

  def test_cost_of_owners_does_not_depend_on_the_number_of_chips(self):
    found = facts(POD, 'owned_update(muon)')

    # A ring of 256 sends 255/256, and eight matrices an eighth more as slices
    # for 256 owners.
    self.assertLess(found['sent'], 1.35 * SENT)
    self.assertLess(found['temporary'], 0.1 * PARAMS_MB)

  def test_slices_need_little_memory_and_code(self):
    plain = facts(TPU, 'large: by hand')
    found = facts(TPU, 'large: shard_update')

    self.assertLess(found['temporary'], 2.1 * plain['temporary'])
    self.assertLess(found['code'], 1.5 * plain['code'])

  def test_owners_compile_the_program_of_one_matrix(self):
    plain, found = facts(TPU, 'by hand'), facts(TPU, 'owned_update(muon)')

    # Each of the eight matrices is 0.125 of the parameters.
    self.assertLess(found['temporary'], 0.25 * PARAMS_MB)
    self.assertLess(found['code'], 2 * plain['code'])

  @cases.parameters((TPU, 1.05), (GPU, 1.15))
  def test_an_embedding_is_updated_in_place(self, name, most):
    found = facts(name, f'{GPT2[name]}: shard_update')

    # A copy of it takes 154 MB, copies of a shard's part of its two moments 39
    # MB.
    self.assertLess(found['temporary'], most * MEGABYTES['gpt2'])

  @cases.parameters(TPU, GPU)
  def test_updates_of_master_weights_are_gathered_in_16_bits(self, name):
    wide = facts(name, f'{GPT2[name]}: shard_update')
    found = facts(name, f'{GPT2[name]} bfloat16: shard_update(master_weights)')

    # Gradients are summed in float32. All but a few bytes of short leaves, and
    # rows of the embedding that XLA sends on for themselves.
    self.assertLess(found['sent'], 0.76 * wide['sent'])
    self.assertAlmostEqual(
        found['payload']['reduce_scatter'], wide['payload']['reduce_scatter']
    )
    # Two moments of float32, and the copies.
    self.assertAlmostEqual(found['state'], 1.5 * wide['state'], delta=0.1)
    self.assertAlmostEqual(wide['state'], MEGABYTES[GPT2[name]] / 4, delta=0.1)

  @cases.product(name=(TPU, GPU), case=SMALL)
  def test_small_leaves_share_buffers(self, name, case):
    found = facts(name, case)

    # XLA does not merge all-to-alls. Those of `adasum` have two shapes.
    self.assertBetween(found['times']['all_to_all'], 1, 2)
    if name == TPU:
      self.assertLess(
          found['code'], 3.5 * facts(name, 'leaves: by hand')['code']
      )

  @cases.product(
      name=(TPU, GPU), case=('by hand, ZeRO-1', 'reproducible.cross_shard_mean')
  )
  def test_report_counts_each_byte_once(self, name, case):
    found = facts(name, case)

    # Asynchronous parts of a collective stand in the text of a TPU as often.
    self.assertAlmostEqual(found['sent'], SENT, delta=32)


SLICES = """
import json
import topology
import hardware
import shard_transforms as st
import optax

for sizes in {'slices': 2, 'data': 4}, {'data': 8}:
  mesh = topology.mesh('v5e:2x2', sizes, num_slices=2)
  tx = st.shard_update(optax.adam(1e-3), tuple(sizes))
  params = hardware.shapes_of('matrices')
  step, state = hardware.mapped_step(tx, params, mesh)
  spec = hardware.P(tuple(sizes))
  x = hardware.jax.ShapeDtypeStruct(
      (32, 1024), 'float32', sharding=hardware.NamedSharding(mesh, spec)
  )
  report = st.monitoring.communication_report(
      step, params, state, x, compiled=True
  )
  sent = [
      [c.primitive, c.axes, c.num_slices, c.sent_bytes]
      for c in report.collectives
      if c.payload_bytes > 1e5
  ]
  print(json.dumps(sent))
"""


class SlicesTest(parameterized.TestCase):

  def test_report_counts_what_slices_send_to_each_other(self):
    facts(TPU, 'by hand')

    of_axes, of_one_axis = map(json.loads, run(SLICES).splitlines())

    # A ring of 4 inside of a slice sends 3/4 of 33.6 MB twice, or more often if
    # one axis is in both slices: XLA then sums whole buffers in each slice. The
    # 2 slices send halves of the quarter that remains.
    for axes, most, found in (
        (['slices', 'data'], 2, of_axes),
        (['data', 'data'], 3, of_one_axis),
    ):
      sent = collections.Counter()
      for _, over, num_slices, num_bytes in found:
        self.assertEqual(over, [axes[2 - num_slices]])
        sent[num_slices] += num_bytes
      self.assertAlmostEqual(sent[1], most * 3 / 4 * PARAMS_MB * 1e6, delta=32)
      self.assertAlmostEqual(sent[2], 2 / 2 / 4 * PARAMS_MB * 1e6, delta=32)

  @cases.parameters(
      (
          TPU,
          'xla_jf_crs_combiner_threshold_in_bytes',
          'xla_enable_async_all_reduce',
      ),
      (
          GPU,
          'xla_gpu_reduce_scatter_combine_threshold_bytes',
          'xla_gpu_all_reduce_combine_threshold_bytes',
      ),
  )
  def test_compilers_know_the_options_of_the_page(self, name, *options):
    facts(name, 'by hand')
    for option in options:
      self.assertIn(f'`{option}=', PAGE.read_text(encoding='utf-8'))
    code = """
import hardware, sys, topology
topology_name, *names = sys.argv[1:]
mesh = topology.mesh(topology_name, {'data': 8})
shapes = hardware.shapes_of('matrices')[:2]
for name in *names, 'xla_no_such_option':
  options = {name: 'true' if 'async' in name else '1000000'}
  try:
    hardware.measure('by hand', shapes, mesh, options=options)
    print(name)
  except Exception as error:
    print(type(error).__name__)
"""

    printed = run(code, name, *options).split()
    self.assertEqual(printed, [*options, 'JaxRuntimeError'])


class SetUpTest(parameterized.TestCase):

  @cases.parameters(
      (
          TPU,
          ('v9:2x4', 8, "must be a TPU slice .* got 'v9:2x4'"),
          ('v5e', 8, "must be a TPU slice .* got 'v5e'"),
          ('v5e:2x4', 7, 'must multiply to the 8 devices'),
      ),
      (GPU, ('h100:8', 8, "h100:1x8 .* got 'h100:8'")),
  )
  def test_refuses_unknown_arguments(self, name, *mistakes):
    facts(name, 'by hand')
    code = """
import json, sys, topology
for name, size, _ in json.loads(sys.argv[1]):
  try:
    topology.mesh(name, {'data': size})
  except ValueError as error:
    print(json.dumps(str(error)))
"""

    printed = run(code, json.dumps(mistakes)).splitlines()
    for error, (_, _, message) in zip(printed, mistakes, strict=True):
      self.assertRegex(error, message)

  @cases.parameters(TPU, GPU)
  def test_reports_missing_compilers(self, name):
    # A nonexistent version, or no installation.
    code = (
        'import importlib.metadata, topology\n'
        f'importlib.metadata.version = lambda name: "0.0.1"\n'
        f'topology.devices({name!r})'
    )

    with self.assertRaisesRegex(
        RuntimeError, r'ImportError: .* got 0\.0\.1\. Install it by: pip inst'
    ):
      run(code)

  def test_refuses_arrays_on_absent_devices(self):
    facts(TPU, 'by hand')
    code = (
        'import topology, jax, optax, shard_transforms as st\n'
        "mesh = topology.mesh('v5e:2x4', {'data': 8})\n"
        'st.init_state(optax.adam(0.1), jax.numpy.ones(8), mesh)'
    )

    with self.assertRaisesRegex(RuntimeError, 'Pass the shapes of the'):
      run(code)

  def test_recipe_of_the_page_prints_the_shown_output(self):
    facts(TPU, 'by hand')
    text = PAGE.read_text(encoding='utf-8')
    blocks = re.findall(r'^```python\n(.*?)^```', text, re.M | re.S)
    shown = re.findall(r'^```text\n(.*?)^```', text, re.M | re.S)

    code = '\n'.join(blocks)
    printed = run(f'exec(compile({code!r}, "step.py", "exec"))')
    if jax.__version_info__[:2] == (0, 10):
      self.assertEqual(printed, ''.join(shown))
