"""Whole transformations are tested in elementwise_test and norms_test."""

from absl.testing import parameterized
import jax
from jax import lax
import jax.numpy as jnp

import cases
from shard_transforms._src.analysis import element_flow
from shard_transforms._src.analysis import inlining
from shard_transforms._src.analysis import interpreter

CUT = element_flow.Elements(end_in_zeros=True)
OTHER = element_flow.Elements()
ONE = element_flow.Shared()
TOTAL = element_flow.Shared(num_summed=8)
WIDE_TOTAL = element_flow.Shared(num_summed=16)
PART = element_flow.Partial()
AXIS = 'data'


def total(x):
  return lax.psum(jnp.sum(x), AXIS)


def three():
  return jnp.full(3, 0.5)


def kind_of(fn, *kinds):
  """Returns the kind of what a function makes of values of these kinds."""
  is_array = [isinstance(kind, element_flow.Elements) for kind in kinds]
  values = [jnp.ones((4,) * is_one) for is_one in is_array]
  axis_env = [(AXIS, 8), ('model', 2)]
  jaxpr = jax.make_jaxpr(fn, axis_env=axis_env)(*values)
  program = inlining.flatten(jaxpr.jaxpr)
  flow = element_flow.Flow((AXIS,))
  found = []

  # It reads a program where the axes are bound.
  def follow():
    found.extend(interpreter.interpret(program, kinds, flow))

  jax.make_jaxpr(follow, axis_env=axis_env)()
  (kind,) = found
  return kind, len(flow.sums)


