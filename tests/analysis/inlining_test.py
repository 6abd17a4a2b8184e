import functools

from absl.testing import parameterized
import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

import cases
from shard_transforms._src.analysis import inlining
from shard_transforms._src.analysis import interpreter


def _flatten(fn, *args):
  return inlining.flatten(jax.make_jaxpr(fn)(*args).jaxpr)


def _names(program):
  return [step.name for step in program.steps]


def _mapped(fn, check_vma=True, spec=P(('host', 'core'))):
  auto = (jax.sharding.AxisType.Auto,) * 2
  mesh = jax.sharding.AbstractMesh((2, 4), ('host', 'core'), axis_types=auto)
  return jax.shard_map(
      fn, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=check_vma
  )


@jax.custom_vjp
def _with_rule(x):
  return jnp.sin(x)


_with_rule.defvjp(lambda x: (jnp.sin(x), x), lambda x, t: (t * jnp.cos(x),))


class FlattenTest(parameterized.TestCase):

  @cases.parameters(
      jax.jit,
      jax.checkpoint,
      functools.partial(_mapped, spec=P()),
      functools.partial(_mapped, spec=P(), check_vma=False),
      lambda fn: jax.jit(jax.jit(fn)),
      lambda _: _with_rule,
  )
  def test_a_call_becomes_what_it_does(self, wrap):
    fn = wrap(jnp.sin)

    program = _flatten(lambda x: -fn(x * 2), jax.ShapeDtypeStruct((8,), 'f'))

    self.assertEqual(_names(program), ['mul', 'sin', 'neg'])
    mul, sin, neg = program.steps
    self.assertIs(mul.inputs[0], program.inputs[0])
    self.assertIs(sin.inputs[0], mul.outputs[0])
    self.assertIs(neg.inputs[0], sin.outputs[0])
    self.assertIs(program.outputs[0], neg.outputs[0])
    self.assertTrue(mul.inputs[1].is_literal)
    self.assertFalse(mul.inputs[0].is_literal)

  @cases.parameters(True, False)
  def test_a_map_cuts_and_joins(self, check_vma):
    fn = _mapped(jnp.sin, check_vma, spec=P(None, ('host', 'core')))

    program = _flatten(lambda x: -fn(x), jax.ShapeDtypeStruct((3, 8), 'f'))

    self.assertEqual(_names(program), ['shard_map', 'sin', 'shard_map', 'neg'])
    cut, sin, join, neg = program.steps
    self.assertIs(cut.inputs[0], program.inputs[0])
    self.assertIs(sin.inputs[0], cut.outputs[0])
    self.assertIs(join.inputs[0], sin.outputs[0])
    self.assertIs(neg.inputs[0], join.outputs[0])
    shapes = [step.inputs[0].aval.shape for step in program.steps]
    self.assertEqual(shapes, [(3, 8), (3, 1), (3, 1), (3, 8)])
    self.assertEqual([cut.axes, join.axes], [('host', 'core')] * 2)
    sizes = map(inlining.axis_sizes, program.steps)
    self.assertEqual(list(map(len, sizes)), [2, 2, 0, 0])

  def test_each_call_of_one_function_is_its_own(self):
    fn = jax.jit(jnp.sin)

    program = _flatten(lambda x: fn(fn(x)), 1.0)

    first, second = program.steps
    self.assertIs(second.inputs[0], first.outputs[0])
    self.assertIsNot(second.outputs[0], first.outputs[0])

  def test_loops_and_branches_have_bodies(self):
    def fn(x):
      x = lax.scan(lambda c, _: (jnp.sin(c), None), x, length=3)[0]
      x = lax.while_loop(lambda c: c < 9, jnp.exp, x)
      return lax.cond(x > 0, jnp.cos, jnp.tan, x)

    program = _flatten(fn, 1.0)

    bodies = {
        step.name: [_names(body) for body in step.bodies]
        for step in program.steps
        if step.bodies
    }
    self.assertEqual(bodies['scan'], [['sin']])
    self.assertCountEqual(bodies['while'], [['lt'], ['exp']])
    self.assertEqual(bodies['cond'], [['tan'], ['cos']])

  @cases.parameters('gate', 'other')
  def test_a_loop_of_at_most_one_turn_is_a_branch(self, scope):
    def fn(x, y):
      with jax.named_scope(scope):
        return lax.while_loop(
            lambda carry: carry[0],
            lambda carry: (jnp.zeros_like(carry[0]), jnp.sin(carry[1]) * y),
            (x > 0, x),
        )[1]

    program = _flatten(fn, 1.0, 2.0)

    decided, step = program.steps
    self.assertEqual(step.name, 'cond')
    self.assertIs(step.inputs[0], decided.outputs[0])
    y, x = program.inputs[::-1]
    self.assertEqual(step.inputs[1:], (y, decided.outputs[0], x))
    skipped, run = step.bodies
    self.assertEmpty(skipped.steps)
    self.assertEqual(skipped.outputs, skipped.inputs[1:])
    self.assertEqual(_names(run), ['sin', 'mul'])
    self.assertIs(run.steps[1].inputs[1], run.inputs[0])

  def test_a_condition_may_be_given_what_it_does_not_use(self):
    def fn(x, y):
      return lax.while_loop(
          lambda carry: (x > y, carry[0])[1],
          lambda carry: (jnp.zeros_like(carry[0]), jnp.sin(carry[1])),
          (x > 0, x),
      )[1]

    program = _flatten(fn, 1.0, 2.0)

    decided, step = program.steps
    self.assertEqual(step.name, 'cond')
    self.assertEqual(step.inputs[1:], (decided.outputs[0], program.inputs[0]))

  @cases.parameters(
      # A condition that reads what is around it.
      lambda x, y: lax.while_loop(lambda c: c > y, lambda c: 0.5 * c, x),
      lambda x, y: lax.while_loop(lambda c: x > y, lambda c: 0.5 * c, x),
      # It is one of the carry, and may stay true.
      lambda x, y: lax.while_loop(
          lambda c: c[0], lambda c: (c[1] > y, 0.5 * c[1]), (x > y, x)
      ),
      lambda x, y: lax.while_loop(
          lambda c: c[0], lambda c: (True, 0.5 * c[1]), (x > y, x)
      ),
      lambda x, y: lax.while_loop(lambda c: True, lambda c: 0.5 * c, x),
  )
  def test_a_loop_of_more_turns_stays_one_in_any_scope(self, fn):
    program = _flatten(jax.named_scope('gate')(fn), 1.0, 2.0)

    self.assertIn('while', _names(program))
    self.assertNotIn('cond', _names(program))

  def test_carry_of_a_scan_is_what_a_turn_gives_to_the_next(self):
    def fn(x, ys):
      def turn(carry, y):
        return (carry[0] + y, carry[1] * jnp.sum(x)), carry[0]

      return lax.scan(turn, (0.0, 1.0), ys)

    program = _flatten(fn, jnp.ones(3), jnp.ones(3))

    (scan,) = (step for step in program.steps if step.name == 'scan')
    self.assertEqual(interpreter.loop(scan).carry, scan.bodies[0].inputs[-3:-1])

  def test_sentences_name_a_step_and_its_scope(self):
    program = _flatten(lambda x: jax.named_scope('outer')(jnp.sin)(-x), 1.0)

    labels = list(map(inlining.label, program.steps))
    self.assertEqual(labels, ['`neg`', "`sin` in 'outer'"])

  def test_scopes_and_axes_reach_into_calls_and_bodies(self):
    @jax.named_scope('inner')
    def body(carry, _):
      return carry + jax.jit(jnp.sin)(carry), None

    def fn(x):
      with jax.named_scope('outer'):
        return jax.jit(lambda x: lax.scan(body, x, length=3)[0])(x)

    program = _flatten(_mapped(fn), jax.ShapeDtypeStruct((8,), 'f'))

    (scan,) = (step for step in program.steps if step.name == 'scan')
    sizes = {'host': 2, 'core': 4}
    found = [
        (inlining.scope(step), inlining.axis_sizes(step))
        for step in (scan, *scan.bodies[0].steps)
    ]
    inside = ('outer/inner', sizes)
    self.assertEqual(found, [('outer', sizes), inside, inside])

  @cases.parameters(True, False)
  def test_variants_of_a_primitive_have_one_name(self, check_vma):
    def fn(x):
      x = lax.psum(x, ('host', 'core'))
      x = lax.pcast(x, 'core', to='varying') if check_vma else x
      x = lax.all_gather(x, 'core', axis=0, to='varying')[0]
      return x if not check_vma else lax.pcast(x, 'host', to='varying')

    program = _flatten(_mapped(fn, check_vma), jax.ShapeDtypeStruct((8,), 'f'))

    axes = {step.name: step.axes for step in program.steps}
    self.assertEqual(axes['psum'], ('host', 'core'))
    self.assertEqual(axes['all_gather'], ('core',))

  def test_tells_axes_of_arrays_from_mapped_ones(self):
    def fn(x):
      return jax.vmap(
          lambda x: lax.psum(x, ('rows', 'core')), axis_name='rows'
      )(x)

    mapped = _mapped(fn, check_vma=False)
    program = _flatten(mapped, jax.ShapeDtypeStruct((8, 3), 'f'))

    (step,) = (step for step in program.steps if step.name == 'psum')
    self.assertEqual(step.axes, ('core',))
    self.assertCountEqual(interpreter.all_axes(step.params), (0, 'core'))
