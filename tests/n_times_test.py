"""A gradient that is N times too large, in every way to take one, in each mode.

JAX sums or does not sum over shards depending on the mode and on what is done
to the parameters, the loss and the gradient. Behind `cross_shard_mean`, each of
these is right, is refused, or is listed in `UNDETECTABLE`.
"""

import functools
import pathlib
import re

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


def value_and_grad(of):
  return lambda w, x: shard_transforms.value_and_grad(of, AXIS)(w, x)[1]


def then(reduce):
  """Returns what reduces the results of a loss or a gradient."""
  return lambda of: lambda w, x: reduce(of(w, x), AXIS)


def at(own):
  """Returns what takes a gradient at parameters of each shard's own."""
  return lambda of: lambda w, x: of(own(w, AXIS), x)


grad = jax.grad
pmean, psum = then(lax.pmean), then(lax.psum)
shard_mean = then(shard_transforms.shard_mean)
divide = then(lambda g, axis: g / lax.axis_size(axis))
pcast = at(functools.partial(lax.pcast, to='varying'))
per_shard = at(shard_transforms.per_shard)
# Ways to take a gradient; for those at the end, `cross_shard_mean` is told that
# it is averaged.
WAYS = {
    'grad(loss)': grad(loss),
    'pmean(grad(loss))': pmean(grad(loss)),
    'psum(grad(loss))': psum(grad(loss)),
    'grad(loss) / axis_size': divide(grad(loss)),
    'grad(pmean(loss))': grad(pmean(loss)),
    'pmean(grad(pmean(loss)))': pmean(grad(pmean(loss))),
    'grad(psum(loss))': grad(psum(loss)),
    'grad(shard_mean(loss))': grad(shard_mean(loss)),
    'pcast, grad(loss)': pcast(grad(loss)),
    'pcast, pmean(grad(loss))': pcast(pmean(grad(loss))),
    'pcast, pmean(grad(pmean(loss)))': pcast(pmean(grad(pmean(loss)))),
    'per_shard, grad(loss)': per_shard(grad(loss)),
    'per_shard, pmean(grad(loss))': per_shard(pmean(grad(loss))),
    'per_shard, psum(grad(loss))': per_shard(psum(grad(loss))),
    'per_shard, grad(loss) / axis_size': per_shard(divide(grad(loss))),
    'per_shard, grad(pmean(loss))': per_shard(grad(pmean(loss))),
    'per_shard, grad(psum(loss))': per_shard(grad(psum(loss))),
    'per_shard, grad(shard_mean(loss))': per_shard(grad(shard_mean(loss))),
    'value_and_grad(loss)': value_and_grad(loss),
    'value_and_grad(pmean(loss))': value_and_grad(pmean(loss)),
    'value_and_grad(psum(loss))': value_and_grad(psum(loss)),
    'value_and_grad(shard_mean(loss))': value_and_grad(shard_mean(loss)),
    'grad(loss), averaged': grad(loss),
    'grad(pmean(loss)), averaged': grad(pmean(loss)),
    'value_and_grad(loss), averaged': value_and_grad(loss),
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
    return {name: reduce(name, w, x) for name in names}

  def reduce(name, w, x):
    told = 'averaged' if name.endswith('averaged') else 'error'
    tx = shard_transforms.cross_shard_mean(AXIS, on_invariant=told)
    return tx.update(WAYS[name](w, x), optax.EmptyState())[0]

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
