"""`tf`: the names of TensorFlow 1 for functions that mean the same.

`from shard_transforms.facade import tf` takes the place of
`import tensorflow as tf`. Each name is a function of the façade, JAX or Optax
that takes the arguments of TensorFlow; this module computes nothing itself. Any
other name raises an `AttributeError`. The porting page tells what differs, and
what takes the place of other frequent names.
"""

import contextlib
import functools
import itertools
import sys
from typing import Any, NamedTuple
import warnings

from absl import logging
import jax
import jax.numpy as jnp
import numpy as np
import optax

from shard_transforms import facade
from shard_transforms._src.tf1 import ties
from shard_transforms.facade import leaves
from shard_transforms.facade import variables

_PAGE = 'docs/porting_from_tf1.md'


class _Namespace:
  """A part of the namespace, such as `tf.train`."""

  def __init__(self, path: str):
    self._path = path

  def __getattr__(self, name: str) -> Any:
    raise AttributeError(_missing(f'{self._path}.{name}'))


def __getattr__(name: str) -> Any:
  raise AttributeError(_missing(f'tf.{name}'))


def _missing(path):
  return (
      f'`{path}` is not here. {_PAGE} lists what takes the place of frequent'
      ' names; for others, use JAX, Optax or Flax.'
  )


def _renamed(function, name, parameters):
  """Returns a function that takes the arguments of TensorFlow.

  Args:
    function: The function.
    name: The name in TensorFlow.
    parameters: The parameters of TensorFlow, in their order, each with that of
      the function: a position, a name, `None` if it has no effect, or `...` if
      it must be left out.
  """

  @functools.wraps(function)
  def call(*args: Any, **kwargs: Any) -> Any:
    given = dict(zip(parameters, args, strict=False)) | kwargs
    unknown = [key for key in given if key not in parameters]
    if len(args) > len(parameters) or unknown:
      raise TypeError(
          f'`tf.{name}` must be given some of {list(parameters)}, got'
          f' {unknown or args}.'
      )
    given = {
        key: _arrays(key, value)
        for key, value in given.items()
        if value is not None or key == 'loss_collection'
    }
    positional, named = {}, {}
    for key, value in given.items():
      target = parameters[key]
      if target is ... and value:
        raise TypeError(f'`{key}` of `tf.{name}` must be left out: {_PAGE}.')
      if isinstance(target, int):
        positional[target] = value
      elif isinstance(target, str):
        named[target] = value
    if max(positional, default=-1) != len(positional) - 1:
      raise TypeError(f'An argument of `tf.{name}` is missing: got {given}.')
    out = function(*(positional[i] for i in sorted(positional)), **named)
    if given.keys() & _DTYPES:
      return out
    return variables.in_32_bits(out, given)

  return call


def _arrays(key, value):
  # Unflattened, variables are arrays, also those in lists. Rates stay.
  value = jax.tree.map(
      lambda x: x, value, is_leaf=lambda x: isinstance(x, leaves.Rate)
  )
  if key in _DTYPES:
    return jax.dtypes.canonicalize_dtype(value)
  if key in _TENSORS and type(value) is list:
    return variables.in_32_bits(jnp.asarray(value), value)
  return value


def _constant(value, dtype=None, shape=None):
  # No `jax.Array`: a rate that is one may have been computed too early.
  array = np.asarray(value, dtype)
  array = array.astype(jax.dtypes.canonicalize_dtype(array.dtype))
  if shape is None:
    return array
  return np.full(shape, array) if array.ndim == 0 else array.reshape(shape)


def _where(condition, x, y):
  if jnp.ndim(condition) == 1 and jnp.ndim(x) > 1:
    raise ValueError(
        '`condition` of `tf.where` must have the shape of `x`, got'
        f' {jnp.shape(condition)} for {jnp.shape(x)}: it would choose rows in'
        ' TensorFlow, and columns here.'
    )
  return jnp.where(condition, x, y)


