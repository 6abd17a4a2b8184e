"""`scale_by_one_bit_adam`: Adam whose momentum is sent in one bit."""

import dataclasses
import functools
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import optax

from shard_transforms._src.base import arguments
from shard_transforms._src.base import axes as axes_lib
from shard_transforms._src.base import leaves as leaves_lib
from shard_transforms._src.base import weights
from shard_transforms._src.compression import compressed_reduction
from shard_transforms._src.compression import compressor as compressor_lib
from shard_transforms._src.compression import quantization
from shard_transforms._src.reduction import collectives
from shard_transforms._src.reduction import leaf_sums

_CALLER = 'scale_by_one_bit_adam'


class ScaleByOneBitAdamState(NamedTuple):
  """State of `scale_by_one_bit_adam`.

  Attributes:
    mu: The momentum, a tree like the parameters, the same on all shards.
    nu: The mean square of the gradient, which stays after the warm-up.
    mean_state: The `CompressedMeanState` of the momentum, with `step`, the
      number of updates.

  Examples:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> import shard_transforms
    >>> from shard_transforms import compression
    >>> mesh = jax.make_mesh((8,), ('data',))
    >>> tx = compression.scale_by_one_bit_adam('data', warmup_steps=100)
    >>> state = shard_transforms.init_state(tx, jnp.ones((200, 300)), mesh)
    >>> print(state.mu.shape, state.mean_state.residual.shape)
    (200, 300) (8, 200, 300)
  """

  mu: optax.Updates
  nu: optax.Updates
  mean_state: Any


def scale_by_one_bit_adam(
    axis_name: axes_lib.AxisName,
    *,
    warmup_steps: int,
    b1: chex.Numeric = 0.9,
    b2: chex.Numeric = 0.999,
    eps: chex.Numeric = 1e-8,
    compressor: compressor_lib.Compressor | None = None,
    min_elements: int = 16384,
    seed: int = 0,
) -> optax.GradientTransformationExtraArgs:
  r"""Rescales the mean update over shards by Adam, in one bit an element.

  Takes the place of `cross_shard_mean` and `optax.scale_by_adam` together. For
  `warmup_steps` steps it is these two. Then the mean square v of the gradient
  is frozen, and shards no longer send their gradients :math:`u_i`. Each sends
  the momentum to which its gradient would lead, rescaled, and compressed with
  error feedback as by `compressed_mean`:

  .. math:: d = \sqrt{v / (1 - \beta_2^T)} + \epsilon, \quad m \leftarrow d \,
     \text{mean}_i \frac{\beta_1 m + (1 - \beta_1) u_i}{d}, \quad u \leftarrow
     \frac{m}{(1 - \beta_1^t) \, d}

  with T the steps of the warm-up. (The paper sends the momentum as it is. The
  scale that elements of a block share then moves those of a small mean square
  by many times as much as Adam would.) Elements whose mean square is zero, such
  as embeddings that no batch of the warm-up has seen, stay at zero; so the
  warm-up must be long enough for each to be seen, and for v to settle.

  Weights, leaves that are not compressed, and `resize_state` work as with
  `compressed_mean`. Gradients must be real.

  Args:
    axis_name: The mapped axis to reduce over, or a sequence of them.
    warmup_steps: For how many steps it is plain Adam, at least 1.
    b1: The decay of the momentum.
    b2: The decay of the mean square.
    eps: The number added to the root of the mean square.
    compressor: How blocks of momenta are compressed; `scaled_sign()` if left
      out.
    min_elements: The least number of elements of a leaf that is compressed.
    seed: The seed of compressors that draw random numbers.

  Returns:
    An `optax.GradientTransformationExtraArgs` with a `ScaleByOneBitAdamState`,
    whose `update` takes the optional extra argument `weight`.

  Raises:
    NameError: In `init` and `update`, if an axis is not bound.
    TypeError: If an argument is of the wrong kind; in `update`, if a leaf is
      not real, `weight` is not a real number, or the state is of another
      transformation.
    ValueError: If an argument has a wrong value; in `update`, as in
      `compressed_mean`.

  Examples:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> from shard_transforms import compression
    >>> tx = compression.scale_by_one_bit_adam('data', warmup_steps=10)
    >>> step = lambda update: tx.update(update, tx.init(update))[0]
    >>> updates = jax.vmap(step, axis_name='data')(jnp.array([[3.0], [5.0]]))
    >>> print(updates.round(3))
    [[1.]
     [1.]]

  References:
    Tang et al., 1-bit Adam: Communication Efficient Large-Scale Training with
    Adam's Convergence Speed, 2021, https://arxiv.org/abs/2102.02888.
  """
  reduce = compressed_reduction.CompressedReduction(
      leaf_sums.Reduction(_CALLER, 'mean', axes_lib.as_axes(axis_name)),
      arguments.as_at_least('warmup_steps', warmup_steps, 1),
      seed,
      quantization.scaled_sign() if compressor is None else compressor,
      'residual',
      min_elements,
  )
  b1, b2 = arguments.as_decay('b1', b1), arguments.as_decay('b2', b2)
  eps = arguments.as_not_negative('eps', eps)

  def init_fn(params):
    mu, nu = map(leaves_lib.accumulators, (params, params))
    return ScaleByOneBitAdamState(mu, nu, reduce.start(params))

  def update_fn(updates, state, params=None, *, weight=None, **extra_args):
    del params, extra_args
    arguments.check_state(state, ScaleByOneBitAdamState, _CALLER)
    _check_real(updates)
    leaves_lib.check_per_shard(updates, reduce.axes, _CALLER)
    arguments.check_like(updates, state.mu, _CALLER)
    rule = _Rule(b1, b2, eps, warmup_steps, state.mean_state.step)
    to_send = leaves_lib.tree_map(rule.to_send, updates, state.mu, state.nu)
    means, mean_state = reduce(to_send, state.mean_state, weight)
    advance = functools.partial(
        rule.advance, is_any=_is_any(weight, reduce.axes)
    )
    leaves, treedef = jax.tree.flatten(updates, is_leaf=leaves_lib.is_none)
    others = map(treedef.flatten_up_to, (means, state.mu, state.nu))
    moved = list(map(advance, leaves, *others))
    rescaled, mu, nu = (
        treedef.unflatten(x[i] for x in moved) for i in range(3)
    )
    return rescaled, ScaleByOneBitAdamState(mu, nu, mean_state)

  return optax.GradientTransformationExtraArgs(init_fn, update_fn)


