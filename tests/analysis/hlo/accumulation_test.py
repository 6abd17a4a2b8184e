"""Programs that could reduce once, and programs that could not."""

from absl.testing import parameterized
import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
import optax

import cases
import modes
import shard_transforms
from shard_transforms.monitoring import hlo_wire_report
from shard_transforms.monitoring import wire_report


def sharding(*spec):
  return NamedSharding(modes.mesh(), P(*spec))


def array(*shape, spec=(), dtype=jnp.float32):
  return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding(*spec))


def gradient(w, x):
  return jax.grad(lambda w: jnp.mean(jnp.tanh(x @ w) ** 2))(w)


def stacked(layers, x):
  """Returns the gradient of layers that a loop runs."""

  def loss(layers):
    return lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, layers)[0].sum()

  return jax.grad(loss)(layers)


def shared(w, x):
  """Returns the gradient of five layers with the same parameters."""

  def loss(w):
    return lax.fori_loop(0, 5, lambda _, x: jnp.tanh(x @ w), x).sum()

  return jax.grad(loss)(w)


def accumulate(combine, gradient=gradient):
  """Returns a step that combines the gradients of micro-batches in a scan."""

  def step(w, xs):
    def turn(total, x):
      return combine(total, gradient(w, x)), None

    return lax.scan(turn, jnp.zeros_like(w), xs)[0]

  return step


W, X = array(16, 4), array(64, 16, spec=('data',))
MICRO_BATCHES = W, array(4, 64, 16, spec=(None, 'data'))


