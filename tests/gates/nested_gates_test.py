"""Each fact is checked once in a nest of gates, and none is forgotten."""

import functools
import itertools

from absl.testing import parameterized
import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import optax

import cases
import modes
import shard_transforms

AXIS = modes.AXIS
GATES = {
    'drop_stale': functools.partial(shard_transforms.drop_stale, 9),
    'guard': shard_transforms.guard,
    'one_tower': functools.partial(shard_transforms.tower_reduce, 1),
    'scale_by_staleness': functools.partial(
        shard_transforms.scale_by_staleness, 'inverse'
    ),
    'tower_reduce': functools.partial(shard_transforms.tower_reduce, 2),
}
NAMES = {name: name for name in GATES} | {'one_tower': 'tower_reduce'}
MEAN = shard_transforms.cross_shard_mean(AXIS)
BY_HAND = optax.stateless(lambda updates, _: lax.pmean(updates, AXIS))


def gate(name, inner, is_mapped=True, **kwargs):
  """Returns a gate, over the axis or not."""
  if is_mapped:
    kwargs['axis_name'] = AXIS
    if name == 'guard':
      kwargs['on_bad'] = 'exclude'
  return GATES[name](inner=inner, **kwargs)


def nested(outer, inner, innermost, *, link, is_mapped=True, words=()):
  """Returns two gates, a link of a chain between them or not."""
  told = [{'assume_weighted': True} if x in words else {} for x in (0, 1)]
  tx = gate(inner, innermost, **told[1])
  if link:
    tx = optax.chain(optax.scale(2.0), tx)
  return gate(outer, tx, is_mapped, **told[0])


def mapped(tx, mode='vmap', change=None, weight=None, num_calls=1):
  """Returns a function that gives the updates of the last of some calls."""

  def shard(params, x):
    updates = shard_transforms.per_shard(x * params, AXIS)
    if change is not None:
      updates = change(updates)
    # A window of towers, or moments, may differ between shards.
    state = tx.init(shard_transforms.per_shard(params, AXIS))
    given = {'weight': x if weight is None else weight}
    for _ in range(num_calls):
      result, state = tx.update(updates, state, params, local_step=0, **given)
    return shard_transforms.per_shard(result, AXIS)

  fn = modes.map_shards(mode, shard)
  return lambda: fn(jnp.ones(3), jnp.arange(8.0))


def trace(tx, *args, **kwargs):
  """Traces a call, which runs all checks."""
  jax.eval_shape(mapped(tx, *args, **kwargs))


class WeightTest(parameterized.TestCase):

  @cases.product(outer=tuple(GATES), inner=tuple(GATES), link=(False, True))
  def test_passes_the_weight_on(self, outer, inner, link):
    tx = nested(outer, inner, MEAN, link=link)

    # That many end a window of windows.
    updates = mapped(tx, num_calls=4)()

    # Of shards with the gradients and weights 0, ..., 7.
    expected = (2 if link else 1) * 140 / 28
    np.testing.assert_allclose(updates, np.full((8, 3), expected), rtol=1e-6)

  @cases.product(outer=tuple(GATES), inner=tuple(GATES))
  def test_refuses_a_reduction_by_hand(self, outer, inner):
    # What a window returns has its weights. Behind a link, nobody sees that the
    # weight was only read to leave out a shard.
    hides = {
        False: ('tower_reduce',),
        True: ('tower_reduce', 'drop_stale', 'scale_by_staleness'),
    }
    for link, words in itertools.product((False, True), ((), (0,), (1,))):
      tx = nested(outer, inner, BY_HAND, link=link, words=words)
      if words == (1,) and inner in hides[link]:
        trace(tx)
        continue

      told = NAMES[outer if words == (1,) else inner]
      with self.assertRaisesRegex(
          ValueError, f'must use .*weight`.*tell `{told}` with `assume_weighted'
      ):
        trace(tx)

  @cases.product(outer=tuple(GATES), inner=tuple(GATES), link=(False, True))
  def test_takes_the_word_for_both(self, outer, inner, link):
    tx = nested(outer, inner, BY_HAND, link=link, words=(0, 1))

    trace(tx)

  @cases.product(
      outer=('drop_stale', 'guard', 'one_tower', 'tower_reduce'),
      inner=tuple(GATES),
      link=(False, True),
  )
  def test_refuses_a_reduction_by_hand_behind_a_gate_without_axis(
      self, outer, inner, link
  ):
    tx = nested(outer, inner, BY_HAND, link=link, is_mapped=False)

    with self.assertRaisesRegex(ValueError, f'tell `{NAMES[inner]}`'):
      trace(tx)

  @cases.product(outer=tuple(GATES), inner=('drop_stale', 'guard', 'one_tower'))
  def test_refuses_it_in_a_gate_without_axis(self, outer, inner):
    tx = gate(outer, gate(inner, BY_HAND, is_mapped=False))

    with self.assertRaisesRegex(ValueError, f'tell `{NAMES[outer]}`'):
      trace(tx)

  @cases.parameters(
      ('drop_stale', 'one_tower', True),
      ('one_tower', 'drop_stale', True),
      ('scale_by_staleness', 'one_tower', True),
      ('drop_stale', 'tower_reduce', False),
      ('guard', 'one_tower', False),
  )
  def test_updates_that_are_not_summed_are_not_dropped(
      self, outer, inner, is_refused
  ):
    tx = nested(outer, inner, optax.sgd(1.0), link=False)

    if is_refused:
      with self.assertRaisesRegex(ValueError, 'by hand, or none, counts them'):
        trace(tx)
    else:
      trace(tx)


