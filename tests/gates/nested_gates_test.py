"""Each fact is checked once in a nest of gates, and none is forgotten."""

import functools

from absl.testing import parameterized
import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import optax

import cases
import modes
import shard_transforms as st

AXIS = modes.AXIS
GATES = {
    'drop_stale': functools.partial(st.drop_stale, 9),
    'guard': st.guard,
    'one_tower': functools.partial(st.tower_reduce, 1),
    'scale_by_staleness': functools.partial(
        st.contrib.scale_by_staleness, 'inverse'
    ),
    'tower_reduce': functools.partial(st.tower_reduce, 2),
}
NAMES = {name: name for name in GATES} | {'one_tower': 'tower_reduce'}
MEAN = st.cross_shard_mean(AXIS)
BY_HAND = optax.stateless(lambda updates, _: lax.pmean(updates, AXIS))
# Each gate is twice outside and twice inside of another.
GIVEN = tuple(GATES)
PAIRS = [
    (outer, GIVEN[(i + shift) % len(GIVEN)])
    for i, outer in enumerate(GIVEN)
    for shift in (1, 2)
]
NESTS = [(*pair, i % 2 == 1) for i, pair in enumerate(PAIRS)]


def gate(name, inner, is_mapped=True, **kwargs):
  """Returns a gate, over the axis or not."""
  if is_mapped:
    kwargs['axis_name'] = AXIS
    if name == 'guard':
      kwargs['on_bad'] = 'exclude'
  return GATES[name](inner=inner, **kwargs)


def nested(outer, inner, link, innermost, *, is_mapped=True, words=()):
  """Returns two gates, a link of a chain between them or not."""
  told = [{'assume_weighted': True} if x in words else {} for x in (0, 1)]
  tx = gate(inner, innermost, **told[1])
  if link:
    tx = optax.chain(optax.scale(2.0), tx)
  return gate(outer, tx, is_mapped, **told[0])


def last_updates(tx, x, weight, num_calls=1):
  """Returns the updates of the last of some calls."""

  def call(state, _):
    updates, state = tx.update(x, state, x, local_step=0, weight=weight)
    return state, updates

  return lax.scan(call, tx.init(x), length=num_calls)[1][-1]


def trace(tx, weight=None):
  """Traces a call, which runs all checks."""

  def shard(x):
    return last_updates(tx, x, x[0] if weight is None else weight)

  jax.eval_shape(jax.vmap(shard, axis_name=AXIS), jnp.ones((8, 3)))


class WeightTest(parameterized.TestCase):

  def test_passes_the_weight_on(self):
    @jax.jit
    @functools.partial(jax.vmap, axis_name=AXIS)
    def updates(x):
      # So many calls end a window of windows.
      return [
          last_updates(nested(*nest, MEAN), x * jnp.ones(3), x, num_calls=4)
          for nest in NESTS
      ]

    given = updates(jnp.arange(8.0))
    for (*nest, link), found in zip(NESTS, given, strict=True):
      # Of shards with the gradients and weights 0, ..., 7.
      expected = np.full((8, 3), (2 if link else 1) * 140 / 28)
      np.testing.assert_allclose(found, expected, rtol=1e-6, err_msg=nest)

  @cases.parameters(NESTS)
  def test_refuses_a_reduction_by_hand(self, outer, inner, link):
    # What a window returns has its weights. Behind a link, nobody sees that the
    # weight was only read to leave out a shard.
    hides = ('tower_reduce',)
    if link:
      hides += 'drop_stale', 'scale_by_staleness', 'one_tower'
    for words in (), (0,), (1,):
      tx = nested(outer, inner, link, BY_HAND, words=words)
      if words == (1,) and inner in hides:
        trace(tx)
        continue

      told = NAMES[outer if words == (1,) else inner]
      message = f'must use .*weight`.* pass `assume_weighted=True` to `{told}`'
      with self.assertRaisesRegex(ValueError, message):
        trace(tx)
    trace(nested(outer, inner, link, BY_HAND, words=(0, 1)))

  @cases.parameters([nest for nest in NESTS if nest[0] != 'scale_by_staleness'])
  def test_refuses_a_reduction_by_hand_behind_a_gate_without_axis(self, *nest):
    tx = nested(*nest, BY_HAND, is_mapped=False)

    with self.assertRaisesRegex(ValueError, f'to `{NAMES[nest[1]]}`'):
      trace(tx)

  @cases.parameters([x for x in PAIRS if x[1] in GIVEN[:3]])
  def test_refuses_it_in_a_gate_without_axis(self, outer, inner):
    tx = gate(outer, gate(inner, BY_HAND, is_mapped=False))

    with self.assertRaisesRegex(ValueError, f'to `{NAMES[outer]}`'):
      trace(tx)

  @cases.parameters(
      ('drop_stale', 'one_tower'),
      ('one_tower', 'drop_stale'),
      ('scale_by_staleness', 'one_tower'),
  )
  def test_refuses_to_drop_updates_that_are_not_summed(self, outer, inner):
    tx = nested(outer, inner, False, optax.sgd(1.0))

    message = 'otherwise excluded shards still count'
    with self.assertRaisesRegex(ValueError, message):
      trace(tx)

  @cases.parameters(('drop_stale', 'tower_reduce'), ('guard', 'one_tower'))
  def test_local_updates_of_a_window_and_of_a_guard_pass(self, outer, inner):
    trace(nested(outer, inner, False, optax.sgd(1.0)))


