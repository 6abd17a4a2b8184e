"""Tests of gradients that are N times too large, in each mode.

Whether JAX sums a gradient over shards depends on the mode and on the
operations on the parameters, the loss and the gradient. After
`cross_shard_mean`, the result is correct, refused, or listed as a multiple that
types do not show.
"""

from collections.abc import Callable
import functools
import pathlib
import re
from typing import Any, NamedTuple

from absl.testing import parameterized
import jax
from jax import lax
import numpy as np
import optax

import cases
import modes
import shard_transforms

AXIS = modes.AXIS
SHARDS = 8
TRUE_MEAN = np.float32(3.5)


def loss(w, x):
  return w * x


def value_and_grad(fn):
  return lambda w, x: shard_transforms.value_and_grad(fn, AXIS)(w, x)[1]


def then(reduce):
  """Returns a function whose results are reduced."""
  return lambda fn: lambda w, x: reduce(fn(w, x), AXIS)


def at(convert):
  """Returns a function that takes the gradient at converted parameters."""
  return lambda fn: lambda w, x: fn(convert(w, AXIS), x)


grad = jax.grad
pmean, psum = then(lax.pmean), then(lax.psum)
shard_mean = then(shard_transforms.shard_mean)
divide = then(lambda g, axis: g / lax.axis_size(axis))

# The result of a way: an error with its words, or a multiple of the true mean.
REDUCED = ValueError, '`cross_shard_mean` .* already reduced'
REDUCED_LOSS = ValueError, 'loss of `value_and_grad` is the same on all'
RIGHT = 1, ''
# No type shows what follows, and the documentation says so in these words. JAX
# transposes `psum` to `psum` where types are not tracked.
SUMMED_LOSS = (
    SHARDS,
    r'`lax\.psum` in the loss|loss that is summed with `lax\.psum`',
)
# Where types are not tracked, a sum looks like a gradient of a shard.
SUMMED = SHARDS, 'update that is reduced twice'
# A gradient that the caller has scaled looks like any other.
SCALED = 1 / SHARDS, r'`[^`]*lax\.axis_size'
# The gradient of a mean with respect to `per_shard` parameters is a part of the
# gradient of the shard: it differs between shards as any other.
PART = 1 / SHARDS, r'`lax\.pmean\(loss\)`[^.]*`per_shard`'
# A sum and a mean have the same type, so the caller must say which it is.
WRONGLY_AVERAGED = SHARDS, "'mean'` assumes that the leaf is already the mean"


class Way(NamedTuple):
  """A way to take a gradient, and its results.

  Attributes:
    grad_fn: A function of parameters and the data of a shard.
    untracked: The result where JAX does not track types.
    tracked: The result where JAX tracks types.
    at_per_shard: The result with types at `per_shard` parameters, if another.
    if_averaged: The result with types and `if_reduced='mean'`, if tested.
  """

  grad_fn: Callable[..., Any]
  untracked: Any = RIGHT
  tracked: Any = REDUCED
  at_per_shard: Any = None
  if_averaged: Any = None


WAYS = {
    'grad(loss)': Way(
        grad(loss), at_per_shard=RIGHT, if_averaged=WRONGLY_AVERAGED
    ),
    'pmean(grad(loss))': Way(pmean(grad(loss))),
    'psum(grad(loss))': Way(psum(grad(loss)), SUMMED),
    'grad(loss) / axis_size': Way(
        divide(grad(loss)), SCALED, at_per_shard=SCALED
    ),
    'grad(pmean(loss))': Way(
        grad(pmean(loss)), at_per_shard=PART, if_averaged=RIGHT
    ),
    'pmean(grad(pmean(loss)))': Way(pmean(grad(pmean(loss)))),
    'grad(psum(loss))': Way(grad(psum(loss)), SUMMED_LOSS, at_per_shard=RIGHT),
    # The library's own, but with respect to replicated parameters.
    'grad(shard_mean(loss))': Way(grad(shard_mean(loss)), at_per_shard=PART),
    'value_and_grad(loss)': Way(
        value_and_grad(loss), tracked=RIGHT, if_averaged=RIGHT
    ),
    'value_and_grad(pmean(loss))': Way(
        value_and_grad(pmean(loss)), tracked=REDUCED_LOSS
    ),
    'value_and_grad(psum(loss))': Way(
        value_and_grad(psum(loss)), SUMMED_LOSS, REDUCED_LOSS
    ),
    'value_and_grad(shard_mean(loss))': Way(
        value_and_grad(shard_mean(loss)), tracked=REDUCED_LOSS
    ),
}


def outcomes(mode):
  """Yields the name, the function and the outcome of each way."""
  is_tracked = mode == 'shard_map'
  pcast = functools.partial(lax.pcast, to='varying')
  for name, way in WAYS.items():
    grad_fn, outcome, *_ = way
    yield name, grad_fn, way.tracked if is_tracked else outcome
    if way.if_averaged:
      averaged = way.if_averaged if is_tracked else outcome
      yield f'{name}, averaged', grad_fn, averaged
    if is_tracked:
      outcome = way.at_per_shard or way.tracked
    yield f'per_shard, {name}', at(shard_transforms.per_shard)(grad_fn), outcome
    # JAX has no `lax.pcast` there.
    outcome = (AssertionError, '') if mode == 'vmap' else outcome
    yield f'pcast, {name}', at(pcast)(grad_fn), outcome


