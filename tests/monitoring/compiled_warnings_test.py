"""Programs that barely earn a warning, and programs that barely do not."""

from absl.testing import parameterized
import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import cases
import modes
from shard_transforms.monitoring import hlo_wire_report
from shard_transforms.monitoring import wire_report


def sharding(*spec):
  return NamedSharding(modes.mesh(), P(*spec))


def array(*shape, spec=(), dtype=jnp.float32):
  return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding(*spec))


def _whole(w):
  return lax.with_sharding_constraint(w, sharding())


class RepeatedGatherTest(parameterized.TestCase):

  def test_warns_of_what_is_gathered_in_each_turn(self):
    # What is computed again for the gradient, XLA does not take out of a loop.
    @jax.checkpoint
    def layer(w, x):
      return jnp.tanh(x @ _whole(w))

    def step(w, x, ys):
      def loss(w):
        return lax.scan(lambda x, y: (layer(w, x) + y, None), x, ys)[0].sum()

      return jax.grad(loss)(w)

    report = wire_report(
        step,
        array(16, 16, spec=('data',)),
        array(16, 16),
        array(5, 16, 16),
        compiled=True,
    )

    (warning,) = report.warnings
    self.assertRegex(
        warning,
        r'`all_gather` .* gathers the same float32\[16,16\] in each of 5 turns'
        ' of a loop, which sends 4,480 bytes: gather it once before the loop',
    )


class FewBitsTest(parameterized.TestCase):

  # On CPU, XLA itself sums `bfloat16` in `float32`.
  @cases.parameters('f16', 'bf16', 'f8e5m2')
  def test_warns_of_a_sum_that_rounds(self, dtype):
    report = hlo_wire_report(_all_reduce(dtype, 'add'))

    (warning,) = report.warnings
    self.assertRegex(
        warning,
        r"`psum` \('grads', train.py:7\) sums b?float\w+\[24\] over 8 shards"
        r' with the rounding of b?float\w+, which sends (42|84) bytes: cast',
    )
    self.assertIn('cast to float32 before', warning)

  @cases.parameters(
      ('f32', 'add'), ('s8', 'add'), ('f16', 'maximum'), ('c64', 'add')
  )
  def test_does_not_warn_of_one_that_does_not(self, dtype, combine):
    self.assertEmpty(hlo_wire_report(_all_reduce(dtype, combine)).warnings)

  @cases.parameters(('float16', 1), ('bfloat16', 0), ('float32', 0))
  def test_warns_of_what_jax_compiles(self, dtype, num_warnings):
    mapped = modes.map_shards(
        'shard_map', lambda _, x: lax.psum(x, modes.AXIS)[None][0]
    )

    x = jax.ShapeDtypeStruct((8, 24), dtype)
    report = wire_report(mapped, 0.0, x, compiled=True)

    self.assertLen(report.warnings, num_warnings)


def _all_reduce(dtype, combine):
  return f"""HloModule jit_f, is_scheduled=true, num_partitions=8

%reducer {{
  %x = {dtype}[] parameter(0)
  %y = {dtype}[] parameter(1)
  ROOT %z = {dtype}[] {combine}(%x, %y)
}}

ENTRY %main {{
  %p = {dtype}[24] parameter(0)
  ROOT %r = {dtype}[24] all-reduce(%p), \
replica_groups=mesh['data'=8] {{'data'}}, to_apply=%reducer, \
metadata={{op_name="jit(f)/grads/psum" \
source_file="/home/user/train.py" source_line=7}}
}}
"""


class SlicedGatherTest(parameterized.TestCase):

  def test_warns_of_what_is_gathered_to_take_a_slice(self):
    def step(table, i):
      return _whole(lax.dynamic_slice_in_dim(table, i, 4))

    report = wire_report(
        step, array(64, 16, spec=('data',)), array(dtype='int32'), compiled=True
    )

    (warning,) = report.warnings
    self.assertRegex(
        warning,
        r'`all_gather`.* gathers the whole float32\[64,16\], which sends 3,584'
        ' bytes, but only 64 of its elements are used: slice it before',
    )