def _arg(function, x, axis=0, dtype=None):
  return jnp.asarray(function(x, axis), dtype)


def _count_nonzero(x, axis=None, keepdims=False, dtype=None):
  axis = tuple(axis) if isinstance(axis, list) else axis
  return jnp.asarray(jnp.count_nonzero(x, axis, keepdims=keepdims), dtype)


class _TopK(NamedTuple):
  values: jax.Array
  indices: jax.Array


def _top_k(x, k=1):
  return _TopK(*jax.lax.top_k(x, k))


def _norm(x, order='euclidean', axis=None, **options):
  if order not in ('euclidean', 2) or not (axis is None or np.ndim(axis) == 0):
    raise ValueError(
        '`tf.norm` must be the Euclidean one over all dimensions or one, got'
        f' ord={order!r}, axis={axis!r}. Use `jax.numpy.linalg.norm`.'
    )
  return jnp.linalg.norm(x, None, axis, **options)


def _cross_entropy(logits, labels):
  labels = jnp.asarray(labels, jnp.result_type(logits))
  return optax.softmax_cross_entropy(logits, jax.lax.stop_gradient(labels))


def _sparse_cross_entropy(logits, labels):
  labels = jnp.asarray(labels)
  if labels.ndim == logits.ndim and labels.shape[-1] == 1:
    labels = labels[..., 0]
  _check_same_shape(labels, logits[..., 0])
  # Not the last class: another one that does not exist, so that it gives NaN.
  labels = jnp.where(labels < 0, jnp.int32(logits.shape[-1]), labels)
  return optax.softmax_cross_entropy_with_integer_labels(logits, labels)


def _members(names: str, prefix: str = '', module: Any = jnp):
  """Returns members of a module by their names in TensorFlow, `'pow=power'`."""
  pairs = (name.partition('=') for name in names.split())
  return {
      f'{prefix}{name}': getattr(module, member or name)
      for name, _, member in pairs
  }


def _normal(stddev=1.0, **options):
  return jax.nn.initializers.normal(stddev, **options)


def _truncated_normal(stddev=1.0, **options):
  return jax.nn.initializers.truncated_normal(stddev, **options)


def _variance_scaling(
    scale=1.0, mode='fan_in', distribution='truncated_normal', **options
):
  # By its older name, too, the normal one is truncated in TensorFlow.
  kinds = {'normal': 'truncated_normal', 'untruncated_normal': 'normal'}
  kind = kinds.get(distribution, distribution)
  return _initializers.variance_scaling(scale, mode, kind, **options)


_DTYPES = {'dtype', 'output_type'}
# Parameters that TensorFlow also takes as lists of numbers.
_TENSORS = (
    *('a', 'b', 'condition', 'features', 'ids', 'indices', 'input'),
    *(
        'input_tensor',
        'labels',
        'lengths',
        'logits',
        'onehot_labels',
        'params',
        'predictions',
        't',
    ),
    *('tensor', 'weights', 'x', 'y'),
)


def _split(value, parts, **options):
  if np.ndim(parts):
    raise ValueError(
        '`num_or_size_splits` of `tf.split` must be a number of parts, got'
        f' {parts!r}. `jax.numpy.split` takes the indices of the cuts.'
    )
  return jnp.split(value, parts, **options)


def _moments(x, axes, keepdims=False):
  axes = tuple(axes) if np.ndim(axes) else axes
  return tuple(f(x, axes, keepdims=keepdims) for f in (jnp.mean, jnp.var))


def _l2_loss(t):
  return jnp.sum(optax.l2_loss(t))


def _smoothed_cross_entropy(logits, labels, label_smoothing=0.0):
  return _cross_entropy(logits, optax.smooth_labels(labels, label_smoothing))


