"""The namespace of TensorFlow 1.

`from shard_transforms.facade import tf` replaces `import tensorflow as tf` in a
script. Each name is a function of the façade, JAX or Optax with the arguments
of TensorFlow; this module computes nothing itself. Any other name raises an
`AttributeError`. The page about porting lists the differences, and replacements
of other frequent names.
"""

import contextlib
import functools
import sys
from typing import Any
import warnings

from absl import logging
import jax
import jax.numpy as jnp
import optax

from shard_transforms.facade import clipping
from shard_transforms.facade import control_flow
from shard_transforms.facade import cross_shard
from shard_transforms.facade import decays
from shard_transforms.facade import differentiation
from shard_transforms.facade import estimator as estimator_lib
from shard_transforms.facade import graph as graph_lib
from shard_transforms.facade import lookup
from shard_transforms.facade import losses as losses_lib
from shard_transforms.facade import moving_averages
from shard_transforms.facade import optimizer
from shard_transforms.facade import scopes
from shard_transforms.facade import shards
from shard_transforms.facade import sync_replicas
from shard_transforms.facade import tf_arguments
from shard_transforms.facade import tf_functions as functions
from shard_transforms.facade import tf_optimizers
from shard_transforms.facade import towers
from shard_transforms.facade import variables
from shard_transforms.facade import workers

_PAGE = 'docs/porting_from_tf1.md'


class _Namespace:
  """A part of the namespace, such as `tf.train`."""

  def __init__(self, path: str):
    self._path = path

  def __getattr__(self, name: str) -> Any:
    if name.startswith('_'):  # Of Python, also before `copy` sets `_path`.
      raise AttributeError(name)
    raise AttributeError(_missing(f'{self._path}.{name}'))

  def __repr__(self) -> str:
    return f'<namespace {self._path}>'


def __getattr__(name: str) -> Any:
  raise AttributeError(_missing(f'tf.{name}'))


def __dir__() -> list[str]:
  """Lists the names of TensorFlow, without the imports of this module."""
  return sorted({path.split('.')[1] for path in _PATHS})


def _missing(path):
  return (
      f'`{path}` is not available in `shard_transforms.facade.tf`. Look for a'
      f' replacement in {_PAGE}; if the name is not listed there, use JAX,'
      ' Optax or Flax.'
  )


def _members(names: str, prefix: str = '', module: Any = jnp):
  """Returns members of a module by their names in TensorFlow, `'pow=power'`."""
  pairs = (name.partition('=') for name in names.split())
  return {
      f'{prefix}{name}': getattr(module, member or name)
      for name, _, member in pairs
  }


def _without_effect(name, result=None):
  """Returns a function that warns and returns a constant."""

  def call(*args: Any, **kwargs: Any) -> Any:
    warnings.warn(f'`tf.{name}` has no effect here: {_PAGE}.', stacklevel=2)
    return result

  return call