class LoopTest(parameterized.TestCase):

  @cases.parameters(
      lambda total, grad: total + grad,
      lambda total, grad: total - 0.5 * grad,
      lambda total, grad: (total.T + grad.T / 3).T,
  )
  def test_warns_of_a_reduction_that_could_wait(self, combine):
    report = wire_report(accumulate(combine), *MICRO_BATCHES, compiled=True)

    (warning,) = report.warnings
    self.assertContainsInOrder(
        [
            # XLA has the gradient transposed.
            '`psum`',
            'reduces float32[4,16] in each of 4 turns of a loop that only adds',
            'which sends 1,792 bytes: accumulate on each shard and reduce once',
            "by `accumulated_value_and_grad(loss_fn, 'data')`",
            "`tower_reduce(num_towers, inner, axis_name='data')` under",
        ],
        warning,
    )
    self.assertEqual(report.total_bytes, 1792)

  def test_warns_where_the_turns_are_not_known(self):
    def step(w, x, count):
      def turn(i, total):
        return total + gradient(w, x * i)

      return lax.fori_loop(0, count, turn, jnp.zeros_like(w))

    report = wire_report(
        step,
        *(array(16, 4), array(64, 16, spec=('data',)), array(dtype=jnp.int32)),
        compiled=True,
    )

    (warning,) = report.warnings
    self.assertIn('in each turn of a loop', warning)
    self.assertTrue(report.collectives[0].in_while)

  @cases.parameters(stacked, shared)
  def test_warns_of_what_the_layers_of_an_inner_loop_give(self, gradient):
    w = array(5, 16, 16) if gradient is stacked else array(16, 16)
    step = accumulate(lambda total, grad: total + grad, gradient=gradient)

    report = wire_report(step, w, MICRO_BATCHES[1], compiled=True)

    (warning,) = report.warnings
    self.assertIn('float32[16,16] in each of 4 turns of a loop that', warning)
    self.assertIn(f'sends {report.total_bytes:,.0f} bytes', warning)
    self.assertEqual(report.num_collectives, 4 * 5)

  @cases.parameters(
      lambda total, grad: jnp.maximum(total, grad),
      lambda total, grad: total + grad[::-1] * total,
      lambda total, grad: total.at[0].add(grad[0] ** 2),
  )
  def test_does_not_warn_of_layers_that_are_read(self, combine):
    step = accumulate(combine, gradient=stacked)

    report = wire_report(
        step, array(5, 16, 16), MICRO_BATCHES[1], compiled=True
    )

    self.assertEqual(report.num_collectives, 4 * 5)
    self.assertEmpty(report.warnings)

  @cases.product(
      widths=((4, 5), (5, 4)), is_first=(True, cases.Repeated(False))
  )
  def test_counts_the_arrays_that_can_wait_alone(self, widths, is_first):
    # One operation reduces both; which of them comes first must not matter.
    def step(xs):
      def turn(carry, x):
        total, largest = carry if is_first else carry[::-1]
        grads = [gradient(jnp.ones((16, width)), x) for width in widths]
        carry = (total + grads[0], jnp.maximum(largest, grads[1]))
        return carry if is_first else carry[::-1], None

      zeros = tuple(jnp.zeros((16, width)) for width in widths)
      return lax.scan(turn, zeros if is_first else zeros[::-1], xs)[0]

    report = wire_report(step, MICRO_BATCHES[1], compiled=True)

    (warning,) = report.warnings
    sent = 4 * 2 * 7 / 8 * 4 * 16
    self.assertIn(f'which sends {sent * widths[0]:,.0f} bytes', warning)
    self.assertEqual(report.total_bytes, sent * sum(widths))
    self.assertEqual(report.merged.num_collectives, 4)

  @cases.parameters(
      # What is not linear in the gradient.
      lambda total, grad: total + grad**2,
      lambda total, grad: jnp.maximum(total, grad),
      # What the next turn reads.
      lambda total, grad: total + grad * total,
      lambda total, grad: 0.9 * total.at[0].set(total[0] ** 2) + grad,
      lambda total, grad: total + grad.astype(jnp.int32),
      # What an inner loop adds up, but the outer one does not.
      lambda total, grad: jnp.maximum(
          total,
          lax.fori_loop(0, 9, lambda _, x: x / 2 - grad, jnp.ones((16, 4))),
      ),
  )
  def test_does_not_warn_of_one_that_cannot(self, combine):
    report = wire_report(accumulate(combine), *MICRO_BATCHES, compiled=True)

    self.assertEqual(report.num_collectives, 4)
    self.assertEmpty(report.warnings)

  @cases.parameters(
      (lambda total, grad: total + grad / 4, 1),
      (lambda total, grad: total + grad * total, 0),
  )
  def test_tells_a_scale_from_a_factor_of_a_scalar(self, combine, num_warnings):
    def step(w, xs):
      def turn(total, x):
        return combine(total, jax.grad(lambda w: jnp.mean(x * w))(w)), None

      return lax.scan(turn, w, xs)[0]

    report = wire_report(step, array(), MICRO_BATCHES[1], compiled=True)

    self.assertEqual(report.num_collectives, 4)
    self.assertLen(report.warnings, num_warnings)

  def test_does_not_warn_of_a_sum_that_is_summed_again(self):
    def step(x):
      return lax.fori_loop(0, 5, lambda _, x: lax.psum(x, 'data') / 2, x)

    spec = P('data')
    mapped = jax.shard_map(
        step, mesh=modes.mesh(), in_specs=spec, out_specs=spec, check_vma=False
    )
    report = wire_report(mapped, array(16, 4, spec=spec), compiled=True)

    self.assertEqual(report.num_collectives, 5)
    self.assertEmpty(report.warnings)

  def test_does_not_warn_of_a_sum_that_ends_the_loop(self):
    def step(w, x):
      def turn(carry):
        scale, total = carry
        return scale + 1, total + gradient(w, x * scale)

      return lax.while_loop(
          lambda carry: carry[1].sum() < 9, turn, (1, jnp.zeros_like(w))
      )[1]

    report = wire_report(
        step, array(16, 4), array(64, 16, spec=('data',)), compiled=True
    )

    self.assertTrue(report.collectives[0].in_while)
    self.assertEmpty(report.warnings)

  def test_does_not_warn_of_a_loop_of_at_most_one_turn(self):
    def step(w, x):
      return lax.while_loop(
          lambda carry: carry[0],
          lambda carry: (False, carry[1] + gradient(w, x)),
          (w[0, 0] > 0, jnp.zeros_like(w)),
      )[1]

    report = wire_report(
        step, array(16, 4), array(64, 16, spec=('data',)), compiled=True
    )

    self.assertTrue(report.collectives[0].conditional)
    self.assertEmpty(report.warnings)

  def test_does_not_warn_of_a_branch_that_some_turns_take(self):
    def step(w, xs, takes):
      def turn(total, given):
        x, is_taken = given
        grads = lax.cond(
            is_taken, gradient, lambda w, _: jnp.zeros_like(w), w, x
        )
        return total + grads, None

      return lax.scan(turn, jnp.zeros_like(w), (xs, takes))[0]

    report = wire_report(
        step, *MICRO_BATCHES, array(4, dtype=jnp.bool_), compiled=True
    )

    self.assertTrue(report.collectives[0].conditional)
    self.assertEmpty(report.warnings)

  def test_does_not_warn_of_results_that_only_a_tuple_holds(self):
    # As where XLA leaves the tuple of an operation as that of the body.
    report = hlo_wire_report(TUPLE_OF_SUMS)

    self.assertLen(report.collectives, 2)
    self.assertEmpty(report.warnings)

  def test_does_not_warn_of_steps_in_a_loop(self):
    def steps(w, xs):
      return lax.scan(lambda w, x: (w - gradient(w, x), None), w, xs)[0]

    report = wire_report(steps, *MICRO_BATCHES, compiled=True)

    self.assertEqual(report.num_collectives, 4)
    self.assertEmpty(report.warnings)

  def test_does_not_warn_of_what_is_stacked(self):
    def step(w, xs):
      return lax.scan(lambda c, x: (c, gradient(w, x)), 0, xs)[1]

    report = wire_report(step, *MICRO_BATCHES, compiled=True)

    self.assertEqual(report.num_collectives, 4)
    self.assertEmpty(report.warnings)


