"""Tests of the warning that a program reduces each micro-batch separately."""

from absl.testing import parameterized
import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
import optax

import cases
import modes
import shard_transforms as st
from shard_transforms.monitoring import communication_report
from shard_transforms.monitoring import hlo_communication_report


def sharding(*spec):
  return NamedSharding(modes.mesh(), P(*spec))


def array(*shape, spec=(), dtype=jnp.float32):
  return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding(*spec))


def gradient(w, x):
  return jax.grad(lambda w: jnp.mean(jnp.tanh(x @ w) ** 2))(w)


def stacked(layers, x):
  """Returns the gradient of layers in a loop."""

  def loss(layers):
    return lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, layers)[0].sum()

  return jax.grad(loss)(layers)


def accumulate(combine, gradient=gradient):
  """Returns a step that combines the gradients of micro-batches in a scan."""

  def step(w, xs):
    def turn(total, x):
      return combine(total, gradient(w, x)), None

    return lax.scan(turn, jnp.zeros_like(w), xs)[0]

  return step


W, X = array(16, 4), array(64, 16, spec=('data',))
MICRO_BATCHES = W, array(4, 64, 16, spec=(None, 'data'))
XS = MICRO_BATCHES[1]


def add(total, grad):
  return total + grad


def warnings_of(fn, *args, num_collectives=None):
  """Returns the warnings of a program, which must communicate."""
  report = communication_report(fn, *args, compiled=True)
  assert report.num_collectives > 0
  if num_collectives is not None:
    assert report.num_collectives == num_collectives, report
  return report.warnings


def unmapped(fn, num_args=1):
  """Maps a function of replicated arguments, without tracking types."""
  specs = (P(),) * num_args
  return jax.shard_map(
      fn, mesh=modes.mesh(), in_specs=specs, out_specs=P(), check_vma=False
  )


def total_of(combine):
  return accumulate(combine), MICRO_BATCHES


def of_unknown_length(w, x, count):
  def turn(i, total):
    return total + gradient(w, x * i)

  return lax.fori_loop(0, count, turn, jnp.zeros_like(w))


def unrolled(w, xs):
  def turn(total, x):
    return total + gradient(w, x), None

  return lax.scan(turn, jnp.zeros_like(w), xs, unroll=2)[0]


def in_python(combine):
  return lambda w, xs: combine([gradient(w, xs[i]) for i in range(4)])


def two_leaves(params, xs):
  def loss(params, x):
    up, down = params
    return jnp.mean((jnp.tanh(x @ up) @ down) ** 2)

  grads = [jax.grad(loss)(params, xs[i]) for i in range(4)]
  return jax.tree.map(lambda *grads: sum(grads), *grads)


def of_scalars(w, xs):
  def turn(total, x):
    return total + jax.grad(lambda w: jnp.mean(x * w))(w) / 4, None

  return lax.scan(turn, w, xs)[0]


IN_LOOP = 'float32[4,16] in each of 4 iterations of a loop that only adds'
ONE_BY_ONE = 'reduces 4 float32[4,16] one by one, and only adds up the results'
# A step, its arguments, and words of the warning.
COULD_WAIT = {
    'a difference': (*total_of(lambda t, g: t - 0.5 * g), [IN_LOOP]),
    'moved': (*total_of(lambda t, g: (t.T + g.T / 3).T), [IN_LOOP]),
    'turns that are not known': (
        *(of_unknown_length, (W, X, array(dtype=jnp.int32))),
        ['in each iteration of a loop'],
    ),
    'layers in a loop': (
        *(accumulate(add, stacked), (array(5, 16, 16), XS)),
        ['float32[16,16] in each of 4 iterations of a loop', 'sends 35,840 by'],
    ),
    'scalars': (of_scalars, (array(), XS), ['in each of 4 iterations']),
    'in Python, moved': (
        in_python(lambda x: (x[0] - x[1] / 3) - (x[2] + x[3]).T.T),
        *(MICRO_BATCHES, [ONE_BY_ONE]),
    ),
    'all leaves at once': (
        *(two_leaves, ((array(16, 4), array(4, 2)), XS)),
        ['4 float32[2,4]', 'sends 2,016 bytes'],
    ),
    'unrolled in part': (
        *(unrolled, MICRO_BATCHES),
        ['reduces 2 float32[4,16] in each of 2 iterations'],
    ),
}


def summed_again(x):
  return lax.fori_loop(0, 5, lambda _, x: lax.psum(x, 'data') / 2, x)


