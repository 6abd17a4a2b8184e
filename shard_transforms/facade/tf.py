"""`tf`: the names of TensorFlow 1 for functions that mean the same.

`from shard_transforms.facade import tf` takes the place of
`import tensorflow as tf`. Behind a name stands a function of the façade, JAX or
Optax, which takes the arguments of TensorFlow; nothing computes by itself. Any
other name raises an `AttributeError`. The porting page tells what differs.
"""

import contextlib
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from shard_transforms import facade
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
      f'`{path}` is not here: it would not mean the same, or is not about'
      f' training. {_PAGE} has what to write in its place.'
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
    given = {k: _arrays(k, v) for k, v in given.items() if v is not None}
    positional, named = {}, {}
    for key, value in given.items():
      target = parameters[key]
      if target is ... and value:
        raise TypeError(f'`{key}` of `tf.{name}` must be left out: {_PAGE}.')
      if isinstance(target, int):
        positional[target] = value
      elif isinstance(target, str):
        named[target] = value
    return function(*(positional[i] for i in sorted(positional)), **named)

  return call


def _arrays(key, value):
  # Unflattened, variables are arrays, also those in lists.
  value = jax.tree.map(lambda x: x, value)
  if key in ('dtype', 'output_type'):
    return jax.dtypes.canonicalize_dtype(value)
  return (
      jnp.asarray(value) if key in _TENSORS and type(value) is list else value
  )


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


def _norm(x, order='euclidean', axis=None, **options):
  if order not in ('euclidean', 2) or not (axis is None or np.ndim(axis) == 0):
    raise ValueError(
        '`tf.norm` must be the Euclidean one over all dimensions or one, got'
        f' ord={order!r}, axis={axis!r}. Use `jax.numpy.linalg.norm`.'
    )
  return jnp.linalg.norm(x, None, axis, **options)


def _cross_entropy(logits, labels):
  return optax.softmax_cross_entropy(logits, jax.lax.stop_gradient(labels))


def _same(names, prefix='', module=jnp):
  """Returns functions of a module by their names in TensorFlow."""
  return {f'{prefix}{name}': getattr(module, name) for name in names.split()}