# The last parameters of the functions in `tf.losses`.
_LOSS = 'scope=None loss_collection reduction'
# The functions by their parameters in TensorFlow.
_FUNCTIONS = {
    'x name': {
        **_members(
            'acos=arccos asin=arcsin atan=arctan ceil cos cosh exp expm1'
            ' floor is_finite=isfinite is_inf=isinf is_nan=isnan log log1p'
            ' logical_not negative nn.tanh=tanh reciprocal rint round sign sin'
            ' sinh sqrt square tan tanh'
        ),
        **_members('log_sigmoid nn.sigmoid=sigmoid sigmoid', module=jax.nn),
        **_members('erf lgamma=gammaln', module=jax.scipy.special),
        'abs': functions.magnitude,
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
        **_members('maximum minimum', module=functions),
        'div': functions.div,
        'squared_difference': optax.squared_error,
    },
    'input_tensor axis keepdims name reduction_indices keep_dims': {
        **_members('all any max mean min prod std sum variance=var', 'reduce_'),
        **_members('logsumexp', 'reduce_', jax.scipy.special),
    },
    'input_tensor axis keepdims dtype name reduction_indices keep_dims': {
        'count_nonzero': functions.count_nonzero
    },
    'a b axes name': _members('tensordot'),
    'a b transpose_a transpose_b name': {'matmul': functions.matmul},
    'a perm=axes name': _members('transpose'),
    'condition x y name': {'where': functions.where},
    'dims value name': _members('fill=full'),
    'fn elems dtype=None parallel_iterations=None back_prop=None'
    ' swap_memory=None infer_shape=None name': {'map_fn': jax.lax.map},
    'input axis name dim': _members('expand_dims'),
    'input axis name dimension output_type=dtype': {
        name: functools.partial(functions.arg, getattr(jnp, name))
        for name in ('argmax', 'argmin')
    },
    'input axis name squeeze_dims': _members('squeeze'),
    'input k sorted=None name': {'nn.top_k': functions.top_k},
    'input multiples name': _members('tile'),
    'input shape name': _members('broadcast_to'),
    'input_ begin size name': {'slice': functions.slice_of},
    'input name': {
        **_members('identity=asarray rank=ndim shape size'),
        **_members('stop_gradient', module=jax.lax),
    },
    'inputs name': {'add_n': functions.add_n},
    'lengths maxlen dtype name': {'sequence_mask': functions.sequence_mask},
    'num_rows num_columns batch_shape=... dtype name': _members('eye'),
    'params ids partition_strategy=None name validate_indices max_norm=...': {
        'nn.embedding_lookup': functools.partial(jnp.take, axis=0)
    },
    'params indices name batch_dims=...': {'gather_nd': functions.gather_nd},
    'params indices validate_indices name axis': {
        'gather': functools.partial(jnp.take, axis=0)
    },
    'scalar x name': _members('scalar_mul=multiply'),
    'shape dtype name': _members('ones zeros'),
    'start stop num name': _members('linspace'),
    'start limit=stop delta=step dtype name': _members('range=arange'),
    'tensor axis name': _members('reverse=flip'),
    'tensor dtype name': _members('ones_like zeros_like'),
    'tensor ord=order axis keepdims name': {'norm': functions.norm},
    'tensor paddings mode=mode name constant_values=constant_values': {
        'pad': functions.pad
    },
    'tensor shape name': _members('reshape'),
    'value bias data_format=... name': {'nn.bias_add': functions.bias_add},
    'value dtype name': _members('convert_to_tensor=asarray'),
    'value dtype shape=shape name': {'constant': functions.constant},
    'value num=num axis name': {'unstack': functions.unstack},
    'value num_or_size_splits axis name': {'split': functions.split},
    'values axis name': {
        'concat': functions.concat,
        'stack': functions.stack,
    },
    'x axis epsilon=epsilon name dim': {
        'nn.l2_normalize': functions.l2_normalize
    },
    'x axis exclusive=... reverse=... name': {
        'cumsum': functools.partial(jnp.cumsum, axis=0)
    },
    'x dtype name': _members('cast=asarray'),
    # Losses, and the layers of networks.
    'features name': {
        **_members('elu relu relu6 softplus swish', 'nn.', jax.nn),
        'nn.selu': functions.selu,
    },
    'features alpha name': {'nn.leaky_relu': functions.leaky_relu},
    'indices depth on_value=... off_value=... axis dtype name': _members(
        'one_hot', module=jax.nn
    ),
    f'labels=1 predictions=0 weights {_LOSS}': {
        'losses.absolute_difference': losses_lib.reduced_loss(
            lambda x, y: functions.magnitude(x - y)
        ),
        'losses.mean_squared_error': losses_lib.reduced_loss(
            optax.squared_error
        ),
    },
    f'labels=1 predictions=0 weights delta=2 {_LOSS}': {
        'losses.huber_loss': losses_lib.reduced_loss(
            lambda x, y, delta=1.0: optax.huber_loss(x, y, delta=delta)
        )
    },
    f'multi_class_labels=1 logits=0 weights label_smoothing=... {_LOSS}': {
        'losses.sigmoid_cross_entropy': losses_lib.reduced_loss(
            optax.sigmoid_binary_cross_entropy
        )
    },
    f'onehot_labels=1 logits=0 weights label_smoothing=2 {_LOSS}': {
        'losses.softmax_cross_entropy': losses_lib.reduced_loss(
            losses_lib.smoothed_cross_entropy
        )
    },
    f'labels=1 predictions=0 weights epsilon=2 {_LOSS}': {
        'losses.log_loss': losses_lib.reduced_loss(losses_lib.log_loss)
    },
    f'labels=1 logits=0 weights {_LOSS}': {
        'losses.hinge_loss': losses_lib.reduced_loss(losses_lib.hinge),
        'losses.sparse_softmax_cross_entropy': losses_lib.reduced_loss(
            losses_lib.sparse_cross_entropy, labels_dtype=None
        ),
    },
    'add_regularization_losses name scope=scope': {
        'losses.get_total_loss': losses_lib.total_loss
    },
    'labels=1 logits=0 axis=... name': _members(
        'softmax_cross_entropy_with_logits_v2=softmax_cross_entropy',
        'nn.',
        optax,
    ),
    'logits axis name dim': _members('log_softmax softmax', 'nn.', jax.nn),
    't name': {'nn.l2_loss': functions.l2_loss},
    'x axes shift name keep_dims keepdims': {'nn.moments': functions.moments},
    '_sentinel=... labels=1 logits=0 name': {
        'nn.softmax_cross_entropy_with_logits': losses_lib.cross_entropy,
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
        'ones_initializer': lambda: jax.nn.initializers.ones,
        'zeros_initializer': lambda: jax.nn.initializers.zeros,
    },
    'mean=... stddev seed dtype': {
        'random_normal_initializer': functions.random_normal,
        'truncated_normal_initializer': functions.truncated_normal,
    },
    'minval=minval maxval=maxval seed dtype': {
        'random_uniform_initializer': functions.random_uniform
    },
    'seed dtype': _members(
        'glorot_normal_initializer=glorot_normal'
        ' glorot_uniform_initializer=glorot_uniform'
        ' initializers.he_normal=he_normal initializers.he_uniform=he_uniform'
        ' initializers.lecun_normal=lecun_normal'
        ' initializers.lecun_uniform=lecun_uniform',
        module=jax.nn.initializers,
    ),
    'uniform seed dtype': {
        'contrib.layers.xavier_initializer': functions.xavier
    },
    'value dtype': _members(
        'constant_initializer=constant', module=jax.nn.initializers
    ),
    'gain seed dtype': _members(
        'orthogonal_initializer=orthogonal', module=jax.nn.initializers
    ),
    'scale=scale mode=mode distribution=distribution seed dtype': {
        'variance_scaling_initializer': functions.variance_scaling
    },
}
_TYPES = 'bfloat16 float16 float32 float64 int8 int16 int32 int64 uint8'
# The names of the façade, by their place in TensorFlow and their module.
_FACADE = (
    ('tf', graph_lib, 'Graph GraphKeys add_to_collection get_collection'),
    ('tf', graph_lib, 'get_default_graph reset_default_graph set_random_seed'),
    ('tf', scopes, 'get_variable_scope name_scope variable_scope'),
    ('tf', variables, 'Variable'),
    ('tf', lookup, 'get_variable global_variables local_variables'),
    ('tf', lookup, 'trainable_variables'),
    (
        'tf',
        clipping,
        'clip_by_global_norm clip_by_norm clip_by_value global_norm',
    ),
    ('tf', control_flow, 'cond control_dependencies group no_op'),
    ('tf', differentiation, 'gradients'),
    ('tf', optimizer, 'AggregationMethod'),
    ('tf.train', optimizer, 'Optimizer'),
    (
        'tf.train',
        tf_optimizers,
        'AdadeltaOptimizer AdagradOptimizer AdamOptimizer',
    ),
    ('tf.train', tf_optimizers, 'FtrlOptimizer GradientDescentOptimizer'),
    ('tf.train', tf_optimizers, 'MomentumOptimizer RMSPropOptimizer'),
    ('tf.train', sync_replicas, 'SyncReplicasOptimizer'),
    (
        'tf.train',
        decays,
        'cosine_decay cosine_decay_restarts exponential_decay',
    ),
    ('tf.train', decays, 'inverse_time_decay natural_exp_decay'),
    ('tf.train', decays, 'piecewise_constant polynomial_decay'),
    ('tf.train', moving_averages, 'ExponentialMovingAverage'),
    ('tf.train', lookup, 'get_global_step get_or_create_global_step'),
    ('tf.estimator', estimator_lib, 'EstimatorSpec ModeKeys'),
    ('tf.losses', losses_lib, 'Reduction'),
    ('tf.tpu', cross_shard, 'CrossShardOptimizer cross_replica_sum'),
    ('tf.tpu', shards, 'shard'),
    ('tf.contrib.tpu', cross_shard, 'CrossShardOptimizer cross_replica_sum'),
    ('tf.contrib.tpu', shards, 'shard'),
    ('tf.contrib.tpu', estimator_lib, 'TPUEstimatorSpec'),
    ('tf.contrib.opt', tf_optimizers, 'AdamWOptimizer LARSOptimizer'),
    ('tf.contrib.opt', tf_optimizers, 'DecoupledWeightDecayExtension'),
    ('tf.contrib.opt', tf_optimizers, 'LazyAdamOptimizer'),
    ('tf.contrib.opt', workers, 'DropStaleGradientOptimizer'),
    ('tf.contrib.estimator', towers, 'TowerOptimizer'),
    ('tf.contrib.estimator', clipping, 'clip_gradients_by_norm'),
    ('tf.contrib.estimator', estimator_lib, 'replicate_model_fn'),
    ('tf.contrib.training', clipping, 'clip_gradient_norms'),
)


