"""`tower_reduce`: gradient accumulation over several calls of `update`."""

from collections.abc import Hashable
import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
import optax

from shard_transforms._src.base import arguments
from shard_transforms._src.base import axes as axes_lib
from shard_transforms._src.base import leaves as leaves_lib
from shard_transforms._src.base import weights
from shard_transforms._src.gates import gating
from shard_transforms._src.reduction import collectives
from shard_transforms._src.transforms import tower_window

_CALLER = 'tower_reduce'


def tower_reduce(
    num_towers: int,
    inner: optax.GradientTransformation | None = None,
    *,
    axis_name: axes_lib.AxisName | None = None,
    reduction: Literal['mean', 'sum'] = 'mean',
    assume_weighted: bool = False,
) -> optax.GradientTransformationExtraArgs:
  r"""Gradient accumulation: sums several updates and applies them once.

  Each call of `update` takes the update of one tower, that is, of one
  micro-batch. All but the last of `num_towers` calls return zero updates and do
  not run `inner`; the last runs `inner` with the mean (or sum) over all towers.
  With the extra argument `weight`, a scalar :math:`w_t` a tower, that mean is

  .. math:: u = \sum_{t: w_t > 0} w_t u_t / W,
     \quad W = \sum_{t: w_t > 0} w_t

  and `inner` receives the weight :math:`W`, so that a `cross_shard_mean` inside
  gives the mean over all tokens of all towers of all shards. With
  `reduction='sum'` the sum contains the weights, and `inner` receives 1 for a
  shard that has any, else 0. If the total over all shards is zero, the update
  is zero, the state of `inner` keeps every bit, and the window starts again.
  Give `weight` with every tower of a window or with none.

  A tower that has no gradient for a leaf (`None` in its place) counts as zero
  there; the divisor stays. The minimum of the `local_step`s of a window is
  passed to `inner`; any other extra argument is the last tower's. Collectives
  inside `inner` run once a window.

  Without `inner`, the result goes to the next link of an `optax.chain`, as
  zeros in all calls but the last: right for links that keep no moments, such as
  `optax.sgd` without momentum. Weights then raise, and the next link sees the
  last tower's `local_step`.

  Args:
    num_towers: How many updates count as one step, at least 1. With 1, `inner`
      is called with the arguments of `update`.
    inner: The transformation that is applied once a window.
    axis_name: The mapped axis, or a sequence of them, between whose shards the
      updates differ; the sum is then kept per shard (see `init_state`). `None`
      if updates are already the same on all shards.
    reduction: `'mean'` or `'sum'` over the towers.
    assume_weighted: Whether to take your word that `inner` uses `weight` in all
      of its sums over shards, for an `inner` that is refused because the check
      does not see it. Nothing is checked then: a sum without the weight counts
      all shards, without an error.

  Returns:
    An `optax.GradientTransformationExtraArgs` with a `TowerReduceState`, whose
    `update` takes the optional extra arguments `weight` and `local_step`.

  Raises:
    NameError: In `init` and `update`, if an axis is not bound.
    TypeError: If an argument is of the wrong kind; in `update`, if a leaf is an
      integer or boolean, an extra argument is of the wrong kind, or the state
      is of another transformation.
    ValueError: If `num_towers` is less than 1, or `reduction` unknown; in
      `update`, if the tree is not the one that the state was made for, updates
      are already reduced although `axis_name` is given, or differ between
      shards although it is not, an extra argument has a wrong value, or `inner`
      reduces over shards without the weight.

  Examples:
    >>> import jax.numpy as jnp
    >>> import optax
    >>> import shard_transforms
    >>> tx = shard_transforms.tower_reduce(2, optax.sgd(1.0))
    >>> state = tx.init(jnp.zeros(2))
    >>> for tower, weight in ([1.0, 1.0], 30), ([5.0, 9.0], 10):
    ...   updates, state = tx.update(jnp.array(tower), state, weight=weight)
    ...   print(updates)
    [0. 0.]
    [-2. -3.]

  References:
    `tf.contrib.estimator.TowerOptimizer` of TensorFlow 1.15; Goyal et al.,
    Accurate, Large Minibatch SGD: Training ImageNet in 1 Hour, 2017,
    https://arxiv.org/abs/1706.02677 (the mean over all examples of a step).
  """
  num_towers = arguments.as_at_least('num_towers', num_towers, 1)
  arguments.check_reduction(reduction)
  arguments.check_bool('assume_weighted', assume_weighted)
  axes = axes_lib.optional_axes(axis_name)
  is_link = inner is None
  towers = _Towers(
      num_towers=num_towers,
      inner=arguments.as_inner(optax.identity() if is_link else inner, _CALLER),
      is_link=is_link,
      axes=axes,
      assume_weighted=assume_weighted,
      reduction=reduction,
  )
  return gating.transformation(towers.init, towers.step)


