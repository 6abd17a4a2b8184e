import functools

from absl.testing import parameterized
import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import optax

import modes
import shard_transforms
from shard_transforms import cross_shard_mean

AXIS = modes.AXIS
# Where types do not refuse most of what hangs.
UNCHECKED = ('pmap', 'shard_map_unchecked')
HALVES = [[0, 1, 2, 3], [4, 5, 6, 7]]
PAIRS = [[0, 1], [2, 3], [4, 5], [6, 7]]
RING = [(i, (i + 1) % 8) for i in range(8)]
# Of eight shards with five examples of three features each.
OWN = jax.ShapeDtypeStruct((8, 5, 3), jnp.float32)
PARAMS = jax.ShapeDtypeStruct((3,), jnp.float32)

psum = functools.partial(lax.psum, axis_name=AXIS)
pmean = functools.partial(lax.pmean, axis_name=AXIS)
gather = functools.partial(lax.all_gather, axis_name=AXIS)
index = functools.partial(lax.axis_index, AXIS)
sgd = optax.sgd(0.1)
shard_update = shard_transforms.shard_update
grouped = functools.partial(lax.psum, axis_name=AXIS, axis_index_groups=HALVES)


def mean_of(inner, **kwargs):
  return optax.chain(cross_shard_mean(AXIS, **kwargs), inner)


def not_finite(tx):
  return optax.apply_if_finite(tx, 5)


def multi_steps(tx, k=2):
  return optax.MultiSteps(tx, k, should_skip_update_fn=optax.skip_not_finite)


def warnings(mode, fn, *shared):
  """Returns the warnings on `fn(*shared, x)` of a shard with examples `x`."""
  mapped = modes.map_shards(mode, lambda shared, x: fn(*shared, x))
  return shard_transforms.wire_report(mapped, shared, OWN).warnings


def step(tx, **extra_args):
  """Returns a training step, of a state that is the same on all shards."""

  def fn(params, state, x):
    def loss(params, x):
      return jnp.mean((x @ params - 1) ** 2)

    grads = shard_transforms.value_and_grad(loss, AXIS)(params, x)[1]
    updates, state = tx.update(grads, state, params, **extra_args)
    return optax.apply_updates(params, updates), state

  return fn


def step_warnings(mode, tx, **extra_args):
  state = jax.eval_shape(tx.init, PARAMS)
  return warnings(mode, step(tx, **extra_args), PARAMS, state)


def if_positive(send, other=lambda x: x):
  """Returns a function that sends where what a shard has sums up to more."""
  return lambda x: lax.cond(jnp.sum(x) > 0, send, other, x)


def first(x):
  return gather(x)[0]


def permute(x):
  return lax.ppermute(x, AXIS, RING)


def send_in_turns(x):
  return lax.scan(lambda c, _: (permute(c), None), x, length=3)[0]


def until_small(x, send):
  """Halves `x` until it is small on this shard."""
  return lax.while_loop(lambda x: jnp.sum(x) > 1, lambda x: send(x) / 2, x)


def carried(x):
  """Decides by what only in the second turn is the shard's own."""

  def turn(carry, _):
    before, now = carry
    y = lax.cond(jnp.sum(before) > 0, permute, lambda x: x, x)
    return (now, y), None

  zeros = x - pmean(x) * 0 if False else 0 * permute(x)
  return lax.scan(turn, (jnp.zeros_like(x), zeros), length=3)[0][1]


class WrapperTest(parameterized.TestCase):

  @parameterized.product(
      mode=UNCHECKED,
      wrap=(not_finite, multi_steps),
      tx=(
          mean_of(sgd),
          mean_of(sgd, bucket_bytes=0),
          mean_of(sgd, algorithm='reduce_scatter')
          if False
          else mean_of(optax.adam(0.1)),
          shard_update(optax.adam(0.1), AXIS),
          shard_transforms.tower_reduce(2, mean_of(sgd), axis_name=AXIS),
          mean_of(sgd, groups=HALVES),
      ),
  )
  def test_around_a_reduction_is_found(self, mode, wrap, tx):
    (warning, *_) = step_warnings(mode, wrap(tx))

    self.assertRegex(warning, "^`cond` runs `.*` over 'data' on those shards")
