"""`compressed_mean`: the mean over shards in fewer bytes."""

import optax

from shard_transforms._src.base import arguments
from shard_transforms._src.base import axes as axes_lib
from shard_transforms._src.compression import compressed_reduction
from shard_transforms._src.compression import compressor as compressor_lib
from shard_transforms._src.reduction import leaf_sums

_CALLER = 'compressed_mean'


def compressed_mean(
    axis_name: axes_lib.AxisName,
    compressor: compressor_lib.Compressor,
    *,
    feedback: compressed_reduction.Feedback = 'residual',
    min_elements: int = 16384,
    warmup_steps: int = 0,
    seed: int = 0,
) -> optax.GradientTransformationExtraArgs:
  r"""Replaces updates by a compressed mean over all shards of a mapped axis.

  Takes the place of `cross_shard_mean` where the link between shards is slow.
  With the updates :math:`u_i` of N shards and a compressor C, shard i sends
  :math:`C(p_i)`, in parts, to the owners of the slices of each leaf; owner j
  sends :math:`C(s_j)` to all:

  .. math:: p_i = u_i + e_i, \quad s_j = \frac1N \sum_i C(p_i)_j + E_j, \quad
     u \leftarrow C(s)

  Each error is held back and added in the next step, :math:`e_i \leftarrow p_i
  - C(p_i)` and :math:`E_j \leftarrow s_j - C(s_j)`, so that nothing is lost:
  the sum of all results, with :math:`\frac1N \sum_i e_i + E`, is the sum of all
  means, but for rounding in float32. The results of leaves of 16 bits are then
  rounded to 16 bits, and this rounding is not held back. The result is the same
  on all shards, to the bit; with one shard, it is the update itself.

  With the extra argument `weight`, a scalar :math:`w_i` a shard, :math:`u_i`
  stands for :math:`N w_i u_i / \sum_i w_i`. A shard of weight zero sends zeros
  and keeps its residuals; a total of zero gives a zero update, and all shards
  keep theirs. A NaN with a weight enters the residuals and stays there:
  `guard` around the reduction keeps it out.

  With `feedback='ef21'`, each shard keeps an estimate :math:`m_i` of its
  update, whose mean all shards know, and sends the difference:

  .. math:: m_i \leftarrow m_i + C(u_i - m_i), \quad
     u \leftarrow u + C\Big(\frac1N \sum_i m_i - u\Big)

  (the owners apply the second C, with a residual of their own). For constant
  updates, the error :math:`u_i - m_i` contracts in each step as C does, and no
  old error comes back. Changes from step to step, such as the noise of batches,
  are followed with a delay. It takes no weights, because the estimates do not
  contain them.

  Leaves of fewer than `min_elements` elements and complex leaves are reduced as
  by `cross_shard_mean`. Put compression before transformations that keep
  moments. Make the state with `init_state`; it is for this number of shards,
  and `resize_state` converts it to another. It does not depend on the
  compressor, which may change between runs.

  Args:
    axis_name: The mapped axis to reduce over, or a sequence of them.
    compressor: How blocks of updates are compressed, such as `quantize(8)`.
    feedback: `'residual'` to add each error to the next update, `'ef21'` to
      send the difference from an estimate, or `None` to forget errors.
    min_elements: The least number of elements of a leaf that is compressed. The
      slice of each shard is filled up to whole blocks, so that leaves of less
      than a block for each shard gain little.
    warmup_steps: For how many steps nothing is compressed.
    seed: The seed of compressors that draw random numbers.

  Returns:
    An `optax.GradientTransformationExtraArgs` with a `CompressedMeanState`, or
    an `EF21State`, whose `update` takes the optional extra argument `weight`.

  Raises:
    NameError: In `init` and `update`, if an axis is not bound.
    TypeError: If an argument is of the wrong kind; in `update`, if a leaf is an
      integer or boolean, `weight` is not a real number, or the state is of
      another transformation.
    ValueError: If an argument has a wrong value; in `update`, if a leaf is
      already reduced, `weight` is not a scalar, known to be negative or given
      together with `feedback='ef21'`, or the state was made for other
      parameters, another number of shards, or with another `feedback` or
      `min_elements`.

  Examples:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> from shard_transforms import compression
    >>> tx = compression.compressed_mean(
    ...     'data', compression.top_k(0.5, block=2), min_elements=1)
    >>> def two_steps(update):
    ...   first, state = tx.update(update, tx.init(update))
    ...   second, state = tx.update(jnp.zeros(4), state)
    ...   return first, second
    >>> updates = jnp.array([[4.0, 1.0, 1.0, 2.0], [4.0, 3.0, 1.0, 2.0]])
    >>> first, second = jax.vmap(two_steps, axis_name='data')(updates)
    >>> print(first[0], second[0])
    [4. 0. 0. 2.] [0. 2. 1. 0.]

  References:
    Karimireddy et al., Error Feedback Fixes SignSGD and other Gradient
    Compression Schemes, 2019, https://arxiv.org/abs/1901.09847.
    Richtarik et al., EF21: A New, Simpler, Theoretically Better, and
    Practically Faster Error Feedback, 2021, https://arxiv.org/abs/2106.05203.
    Tang et al., DoubleSqueeze: Parallel Stochastic Gradient Descent with
    Double-pass Error-Compensated Compression, 2019,
    https://arxiv.org/abs/1905.05957.
  """
  reduce = compressed_reduction.CompressedReduction(
      leaf_sums.Reduction(_CALLER, 'mean', axes_lib.as_axes(axis_name)),
      warmup_steps,
      seed,
      compressor,
      feedback,
      min_elements,
  )

  def init_fn(params):
    return reduce.start(params)

  def update_fn(updates, state, params=None, *, weight=None, **extra_args):
    del params, extra_args
    arguments.check_state(state, reduce.kind, _CALLER)
    if weight is not None and feedback == 'ef21':
      raise ValueError(
          f'`weight` of `{_CALLER}` must be left out with'
          f" `feedback='ef21'`, got {weight!r}: estimates do not know it. Use"
          " `feedback='residual'`; `guard` with `on_bad='skip'` gives none."
      )
    return reduce(updates, state, weight)

  return optax.GradientTransformationExtraArgs(init_fn, update_fn)