TUPLE_OF_SUMS = """HloModule jit_f, is_scheduled=true, num_partitions=8

%add {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %z = f32[] add(%x, %y)
}

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


ADAM, SGD = optax.adam(0.1), optax.sgd(0.1)


def multi_steps(inner, **options):
  return optax.MultiSteps(inner, 4, **options).gradient_transformation()


def collecting(collect):
  """Returns a transformation whose state is a total, a counter, and Adam's."""

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
def scaled_by_a_norm(grads, total, is_last, tower, inner, params):
  del tower, params
  total = total + grads / jnp.linalg.norm(grads)
  return jnp.where(is_last, total, 0.0), jnp.where(is_last, 0.0, total), inner


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


def fused(tx):
  def step(params, state, x):
    grads = gradient(params, x)
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state

  return step


TOWERS = shard_transforms.tower_reduce(4, ADAM)
COLLECTING = {
    'MultiSteps': multi_steps(ADAM),
    'MultiSteps, sgd': multi_steps(SGD),
    'MultiSteps, sum': multi_steps(ADAM, use_grad_mean=False),
    'apply_every': optax.chain(optax.apply_every(4), ADAM),
    'tower_reduce': TOWERS,
    'in a branch': emptied_in_a_branch,
    'by the last': emptied_by_the_last,
    'by the first': emptied_by_the_first,
}