# What the sum of weighted losses is divided by, of the losses and the weights.
_DIVISORS = {
    facade.Reduction.SUM: lambda losses, weights: 1,
    facade.Reduction.MEAN: lambda losses, weights: jnp.sum(weights),
    facade.Reduction.SUM_OVER_BATCH_SIZE: lambda losses, weights: losses.size,
    facade.Reduction.SUM_BY_NONZERO_WEIGHTS: (
        lambda losses, weights: jnp.count_nonzero(weights)
    ),
}


def _reduced_loss(of_example, labels_dtype=jnp.float32):
  """Returns a loss that is reduced over the examples."""

  def loss(
      predictions,
      labels,
      *args,
      weights=1.0,
      loss_collection=facade.GraphKeys.LOSSES,
      reduction=facade.Reduction.SUM_BY_NONZERO_WEIGHTS,
  ):
    facade.Reduction.validate(reduction)
    # As in TensorFlow: sums of many numbers of 16 bits are inf or lose bits.
    predictions = jnp.asarray(predictions, jnp.float32)
    labels = jnp.asarray(labels, labels_dtype)
    if labels_dtype is not None:
      _check_same_shape(labels, predictions)
    losses = of_example(predictions, labels, *args)
    if jnp.ndim(weights) not in (0, losses.ndim):
      raise ValueError(
          '`weights` of a loss must be a number, or have the dimensions of'
          f' {losses.shape}, got {jnp.shape(weights)}.'
      )
    weights = jnp.broadcast_to(weights, losses.shape)
    out = losses * weights
    if reduction != facade.Reduction.NONE:
      divisor = _DIVISORS[reduction](losses, weights)
      is_zero = divisor == 0  # The loss is zero then, too.
      out = jnp.where(is_zero, 0, jnp.sum(out) / jnp.where(is_zero, 1, divisor))
    if loss_collection is not None:
      facade.add_to_collection(loss_collection, out)
    return out

  return loss


def _check_same_shape(labels, predictions):
  if labels.shape != predictions.shape:
    raise ValueError(
        '`labels` must have the shape of the predictions (or of the logits, of'
        ' classes without the last dimension), got'
        f' {labels.shape} for {predictions.shape}.'
    )


def _total_loss(add_regularization_losses=True, scope=None):
  keys = facade.GraphKeys.LOSSES, facade.GraphKeys.REGULARIZATION_LOSSES
  found = [facade.get_collection(key, scope) for key in keys]
  return _add_n(found[0] + found[1] * add_regularization_losses)


def _add_n(inputs):
  if not isinstance(inputs, list | tuple) or not inputs:
    raise ValueError(
        '`inputs` of `tf.add_n` must be a list of at least one array, got'
        f' {inputs!r}.'
    )
  return sum(inputs)


def _unstack(value, num=None, axis=0):
  if num not in (None, jnp.shape(value)[axis]):
    raise ValueError(
        f'`num` of `tf.unstack` must be {jnp.shape(value)[axis]}, got {num}.'
    )
  return jnp.unstack(value, axis=axis)


def _matmul(a, b, transpose_a=False, transpose_b=False):
  a = jnp.matrix_transpose(a) if transpose_a else a
  return jnp.matmul(a, jnp.matrix_transpose(b) if transpose_b else b)


def _div(x, y):
  is_integer = jnp.issubdtype(jnp.result_type(x, y), jnp.integer)
  return jnp.floor_divide(x, y) if is_integer else jnp.true_divide(x, y)


def _einsum(equation, *inputs, name=None):
  del name
  return jnp.einsum(equation, *inputs)


def _gather_nd(params, indices):
  return params[tuple(jnp.moveaxis(jnp.asarray(indices), -1, 0))]


def _hinge(logits, labels):
  return jax.nn.relu(1 - (2 * labels - 1) * logits)


def _l2_normalize(x, epsilon=1e-12, axis=None):
  axis = tuple(axis) if isinstance(axis, list) else axis
  squares = jnp.sum(x * x, axis, keepdims=True)
  return x * jax.lax.rsqrt(ties.maximum(squares, epsilon))