def ends_the_loop(w, x):
  def turn(carry):
    scale, total = carry
    return scale + 1, total + gradient(w, x * scale)

  start = 1, jnp.zeros_like(w)
  return lax.while_loop(lambda carry: carry[1].sum() < 9, turn, start)[1]


def at_most_one_turn(w, x):
  return lax.while_loop(
      lambda carry: carry[0],
      lambda carry: (False, carry[1] + gradient(w, x)),
      (w[0, 0] > 0, jnp.zeros_like(w)),
  )[1]


def in_some_turns(w, xs, takes):
  def turn(total, given):
    x, is_taken = given
    grads = lax.cond(is_taken, gradient, lambda w, _: jnp.zeros_like(w), w, x)
    return total + grads, None

  return lax.scan(turn, jnp.zeros_like(w), (xs, takes))[0]


def logging(w, total, count, x):
  loss, grad = jax.value_and_grad(lambda w: jnp.mean(jnp.tanh(x @ w) ** 2))(w)
  total = jnp.where(count % 100 == 0, 0.0, total) + loss
  return w - grad, total, count + 1


def maxima(x):
  def turn(i, total):
    return total + lax.pmax(x * (i + 1), modes.AXIS)

  unrolled = sum(lax.pmax(x[i] + i, modes.AXIS) for i in range(2))
  return lax.fori_loop(0, 4, turn, jnp.zeros_like(x)), unrolled


def different_terms(w, xs):
  # Two lines of the program.
  first = gradient(w, xs[0])
  second = gradient(w, xs[1])
  return first + second


LAYERS = array(5, 16, 16), XS
CANNOT_WAIT = {
    # Results that are not linear in the gradient.
    'a square': total_of(lambda t, g: t + g**2),
    'a maximum of both': total_of(jnp.maximum),
    # Values that the next iteration reads.
    'a factor': total_of(lambda t, g: t + g * t),
    'a part': total_of(lambda t, g: 0.9 * t.at[0].set(t[0] ** 2) + g),
    # Values that an inner loop adds up, but the outer loop does not.
    'an inner loop': total_of(
        lambda t, g: jnp.maximum(
            t, lax.fori_loop(0, 9, lambda _, x: x / 2 - g, jnp.ones_like(g))
        )
    ),
    'layers, read': (
        *(accumulate(lambda t, g: t + g[::-1] * t, stacked), LAYERS),
    ),
    'summed again': (unmapped(summed_again), (array(16, 4),)),
    'ends the loop': (ends_the_loop, (W, X)),
    'at most one turn': (at_most_one_turn, (W, X)),
    'in some turns': (
        *(in_some_turns, (*MICRO_BATCHES, array(4, dtype=jnp.bool_))),
    ),
    'steps': (
        lambda w, xs: lax.scan(lambda w, x: (w - gradient(w, x), None), w, xs),
        MICRO_BATCHES,
    ),
    'stacked': (
        lambda w, xs: lax.scan(lambda c, x: (c, gradient(w, x)), 0, xs)[1],
        MICRO_BATCHES,
    ),
    'a number for a log': (
        *(logging, (W, array(), array(dtype=jnp.int32), X)),
    ),
    'maxima': (unmapped(maxima), (array(16, 4),)),
    'functions': (
        in_python(lambda grads: sum(jnp.tanh(grad) for grad in grads)),
        MICRO_BATCHES,
    ),
    'used twice': (
        in_python(lambda grads: sum(grads) + jnp.stack(grads).max(0)),
        MICRO_BATCHES,
    ),
    'a choice': (
        in_python(lambda x: jnp.where(x[0][0, 0] > 0, x[1], x[2])),
        MICRO_BATCHES,
    ),
    'different terms': (different_terms, MICRO_BATCHES),
}

ADAM = optax.adam(0.1)


def multi_steps(inner, **options):
  return optax.MultiSteps(inner, 4, **options).gradient_transformation()


def collecting(collect):
  """Returns a transformation with a total, a counter, and the state of Adam."""

  def init(params):
    return jnp.zeros_like(params), jnp.int32(0), ADAM.init(params)

  def update(grads, state, params):
    total, tower, inner = state
    is_last = tower % 4 == 3
    updates, total, inner = collect(grads, total, is_last, tower, inner, params)
    return updates, (total, tower + 1, inner)

  return optax.GradientTransformation(init, update)


@collecting
def emptied_in_a_branch(grads, total, is_last, tower, inner, params):
  del tower

  def apply(total, inner):
    updates, inner = ADAM.update(total / 4, inner, params)
    return updates, jnp.zeros_like(total), inner

  def wait(total, inner):
    return jnp.zeros_like(total), total, inner

  return lax.cond(is_last, apply, wait, total + grads, inner)