READING = {
    'adam': ADAM,
    'momentum': optax.sgd(0.1, momentum=0.9),
    'schedule': optax.sgd(optax.cosine_decay_schedule(0.1, 10)),
    'clip': optax.chain(optax.clip_by_global_norm(1.0), ADAM),
    'apply_if_finite': optax.apply_if_finite(ADAM, 3),
    'MultiSteps of one': optax.MultiSteps(ADAM, 1).gradient_transformation(),
    # It looks at each gradient, so none can wait.
    'MultiSteps, skip': multi_steps(
        ADAM, should_skip_update_fn=optax.skip_not_finite
    ),
    'shown each time': shown_each_time,
    'momentum that starts again': momentum_that_starts_again,
    'shown by both branches': shown_by_both_branches,
    'scaled by a norm': scaled_by_a_norm,
    'never emptied': never_emptied,
    'kept until the last': kept_until_the_last,
}


class CallsTest(parameterized.TestCase):

  @cases.product(tx=COLLECTING)
  def test_warns_of_calls_that_add_up(self, tx):
    tx = COLLECTING[tx]

    report = wire_report(call(tx), W, state_of(tx), X, compiled=True)

    (warning,) = report.warnings
    self.assertContainsInOrder(
        [
            'reduces float32[4,16] in each call, and only adds up the results',
            'which sends 448 bytes: accumulate on each shard and reduce once,',
            "by `tower_reduce(num_towers, inner, axis_name='data')` under",
        ],
        warning,
    )

  def test_warns_where_updates_are_applied_in_place(self):
    report = wire_report(fused(TOWERS), W, state_of(TOWERS), X, compiled=True)

    (warning,) = report.warnings
    self.assertIn('in each call, and only adds up the results', warning)

  @cases.product(tx=COLLECTING)
  def test_warns_of_a_scan_of_such_calls(self, tx):
    tx = COLLECTING[tx]

    report = wire_report(
        scanned(tx), W, state_of(tx), MICRO_BATCHES[1], compiled=True
    )

    (warning,) = report.warnings
    self.assertIn('in each of 4 turns of a loop that only adds up', warning)

  @cases.product(tx=READING)
  def test_does_not_warn_of_a_step_that_reads_the_gradient(self, tx):
    tx = READING[tx]

    report = wire_report(call(tx), W, state_of(tx), X, compiled=True)

    self.assertEqual(report.num_collectives, 1)
    self.assertEmpty(report.warnings)

  def test_does_not_warn_of_a_number_for_a_log(self):
    def step(w, total, count, x):
      loss, grad = jax.value_and_grad(lambda w: jnp.mean(jnp.tanh(x @ w) ** 2))(
          w
      )
      total = jnp.where(count % 100 == 0, 0.0, total) + loss
      return w - grad, total, count + 1

    report = wire_report(
        step, W, array(), array(dtype=jnp.int32), X, compiled=True
    )

    self.assertEqual(report.num_collectives, 2)
    self.assertEmpty(report.warnings)

  def test_a_branch_may_take_nothing(self):
    (warning,) = hlo_wire_report(EMPTIED_FROM_NOTHING).warnings

    self.assertIn('reduces float32[3] in each call, and only adds', warning)