def _log_loss(predictions, labels, epsilon=1e-7):
  return -labels * jnp.log(predictions + epsilon) - (1 - labels) * jnp.log(
      1 - predictions + epsilon
  )


def _pad(tensor, paddings, mode='CONSTANT', **options):
  return jnp.pad(tensor, paddings, mode.lower(), **options)


def _regularizer(of_weights):
  """Returns what makes a regularizer of a scale, such as 1e-4."""
  return lambda scale, scope=None: lambda w: scale * of_weights(jnp.asarray(w))


def _sequence_mask(lengths, maxlen, dtype=bool):
  positions = jnp.arange(maxlen)[(None,) * lengths.ndim]
  return jnp.asarray(positions < lengths[..., None], dtype)


def _slice(x, begin, size):
  sizes = zip(begin, size, jnp.shape(x), strict=True)
  ends = [n if length == -1 else b + length for b, length, n in sizes]
  return jax.lax.slice(x, begin, ends)


def _uniform(minval=0.0, maxval=1.0, **options):
  return functools.partial(_draw_uniform, minval, maxval, options)


def _draw_uniform(minval, maxval, options, key, shape, dtype):
  return jax.random.uniform(
      key, shape, options.get('dtype', dtype), minval, maxval
  )


def _xavier(uniform=True):
  kind = 'glorot_uniform' if uniform else 'glorot_normal'
  return getattr(_initializers, kind)()


def _without_effect(name, result=None):
  """Returns a function that warns, and returns always the same."""

  def call(*args: Any, **kwargs: Any) -> Any:
    warnings.warn(f'`tf.{name}` has no effect here: {_PAGE}.', stacklevel=2)
    return result

  return call


# What parameters of TensorFlow are here, if not positions. (`None`: no effect.)
_MEANINGS: dict[str, Any] = {
    **{name: name for name in ('axis', 'dtype', 'keepdims', 'weights')},
    **{name: name for name in ('loss_collection', 'reduction')},
    **{name: name for name in ('transpose_a', 'transpose_b')},
    **{name: None for name in ('name', 'seed', 'shift', 'validate_indices')},
    'dim': 'axis',
    'dimension': 'axis',
    'keep_dims': 'keepdims',
    'reduction_indices': 'axis',
    'squeeze_dims': 'axis',
}


def _parameters(signature):
  """Returns the parameters of a signature, for `_renamed`.

  Args:
    signature: The parameters of TensorFlow in their order, such as
      `'a perm=axes name'`. A parameter alone means what `_MEANINGS` says, or
      else the next position; after `=` comes a position, a name, `...` or
      `None`.
  """
  meanings = {'...': ..., 'None': None}
  position = itertools.count()
  found = {}
  for parameter in signature.split():
    name, _, given = parameter.partition('=')
    if given:
      found[name] = (
          int(given) if given.isdigit() else meanings.get(given, given)
      )
    else:
      found[name] = _MEANINGS[name] if name in _MEANINGS else next(position)
  return found


_nn, _initializers = jax.nn, jax.nn.initializers
# What the functions of `tf.losses` take last.
_LOSS = 'scope=None loss_collection reduction'