class RefusalTest(parameterized.TestCase):

  @cases.parameters(NESTS[::2])
  def test_refuses_a_wrong_weight(self, outer, inner, link):
    tx = nested(outer, inner, link, MEAN)

    for weight, error, message in (
        (np.nan, ValueError, 'be finite and not negative, got nan'),
        ('1', TypeError, "be a real number, got '1'"),
    ):
      with self.assertRaisesRegex(error, f'`{NAMES[outer]}` must {message}'):
        trace(tx, weight=weight)

  @cases.parameters([x for x in PAIRS if x[0] in ('drop_stale', 'guard')])
  def test_the_inner_gate_refuses_it_if_it_is_the_first_to_weigh(self, *pair):
    tx = nested(*pair, False, MEAN, is_mapped=False)

    with self.assertRaisesRegex(ValueError, f'`{NAMES[pair[1]]}` .* got -1.0'):
      trace(tx, weight=-1.0)

  def test_a_weight_that_no_gate_has_looked_at_is_made_usable(self):
    found = []

    def update(updates, state, params=None, *, weight):
      del params
      found.append(weight)
      return weight * updates, state

    inner = optax.GradientTransformationExtraArgs(lambda _: (), update)
    tx = st.guard(st.tower_reduce(1, inner))
    state = tx.init(jnp.zeros(3))

    jax.make_jaxpr(lambda w: tx.update(jnp.ones(3), state, weight=w))(1.0)
    tx.update(jnp.ones(3), state, weight=3)
    with self.assertRaisesRegex(ValueError, 'finite and not negative'):
      tx.update(jnp.ones(3), state, weight=jnp.float32(-1.0))

    weights = [jax.typeof(weight).dtype for weight in found]
    self.assertEqual(weights, [jnp.result_type(float)] * 2)

    @jax.jit
    def given(weight):
      return tx.update(jnp.ones(3), state, weight=weight)[0]

    np.testing.assert_array_equal(given(np.nan), np.zeros(3))

  @cases.parameters(NESTS[1::2])
  def test_refuses_an_axis_of_the_inner_gate_that_is_not_bound(self, *nest):
    outer, inner, _ = nest
    tx = GATES[inner](inner=MEAN, axis_name=(AXIS, 'other'))
    tx = gate(outer, optax.chain(optax.scale(2.0), tx))

    with self.assertRaisesRegex(NameError, f"`{NAMES[inner]}` .* 'other'"):
      trace(tx)


class OnceTest(parameterized.TestCase):

  @cases.parameters('drop_stale', 'guard', 'one_tower', 'scale_by_staleness')
  def test_all_gates_trace_inner_once(self, outer):
    calls = []

    def update(updates, state, params=None, **extra_args):
      calls.append(state)
      return MEAN.update(updates, state, params, **extra_args)

    inner = optax.GradientTransformationExtraArgs(MEAN.init, update)
    guarded = nested(outer, 'guard', False, inner)
    tx = gate('drop_stale', guarded)

    trace(tx)

    self.assertLen(calls, 1)