EMPTIED_FROM_NOTHING = """HloModule jit_f, is_scheduled=true, num_partitions=8

%add {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %z = f32[] add(%x, %y)
}

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


class PartsTest(parameterized.TestCase):

  @cases.parameters(
      lambda grads: sum(grads),
      lambda grads: ADAM.update(sum(grads) / 4, ADAM.init(W))[0],
      lambda grads: (grads[0] - grads[1] / 3) - (grads[2] + grads[3]).T.T,
  )
  def test_warns_of_a_loop_in_python(self, combine):
    def step(w, xs):
      return combine([gradient(w, xs[i]) for i in range(4)])

    report = wire_report(step, *MICRO_BATCHES, compiled=True)

    (warning,) = report.warnings
    self.assertContainsInOrder(
        [
            'reduces 4 float32[4,16] one by one, and only adds up the results',
            'which sends 1,792 bytes: accumulate on each shard and reduce once',
            "as `accumulated_value_and_grad(loss_fn, 'data')` does for grad",
        ],
        warning,
    )

  def test_warns_once_of_all_leaves(self):
    def step(params, xs):
      def loss(params, x):
        up, down = params
        return jnp.mean((jnp.tanh(x @ up) @ down) ** 2)

      grads = [jax.grad(loss)(params, xs[i]) for i in range(4)]
      return jax.tree.map(lambda *grads: sum(grads), *grads)

    report = wire_report(
        step, (array(16, 4), array(4, 2)), MICRO_BATCHES[1], compiled=True
    )

    (warning,) = report.warnings
    self.assertIn('4 float32[4,16]', warning)
    self.assertIn('4 float32[2,4]', warning)
    self.assertIn('sends 2,016 bytes', warning)

  def test_warns_of_a_loop_that_is_unrolled(self):
    def step(w, xs):
      def turn(total, x):
        return total + gradient(w, x), None

      return lax.scan(turn, jnp.zeros_like(w), xs, unroll=4)[0]

    report = wire_report(step, *MICRO_BATCHES, compiled=True)

    (warning,) = report.warnings
    self.assertIn('reduces 4 float32[4,16] one by one', warning)

  def test_warns_once_of_a_loop_that_is_unrolled_in_part(self):
    def step(w, xs):
      def turn(total, x):
        return total + gradient(w, x), None

      return lax.scan(turn, jnp.zeros_like(w), xs, unroll=2)[0]

    report = wire_report(step, *MICRO_BATCHES, compiled=True)

    (warning,) = report.warnings
    self.assertIn('reduces 2 float32[4,16] in each of 2 turns', warning)

  @cases.parameters(lax.psum, lax.pmax)
  def test_does_not_warn_of_a_maximum(self, reduce):
    def step(x):
      def turn(i, total):
        return total + reduce(x * (i + 1), modes.AXIS)

      unrolled = sum(reduce(x[i] + i, modes.AXIS) for i in range(2))
      return lax.fori_loop(0, 4, turn, jnp.zeros_like(x)), unrolled

    mapped = jax.shard_map(
        step, mesh=modes.mesh(), in_specs=P(), out_specs=P(), check_vma=False
    )
    report = wire_report(mapped, array(16, 4), compiled=True)

    self.assertLen(report.warnings, 2 if reduce is lax.psum else 0)

  @cases.parameters(
      lambda grads: sum(jnp.tanh(grad) for grad in grads),
      lambda grads: sum(grads) + jnp.stack(grads).max(0),
      lambda grads: jnp.stack(grads),
      lambda grads: (sum(grads), *grads),
      lambda grads: jnp.where(grads[0][0, 0] > 0, grads[1], grads[2]),
      lambda grads: grads[0] * grads[1] + grads[2] * grads[3],
  )
  def test_does_not_warn_of_other_uses(self, combine):
    def step(w, xs):
      return combine([gradient(w, xs[i]) for i in range(4)])

    report = wire_report(step, *MICRO_BATCHES, compiled=True)

    self.assertEmpty(report.warnings)

  def test_does_not_warn_of_different_terms(self):
    def step(w, xs):
      first = gradient(w, xs[0])
      second = gradient(w, xs[1])
      return first + second

    report = wire_report(step, *MICRO_BATCHES, compiled=True)

    self.assertEqual(report.num_collectives, 2)
    self.assertEmpty(report.warnings)


class SlicedSumTest(parameterized.TestCase):

  @cases.parameters(
      lambda total, grad: total + grad, lambda total, grad: total - grad / 4
  )
  def test_warns_of_parameters_that_are_sharded(self, combine):
    step = jax.jit(accumulate(combine), out_shardings=sharding('data'))
    w = array(16, 4, spec=('data',))

    report = wire_report(step, w, MICRO_BATCHES[1], compiled=True)

    wait, cut = report.warnings
    self.assertIn('in each of 4 turns of a loop that only adds up', wait)
    self.assertContainsInOrder(
        [
            'sums the whole float32[4,16], which sends 1,792 bytes, but each',
            'keeps one part in 8: a reduce-scatter sends half.',
            '`accumulated_value_and_grad` with `param_specs` (FSDP) and',
        ],
        cut,
    )

  def test_warns_of_a_state_that_is_sharded(self):
    momentum = array(16, 4, spec=('data',))

    def step(w, momentum, x):
      momentum = 0.9 * momentum + gradient(w, x) / 2
      return w - 0.1 * momentum, momentum

    shardings = sharding(), sharding('data')
    report = wire_report(
        jax.jit(step, out_shardings=shardings), W, momentum, X, compiled=True
    )

    (warning,) = report.warnings
    self.assertIn('sums the whole float32[4,16], which sends 448', warning)

  @cases.parameters(
      # What all shards keep the same part of.
      lambda total, i: total[2:4],
      lambda total, i: lax.dynamic_slice_in_dim(total, i, 2),
      # What is used whole, too.
      lambda total, i: (own_part(total), total),
      # Parts that overlap.
      lambda total, i: own_part(total, 4),
      # What may be the same part, or any other.
      lambda total, i: lax.dynamic_slice_in_dim(
          total, (i * jnp.arange(8))[lax.axis_index(modes.AXIS)], 2
      ),
  )
  def test_does_not_warn_of_other_parts(self, part):
    def step(x, i):
      return part(lax.psum(x, modes.AXIS), i)

    mapped = jax.shard_map(
        step,
        mesh=modes.mesh(),
        in_specs=(P(), P()),
        out_specs=P(modes.AXIS),
        check_vma=False,
    )
    report = wire_report(
        mapped, array(16, 4), array(dtype=jnp.int32), compiled=True
    )

    self.assertEqual(report.num_collectives, 1)
    self.assertEmpty(report.warnings)

  def test_does_not_warn_of_the_same_part_in_a_loop(self):
    def step(x, i):
      def turn(x, _):
        total = lax.psum(x, modes.AXIS)
        return x + jnp.tile(lax.dynamic_slice_in_dim(total, i, 2), (8, 1)), None

      return lax.scan(turn, x, length=3)[0]

    mapped = jax.shard_map(
        step, mesh=modes.mesh(), in_specs=P(), out_specs=P(), check_vma=False
    )
    report = wire_report(
        mapped, array(16, 4), array(dtype=jnp.int32), compiled=True
    )

    self.assertEqual(report.num_collectives, 3)
    self.assertEmpty(report.warnings)

  def test_warns_of_a_part_that_a_shard_takes_itself(self):
    def step(x):
      return own_part(lax.psum(x, modes.AXIS))

    spec = P(modes.AXIS)
    mapped = jax.shard_map(
        step, mesh=modes.mesh(), in_specs=P(), out_specs=spec, check_vma=False
    )
    report = wire_report(mapped, array(16, 4), compiled=True)

    (warning,) = report.warnings
    self.assertIn('sums the whole float32[16,4]', warning)
    self.assertIn('a reduce-scatter sends half. XLA', warning)

  @cases.parameters('data', 'model')
  def test_tells_of_another_axis_that_may_choose_the_part(self, axis):
    mesh = jax.make_mesh((2, 2), ('data', 'model'), devices=jax.devices()[:4])
    mapped = jax.shard_map(
        lambda x: own_part(lax.psum(x, 'data'), 8, axis),
        mesh=mesh,
        in_specs=P(),
        out_specs=P(('data', 'model')),
        check_vma=False,
    )

    report = wire_report(
        mapped, jax.ShapeDtypeStruct((16, 4), jnp.float32), compiled=True
    )

    (warning,) = report.warnings
    self.assertIn('half, or a slice before the sum, if another axis', warning)


def own_part(total, size=2, axis=modes.AXIS):
  start = 2 * lax.axis_index(axis)
  return lax.dynamic_slice_in_dim(total, start, size)
