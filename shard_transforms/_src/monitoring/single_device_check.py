"""`assert_trains_as_one_device`: a test of N shards against one device."""

import collections
from collections.abc import Callable
from collections.abc import Mapping
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np

from shard_transforms._src.base import arguments

_CALLER = 'assert_trains_as_one_device'

# Possible causes if a part is the first that differs, in the order in which a
# step computes the parts.
_CAUSES = {
    'loss': (
        'random keys that depend on the shard, or are the same on all shards;'
        ' different numbers of rows or tokens that are not passed as `weight`;'
        ' batch statistics of only one shard; in a later step, a missing'
        ' reduction.'
    ),
    'statistics': (
        'batch statistics of only one shard: average them over the shards'
        ' inside the model.'
    ),
    'gradient': (
        'a loss that is reduced before its gradient is taken: use'
        ' `shard_transforms.value_and_grad`; a missing or wrong `weight`; batch'
        ' statistics of only one shard.'
    ),
    'update': (
        'a missing reduction; clipping, signs, moments or noise before the'
        ' mean: put the reduction first; a missing or wrong `weight`; random'
        ' keys that depend on the shard.'
    ),
}
_CAUSES_OF_COPIES = (
    'a missing reduction, which types do not show under `check_vma=False`,'
    ' `jax.pmap` and `jax.vmap`; a metric that is not reduced: return its'
    ' `shard_transforms.shard_mean`; random keys that depend on the shard;'
    ' state that differs between shards although its spec is `P()`: create it'
    ' with `init_state`, and map it with `state_specs`.'
)
_CAUSES_OF_N_TIMES = (
    '`jax.grad` of replicated parameters, which JAX sums: use'
    ' `shard_transforms.value_and_grad` and `cross_shard_mean`; a sum instead'
    ' of a mean.'
)
_CAUSES_OF_ONE_NTH = (
    'a loss that is a sum over examples: use its mean, or reduce with'
    ' `cross_shard_sum`; a gradient that is divided by the number of shards'
    ' twice.'
)
# A leaf that is smaller than this fraction of the others may consist of
# rounding errors.
_SMALL = 1e-3


class _Leaf(NamedTuple):
  """The values of a leaf in all copies, and the values of one device.

  Values are float64 or complex128.

  Attributes:
    name: The name of the leaf.
    actual: The values of all shards.
    expected: The values of one device, repeated for each shard.
    num_copies: The number of copies of the leaf, on devices or as rows.
    num_values: The number of copies with different bits.
  """

  name: str
  actual: np.ndarray
  expected: np.ndarray
  num_copies: int
  num_values: int

  def difference(self, scale: float = 0) -> float:
    """Returns the size of the difference, relative to at least `scale`."""
    size = _root_mean_square(self.actual - self.expected)
    with np.errstate(divide='ignore'):
      return size / max(_root_mean_square(self.expected), scale) if size else 0

  def is_times(self, factor: float, rtol: float) -> bool:
    """Whether all values are `factor` times those of one device."""
    return self._replace(actual=self.actual / factor).difference() <= rtol


def assert_trains_as_one_device(
    run: Callable[[int], Mapping[str, chex.ArrayTree]],
    num_shards: int,
    *,
    rtol: float = 1e-3,
) -> None:
  r"""Asserts that several shards train like one device; for tests.

  Clipping before the mean, a loss that is a sum, batch statistics of only one
  shard, or a random key that depends on the shard are not detected by types or
  errors. This function calls `run(1)` and `run(num_shards)`, which run your
  training step on the same global batch, and compares the results.

  A leaf agrees if :math:`\lVert a - b\rVert \le r \max(\lVert b\rVert, s)`.
  Here :math:`b` is the leaf of one device, :math:`r` is `rtol`, and :math:`s`
  is a thousandth of the norm that the leaf would have if its elements had the
  average size of the elements in its part. All copies on devices are compared,
  first with each other: they must have equal bits, because copies with small
  differences train different models.

  Args:
    run: A function of the number of shards that returns a mapping with some of
      the keys 'loss', 'statistics', 'gradient' and 'update', each a tree of
      arrays. All values are for the whole batch: the `shard_mean` of losses and
      gradients, and as update the parameters after the step minus those before.
      A leading axis of shards, as added by `jax.pmap`, is compared row by row.
      Return the loss of the first step, because a later loss may differ due to
      an earlier update. Return the update, whose copies reveal a missing
      reduction. Return the gradient if the optimizer clips, uses signs or is
      similar to Adam, which hides a gradient that is N times too large.
    num_shards: The number of shards, at least 2.
    rtol: The largest relative difference that counts as rounding. Increase it
      for 16-bit parameters. Adam and signs magnify rounding where a gradient is
      about zero: in the test, set `eps` of Adam to a value such as 1e-3.

  Raises:
    AssertionError: If copies of a result differ from each other, or results
      differ from those of one device. The message lists the parts that differ,
      in the order in which a step computes them, and the usual causes.
    TypeError: If an argument or the result of `run` has the wrong type.
    ValueError: If `num_shards` is less than 2, `rtol` is not positive, results
      of one device are not finite, or `run` returns unknown keys, or trees or
      shapes that depend on the number of shards.

  Examples:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> import optax
    >>> import shard_transforms as st
    >>> tx = optax.chain(optax.scale_by_sign(), st.cross_shard_mean('data'))
    >>> def step(x):
    ...   gradient = jnp.mean(x) - 2
    ...   update, _ = tx.update(gradient, tx.init(gradient))
    ...   return {'gradient': st.shard_mean(gradient, 'data'), 'update': update}
    >>> def run(num_shards):
    ...   x = jnp.arange(8.0).reshape(num_shards, -1)
    ...   return jax.vmap(step, axis_name='data')(x)
    >>> st.monitoring.assert_trains_as_one_device(run, 4)
    Traceback (most recent call last):
        ...
    AssertionError: 4 shards do not train like one device. They differ in
      update: relative difference 0.5
    Usual causes of the first difference: a missing reduction; clipping, ...
  """
  num_shards = arguments.as_at_least('num_shards', num_shards, 2)
  rtol = arguments.as_positive('rtol', rtol)
  expected, actual = _check_results(run(1)), _check_results(run(num_shards))
  if jax.tree.structure(expected) != jax.tree.structure(actual):
    raise ValueError(
        f'`run` of `{_CALLER}` must return the same tree for any number of'
        f' shards, got {jax.tree.structure(expected)} for one and'
        f' {jax.tree.structure(actual)} for {num_shards}.'
    )
  parts = {
      part: _leaves(part, actual[part], expected[part])
      for part in filter(expected.__contains__, _CAUSES)
  }
  _check_copies(parts, num_shards)
  lines, causes = [], None
  for part, leaves in parts.items():
    scale = _scale(leaves)
    for leaf in leaves:
      if not leaf.difference(scale) <= rtol:
        causes_of_factor = {
            num_shards: _CAUSES_OF_N_TIMES,
            1 / num_shards: _CAUSES_OF_ONE_NTH,
        }
        factors = [x for x in causes_of_factor if leaf.is_times(x, rtol)]
        lines.append(
            f'\n  {leaf.name}: relative difference {leaf.difference(scale):.2g}'
            + ''.join(f', {x:.3g} times that of one device' for x in factors)
        )
        causes = causes or (
            causes_of_factor[factors[0]] if factors else _CAUSES[part]
        )
  if lines:
    raise AssertionError(_message(num_shards, 'They differ', lines, causes))