# Parameters that TensorFlow also takes as lists of numbers.
_TENSORS = (
    *('a', 'b', 'condition', 'features', 'indices', 'input', 'input_tensor'),
    *('labels', 'logits', 'predictions', 't', 'tensor', 'x', 'y'),
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
  return jnp.mean(x, axes, keepdims=keepdims), jnp.var(
      x, axes, keepdims=keepdims
  )


def _l2_loss(t):
  return jnp.sum(optax.l2_loss(t))


def _mean_squared_error(labels, predictions):
  loss = jnp.mean(optax.squared_error(predictions, labels))
  facade.add_to_collection(facade.GraphKeys.LOSSES, loss)
  return loss


# What parameters of TensorFlow are here, if not positions. (`None`: no effect.)
_MEANINGS: dict[str, Any] = {
    **{name: name for name in ('axis', 'dtype', 'keepdims')},
    **{name: None for name in ('name', 'seed', 'shift')},
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
      `'a perm=axes name'`: one that stands alone is as in `_MEANINGS`, or else
      the next position; behind `=` stands a position, a name, `...` or `None`.
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


_OF_X = {
    **_same('abs ceil cos cosh exp expm1 floor log log1p logical_not negative'),
    **_same('reciprocal rint round sign sin sinh sqrt square tan tanh'),
    'acos': jnp.arccos,
    'asin': jnp.arcsin,
    'atan': jnp.arctan,
    'erf': jax.scipy.special.erf,
    'is_finite': jnp.isfinite,
    'is_inf': jnp.isinf,
    'is_nan': jnp.isnan,
    'lgamma': jax.scipy.special.gammaln,
    'log_sigmoid': jax.nn.log_sigmoid,
    'nn.sigmoid': jax.nn.sigmoid,
    'nn.tanh': jnp.tanh,
    'rsqrt': jax.lax.rsqrt,
    'sigmoid': jax.nn.sigmoid,
}
_OF_X_AND_Y = {
    **_same('add divide equal greater greater_equal less less_equal'),
    **_same('logical_and logical_or logical_xor maximum minimum mod multiply'),
    **_same('not_equal subtract'),
    'floordiv': jnp.floor_divide,
    'floormod': jnp.mod,
    'pow': jnp.power,
    'truediv': jnp.true_divide,
}
_REDUCTIONS = {
    **_same('all any max mean min prod sum', 'reduce_'),
    'reduce_logsumexp': jax.scipy.special.logsumexp,
}
_OF_FEATURES = _same('elu relu relu6 selu softplus', 'nn.', jax.nn)
_initializers = jax.nn.initializers
_ENTROPY = '_sentinel=... labels=1 logits=0 name'
_NORMAL = 'mean=... stddev=stddev seed dtype'
_ARG = 'input axis name dimension output_type=dtype'
_OTHERS = {
    'add_n': (sum, 'inputs name'),
    'argmax': (functools.partial(_arg, jnp.argmax), _ARG),
    'argmin': (functools.partial(_arg, jnp.argmin), _ARG),
    'cast': (jnp.asarray, 'x dtype name'),
    'concat': (jnp.concatenate, 'values axis name'),
    'constant': (_constant, 'value dtype shape=shape name'),
    'constant_initializer': (_initializers.constant, 'value dtype'),
    'convert_to_tensor': (jnp.asarray, 'value dtype name'),
    'expand_dims': (jnp.expand_dims, 'input axis name dim'),
    'fill': (jnp.full, 'dims value name'),
    'glorot_uniform_initializer': (_initializers.glorot_uniform, 'seed dtype'),
    'identity': (jnp.asarray, 'input name'),
    'losses.mean_squared_error': (
        _mean_squared_error,
        'labels predictions weights=...',
    ),
    'matmul': (jnp.matmul, 'a b transpose_a=... transpose_b=... name'),
    'nn.leaky_relu': (
        functools.partial(jax.nn.leaky_relu, negative_slope=0.2),
        'features alpha=negative_slope name',
    ),
    'nn.l2_loss': (_l2_loss, 't name'),
    'nn.moments': (_moments, 'x axes shift name keep_dims keepdims'),
    'nn.log_softmax': (jax.nn.log_softmax, 'logits axis name dim'),
    'nn.sigmoid_cross_entropy_with_logits': (
        optax.sigmoid_binary_cross_entropy,
        _ENTROPY,
    ),
    'nn.softmax': (jax.nn.softmax, 'logits axis name dim'),
    'nn.softmax_cross_entropy_with_logits': (_cross_entropy, _ENTROPY),
    'nn.softmax_cross_entropy_with_logits_v2': (
        optax.softmax_cross_entropy,
        'labels=1 logits=0 axis=... name',
    ),
    'nn.sparse_softmax_cross_entropy_with_logits': (
        optax.softmax_cross_entropy_with_integer_labels,
        _ENTROPY,
    ),
    'norm': (_norm, 'tensor ord=order axis keepdims name'),
    'one_hot': (
        jax.nn.one_hot,
        'indices depth on_value=... off_value=... axis dtype name',
    ),
    'ones': (jnp.ones, 'shape dtype name'),
    'ones_initializer': (lambda: _initializers.ones, 'dtype=None'),
    'ones_like': (jnp.ones_like, 'tensor dtype name'),
    'random_normal_initializer': (
        functools.partial(_initializers.normal, stddev=1.0),
        _NORMAL,
    ),
    'range': (jnp.arange, 'start limit delta'),
    'rank': (jnp.ndim, 'input name'),
    'reshape': (jnp.reshape, 'tensor shape name'),
    'shape': (jnp.shape, 'input name'),
    'size': (jnp.size, 'input name'),
    'split': (_split, 'value num_or_size_splits axis name'),
    'squared_difference': (optax.squared_error, 'x y name'),
    'squeeze': (jnp.squeeze, 'input axis name squeeze_dims'),
    'stack': (jnp.stack, 'values axis name'),
    'stop_gradient': (jax.lax.stop_gradient, 'input name'),
    'tile': (jnp.tile, 'input multiples name'),
    'to_float': (functools.partial(jnp.asarray, dtype=jnp.float32), 'x name'),
    'to_int32': (functools.partial(jnp.asarray, dtype=jnp.int32), 'x name'),
    'transpose': (jnp.transpose, 'a perm=axes name'),
    'truncated_normal_initializer': (
        functools.partial(_initializers.truncated_normal, stddev=1.0),
        _NORMAL,
    ),
    'where': (_where, 'condition x y name'),
    'zeros': (jnp.zeros, 'shape dtype name'),
    'zeros_initializer': (lambda: _initializers.zeros, 'dtype=None'),
    'zeros_like': (jnp.zeros_like, 'tensor dtype name'),
}
_REDUCED = 'input_tensor axis keepdims name reduction_indices keep_dims'
_FUNCTIONS = (
    {name: (function, 'x name') for name, function in _OF_X.items()}
    | {name: (function, 'x y name') for name, function in _OF_X_AND_Y.items()}
    | {name: (function, _REDUCED) for name, function in _REDUCTIONS.items()}
    | {name: (f, 'features name') for name, f in _OF_FEATURES.items()}
    | _OTHERS
)
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
        ' get_or_create_global_step inverse_time_decay linear_cosine_decay'
        ' natural_exp_decay piecewise_constant polynomial_decay'
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
        ' extend_with_decoupled_weight_decay'
    ),
    'tf.contrib.estimator': (
        'TowerOptimizer clip_gradients_by_norm replicate_model_fn'
    ),
    'tf.contrib.training': 'clip_gradient_norms',
}


def _names() -> dict[str, Any]:
  """Returns all names with what stands behind them."""
  key = facade.GraphKeys
  found = {
      'tf.AUTO_REUSE': None,
      'tf.assign': variables.Variable.assign,
      'tf.assign_add': variables.Variable.assign_add,
      'tf.assign_sub': variables.Variable.assign_sub,
      'tf.bool': jnp.bool_,
      # Contexts without effect: devices are those of the mesh.
      'tf.colocate_with': contextlib.nullcontext,
      'tf.losses.add_loss': functools.partial(
          facade.add_to_collection, key.LOSSES
      ),
      'tf.losses.get_losses': functools.partial(
          facade.get_collection, key.LOSSES
      ),
      'tf.losses.get_regularization_losses': functools.partial(
          facade.get_collection, key.REGULARIZATION_LOSSES
      ),
      'tf.newaxis': None,
  }
  found |= {f'tf.{name}': jnp.dtype(name) for name in _TYPES.split()}
  for place, names in _OURS.items():
    found |= {
        f'{place}.{name}': getattr(facade, name) for name in names.split()
    }
  for name, (function, signature) in _FUNCTIONS.items():
    renamed = _renamed(function, name, _parameters(signature))
    found[f'tf.{name}'] = renamed
    if '.' not in name:
      found[f'tf.math.{name}'] = renamed
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