# The functions by the parameters that they have in TensorFlow.
_FUNCTIONS = {
    'x name': {
        **_members(
            'acos=arccos asin=arcsin atan=arctan ceil cos cosh exp expm1'
            ' floor is_finite=isfinite is_inf=isinf is_nan=isnan log log1p'
            ' logical_not negative nn.tanh=tanh reciprocal rint round sign sin'
            ' sinh sqrt square tan tanh'
        ),
        **_members('log_sigmoid nn.sigmoid=sigmoid sigmoid', module=_nn),
        **_members('erf lgamma=gammaln', module=jax.scipy.special),
        'abs': ties.magnitude,
        'rsqrt': jax.lax.rsqrt,
        'to_float': functools.partial(jnp.asarray, dtype=jnp.float32),
        'to_int32': functools.partial(jnp.asarray, dtype=jnp.int32),
    },
    'x y name': {
        **_members(
            'add divide equal floordiv=floor_divide floormod=mod greater'
            ' greater_equal less less_equal logical_and logical_or logical_xor'
            ' mod multiply not_equal pow=power subtract'
            ' truediv=true_divide'
        ),
        **_members('maximum minimum', module=ties),
        'div': _div,
        'squared_difference': optax.squared_error,
    },
    'input_tensor axis keepdims name reduction_indices keep_dims': {
        **_members('all any max mean min prod std sum variance=var', 'reduce_'),
        **_members('logsumexp', 'reduce_', jax.scipy.special),
    },
    'input_tensor axis keepdims dtype name reduction_indices keep_dims': {
        'count_nonzero': _count_nonzero
    },
    'a b axes name': _members('tensordot'),
    'a b transpose_a transpose_b name': {'matmul': _matmul},
    'a perm=axes name': _members('transpose'),
    'condition x y name': {'where': _where},
    'dims value name': _members('fill=full'),
    'fn elems dtype=None parallel_iterations=None back_prop=None'
    ' swap_memory=None infer_shape=None name': {'map_fn': jax.lax.map},
    'input axis name dim': _members('expand_dims'),
    'input axis name dimension output_type=dtype': {
        name: functools.partial(_arg, getattr(jnp, name))
        for name in ('argmax', 'argmin')
    },
    'input axis name squeeze_dims': _members('squeeze'),
    'input k sorted=None name': {'nn.top_k': _top_k},
    'input multiples name': _members('tile'),
    'input shape name': _members('broadcast_to'),
    'input_ begin size name': {'slice': _slice},
    'input name': {
        **_members('identity=asarray rank=ndim shape size'),
        **_members('stop_gradient', module=jax.lax),
    },
    'inputs name': {'add_n': _add_n},
    'lengths maxlen dtype name': {'sequence_mask': _sequence_mask},
    'num_rows num_columns batch_shape=... dtype name': _members('eye'),
    'params ids partition_strategy=None name validate_indices max_norm=...': {
        'nn.embedding_lookup': functools.partial(jnp.take, axis=0)
    },
    'params indices name batch_dims=...': {'gather_nd': _gather_nd},
    'params indices validate_indices name axis': {
        'gather': functools.partial(jnp.take, axis=0)
    },
    'scalar x name': _members('scalar_mul=multiply'),
    'shape dtype name': _members('ones zeros'),
    'start stop num name': _members('linspace'),
    'start limit=stop delta=step dtype name': _members('range=arange'),
    'tensor axis name': _members('reverse=flip'),
    'tensor dtype name': _members('ones_like zeros_like'),
    'tensor ord=order axis keepdims name': {'norm': _norm},
    'tensor paddings mode=mode name constant_values=constant_values': {
        'pad': _pad
    },
    'tensor shape name': _members('reshape'),
    'value bias data_format=... name': {'nn.bias_add': jnp.add},
    'value dtype name': _members('convert_to_tensor=asarray'),
    'value dtype shape=shape name': {'constant': _constant},
    'value num=num axis name': {'unstack': _unstack},
    'value num_or_size_splits axis name': {'split': _split},
    'values axis name': _members('concat=concatenate stack'),
    'x axis epsilon=epsilon name dim': {'nn.l2_normalize': _l2_normalize},
    'x axis exclusive=... reverse=... name': {
        'cumsum': functools.partial(jnp.cumsum, axis=0)
    },
    'x dtype name': _members('cast=asarray'),
    # Losses, and the layers of networks.
    'features name': {
        **_members('elu relu relu6 softplus swish', 'nn.', _nn),
        'nn.selu': ties.selu,
    },
    'features alpha name': {'nn.leaky_relu': ties.leaky_relu},
    'indices depth on_value=... off_value=... axis dtype name': _members(
        'one_hot', module=_nn
    ),
    f'labels=1 predictions=0 weights {_LOSS}': {
        'losses.absolute_difference': _reduced_loss(
            lambda x, y: ties.magnitude(x - y)
        ),
        'losses.mean_squared_error': _reduced_loss(optax.squared_error),
    },
    f'labels=1 predictions=0 weights delta=2 {_LOSS}': {
        'losses.huber_loss': _reduced_loss(
            lambda x, y, delta=1.0: optax.huber_loss(x, y, delta=delta)
        )
    },
    f'multi_class_labels=1 logits=0 weights label_smoothing=... {_LOSS}': {
        'losses.sigmoid_cross_entropy': _reduced_loss(
            optax.sigmoid_binary_cross_entropy
        )
    },
    f'onehot_labels=1 logits=0 weights label_smoothing=2 {_LOSS}': {
        'losses.softmax_cross_entropy': _reduced_loss(_smoothed_cross_entropy)
    },
    f'labels=1 predictions=0 weights epsilon=2 {_LOSS}': {
        'losses.log_loss': _reduced_loss(_log_loss)
    },
    f'labels=1 logits=0 weights {_LOSS}': {
        'losses.hinge_loss': _reduced_loss(_hinge),
        'losses.sparse_softmax_cross_entropy': _reduced_loss(
            _sparse_cross_entropy, labels_dtype=None
        ),
    },
    'add_regularization_losses name scope=scope': {
        'losses.get_total_loss': _total_loss
    },
    'labels=1 logits=0 axis=... name': _members(
        'softmax_cross_entropy_with_logits_v2=softmax_cross_entropy',
        'nn.',
        optax,
    ),
    'logits axis name dim': _members('log_softmax softmax', 'nn.', _nn),
    't name': {'nn.l2_loss': _l2_loss},
    'x axes shift name keep_dims keepdims': {'nn.moments': _moments},
    '_sentinel=... labels=1 logits=0 name': {
        'nn.softmax_cross_entropy_with_logits': _cross_entropy,
        **_members(
            'sigmoid_cross_entropy_with_logits=sigmoid_binary_cross_entropy'
            ' sparse_softmax_cross_entropy_with_logits'
            '=softmax_cross_entropy_with_integer_labels',
            'nn.',
            optax,
        ),
    },
    # Initializers.
    'dtype=None': {
        f'{name}_initializer': functools.partial(getattr, _initializers, name)
        for name in ('ones', 'zeros')
    },
    'mean=... stddev seed dtype': {
        'random_normal_initializer': _normal,
        'truncated_normal_initializer': _truncated_normal,
    },
    'minval maxval seed dtype': {'random_uniform_initializer': _uniform},
    'seed dtype': _members(
        'glorot_normal_initializer=glorot_normal'
        ' glorot_uniform_initializer=glorot_uniform'
        ' initializers.he_normal=he_normal initializers.he_uniform=he_uniform'
        ' initializers.lecun_normal=lecun_normal'
        ' initializers.lecun_uniform=lecun_uniform',
        module=_initializers,
    ),
    'uniform seed dtype': {'contrib.layers.xavier_initializer': _xavier},
    'value dtype': _members(
        'constant_initializer=constant', module=_initializers
    ),
    'gain seed dtype': _members(
        'orthogonal_initializer=orthogonal', module=_initializers
    ),
    'scale=scale mode=mode distribution=distribution seed dtype': {
        'variance_scaling_initializer': _variance_scaling
    },
}
_TYPES = 'bfloat16 float16 float32 float64 int8 int16 int32 int64 uint8'

