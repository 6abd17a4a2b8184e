"""A gradient that is N times too large, in every way to take one, in each mode.

JAX sums or does not sum over shards depending on the mode and on what is done
to the parameters, the loss and the gradient. Behind `cross_shard_mean`, each of
these is right, is refused, or is listed in `UNDETECTABLE`.
"""

import pathlib
import re
from typing import NamedTuple

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
CHECKED = ('shard_map',)
UNTRACKED = tuple(mode for mode in modes.NAMES if mode not in CHECKED)


def loss(w, x):
  return w * x


def pmean_loss(w, x):
  return lax.pmean(loss(w, x), AXIS)


def psum_loss(w, x):
  return lax.psum(loss(w, x), AXIS)


def shard_mean_loss(w, x):
  return shard_transforms.shard_mean(loss(w, x), AXIS)


def grad(of):
  return jax.grad(of)


def grad_of_per_shard(of):
  return lambda w, x: jax.grad(of)(shard_transforms.per_shard(w, AXIS), x)


def grad_of_pcast(of):
  return lambda w, x: jax.grad(of)(lax.pcast(w, AXIS, to='varying'), x)


def value_and_grad(of):
  return lambda w, x: shard_transforms.value_and_grad(of, AXIS)(w, x)[1]


def then(fn, take):
  return lambda w, x: fn(take(w, x))


def pmean(g):
  return lax.pmean(g, AXIS)


def psum(g):
  return lax.psum(g, AXIS)


def divide(g):
  return g / lax.axis_size(AXIS)


class Way(NamedTuple):
  """A way to take a gradient, and what `cross_shard_mean` is told of it."""

  take: object
  on_invariant: str = 'error'


WAYS = {
    'grad(loss)': Way(grad(loss)),
    'pmean(grad(loss))': Way(then(pmean, grad(loss))),
    'psum(grad(loss))': Way(then(psum, grad(loss))),
    'grad(loss) / axis_size': Way(then(divide, grad(loss))),
    'grad(pmean(loss))': Way(grad(pmean_loss)),
    'pmean(grad(pmean(loss)))': Way(then(pmean, grad(pmean_loss))),
    'grad(psum(loss))': Way(grad(psum_loss)),
    'grad(shard_mean(loss))': Way(grad(shard_mean_loss)),
    'pcast, grad(loss)': Way(grad_of_pcast(loss)),
    'pcast, pmean(grad(loss))': Way(then(pmean, grad_of_pcast(loss))),
    'pcast, pmean(grad(pmean(loss)))': Way(
        then(pmean, grad_of_pcast(pmean_loss))
    ),
    'per_shard, grad(loss)': Way(grad_of_per_shard(loss)),
    'per_shard, pmean(grad(loss))': Way(then(pmean, grad_of_per_shard(loss))),
    'per_shard, psum(grad(loss))': Way(then(psum, grad_of_per_shard(loss))),
    'per_shard, grad(loss) / axis_size': Way(
        then(divide, grad_of_per_shard(loss))
    ),
    'per_shard, grad(pmean(loss))': Way(grad_of_per_shard(pmean_loss)),
    'per_shard, grad(psum(loss))': Way(grad_of_per_shard(psum_loss)),
    'per_shard, grad(shard_mean(loss))': Way(
        grad_of_per_shard(shard_mean_loss)
    ),
    'value_and_grad(loss)': Way(value_and_grad(loss)),
    'value_and_grad(pmean(loss))': Way(value_and_grad(pmean_loss)),
    'value_and_grad(psum(loss))': Way(value_and_grad(psum_loss)),
    'value_and_grad(shard_mean(loss))': Way(value_and_grad(shard_mean_loss)),
    'grad(loss), averaged': Way(grad(loss), 'averaged'),
    'grad(pmean(loss)), averaged': Way(grad(pmean_loss), 'averaged'),
    'value_and_grad(loss), averaged': Way(value_and_grad(loss), 'averaged'),
}


def _table(*rows):
  return {
      (way, mode): found for way, in_modes, *found in rows for mode in in_modes
  }


_REDUCED = (ValueError, '`cross_shard_mean` .* already reduced')
_REDUCED_LOSS = (ValueError, 'loss of `value_and_grad` must be per shard')
_NO_PCAST = (AssertionError, '')