@collecting
def emptied_by_the_last(grads, total, is_last, tower, inner, params):
  del tower
  total = total + grads
  updates, after = ADAM.update(total, inner, params)
  return jax.tree.map(
      lambda new, old: jnp.where(is_last, new, old),
      (updates, jnp.zeros_like(total), after),
      (jnp.zeros_like(total), total, inner),
  )


@collecting
def emptied_by_the_first(grads, total, is_last, tower, inner, params):
  total = jnp.where(tower % 4 == 0, 0.0, total) + grads

  def apply(inner):
    return ADAM.update(total / 4, inner, params)

  def wait(inner):
    return jnp.zeros_like(total), inner

  updates, inner = lax.cond(is_last, apply, wait, inner)
  return updates, total, inner


@collecting
def shown_each_time(grads, total, is_last, tower, inner, params):
  del tower, params
  total = total + grads
  return total, jnp.where(is_last, 0.0, total), inner


@collecting
def momentum_that_starts_again(grads, total, is_last, tower, inner, params):
  del tower, params
  total = 0.9 * total + grads
  return -total, jnp.where(is_last, 0.0, total), inner


@collecting
def shown_by_both_branches(grads, total, is_last, tower, inner, params):
  del tower, params
  total = total + grads
  updates, total = lax.cond(
      is_last,
      lambda total: (-total, jnp.zeros_like(total)),
      lambda total: (jnp.tanh(total), total),
      total,
  )
  return updates, total, inner


@collecting
def never_emptied(grads, total, is_last, tower, inner, params):
  del tower, params
  total = total + grads
  return jnp.where(is_last, total, 0.0), total, inner


@collecting
def kept_until_the_last(grads, total, is_last, tower, inner, params):
  del total, tower, params
  return jnp.where(is_last, grads, 0.0), jnp.where(is_last, 0.0, grads), inner


def state_of(tx):
  return jax.tree.map(
      lambda x: array(*x.shape, dtype=x.dtype), jax.eval_shape(tx.init, W)
  )


def call(tx):
  def step(params, state, x):
    updates, state = tx.update(gradient(params, x), state, params)
    return optax.apply_updates(params, updates), state

  return step


def scanned(tx):
  def steps(params, state, xs):
    def turn(carry, x):
      return call(tx)(*carry, x), None

    return lax.scan(turn, (params, state), xs)[0]

  return steps


TOWERS = st.tower_reduce(4, ADAM)
COLLECTING = {
    'MultiSteps': multi_steps(ADAM),
    'apply_every': optax.chain(optax.apply_every(4), ADAM),
    'tower_reduce': TOWERS,
    'in a branch': emptied_in_a_branch,
    'by the last': emptied_by_the_last,
    'by the first': emptied_by_the_first,
}

READING = {
    'momentum': optax.sgd(0.1, momentum=0.9),
    'clip': optax.chain(optax.clip_by_global_norm(1.0), ADAM),
    'apply_if_finite': optax.apply_if_finite(ADAM, 3),
    'MultiSteps of one': optax.MultiSteps(ADAM, 1).gradient_transformation(),
    # The transformation reads each gradient, so no reduction can wait.
    'MultiSteps, skip': multi_steps(
        ADAM, should_skip_update_fn=optax.skip_not_finite
    ),
    'shown each time': shown_each_time,
    'momentum that starts again': momentum_that_starts_again,
    'shown by both branches': shown_by_both_branches,
    'never emptied': never_emptied,
    'kept until the last': kept_until_the_last,
}


ADD = """HloModule jit_f, is_scheduled=true, num_partitions=8

%add {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %z = f32[] add(%x, %y)
}
"""
TUPLE_OF_SUMS = """
%is_due {
  %p = (f32[3], f32[3]) parameter(0)
  %first = f32[3] get-tuple-element(%p), index=0
  ROOT %r = pred[] custom-call(%first)
}

%body {
  %p = (f32[3], f32[3]) parameter(0)
  %first = f32[3] get-tuple-element(%p), index=0
  %second = f32[3] get-tuple-element(%p), index=1
  ROOT %r = (f32[3], f32[3]) all-reduce(%first, %second), \
replica_groups=mesh['data'=8] {'data'}, to_apply=%add
}

ENTRY %main {
  %p = (f32[3], f32[3]) parameter(0)
  ROOT %r = (f32[3], f32[3]) while(%p), condition=%is_due, body=%body
}
"""