@dataclasses.dataclass(frozen=True)
class _Towers:
  """The functions of `tower_reduce`.

  Attributes:
    num_towers: As in `tower_reduce`.
    inner: Its inner transformation.
    is_link: Whether it was given none.
    axes: The axes between whose shards updates differ.
    assume_weighted: As in `tower_reduce`.
    reduction: As in `tower_reduce`.
  """

  num_towers: int
  inner: optax.GradientTransformationExtraArgs
  is_link: bool
  axes: tuple[Hashable, ...]
  assume_weighted: bool
  reduction: weights.Kind

  def init(self, params):
    axes_lib.size(self.axes, _CALLER)
    inner_state = self.inner.init(params)
    if self.num_towers == 1:
      params = ()
    empty = leaves_lib.accumulators((params, jnp.zeros([], jnp.float32)))
    is_sum = self.reduction == 'sum'
    return tower_window.start(empty, inner_state, self.axes, is_sum)

  def step(
      self,
      checked,
      updates,
      state,
      params=None,
      *,
      weight=None,
      local_step=None,
      **extra_args,
  ):
    gating.check_update(
        checked,
        updates,
        state,
        tower_window.TowerReduceState,
        self.axes,
        _CALLER,
    )
    if self.is_link:
      weights.check_not_in_chain(weight, _CALLER)
    if weight is not None:
      weight = gating.as_weight(checked, weight, _CALLER)
    if self.num_towers == 1:
      extra_args |= weights.given(local_step=local_step)
      given = updates, state.inner_state, params, weight, extra_args
      _check_single(state)
      updates, inner_state = self._apply(checked, None, *given)
      return updates, state._replace(inner_state=inner_state)
    window = tower_window.collect(state, updates, weight, local_step, self.axes)

    def end(window, updates, params, /, **extra_args):
      is_sum = self.reduction == 'sum'
      reduced = tower_window.reduced(window, updates, params, self.axes, is_sum)
      if local_step is not None:
        extra_args['local_step'] = reduced.oldest_local_step
      accept, total_weight = None, None
      if weight is not None:
        accept = collectives.total(reduced.total_weight, self.axes) > 0
        total_weight = weights.usable(
            weights.passed_on(reduced.total_weight, self.reduction)
        )
      # The window has used the weights that gates around it care about.
      known = checked._replace(unchecked=(), may_be_local=True)
      updates, inner_state = self._apply(
          known,
          accept,
          reduced.updates,
          window.inner_state,
          params,
          total_weight,
          extra_args,
      )
      return updates, tower_window.emptied(window, inner_state)

    is_last = collectives.agreed(window.tower >= self.num_towers)
    return gating.run_when_due(
        is_last, end, window, updates, params, extra_args=extra_args
    )

  def _apply(
      self, checked, accept, updates, inner_state, params, weight, extra_args
  ):
    """Applies the result of a window, unless no tower of it has a weight."""
    return gating.update_or_skip(
        checked,
        accept,
        self.inner,
        updates,
        inner_state,
        params,
        weight=weight,
        axes=self.axes,
        assume_weighted=self.assume_weighted,
        extra_args=extra_args,
        caller=_CALLER,
    )


def _check_single(state):
  """Checks that a state is of no window of several towers.

  Raises:
    ValueError: If it is of one.
  """
  if jax.tree.leaves(state.total):
    raise ValueError(
        'State of `tower_reduce` must be made for as many towers, got that'
        ' of a window of several where `num_towers` is 1. Make it with'
        ' `init`.'
    )
