import itertools

from absl.testing import parameterized
import jax
import jax.numpy as jnp
import numpy as np
import optax

import cases
import modes
from shard_transforms import cross_shard_mean
from shard_transforms import local_params
from shard_transforms import local_updates

AXIS = modes.AXIS


def _make(**kwargs):
  options = {
      'inner': optax.sgd(0.1, 0.9),
      'outer': optax.chain(cross_shard_mean(AXIS), optax.sgd(1.0, 0.9)),
      'axis_name': AXIS,
      'every': 4,
  }
  return local_updates(**(options | kwargs))


def _params():
  return {'a': jnp.ones(2), 'b': jnp.ones(3)}


def _update(fn, mode='shard_map'):
  """Traces what `fn` does with parameters and an own gradient on a shard."""
  mapped = modes.map_shards(mode, fn)
  own = jax.tree.map(lambda x: np.ones((8, *x.shape), x.dtype), _params())
  jax.eval_shape(mapped, _params(), own)


EVERY, FRAGMENTS = '`every` must be', '`fragments` must be'
LESS = '`delay` .* less than .*'
ERRORS = (
    (dict(inner=1), TypeError, '`inner` of `local_updates` must be an Optax'),
    (dict(axis_name=3), TypeError, '`axis_name` must be the name'),
    (dict(mixing=1.0), ValueError, '`mixing` must be .* less than 1, got 1'),
    (dict(mixing='a'), TypeError, "`mixing` must be a real number, got 'a'"),
    (dict(assume_weighted=1), TypeError, '`assume_weighted` must be a boolean'),
    (dict(every=0), ValueError, f'{EVERY} at least 1, got 0'),
    (dict(every=2.0), TypeError, f'{EVERY} an integer, got 2.0'),
    (dict(delay=-1), ValueError, '`delay` must be at least 0, got -1'),
    (dict(delay=2, fragments=2), ValueError, f'{LESS} 2, got 2'),
    (dict(fragments='all'), TypeError, f"{FRAGMENTS} an integer, got 'all'"),
    (dict(fragments={'a': 1, 'b': 'x'}), TypeError, 'labels that are all str'),
    (dict(fragments={'a': 0.5}), TypeError, 'an integer, or a tree of labels'),
    (dict(fragments={}), TypeError, 'a tree of labels .* got {}'),
)
WRONG_TREES = (
    (6, 'must be at most the number of leaves, 3, got 6'),
    ({'a': 0, 'b': 1}, 'must have the tree of the parameters'),
    ({'a': 0, 'b': None, 'c': 1}, r"each leaf, got None at \['b'\]"),
)


class ArgumentTest(parameterized.TestCase):

  @cases.parameters(*ERRORS)
  def test_refuses_bad_arguments(self, kwargs, error, message):
    with self.assertRaisesRegex(error, message):
      _make(**kwargs)

  @cases.parameters(*WRONG_TREES)
  def test_refuses_fragments_that_do_not_fit_the_tree(self, given, message):
    tx = _make(every=9, fragments=given)

    with self.assertRaisesRegex(ValueError, message):
      _update(lambda params, _: tx.init({**params, 'c': jnp.ones(4)}))

  @cases.parameters('inner', 'outer')
  def test_refuses_local_updates_in_local_updates(self, place):
    tx = _make(**{place: optax.chain(_make())})

    with self.assertRaisesRegex(ValueError, "must not hold .*'host'"):
      _update(lambda params, _: tx.init(params))


class UpdateTest(parameterized.TestCase):

  def test_refuses_a_gradient_of_replicated_parameters(self):
    tx = _make()

    def shard(params, own):
      def loss(params):
        return optax.tree.vdot(params, own)

      return tx.update(jax.grad(loss)(params), tx.init(params), params)

    with self.assertRaisesRegex(
        ValueError, r"got \['a'\] .* already reduced.*`.*local_params\(params"
    ):
      _update(shard)

  @cases.parameters(
      (None, 'must be the parameters, got None'),
      ('own', r"same on all shards, got \['a'\].*along \['data'\].*local_par"),
  )
  def test_refuses_what_is_not_the_anchor(self, given, message):
    tx = _make()

    def shard(params, own):
      state = tx.init(params)
      given_params = local_params(params, state) if given else None
      return tx.update(own, state, given_params)

    with self.assertRaisesRegex(ValueError, message):
      _update(shard)

  @cases.parameters('shard_map', 'vmap')
  def test_refuses_the_state_of_other_fragments(self, mode):
    txs = [
        _make(fragments=2),
        _make(fragments={'a': 'x', 'b': 'y'}),
        _make(fragments={'a': 0, 'b': 0}),
    ]

    for made, given in itertools.permutations(txs, 2):

      def shard(params, own, made=made, given=given):
        return given.update(own, made.init(params), params)

      with self.assertRaisesRegex(ValueError, 'same fragments'):
        _update(shard, mode)

  def test_refuses_the_state_of_other_parameters(self):
    tx = _make()

    def shard(params, own):
      state = tx.init(params)
      params = {'a': jnp.ones(2), 'b': jnp.ones(3, jnp.bfloat16)}
      return tx.update(own, state, params)

    with self.assertRaisesRegex(ValueError, '`params` .* its state was made'):
      _update(shard)

  def test_refuses_the_state_of_another_transformation(self):
    def shard(params, own):
      return _make().update(own, optax.EmptyState(), params)

    with self.assertRaisesRegex(TypeError, 'must be a `LocalUpdatesState`'):
      _update(shard)