EMPTIED_FROM_NOTHING = """
%empty {
  %nothing = () parameter(0)
  %zero = f32[] constant(0)
  %zeros = f32[3] broadcast(%zero), dimensions={}
  ROOT %r = (f32[3]) tuple(%zeros)
}

%wait {
  %p = (f32[3]) parameter(0)
  %total = f32[3] get-tuple-element(%p), index=0
  ROOT %r = (f32[3]) tuple(%total)
}

ENTRY %main {
  %is_last = pred[] parameter(0)
  %total = f32[3] parameter(1)
  %x = f32[3] parameter(2)
  %sum = f32[3] all-reduce(%x), replica_groups=mesh['data'=8] {'data'}, \
to_apply=%add
  %new = f32[3] add(%total, %sum)
  %nothing = () tuple()
  %given = (f32[3]) tuple(%new)
  ROOT %r = (f32[3]) conditional(%is_last, %nothing, %given), \
true_computation=%empty, false_computation=%wait
}
"""


class AccumulationTest(parameterized.TestCase):

  def test_recommends_a_cure_for_a_loop(self):
    report = communication_report(
        accumulate(add), *MICRO_BATCHES, compiled=True
    )

    (warning,) = report.warnings
    self.assertContainsInOrder(
        [
            # The gradient is transposed in XLA.
            '`psum`',
            f'reduces {IN_LOOP}',
            'which sends 1,792 bytes: accumulate on each shard and reduce once',
            "by `accumulated_value_and_grad(loss_fn, 'data')`",
            "`tower_reduce(num_towers, inner, axis_name='data')` under",
        ],
        warning,
    )
    self.assertEqual(report.total_bytes, 1792)

  @cases.parameters(*COULD_WAIT)
  def test_warns_about_a_reduction_that_could_wait(self, name):
    step, given, words = COULD_WAIT[name]

    (warning,) = warnings_of(step, *given)

    self.assertContainsInOrder(words, warning)

  @cases.parameters(*CANNOT_WAIT)
  def test_does_not_warn_about_a_reduction_that_cannot_wait(self, name):
    step, given = CANNOT_WAIT[name]

    self.assertEmpty(warnings_of(step, *given))

  @cases.product(widths=((4, 5), (5, 4)))
  def test_counts_only_arrays_that_can_wait(self, widths):
    # One operation reduces both arrays, in either order.
    def step(xs):
      def turn(carry, x):
        grads = [gradient(jnp.ones_like(w), x) for w in carry]
        return (carry[0] + grads[0], jnp.maximum(carry[1], grads[1])), None

      zeros = tuple(jnp.zeros((16, n), jnp.float32) for n in widths)
      return lax.scan(turn, zeros, xs)[0]

    report = communication_report(step, XS, compiled=True)

    (warning,) = report.warnings
    sent = 4 * 2 * 7 / 8 * 4 * 16
    self.assertIn(f'which sends {sent * widths[0]:,.0f} bytes', warning)
    self.assertEqual(report.total_bytes, sent * sum(widths))
    self.assertEqual(report.merged.num_collectives, 4)

  @cases.parameters(*COLLECTING)
  def test_warns_about_calls_that_add_up(self, name):
    tx = COLLECTING[name]

    (warning,) = warnings_of(call(tx), W, state_of(tx), X)

    self.assertContainsInOrder(
        [
            'reduces float32[4,16] in each call, and only adds up the results',
            'which sends 448 bytes: accumulate on each shard and reduce once,',
            "by `tower_reduce(num_towers, inner, axis_name='data')` under",
        ],
        warning,
    )

  @cases.parameters('MultiSteps', 'by the first')
  def test_warns_about_a_scan_of_such_calls(self, name):
    tx = COLLECTING[name]

    (warning,) = warnings_of(scanned(tx), W, state_of(tx), XS)

    self.assertIn(
        'in each of 4 iterations of a loop that only adds up', warning
    )

  @cases.parameters(*READING)
  def test_does_not_warn_about_a_step_that_reads_the_gradient(self, name):
    tx = READING[name]

    found = warnings_of(call(tx), W, state_of(tx), X, num_collectives=1)

    self.assertEmpty(found)

  def test_a_branch_may_have_no_operands(self):
    (warning,) = hlo_communication_report(ADD + EMPTIED_FROM_NOTHING).warnings

    self.assertIn('reduces float32[3] in each call, and only adds', warning)

  def test_does_not_warn_about_results_in_a_tuple(self):
    # XLA may use the tuple of an operation as the tuple of the body.
    report = hlo_communication_report(ADD + TUPLE_OF_SUMS)

    self.assertLen(report.collectives, 2)
    self.assertEmpty(report.warnings)