def ratios(grad_fns, mode):
  """Returns the result of `cross_shard_mean` in units of the true mean."""

  def reduce_all(w, x):
    return {name: reduce(name, w, x) for name in grad_fns}

  def reduce(name, w, x):
    if_reduced = 'mean' if name.endswith('averaged') else 'error'
    tx = shard_transforms.cross_shard_mean(AXIS, if_reduced=if_reduced)
    return tx.update(grad_fns[name](w, x), optax.EmptyState())[0]

  x = np.arange(SHARDS, dtype=np.float32)
  reduced = jax.device_get(modes.map_shards(mode, reduce_all)(np.float32(1), x))
  return {name: x / TRUE_MEAN for name, x in reduced.items()}


class NTimesTest(parameterized.TestCase):

  @cases.parameters(*modes.MAPPED, fast='shard_map')
  def test_each_gradient_is_correct_refused_or_listed(self, mode):
    grad_fns, expected = {}, {}
    for way, grad_fn, (outcome, words) in outcomes(mode):
      if isinstance(outcome, type):
        with self.subTest(way), self.assertRaisesRegex(outcome, words):
          ratios({way: grad_fn}, mode)
      else:
        grad_fns[way], expected[way] = grad_fn, [outcome] * SHARDS

    ratios_of_ways = ratios(grad_fns, mode)

    for way in grad_fns:
      with self.subTest(way):
        np.testing.assert_array_equal(ratios_of_ways[way], expected[way])

  @cases.parameters(SUMMED_LOSS, SUMMED, SCALED, PART, WRONGLY_AVERAGED)
  def test_documentation_lists_the_multiples(self, _, pattern):
    page = pathlib.Path(__file__).parents[1] / 'docs' / 'silent_mistakes.md'
    documented = (
        shard_transforms.cross_shard_mean,
        shard_transforms.per_shard,
        shard_transforms.value_and_grad,
    )
    text = page.read_text(encoding='utf-8')
    text = ' '.join([text, *(fn.__doc__ for fn in documented)])

    self.assertRegex(re.sub(r'\s+', ' ', text), pattern)


def stacked(fn):
  """Returns a function that takes stacked gradients in plain `jax.jit`."""

  def grads(w, x):
    return shard_transforms.value_and_grad(lambda w, x: fn(w, x)[0], AXIS)(
        w, x
    )[1]

  return grads


# The result of a way under plain `jax.jit`: an error with its words, or a
# multiple of the true mean.
BARE = ValueError, 'needs the gradient of each shard, .* already be reduced'
PLAIN_WAYS = {
    'grad(mean loss)': (lambda w, x: grad(lambda w: (w * x).mean())(w), BARE),
    'value_and_grad(loss)': (stacked(loss), RIGHT),
    'value_and_grad(pmean(loss))': (stacked(pmean(loss)), RIGHT),
    # The loss that is returned is the sum, and this is its gradient.
    'value_and_grad(psum(loss))': (
        stacked(psum(loss)),
        (SHARDS, r'gradient of the mean of the losses'),
    ),
    'mean of value_and_grad(loss)': (
        lambda w, x: stacked(loss)(w, x).tree.mean(0),
        BARE,
    ),
    'mean of the stack': (
        lambda w, x: jax.tree.map(lambda x: x.mean(0), stacked(loss)(w, x)),
        (ValueError, r'got the shape \(\) instead of \(8,\)'),
    ),
    'reduced before': (
        lambda w, x: reduced(stacked(loss)(w, x)),
        BARE,
    ),
    'all rows in the loss': (
        lambda w, x: shard_transforms.value_and_grad(
            lambda w: (w * x).mean(), AXIS
        )(w)[1],
        (ValueError, 'no argument that is split'),
    ),
}


def reduced(grads):
  tx = shard_transforms.on_mesh(
      shard_transforms.cross_shard_mean(AXIS),
      jax.sharding.get_abstract_mesh(),
  )
  return tx.update(grads, optax.EmptyState())[0]


class PlainJitTest(parameterized.TestCase):

  @cases.product(mode=modes.PLAIN, way=PLAIN_WAYS)
  def test_each_gradient_is_correct_refused_or_listed(self, mode, way):
    grad_fn, (outcome, words) = PLAIN_WAYS[way]
    mesh = modes.plain_mesh(mode)
    x = modes.place(np.arange(SHARDS, dtype=np.float32), mesh, AXIS)

    with jax.set_mesh(mesh):
      w = modes.place(np.float32(1), mesh)
      call = functools.partial(
          jax.jit(lambda w, x: reduced(grad_fn(w, x))), w, x
      )
      if isinstance(outcome, type):
        with self.assertRaisesRegex(outcome, words):
          call()
        return
      np.testing.assert_allclose(call() / TRUE_MEAN, outcome, rtol=1e-6)
    documented = shard_transforms.value_and_grad.__doc__
    self.assertIsNotNone(re.search(words, re.sub(r'\s+', ' ', documented)))