def _names() -> dict[str, Any]:
  """Returns all names of `tf` with their values."""
  keys = graph_lib.GraphKeys
  add, get = graph_lib.add_to_collection, graph_lib.get_collection
  regularization = keys.REGULARIZATION_LOSSES
  names_with_values = {
      'tf.AUTO_REUSE': None,
      **_members('assign assign_add assign_sub', 'tf.', variables.Variable),
      'tf.bool': jnp.bool_,
      # Contexts without effect: the mesh determines devices.
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
      'tf.contrib.layers.l1_regularizer': functions.regularizer(
          lambda w: jnp.sum(functions.magnitude(w))
      ),
      'tf.contrib.layers.l2_regularizer': functions.regularizer(
          functions.l2_loss
      ),
      'tf.einsum': functions.einsum,
      'tf.newaxis': None,
      # For `isinstance` checks: gradients are dense.
      'tf.IndexedSlices': type('IndexedSlices', (), {}),
  }
  names_with_values |= {
      f'tf.{name}': jnp.dtype(name) for name in _TYPES.split()
  }
  names_with_values |= {
      f'tf.summary.{name}': _without_effect(f'summary.{name}')
      for name in ('histogram', 'image', 'merge_all', 'scalar')
  }
  for place, module, names in _FACADE:
    names_with_values |= _members(names, f'{place}.', module)
  for signature, members in _FUNCTIONS.items():
    for name, function in members.items():
      renamed = tf_arguments.renamed(function, name, signature)
      names_with_values[f'tf.{name}'] = renamed
      if '.' not in name:
        names_with_values[f'tf.math.{name}'] = renamed
      if name.endswith('_initializer') and '.' not in name:
        names_with_values[
            f'tf.initializers.{name.removesuffix("_initializer")}'
        ] = renamed
  return names_with_values


def _fill(members: dict[str, Any]) -> list[str]:
  """Sets names in the module and its new namespaces; returns their paths."""
  values_by_path = _names()
  for path, value in values_by_path.items():
    _, *parts, name = path.split('.')
    inside, place = members, 'tf'
    for part in parts:
      place += f'.{part}'
      inside = vars(inside.setdefault(part, _Namespace(place)))
    inside[name] = value
  return list(values_by_path)


_PATHS = _fill(globals())
