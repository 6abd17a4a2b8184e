import jax
import jax.numpy as jnp
import numpy as np

import cases
import facade_cases
from shard_transforms import facade

KEYS = facade.GraphKeys


def name_of(name='w'):
  return facade.get_variable(name, initializer=1.0).op.name


class VariableScopeTest(facade_cases.GraphTest):

  def test_puts_names_before_names(self):
    with facade.variable_scope('a') as a:
      with facade.variable_scope('b'):
        inner = name_of()
      outer = name_of()
    with facade.variable_scope('c'), facade.variable_scope(a):
      again = name_of('x')

    self.assertEqual(
        (inner, outer, again, name_of()), ('a/b/w', 'a/w', 'a/x', 'w')
    )

  def test_finds_variables_again(self):
    with facade.variable_scope('a'):
      w = facade.get_variable('w', [2], initializer=jnp.zeros)
    for reuse in (None, False, True):
      with facade.variable_scope('a', reuse=reuse):
        self.assertIs(facade.get_variable('w', [2]), w)

  def test_an_empty_name_changes_nothing(self):
    with facade.variable_scope('a'), facade.variable_scope(''):
      self.assertEqual(name_of(), 'a/w')
    with facade.variable_scope(''):
      self.assertEqual(name_of(), 'w')

  def test_reuse_refuses_new_names_here_and_inside(self):
    for scope in ('', 'inner'):
      with (
          facade.variable_scope('a', reuse=True),
          facade.variable_scope(scope),
          self.assertRaisesRegex(ValueError, 'must exist in a scope with'),
      ):
        name_of('new')
    self.assertEmpty(facade.global_variables())

  @cases.parameters('a', '')
  def test_reuse_variables_lasts_to_the_end_of_the_scope(self, name):
    with facade.variable_scope(name) as scope:
      name_of()
      facade.get_variable_scope().reuse_variables()
      name_of()
      self.assertTrue(scope.reuse)
      with self.assertRaisesRegex(ValueError, 'must exist'):
        name_of('new')

    name_of('new')

  def test_reuse_variables_outside_of_scopes_lasts(self):
    facade.get_variable_scope().reuse_variables()

    with self.assertRaisesRegex(ValueError, 'must exist'):
      name_of()

  def test_gives_defaults(self):
    with facade.variable_scope(
        'a', initializer=jnp.ones, regularizer=jnp.sum, dtype=jnp.bfloat16
    ):
      with facade.variable_scope('b'):
        w = facade.get_variable('w', [2])
      v = facade.get_variable('v', [2], jnp.float32, jnp.zeros)

    self.assert_holds(w, jnp.ones(2, jnp.bfloat16))
    self.assert_holds(v, jnp.zeros(2))
    losses = facade.get_collection(KEYS.REGULARIZATION_LOSSES)
    self.assert_equal(losses, [jnp.bfloat16(2), jnp.float32(0)])

  def test_needs_a_name(self):
    with (
        self.assertRaisesRegex(ValueError, '`name_or_scope` must be given'),
        facade.variable_scope(None, 'dense'),
    ):
      self.fail()

  def test_ends_with_an_exception(self):
    with self.assertRaises(KeyError), facade.variable_scope('a'):
      raise KeyError

    self.assertEqual(facade.get_variable_scope().name, '')

  def test_is_of_its_graph(self):
    with facade.variable_scope('a'), facade.Graph().as_default():
      self.assertEqual(name_of(), 'w')
      self.assertEqual(facade.get_variable_scope().name, '')

  def test_does_not_reach_slots_and_averages(self):
    w = facade.Variable(1.0, name='w')
    opt = facade.MomentumOptimizer(0.1, 0.9)
    ema = facade.ExponentialMovingAverage(0.9)

    with facade.variable_scope('a'):
      opt.minimize(lambda: w * 1.0, var_list=[w])
      ema.apply([w])

    self.assertEqual(
        [v.op.name for v in facade.global_variables()],
        ['w', 'w/Momentum', 'w/ExponentialMovingAverage'],
    )

  def test_a_compiled_step_runs_in_the_scope_where_it_was_made(self):
    with facade.variable_scope('a'):
      step = facade.function(lambda x: name_of() and x)

    step(1.0)
    with facade.variable_scope('b'):
      step(np.ones(2, np.float32))

    names = [v.op.name for v in facade.global_variables()]
    self.assertEqual(names, ['a/w'])

  def test_steps_find_the_same_variables(self):
    @facade.function
    def step(x):
      with facade.variable_scope('a'):
        w = facade.get_variable('w', initializer=1.0)
      return w.assign_add(x.sum())

    for n in (1, 2):
      step(jnp.ones(n))

    self.assertLen(facade.global_variables(), 1)


class NameScopeTest(facade_cases.GraphTest):

  def test_is_for_variables_that_are_not_looked_up(self):
    with facade.name_scope('a') as outer, facade.name_scope('b') as inner:
      made, found = facade.Variable(1.0, name='v').op.name, name_of()

    self.assertEqual((outer, inner), ('a/', 'a/b/'))
    self.assertEqual((made, found), ('a/b/v', 'w'))

  def test_is_unique(self):
    names = []
    for _ in range(2):
      with facade.name_scope('a'):
        names.append(facade.Variable(1.0, name='v').op.name)

    self.assertEqual(names, ['a/v', 'a_1/v'])

  def test_a_scope_of_variables_is_one(self):
    names = []
    for _ in range(2):
      with facade.variable_scope('a'):
        names.append(facade.Variable(1.0, name='v').op.name)

    self.assertEqual(names, ['a/v', 'a_1/v'])

  def test_entered_again_it_is_the_same(self):
    with facade.name_scope('a') as scope:
      pass
    with facade.name_scope('b'), facade.name_scope(scope):
      self.assertEqual(facade.Variable(1.0, name='v').op.name, 'a/v')

  @cases.parameters('', None)
  def test_an_empty_one_leaves_all(self, name):
    with facade.name_scope('a'), facade.name_scope(name):
      self.assertEqual(facade.Variable(1.0, name='v').op.name, 'v')

  def test_takes_a_default(self):
    with facade.name_scope(None, 'default') as scope:
      self.assertEqual(scope, 'default/')

  def test_a_step_uses_up_no_names(self):
    @facade.function
    def step(x):
      with facade.name_scope('a'):
        return x

    step(1.0)
    with facade.name_scope('a') as scope:
      self.assertEqual(scope, 'a/')


class InitializerTest(facade_cases.GraphTest):

  def test_takes_those_of_jax(self):
    w = facade.get_variable(
        'w', [20, 30], initializer=jax.nn.initializers.normal(0.5)
    )

    self.assertBetween(float(jnp.std(w)), 0.4, 0.6)

  def test_by_default_follows_the_seed_and_the_name(self):
    found = []
    for seed, name in ((0, 'w'), (0, 'w'), (1, 'w'), (0, 'v')):
      with facade.Graph().as_default():
        facade.set_random_seed(seed)
        found.append(facade.get_variable(name, [3, 4]).value())

    self.assert_equal(found[0], found[1])
    self.assertTrue(jnp.all(found[0] != found[2]))
    self.assertTrue(jnp.all(found[0] != found[3]))
    self.assertLess(float(jnp.max(jnp.abs(found[0]))), (6 / 7) ** 0.5)

  def test_by_default_integers_are_zero(self):
    self.assert_holds(
        facade.get_variable('n', [2], jnp.int32), np.int32([0, 0])
    )

  def test_takes_functions_that_hide_their_signature(self):
    self.assert_holds(
        facade.get_variable('w', 2, initializer=np.zeros), jnp.zeros(2)
    )