# The names of the façade, by their place in TensorFlow.
_OURS = {
    'tf': (
        'AggregationMethod Graph GraphKeys Variable add_to_collection'
        ' clip_by_global_norm clip_by_norm clip_by_value cond'
        ' control_dependencies get_collection get_default_graph get_variable'
        ' get_variable_scope global_norm global_variables gradients group'
        ' local_variables name_scope no_op reset_default_graph set_random_seed'
        ' trainable_variables variable_scope'
    ),
    'tf.train': (
        'AdadeltaOptimizer AdagradOptimizer AdamOptimizer'
        ' ExponentialMovingAverage FtrlOptimizer GradientDescentOptimizer'
        ' MomentumOptimizer Optimizer RMSPropOptimizer SyncReplicasOptimizer'
        ' cosine_decay cosine_decay_restarts exponential_decay get_global_step'
        ' get_or_create_global_step inverse_time_decay natural_exp_decay'
        ' piecewise_constant polynomial_decay'
    ),
    'tf.estimator': 'EstimatorSpec ModeKeys',
    'tf.losses': 'Reduction',
    'tf.tpu': 'CrossShardOptimizer cross_replica_sum shard',
    'tf.contrib.tpu': (
        'CrossShardOptimizer TPUEstimatorSpec cross_replica_sum shard'
    ),
    'tf.contrib.opt': (
        'AdamWOptimizer DecoupledWeightDecayExtension'
        ' DropStaleGradientOptimizer LARSOptimizer LazyAdamOptimizer'
    ),
    'tf.contrib.estimator': (
        'TowerOptimizer clip_gradients_by_norm replicate_model_fn'
    ),
    'tf.contrib.training': 'clip_gradient_norms',
}