class ElementFlowTest(parameterized.TestCase):

  @cases.parameters(
      (lambda x: x * x, True),
      (lambda x: -jnp.abs(x), True),
      (lambda x: jnp.square(x) + jnp.sqrt(x), True),
      (lambda x: x**3, True),
      (lambda x: 3 * x / 7, True),
      (lambda x: x.astype(jnp.bfloat16), True),
      (lambda x: jnp.maximum(x, 2 * x), True),
      (lambda x: lax.complex(x, x).imag, True),
      (lambda x: x + 1, False),
      (lambda x: jnp.exp(x), False),
      (lambda x: x**0, False),
      (lambda x: x**-2, False),
      (lambda x: 1 / x, False),
      (lambda x: x / x, False),
      (lambda x: jnp.maximum(x, 1), False),
      (lambda x: jnp.where(x == 0, 1, x), False),
      # Of -0.0, which is zero, too.
      (lambda x: lax.bitcast_convert_type(-x, jnp.int32), False),
      (lambda x: x[None] - 2 * x.reshape(1, 4), True),
  )
  def test_knows_what_makes_zeros_of_zeros(self, fn, expected):
    kind, _ = kind_of(fn, CUT)

    self.assertEqual(kind, CUT if expected else OTHER)

  @cases.parameters(
      (lambda x, y: x + y, False),
      # Behind its end, the other may be infinite.
      (lambda x, y: x * y, False),
      (lambda x, y: x / y, False),
  )
  def test_both_must_end_in_zeros(self, fn, expected):
    self.assertEqual(kind_of(fn, CUT, OTHER)[0].end_in_zeros, expected)
    self.assertFalse(kind_of(fn, OTHER, CUT)[0].end_in_zeros)

  def test_a_choice_by_one_number_keeps_zeros(self):
    def fn(one, x):
      return jnp.where(one > 0, x, 2 * x)

    def branch(one, x):
      return lax.cond(one > 0, lambda x: x, lambda x: x + 1, x)

    self.assertTrue(kind_of(fn, ONE, CUT)[0].end_in_zeros)
    self.assertFalse(kind_of(branch, ONE, CUT)[0].end_in_zeros)

  @cases.parameters(
      (lambda x: total(x**2), TOTAL, 1),
      (
          lambda x: lax.psum(jnp.sum(x) + jnp.sum(2 * x), (AXIS, 'model')),
          WIDE_TOTAL,
          2,
      ),
      (lambda x: lax.psum(sum([jnp.sum(x), jnp.sum(2 * x)]), AXIS), TOTAL, 2),
      (lambda x: total(x).astype(jnp.bfloat16), TOTAL, 1),
      (lambda x: total(x) / 7 * (1 / 8), ONE, 1),
      (lambda x: total(x) * 0.5, ONE, 1),
  )
  def test_a_sum_over_all_slices_is_one_number(self, fn, expected, num_sums):
    self.assertEqual(kind_of(fn, CUT), (expected, num_sums))
    self.assertEqual(kind_of(lambda x: jnp.sqrt(fn(x)), CUT), (ONE, num_sums))

  @cases.parameters(
      # Each of them gives another number where all shards hold the whole.
      (lambda x: lax.pmean(jnp.sum(x), AXIS), '`pmean` divides'),
      (lambda x: lax.pmean(jnp.sum(x), (AXIS, 'model')), '`pmean` divides'),
      (lambda x: total(x) * (1 / 8), '`pmean` divides'),
      (lambda x: 0.125 * total(x), '`pmean` divides'),
      (lambda x: lax.psum(total(x), AXIS), 'the same on all shards'),
      (lambda x: lax.psum(jnp.sqrt(total(x)), AXIS), 'the same on all shards'),
      (lambda x: lax.psum(x, AXIS), '`psum` takes several'),
  )
  def test_a_sum_over_slices_is_taken_once(self, fn, reason):
    for scope in 'global_norm', 'clip_by_global_norm', 'other':
      self.assertIn(reason, kind_of(jax.named_scope(scope)(fn), CUT)[0].reason)

  @cases.parameters(
      lambda x: x * lax.psum_scatter(jnp.arange(8.0), AXIS),
      lambda x: x * lax.all_to_all(jnp.arange(8.0), AXIS, 0, 0)[0],
      lambda x: x * lax.ppermute(jnp.float32(1), AXIS, [(0, 1)]),
  )
  def test_numbers_of_their_own_come_from_collectives(self, fn):
    self.assertIn('of their own', kind_of(fn, CUT)[0].reason)

  def test_an_element_may_not_meet_several_numbers(self):
    kind, _ = kind_of(lambda x: x[None] * jnp.ones((3, 4)), CUT)

    self.assertIn('`mul` repeats them at other places', kind.reason)

  @cases.parameters(
      (lambda one: jnp.full((2, 3), one), True),
      (lambda one: jnp.sqrt(jnp.full((2, 3), one))[None] + 1, True),
      (lambda one: jnp.where(jnp.full(3, one) > 0, one, jnp.zeros(3)), True),
      (lambda one: lax.cond(one > 0, three, lambda: -three()), True),
      (lambda one: jnp.full(3, one) * jnp.arange(3), False),
      (lambda one: jnp.cumsum(jnp.full(3, one)), False),
      (lambda one: lax.scan(lambda c, _: (c + 1, c), one, None, 3)[1], False),
  )
  def test_knows_one_number_that_is_repeated(self, fn, expected):
    kind, _ = kind_of(fn, ONE)

    self.assertEqual(kind, element_flow.Shared(is_one=expected))

  @cases.parameters(
      lambda x: x * lax.pmax(jnp.float32(1), AXIS),
      lambda x: x * lax.psum(jnp.sum(jnp.ones(3)), 'model'),
  )
  def test_what_is_sent_may_be_the_same_on_all_shards(self, fn):
    self.assertIsInstance(kind_of(fn, CUT)[0], element_flow.Elements)

  @cases.parameters(
      (lambda x: jnp.sum(x), PART),
      (lambda x: jnp.sum(x) + jnp.sum(x), PART),
      (lambda x: jnp.sum(x).astype(jnp.bfloat16), PART),
      (lambda x: jnp.float32(0) + jnp.sum(x), PART),
      (lambda x: sum([jnp.sum(x), jnp.sum(-x)]), PART),
  )
  def test_a_sum_over_a_slice_is_a_part(self, fn, expected):
    self.assertEqual(kind_of(fn, CUT)[0], expected)

  @cases.parameters(
      (lambda x: 2 * jnp.sum(x), 'as if over all'),
      (lambda x: jnp.sqrt(jnp.sum(x)), 'as if over all'),
      (lambda x: x / jnp.sum(x), 'as if over all'),
      (lambda x: 1 + jnp.sum(x), 'as if over all'),
      (lambda x: lax.pmax(jnp.sum(x), AXIS), 'as if over all'),
      (lambda x: jnp.sum(x + 1), 'may not be zero'),
      (lambda x: jnp.sum(x[None], 0), 'several of them together'),
      (lambda x: jnp.max(x), '`reduce_max` takes several'),
      (lambda x: x * lax.axis_index(AXIS), 'numbers of their own'),
      (lambda x: jnp.stack([x] * 4), '`stack` moves|`concatenate` moves'),
      (
          lambda x: x
          * lax.fori_loop(0, 2, lambda i, y: y + lax.axis_index(AXIS), 1),
          'numbers of their own',
      ),
  )
  def test_says_what_is_wrong(self, fn, reason):
    kind, num_sums = kind_of(fn, CUT)

    self.assertIsInstance(kind, element_flow.Mixed)
    self.assertRegex(kind.reason, reason)
    self.assertLessEqual(num_sums, 1)

  def test_whole_numbers_do_not_add_up(self):
    kind, _ = kind_of(lambda x: jnp.sum(x).astype(jnp.int32), CUT)

    self.assertIn('as if over all', kind.reason)

  @cases.parameters(0, 1)
  def test_a_sum_along_one_dimension_is_none_over_all(self, dimension):
    jaxpr = jax.make_jaxpr(lambda x: jnp.sum(x, dimension))(jnp.ones((4, 4)))
    program = inlining.flatten(jaxpr.jaxpr)

    flow = element_flow.Flow((AXIS,))
    (kind,) = interpreter.interpret(program, [CUT], flow)

    self.assertIsInstance(kind, element_flow.Mixed)

  def test_a_sum_over_other_axes_is_none_over_all(self):
    def fn(x):
      return lax.psum(jnp.sum(x), 'model')

    self.assertIsInstance(kind_of(fn, CUT)[0], element_flow.Mixed)

  def test_a_sum_over_some_slices_is_none_over_all(self):
    groups = [[0, 1, 2, 3], [4, 5, 6, 7]]

    def fn(x):
      return lax.psum(jnp.sum(x), AXIS, axis_index_groups=groups)

    self.assertIsInstance(kind_of(fn, CUT)[0], element_flow.Mixed)

  def test_knows_sums_within_branches(self):
    def fn(one, x):
      return lax.cond(one > 0, total, jnp.max, x)

    def same(one, x):
      return lax.cond(one > 0, total, lambda x: 2 * total(x), x)

    self.assertIsInstance(kind_of(fn, ONE, CUT)[0], element_flow.Mixed)
    self.assertEqual(kind_of(same, ONE, CUT), (ONE, 2))
    self.assertIsInstance(kind_of(same, PART, CUT)[0], element_flow.Mixed)

  @cases.parameters(
      (lambda x, one: lax.map(lambda row: row * one, x), 'one by one'),
      (lambda x, one: lax.scan(lambda c, _: (c, x), one, None, 2)[1], 'one by'),
      (lambda x, one: x[None].T, '`transpose` moves'),
      (lambda x, one: x[:2], '`slice` moves'),
      (lambda x, one: jnp.broadcast_to(x[:, None], (4, 4)), 'moves them'),
      (lambda x, one: x[lax.convert_element_type(one, int)], 'moves them'),
      (lambda x, one: jnp.arange(4)[x.astype(int)], '`gather` moves'),
  )
  def test_elements_stay_in_the_order_of_rows(self, fn, reason):
    kind, _ = kind_of(fn, CUT, ONE)

    self.assertRegex(kind.reason, reason)

  def test_a_scalar_has_no_elements(self):
    jaxpr = jax.make_jaxpr(lambda x: jnp.squeeze(x) * 2)(jnp.ones(1))
    program = inlining.flatten(jaxpr.jaxpr)

    (kind,) = interpreter.interpret(program, [CUT], element_flow.Flow(()))

    self.assertIn('moves them', kind.reason)

  @cases.parameters(
      lambda x, y: lax.scan(lambda c, _: (y + 1, c), x, None, 3)[0],
      lambda x, y: lax.fori_loop(0, 3, lambda _, c: c + y, jnp.zeros(4)),
  )
  def test_loops_carry_elements(self, fn):
    self.assertEqual(kind_of(fn, CUT, OTHER)[0], OTHER)

  def test_what_is_the_same_everywhere_may_do_anything(self):
    kind, _ = kind_of(lambda one: jnp.sort(jnp.arange(5) * one)[::-1][0], ONE)

    self.assertEqual(kind, ONE)