@dataclasses.dataclass(frozen=True, eq=False)
class _Rule:
  """The arithmetic of one step on a leaf of updates and on its moments.

  Attributes:
    b1: The decay of the momentum.
    b2: The decay of the mean square.
    eps: The number added to the root of the mean square.
    warmup_steps: For how many steps it is plain Adam.
    step: The number of steps before this one.
  """

  b1: chex.Numeric
  b2: chex.Numeric
  eps: chex.Numeric
  warmup_steps: int
  step: jax.Array

  def to_send(self, update, mu, nu):
    """Returns what a shard sends: its update, or the rescaled momentum."""
    if mu is None or update is None:
      return update
    update = jnp.asarray(update, mu.dtype)
    # Else the scale of a block would drown its elements of small mean square.
    moved = self.b1 * mu + (1 - self.b1) * update
    moved = moved / self._divisor(nu, self.step)
    return self._if_warm(update, jnp.where(nu > 0, moved, 0))

  def advance(self, update, mean, mu, nu, is_any):
    """Returns the next update, in the dtype of this one, and next moments.

    Without any shard that counts, the momentum decays.
    """
    if mu is None or update is None:
      return update, mu, nu
    of_gradient = (1 - self.b1) * mean + self.b1 * mu
    # Where no shard counts, the mean is zero, which is not the momentum.
    moved = jnp.where(nu > 0, mean * self._divisor(nu, self.step), 0)
    mu = self._if_warm(of_gradient, jnp.where(is_any, moved, self.b1 * mu))
    # The mean square is frozen after the warm-up.
    nu = self._if_warm((1 - self.b2) * jnp.square(mean) + self.b2 * nu, nu)
    rescaled = mu / (1 - self.b1 ** (self.step + 1))
    rescaled = rescaled / self._divisor(nu, self.step + 1)
    return rescaled.astype(jnp.result_type(update)), mu, nu

  def _divisor(self, nu, num_steps):
    seen = jnp.clip(num_steps, 1, self.warmup_steps)
    return jnp.sqrt(nu / (1 - self.b2**seen)) + self.eps

  def _if_warm(self, warm, later):
    return jnp.where(self.step < self.warmup_steps, warm, later)


def _check_real(updates):
  """Checks that all leaves are real and carry a gradient.

  Raises:
    TypeError: If one does not.
  """
  leaves_lib.check_inexact(updates, _CALLER)
  for path, leaf in jax.tree.leaves_with_path(updates):
    if jnp.iscomplexobj(leaf):
      raise TypeError(
          f'`updates` of `{_CALLER}` must be real, got a complex leaf at'
          f' {leaves_lib.name_of(path)}. Leave such leaves out'
          ' with `optax.masked`.'
      )


def _is_any(weight, axes):
  """Returns whether any shard counts."""
  if weight is None:
    return True
  weight = weights.as_weight(weight, (), _CALLER)
  with jax.named_scope(_CALLER):
    return collectives.total(weight, axes) > 0