def _names() -> dict[str, Any]:
  """Returns all names of `tf`, each with its value here."""
  keys = facade.GraphKeys
  add, get = facade.add_to_collection, facade.get_collection
  regularization = keys.REGULARIZATION_LOSSES
  found = {
      'tf.AUTO_REUSE': None,
      **_members('assign assign_add assign_sub', 'tf.', facade.Variable),
      'tf.bool': jnp.bool_,
      # Contexts without effect: devices are those of the mesh.
      'tf.colocate_with': contextlib.nullcontext,
      'tf.device': _without_effect('device', contextlib.nullcontext()),
      'tf.compat.v1': sys.modules[__name__],
      'tf.logging': logging,
      'tf.losses.add_loss': functools.partial(add, keys.LOSSES),
      'tf.losses.get_losses': functools.partial(get, keys.LOSSES),
      'tf.moving_average_variables': functools.partial(
          get, keys.MOVING_AVERAGE_VARIABLES
      ),
      'tf.losses.get_regularization_losses': functools.partial(
          get, regularization
      ),
      'tf.contrib.layers.l1_regularizer': _regularizer(
          lambda w: jnp.sum(ties.magnitude(w))
      ),
      'tf.contrib.layers.l2_regularizer': _regularizer(_l2_loss),
      'tf.einsum': _einsum,
      'tf.newaxis': None,
      # No gradient is of this type.
      'tf.IndexedSlices': type('IndexedSlices', (), {}),
  }
  found |= {f'tf.{name}': jnp.dtype(name) for name in _TYPES.split()}
  found |= {
      f'tf.summary.{name}': _without_effect(f'summary.{name}')
      for name in ('histogram', 'image', 'merge_all', 'scalar')
  }
  for place, names in _OURS.items():
    found |= _members(names, f'{place}.', facade)
  for signature, functions in _FUNCTIONS.items():
    for name, function in functions.items():
      renamed = _renamed(function, name, _parameters(signature))
      found[f'tf.{name}'] = renamed
      if '.' not in name:
        found[f'tf.math.{name}'] = renamed
      if name.endswith('_initializer') and '.' not in name:
        found[f'tf.initializers.{name.removesuffix("_initializer")}'] = renamed
  return found


def _fill(members: dict[str, Any]) -> None:
  """Sets names in the module, and in parts of it that are made here."""
  for path, value in _names().items():
    _, *parts, name = path.split('.')
    inside, place = members, 'tf'
    for part in parts:
      place += f'.{part}'
      inside = vars(inside.setdefault(part, _Namespace(place)))
    inside[name] = value


_fill(globals())
