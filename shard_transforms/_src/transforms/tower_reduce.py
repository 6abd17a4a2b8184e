"""`tower_reduce`: gradient accumulation over several calls of `update`."""

from collections.abc import Mapping
import functools
from typing import Literal, NamedTuple

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import optax

from shard_transforms._src.analysis import weight_flow
from shard_transforms._src.base import arguments
from shard_transforms._src.base import axes as axes_lib
from shard_transforms._src.base import counters
from shard_transforms._src.base import leaves as leaves_lib
from shard_transforms._src.base import per_shard_state
from shard_transforms._src.base import state_rules
from shard_transforms._src.base import weights
from shard_transforms._src.gates import gating
from shard_transforms._src.reduction import collectives
from shard_transforms._src.reduction import tower_squares
from shard_transforms._src.reduction import tree_sums

_CALLER = 'tower_reduce'
_NO_STEP = jnp.iinfo(jnp.int32).max


class TowerReduceState(NamedTuple):
  """State of `tower_reduce`.

  With `axis_name`, `total`, `total_weight` and `oldest_local_step` differ
  between shards: their leaves have a leading axis, of length 1 inside the
  mapped function and of the number of shards outside.

  Attributes:
    tower: Number of towers collected since the last update, int32 [].
    total: Their (weighted) sum, a tree like the parameters, in float32 for
      leaves of fewer bits; `()` where there is but one tower.
    total_weight: The sum of their weights, float32 []. With `order='tree'`, a
      `TowerWeights`; both totals then have a further axis, of length log2
      `num_towers`: row l is the sum of 2**l towers, and counts if bit l of
      `tower` is 1.
    oldest_local_step: The minimum of their local steps, int32 []; the largest
      int32 where no tower gave one.
    inner_state: State of the inner transformation.
    tower_squares: The weighted sum of the squared norms of their updates, and
      the number of towers with a weight, float32 [2]; per shard as `total`;
      `()` unless a state in `inner_state` asks for it.

  Examples:
    >>> import jax.numpy as jnp
    >>> import optax
    >>> import shard_transforms
    >>> state = shard_transforms.tower_reduce(4).init(jnp.zeros(2))
    >>> print(optax.tree_utils.tree_get(state, 'tower'), state.total)
    0 [0. 0.]
  """

  tower: jax.Array
  total: optax.Updates
  total_weight: jax.Array | tree_sums.TowerWeights
  oldest_local_step: jax.Array
  inner_state: optax.OptState
  tower_squares: jax.Array | tuple[()] = ()

  def resize_rules(
      self, reduction: state_rules.Reduction | None
  ) -> Mapping[str, state_rules.ResizeRule]:
    """Returns how `resize_state` converts its fields.

    The window then ends with the same result: totals over all shards are kept,
    or, without weights, their `reduction`. With `order='tree'`, only a window
    without towers is converted.
    """
    if _is_in_order(self):
      return _rules_in_order(self.tower)
    total = total_weight = state_rules.ResizeRule('sum')
    may_be_unweighted = np.all(self.total_weight == self.tower)
    if self.tower and may_be_unweighted and reduction != 'weighted':
      # Without weights, a shard's total weight is the number of its towers.
      total_weight = state_rules.ResizeRule('maximum', self.tower)
      total = _rule_of_unweighted(reduction)
    return {
        'total': total,
        'total_weight': total_weight,
        'oldest_local_step': state_rules.ResizeRule('minimum', _NO_STEP),
        'tower_squares': tower_squares.resize_rule(self.tower),
    }

  def metric_rules(self) -> Mapping[str, state_rules.MetricRule]:
    """Returns how `metrics` reads its attributes."""
    rules = {'tower': state_rules.MetricRule()}
    if not _is_in_order(self):
      rules['total_weight'] = state_rules.MetricRule('sum')
    return rules