LAST_LOOP = r"""HloModule jit_f, is_scheduled=true, num_partitions=8

%is_due {
  %p = (s32[], f32[2,32]) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  ROOT %r = pred[] custom-call(%i)
}

%body {
  ROOT %p = (s32[], f32[2,32]) parameter(0)
}

ENTRY %main {
  %i = s32[] parameter(0)
  %state = f32[2,32] parameter(1), metadata={op_name="state[\'mu\']"}
  %q = f32[8,2,4] reshape(%state)
  %m = f32[8,2,4] all-to-all(%q), replica_groups=mesh['data'=8] {'data'}
  %whole = f32[2,32] reshape(%m)
  %t = (s32[], f32[2,32]) tuple(%i, %whole)
  ROOT %r = (s32[], f32[2,32]) while(%t), condition=%is_due, body=%body
}
"""


def _sharded(x, *spec):
  return lax.with_sharding_constraint(x, sharding(*spec))


class ReshardedArgumentTest(parameterized.TestCase):

  def test_warns_of_state_that_changes_its_sharding(self):
    def step(state, x):
      inside = _sharded(state['mu'], None, 'data')
      return {'mu': _sharded(inside * 2 + x, 'data')}

    state = {'mu': array(16, 32, spec=('data',))}
    report = wire_report(step, state, array(), compiled=True)

    (warning,) = report.warnings
    self.assertRegex(
        warning,
        r'`all_to_all`.* changes the sharding of the argument `state\['
        r"'mu'\]` \(float32\[2,32\] on a device\) in each step, which sends 224"
        ' bytes: pass it in',
    )

  def test_warns_of_state_that_a_last_loop_returns(self):
    report = hlo_wire_report(LAST_LOOP)

    (warning,) = report.warnings
    self.assertIn(
        "changes the sharding of the argument `state['mu']` (float32[2,32]",
        warning,
    )


def of_layers(layers, x):
  return lax.scan(lambda x, w: (x @ _whole(w), None), x, layers)[0]


def of_a_batch(state, x):
  return state + _sharded(x, None, 'data').sum(0)[0]


def asked_for(state):
  ring = [(i, (i + 1) % 8) for i in range(8)]
  spec = P(modes.AXIS)
  return jax.shard_map(
      lambda x: lax.ppermute(x, modes.AXIS, ring),
      mesh=modes.mesh(),
      in_specs=spec,
      out_specs=spec,
  )(state)


def rows(start, size):
  return lambda x: lax.dynamic_slice_in_dim(x, start, size)


SQUARE = array(16, 16, spec=('data',)), array(16, 16)
TABLE = array(64, 16, spec=('data',)), array(dtype='int32')
BARELY_NOT = {
    # The compiler takes it out of the loop.
    'gathered once': (
        lambda w, x: lax.scan(lambda x, _: (x @ _whole(w), None), x, length=5)[
            0
        ],
        *(SQUARE, 1),
    ),
    'layers': (
        *(of_layers, (array(5, 16, 16, spec=(None, 'data')), SQUARE[1])),
        5,
    ),
    # The parts are the whole.
    'parts': (lambda table, i: jnp.split(_whole(table), 2), TABLE, 1),
    'part and whole': (
        lambda table, i: (rows(i, 4)(table), _whole(table)),
        *(TABLE, None),
    ),
    'all rows': (
        lambda table, i: rows(i, 64)(jnp.tanh(_whole(table))),
        *(TABLE, None),
    ),
    # So is what is left of a padded array.
    'padded': (lambda table, i: _whole(table)[:61], TABLE, None),
    'other dimension': (
        lambda table, i: lax.dynamic_slice_in_dim(table, i, 4, axis=1),
        *(TABLE, 0),
    ),
    'a batch': (
        *(of_a_batch, (array(7, 3), array(16, 32, spec=('data',)))),
        None,
    ),
    'asked for': (asked_for, (array(16, spec=('data',)),), 1),
}


class BarelyNotTest(parameterized.TestCase):

  @cases.parameters(*BARELY_NOT)
  def test_does_not_warn(self, name):
    step, given, num_collectives = BARELY_NOT[name]

    report = wire_report(step, *given, compiled=True)

    self.assertEmpty(report.warnings)
    if num_collectives is None:
      self.assertGreater(report.num_collectives, 0)
    else:
      self.assertEqual(report.num_collectives, num_collectives)