class RefusalTest(parameterized.TestCase):

  @cases.product(
      outer=tuple(GATES),
      inner=tuple(GATES),
      link=(False, True),
  )
  def test_refuses_a_wrong_weight(self, outer, inner, link):
    tx = nested(outer, inner, MEAN, link=link)

    for weight, error, message in (
        (-1.0, ValueError, 'be finite and not negative, got -1.0'),
        (np.nan, ValueError, 'be finite and not negative, got nan'),
        (np.ones(3), ValueError, r'have the shape \(\), got \(3,\)'),
        ('1', TypeError, "be a real number, got '1'"),
        (True, TypeError, 'be a real number, got True'),
    ):
      with self.assertRaisesRegex(error, f'`{NAMES[outer]}` must {message}'):
        trace(tx, weight=weight)

  @cases.product(outer=('drop_stale', 'guard'), inner=tuple(GATES))
  def test_the_inner_gate_refuses_it_if_it_is_the_first_to_weigh(
      self, outer, inner
  ):
    tx = nested(outer, inner, MEAN, link=False, is_mapped=False)

    with self.assertRaisesRegex(ValueError, f'`{NAMES[inner]}` .* got -1.0'):
      trace(tx, weight=-1.0)

  def test_a_weight_that_no_gate_has_looked_at_is_made_usable(self):
    found = []

    def update(updates, state, params=None, *, weight):
      del params
      found.append(weight)
      return updates, state

    inner = optax.GradientTransformationExtraArgs(lambda _: (), update)
    tx = shard_transforms.guard(shard_transforms.tower_reduce(1, inner))
    state = tx.init(jnp.zeros(3))

    jax.make_jaxpr(lambda w: tx.update(jnp.ones(3), state, weight=w))(1.0)
    tx.update(jnp.ones(3), state, weight=3)
    with self.assertRaisesRegex(ValueError, 'finite and not negative'):
      tx.update(jnp.ones(3), state, weight=jnp.float32(-1.0))

    weights = [jax.typeof(weight).dtype for weight in found]
    self.assertEqual(weights, [jnp.float32] * 2)

    @jax.jit
    def given(weight):
      tx.update(jnp.ones(3), state, weight=weight)
      return found[-1]

    self.assertEqual(given(np.nan), 0)

  @cases.product(outer=tuple(GATES), inner=tuple(GATES), link=(False, True))
  def test_refuses_an_axis_of_the_inner_gate_that_is_not_bound(
      self, outer, inner, link
  ):
    tx = GATES[inner](inner=MEAN, axis_name=(AXIS, 'other'))
    if link:
      tx = optax.chain(optax.scale(2.0), tx)
    tx = gate(outer, tx)

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
    guarded = nested(outer, 'guard', inner, link=False)
    tx = gate('drop_stale', guarded)

    trace(tx)

    self.assertLen(calls, 1)