def _check_copies(parts, num_shards):
  """Checks that all copies of each leaf have equal bits.

  Raises:
    AssertionError: If they do not.
  """
  lines = [
      f'\n  {leaf.name}: relative difference'
      f' {leaf.difference(_scale(leaves)):.2g}, {leaf.num_values} different'
      f' values in {leaf.num_copies} copies'
      for leaves in parts.values()
      for leaf in leaves
      if leaf.num_values > 1
  ]
  if lines:
    differ = 'The copies of a result differ from each other'
    raise AssertionError(_message(num_shards, differ, lines, _CAUSES_OF_COPIES))


def _message(num_shards, differ, lines, causes):
  return (
      f'{num_shards} shards do not train like one device. {differ} in'
      f'{"".join(lines)}\nUsual causes of the first difference: {causes}'
  )


def _scale(leaves):
  """Returns the size below which differences in a part count as rounding."""
  everything = np.concatenate([x.expected for x in leaves] or [np.zeros(0)])
  return _SMALL * _root_mean_square(everything)


def _check_results(results):
  """Checks the results of `run`.

  Raises:
    TypeError: If they are not a mapping.
    ValueError: If they have no keys, or unknown keys.
  """
  if not isinstance(results, Mapping):
    raise TypeError(
        f'`run` of `{_CALLER}` must return a mapping with some of the keys'
        f' {list(_CAUSES)}, got {type(results).__name__}.'
    )
  if not results or not results.keys() <= _CAUSES.keys():
    raise ValueError(
        f'`run` of `{_CALLER}` must return some of the keys {list(_CAUSES)},'
        f' got {list(results)}.'
    )
  return dict(results)


def _leaves(part, actual, expected):
  """Returns the leaves of a part.

  Raises:
    ValueError: If shapes differ, or a value of one device is not finite.
  """
  leaves = []
  for (path, a), b in zip(
      jax.tree.leaves_with_path(actual), jax.tree.leaves(expected), strict=True
  ):
    name = part + jax.tree_util.keystr(path)
    a, b = jnp.asarray(a), _widen(b)
    if b.shape not in (a.shape, (1, *a.shape[1:])[: a.ndim]):
      raise ValueError(
          f'`run` of `{_CALLER}` must return values for the whole batch, got'
          f' the shape {b.shape} for one shard and {a.shape} for several at'
          f' {name}. Return the `shard_transforms.shard_mean`.'
      )
    if not np.isfinite(b).all():
      raise ValueError(
          f'`run(1)` of `{_CALLER}` returned values that are not finite: {b} at'
          f' {name}. Use parameters and a batch that one device can train on.'
      )
    has_rows = b.shape != a.shape
    b = np.broadcast_to(b, a.shape)
    copies = [
        (np.ravel(_widen(x.data)), np.ravel(b[x.index]))
        for x in a.addressable_shards
    ]
    values, expected_values = map(np.concatenate, zip(*copies, strict=True))
    num_copies, num_values = _count_copies(a, has_rows)
    leaves.append(_Leaf(name, values, expected_values, num_copies, num_values))
  return leaves


def _count_copies(array, has_rows):
  """Returns the largest numbers of copies and of different values."""
  bits = collections.defaultdict(list)
  for shard in array.addressable_shards:
    data = np.asarray(shard.data)
    rows = data if has_rows else [data]
    # Each row is a copy of the values on one device.
    index = str(shard.index[1:] if has_rows else shard.index)
    bits[index] += [np.asarray(row).tobytes() for row in rows]
  num_copies = max(map(len, bits.values()), default=0)
  return num_copies, max((len(set(x)) for x in bits.values()), default=0)


def _widen(x):
  return np.asarray(x, np.complex128 if np.iscomplexobj(x) else np.float64)


def _root_mean_square(x):
  return np.sqrt(np.mean(np.square(np.abs(x)))) if x.size else 0.0