# What raises, with the error.
REFUSED = _table(
    ('grad(loss)', CHECKED, *_REDUCED),
    ('pmean(grad(loss))', CHECKED, *_REDUCED),
    ('psum(grad(loss))', CHECKED, *_REDUCED),
    ('grad(loss) / axis_size', CHECKED, *_REDUCED),
    ('grad(pmean(loss))', CHECKED, *_REDUCED),
    ('pmean(grad(pmean(loss)))', CHECKED, *_REDUCED),
    ('grad(psum(loss))', CHECKED, *_REDUCED),
    # The library's own, but with respect to replicated parameters.
    ('grad(shard_mean(loss))', CHECKED, *_REDUCED),
    ('pcast, pmean(grad(loss))', CHECKED, *_REDUCED),
    ('pcast, pmean(grad(pmean(loss)))', CHECKED, *_REDUCED),
    ('per_shard, pmean(grad(loss))', CHECKED, *_REDUCED),
    ('per_shard, psum(grad(loss))', CHECKED, *_REDUCED),
    ('value_and_grad(pmean(loss))', CHECKED, *_REDUCED_LOSS),
    ('value_and_grad(psum(loss))', CHECKED, *_REDUCED_LOSS),
    ('value_and_grad(shard_mean(loss))', CHECKED, *_REDUCED_LOSS),
    # JAX has no `lax.pcast` there.
    ('pcast, grad(loss)', ('vmap',), *_NO_PCAST),
    ('pcast, pmean(grad(loss))', ('vmap',), *_NO_PCAST),
    ('pcast, pmean(grad(pmean(loss)))', ('vmap',), *_NO_PCAST),
)

# Why no type shows it, and where the documentation says so.
SUMMED_LOSS = (
    'JAX transposes `psum` to `psum` where types are not tracked.',
    r'`lax\.psum` in the loss|loss that is summed with `lax\.psum`',
)
SUMMED_BEFORE = (
    'Where types are not tracked, a sum looks like a gradient of a shard.',
    r'update that is reduced twice',
)
SCALED = (
    'A gradient that the caller has scaled looks like any other.',
    r'`[^`]*lax\.axis_size',
)
AVERAGED_LOSS = (
    'The gradient of a mean with respect to `per_shard` parameters is a part'
    ' of the gradient of the shard: it differs between shards as any other.',
    r'`lax\.pmean\(loss\)`[^.]*`per_shard`',
)
TOLD_WRONGLY = (
    'A sum and a mean have one type; which it is, is what the caller says.',
    r"'averaged'`, which leaves it as it is",
)

# The ratio of the result to the true mean, and the reason.
UNDETECTABLE = _table(
    ('grad(psum(loss))', UNTRACKED, SHARDS, SUMMED_LOSS),
    ('per_shard, grad(psum(loss))', UNTRACKED, SHARDS, SUMMED_LOSS),
    ('value_and_grad(psum(loss))', UNTRACKED, SHARDS, SUMMED_LOSS),
    ('psum(grad(loss))', UNTRACKED, SHARDS, SUMMED_BEFORE),
    ('per_shard, psum(grad(loss))', UNTRACKED, SHARDS, SUMMED_BEFORE),
    ('grad(loss) / axis_size', UNTRACKED, 1 / SHARDS, SCALED),
    ('per_shard, grad(loss) / axis_size', modes.NAMES, 1 / SHARDS, SCALED),
    ('per_shard, grad(pmean(loss))', CHECKED, 1 / SHARDS, AVERAGED_LOSS),
    ('per_shard, grad(shard_mean(loss))', CHECKED, 1 / SHARDS, AVERAGED_LOSS),
    ('grad(loss), averaged', CHECKED, SHARDS, TOLD_WRONGLY),
)

REASONS = {reason for _, reason in UNDETECTABLE.values()}


def ratios(names, mode):
  """Returns what `cross_shard_mean` gives, in units of the true mean."""

  def reduce_all(w, x):
    return {name: reduce(WAYS[name], w, x) for name in names}

  def reduce(way, w, x):
    tx = shard_transforms.cross_shard_mean(AXIS, on_invariant=way.on_invariant)
    return tx.update(way.take(w, x), optax.EmptyState())[0]

  x = np.arange(SHARDS, dtype=np.float32)
  reduced = jax.device_get(modes.map_shards(mode, reduce_all)(np.float32(1), x))
  return {name: x / TRUE_MEAN for name, x in reduced.items()}


class NTimesTest(parameterized.TestCase):

  @cases.parameters(*modes.NAMES)
  def test_each_way_is_right_or_refused_or_listed(self, mode):
    for way in WAYS:
      if (way, mode) in REFUSED:
        error, message = REFUSED[way, mode]
        with self.subTest(way), self.assertRaisesRegex(error, message):
          ratios([way], mode)

    found = ratios([way for way in WAYS if (way, mode) not in REFUSED], mode)

    for way, actual in found.items():
      with self.subTest(way):
        expected, _ = UNDETECTABLE.get((way, mode), (1, None))
        np.testing.assert_array_equal(actual, [expected] * SHARDS)

  @cases.parameters(*sorted(REASONS))
  def test_documentation_tells(self, reason, pattern):
    page = pathlib.Path(__file__).parents[1] / 'docs' / 'silent_mistakes.md'
    documented = (
        shard_transforms.cross_shard_mean,
        shard_transforms.per_shard,
        shard_transforms.value_and_grad,
    )
    text = page.read_text(encoding='utf-8')
    text = ' '.join([text, *(fn.__doc__ for fn in documented)])

    self.assertRegex(re.sub(r'\s+', ' ', text), pattern, reason)