def tower_reduce(
    num_towers: int,
    inner: optax.GradientTransformation | None = None,
    *,
    axis_name: axes_lib.AxisName | None = None,
    reduction: Literal['mean', 'sum'] = 'mean',
    assume_weighted: bool = False,
    order: tree_sums.Order = None,
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
  is zero, `inner` is not run, and the window starts again. Give `weight` with
  every tower of a window or with none.

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
    order: `'tree'` for the same bits on any number of shards: towers, and then
      shards, are added in pairs, pairs of pairs, and so on. `num_towers` is
      then a power of two, and `inner` reduces with the same order. `inner` gets
      the sum over the towers, 16-bit leaves in float32, which its reduction
      divides. A window keeps log2 `num_towers` partial sums per parameter.

  Returns:
    An `optax.GradientTransformationExtraArgs` with a `TowerReduceState`, whose
    `update` takes the optional extra arguments `weight` and `local_step`.

  Raises:
    NameError: In `init` and `update`, if an axis is not bound.
    TypeError: If an argument is of the wrong kind; in `update`, if a leaf is an
      integer or boolean, an extra argument is of the wrong kind, or the state
      is of another transformation.
    ValueError: If `num_towers` is less than 1, or no power of two with
      `order='tree'`, or `reduction` or `order` unknown; in `init` and `update`,
      if `inner` reduces over shards in another order; in
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
  checked = () if assume_weighted else axes
  tree_sums.check_towers(order, num_towers, inner, _CALLER)
  is_link = inner is None
  inner = arguments.as_inner(optax.identity() if is_link else inner, _CALLER)

  def init_fn(params):
    axes_lib.size(axes, _CALLER)
    inner_state, squares = inner.init(params), ()
    tree_sums.check_inner(order, num_towers, inner_state, bool(axes), _CALLER)
    if order is None and num_towers == 1:
      params = ()
    elif order is None and reduction == 'mean':
      squares = tower_squares.start(inner_state, axes)
    empty = leaves_lib.accumulators((params, jnp.zeros([], jnp.float32)))
    if order is not None:
      total, total_weight = tree_sums.empty(empty, num_towers)
      empty = total, tree_sums.TowerWeights(total_weight)
    return _start(empty, inner_state, squares, axes)

  def step(
      gate,
      updates,
      state,
      params=None,
      *,
      weight=None,
      local_step=None,
      **extra_args,
  ):
    arguments.check_update(updates, state, TowerReduceState, axes, _CALLER)
    _check_same_order(state, order, num_towers, axes)
    if is_link:
      weights.check_not_in_chain(weight, _CALLER)
    if num_towers == 1 and order is None:
      extra_args |= weights.given(local_step=local_step)
      return _apply_alone(
          gate, inner, updates, state, params, weight, checked, extra_args
      )

    def end(window, params, /, **extra_args):
      reduced, total_weight, oldest, squares = _reduce(
          window, updates, params, axes, divisor
      )
      extra_args |= weights.given(
          local_step=None if local_step is None else oldest,
          tower_squares=squares,
      )
      counts = None
      if weight is not None:
        counts = weights.passed_on(total_weight, reduction)
      if divides_later:
        known = 1 if reduction == 'sum' else num_towers
        counts = weights.Summed(known if counts is None else counts, dtypes)
      given = inner, reduced, window.inner_state, params
      if weight is None:
        extra_args |= weights.given(weight=counts)
        applied, inner_state = gate.update(*given, **extra_args)
      else:
        applied, inner_state = gate.update_or_skip(
            collectives.total(total_weight, axes) > 0,
            *given,
            weight=counts,
            axes=checked,
            extra_args=extra_args,
            caller=_CALLER,
        )
      return applied, _emptied(window, inner_state)

    dtypes, divides_later = (), bool(order and axes)
    if divides_later:
      dtypes = tree_sums.dtypes_to_restore(updates)
      updates = leaves_lib.widened(updates)
    divisor = None if weight is not None else num_towers
    divisor = 1 if divides_later or reduction == 'sum' else divisor
    window = _collect(state, updates, weight, local_step, axes)
    is_last = collectives.agreed(window.tower >= num_towers)
    applied, after = gate.run_or_skip(
        is_last, end, window, params, extra_args=extra_args, seldom=True
    )
    if num_towers == 1:
      # Nothing is kept of a window of one, which takes the way of all others so
      # that its arithmetic is compiled alike.
      total, total_weight = state.total, state.total_weight
      after = after._replace(total=total, total_weight=total_weight)
    return applied, after

  return gating.transformation(init_fn, step)


def _apply_alone(gate, inner, updates, state, params, weight, axes, extra_args):
  """Applies a single tower.

  Raises:
    TypeError: If the weight is not a real number.
    ValueError: If the state is that of several towers, or sums over `axes` do
      not use the weight.
  """
  if jax.tree.leaves(state.total):
    raise ValueError(
        'State of `tower_reduce` must be made for as many towers, got that of a'
        ' window of several where `num_towers` is 1. Make it with `init`.'
    )

  def run(state, params, updates, weight):
    given = extra_args | weights.given(weight=weight)
    return gate.update(inner, updates, state, params, **given)

  given = state.inner_state, params, updates, weight
  if weight is not None and axes:
    # A bad weight that is known here is not known inside of `jax.jit`.
    weights.as_weight(weight, (), _CALLER)
    run = jax.jit(run)
    program = run.trace(*given).jaxpr.jaxpr
    weight_flow.check(program, updates, given[0], axes, caller=_CALLER)
  applied, inner_state = run(*given)
  return applied, state._replace(inner_state=inner_state)


def _start(zeros, inner_state, squares, axes):
  """Returns an empty window, given a total and a total weight of zero."""
  total, total_weight = zeros
  return TowerReduceState(
      tower=counters.zero(),
      total=per_shard_state.store(total, axes),
      total_weight=per_shard_state.store(total_weight, axes),
      oldest_local_step=per_shard_state.store(
          jnp.full([], _NO_STEP, jnp.int32), axes
      ),
      inner_state=inner_state,
      tower_squares=squares,
  )


def _collect(state, updates, weight, local_step, axes):
  """Returns the window with one more tower.

  Raises:
    TypeError: If the weight or the local step are of the wrong kind.
    ValueError: If updates do not fit the window, or differ between shards where
      the window does not.
  """
  if weight is not None:
    weight = weights.as_weight(weight, (), _CALLER)
  total = per_shard_state.own(state.total, axes, _CALLER)
  like, add = total, lax.add
  if _is_in_order(state):
    like = jax.tree.map(tree_sums.zero_row, total)
    updates = leaves_lib.tree_map(_zeros_for_none, updates, like)
    add = functools.partial(tree_sums.add, tower=state.tower)
  leaves_lib.check_like(updates, like, _CALLER)
  leaves_lib.check_varies_with(updates, like, _CALLER)
  add_update = functools.partial(_add, add, weights.weighing(weight))
  total = leaves_lib.tree_map(add_update, total, updates)
  own_weight = jnp.ones([], jnp.float32) if weight is None else weight
  total_weight = jax.tree.map(
      lambda total: add(total, own_weight),
      per_shard_state.own(state.total_weight, axes, _CALLER),
  )
  oldest = per_shard_state.own(state.oldest_local_step, axes, _CALLER)
  if local_step is not None:
    step = arguments.as_local_step(local_step, _CALLER)
    oldest = jnp.minimum(oldest, step)
  window = TowerReduceState(
      tower=counters.add(state.tower, 1),
      total=per_shard_state.store(total, axes),
      total_weight=per_shard_state.store(total_weight, axes),
      oldest_local_step=per_shard_state.store(oldest, axes),
      inner_state=state.inner_state,
      tower_squares=tower_squares.add(
          state.tower_squares, updates, weight, axes
      ),
  )
  per_shard_state.check_kept(state, window, _CALLER)
  return window


def _reduce(window, updates, params, axes, divisor):
  """Returns the mean or sum of the towers of a full window.

  Args:
    window: The window.
    updates: Those of the last tower, whose dtypes the result gets.
    params: They give the dtype where the last tower has no gradient.
    axes: The axes between whose shards the window differs.
    divisor: A number, or `None` for the total weight.

  Returns:
    The mean or sum; the total weight of this shard, its oldest local step, and
    the squared norms of its towers, or `None`.
  """
  total, total_weight, oldest = per_shard_state.own(
      (window.total, window.total_weight, window.oldest_local_step),
      axes,
      _CALLER,
  )
  if _is_in_order(window):
    total, (total_weight,) = tree_sums.last_rows((total, total_weight))
  if divisor is None:
    divisor = weights.safe_divisor(total_weight)
  in_dtype = functools.cache(jnp.asarray(divisor).astype)

  def divide(total, update, param):
    if total is None:
      return update
    like = param if update is None else update
    if like is None or jnp.iscomplexobj(total) > jnp.iscomplexobj(like):
      like = total
    reduced = lax.div(total, in_dtype(total.dtype))
    return leaves_lib.as_dtype(reduced, leaves_lib.dtype_of(like))

  likes = updates if params is None else params
  reduced = leaves_lib.tree_map(divide, total, updates, likes)
  squares = None
  if not isinstance(window.tower_squares, tuple):
    squares = tower_squares.of_window(
        window.tower_squares, total_weight, reduced, axes
    )
  return reduced, total_weight, oldest, squares


def _emptied(window, inner_state):
  """Returns the state at the start of the next window."""
  zeros = functools.cache(axes_lib.zeros)
  return TowerReduceState(
      tower=jnp.zeros_like(window.tower),
      total=jax.tree.map(lambda x: zeros(jax.typeof(x)), window.total),
      total_weight=jax.tree.map(jnp.zeros_like, window.total_weight),
      oldest_local_step=jnp.full_like(window.oldest_local_step, _NO_STEP),
      inner_state=inner_state,
      tower_squares=tower_squares.emptied(window.tower_squares),
  )


def _check_same_order(state, order, num_towers, axes):
  """Checks that a state was made for sums in this order.

  Raises:
    ValueError: If it was made for another order or another number of towers.
  """
  made_in_order = _is_in_order(state)
  if made_in_order != (order is not None):
    made = "with `order='tree'`" if made_in_order else 'without `order`'
    raise ValueError(
        f'State of `tower_reduce` must be made with the same `order`, got one'
        f' that was made {made}, and order={order!r}. Make it with `init`.'
    )
  if made_in_order:
    kept = per_shard_state.own(state.total_weight, axes, _CALLER).sums.shape
    wanted = tree_sums.num_levels(num_towers)
    if kept != (wanted,):
      raise ValueError(
          'State of `tower_reduce` must be made for as many towers, got one'
          f' with {kept} partial sums where {num_towers} towers take {wanted}.'
          ' Convert it by `shard_transforms.resize_state`.'
      )


def _rules_in_order(tower):
  """Returns the resize rules of a window whose towers are added by a tree."""
  total = state_rules.ResizeRule('begin_anew')
  if tower:
    total = state_rules.ResizeRule(
        'refuse',
        reason=(
            "`state` of `resize_state` with `order='tree'` must have no tower"
            f' in its window, got {tower} at {{name}}: the partial sums of an'
            ' unfinished window belong to other parts of the tree on another'
            ' number of shards. Finish the window first, or begin it again:'
            ' convert `optax.tree_utils.tree_set(state, tower=0)`, and repeat'
            ' its towers from the first. The parameters are still those at its'
            ' start, so that the result has the same bits.'
        ),
    )
  return {
      'total': total,
      'total_weight': total,
      'oldest_local_step': state_rules.ResizeRule('minimum', _NO_STEP),
  }


def _rule_of_unweighted(reduction):
  """Returns the resize rule of the totals of a window without weights."""
  if reduction is None:
    return state_rules.ResizeRule(
        'refuse',
        reason=(
            "`reduction` of `resize_state` must be 'mean', 'sum' or 'weighted',"
            ' got None: the window that was begun without weights, at {name},'
            ' ends with the same result only if it is known how its shards are'
            ' reduced.'
        ),
    )
  return state_rules.ResizeRule(reduction)


def _is_in_order(window):
  return isinstance(window.total_weight, tree_sums.TowerWeights)


def _add(add, weigh, total, update):
  if total is None or update is None or leaves_lib.is_float0(update):
    return total
  update = leaves_lib.as_dtype(jnp.asarray(update), total.dtype)
  return add(total, weigh(update))


def _zeros_for_none(update, zeros):
  return zeros if update is None else update
