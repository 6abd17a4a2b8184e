"""Functions of JAX and Optax that take the arguments of TensorFlow 1."""

from collections.abc import Callable
import inspect
import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp

from shard_transforms.facade import arrays as arrays_lib

# Parameters of TensorFlow that are not positional, by the keyword parameter of
# the function. (`None`: without effect.)
_KEYWORDS: dict[str, str | None] = {
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
_DTYPES = {'dtype', 'output_type'}
# Parameters that can be lists of numbers in TensorFlow.
_TENSORS = (
    'a b condition features ids indices input input_tensor labels lengths'
    ' input_ logits onehot_labels params predictions t tensor weights x y'
)


def renamed(
    function: Callable[..., Any], name: str, parameters: str
) -> Callable[..., Any]:
  """Returns a function that takes the arguments of TensorFlow.

  Args:
    function: The function.
    name: The name in TensorFlow.
    parameters: The parameters in TensorFlow in their order, such as `'a
      perm=axes name'`. After `=` comes what the parameter is in `function`: a
      position, a keyword, `None` if it has no effect, or `...` if it is not
      supported. Without `=`, it is the keyword in `_KEYWORDS`, or else the next
      position.

  Raises:
    TypeError: When called with unknown, missing or unsupported arguments.
  """
  targets = _targets(parameters)
  signature = _signature(targets, _num_required(function))

  def call(*args: Any, **kwargs: Any) -> Any:
    try:
      arguments = signature.bind_partial(*args, **kwargs).arguments
    except TypeError as error:
      raise TypeError(f'`tf.{name}{signature}`: {error}.') from error
    arguments = {
        key: _converted(key, value)
        for key, value in arguments.items()
        if value is not None or key == 'loss_collection'
    }
    missing = [
        key
        for key, parameter in signature.parameters.items()
        if parameter.default is parameter.empty and key not in arguments
    ]
    if missing:
      raise TypeError(f'`tf.{name}{signature}` also needs {missing}.')
    unsupported = [k for k, x in arguments.items() if targets[k] is ... and x]
    if unsupported:
      raise TypeError(
          f'`tf.{name}` does not support `{unsupported[0]}`. Leave it out, or'
          ' use a function of JAX or Optax instead.'
      )
    by_target = {targets[key]: value for key, value in arguments.items()}
    positions = sorted(x for x in by_target if isinstance(x, int))
    out = function(
        *(by_target[i] for i in positions),
        **{x: by_target[x] for x in by_target if isinstance(x, str)},
    )
    if arguments.keys() & _DTYPES:
      return out
    return arrays_lib.in_32_bits(out, arguments)

  call.__name__ = call.__qualname__ = name
  vars(call)['__signature__'] = signature
  call.__doc__ = f'`tf.{name}` with the arguments of TensorFlow 1.15.'
  return call


def _targets(parameters):
  """Parses parameters: a position, a keyword, `...` or `None` for each name."""
  constants = {'...': ..., 'None': None}
  positions = itertools.count()
  targets: dict[str, Any] = {}
  for parameter in parameters.split():
    name, _, target = parameter.partition('=')
    if target.isdigit():
      targets[name] = int(target)
    elif target:
      targets[name] = constants.get(target, target)
    else:
      targets[name] = _KEYWORDS[name] if name in _KEYWORDS else next(positions)
  return targets


def _num_required(function):
  """Returns the number of positional parameters without a default."""
  kinds = (
      inspect.Parameter.POSITIONAL_ONLY,
      inspect.Parameter.POSITIONAL_OR_KEYWORD,
  )
  parameters = inspect.signature(function).parameters.values()
  positional = [p for p in parameters if p.kind in kinds]
  if not positional:
    return math.inf  # JAX's functions of `*args` require each of them.
  return sum(p.default is p.empty for p in positional)


def _signature(targets, num_required):
  """Returns the signature in TensorFlow, for checks, `help` and completion."""
  kind, parameters, default = inspect.Parameter.POSITIONAL_OR_KEYWORD, [], {}
  for name, target in targets.items():
    if not isinstance(target, int) or target >= num_required:
      default = {'default': None}
    parameters.append(inspect.Parameter(name, kind, **default))
  return inspect.Signature(parameters)


def _converted(key, value):
  """Converts an argument; variables, also in lists, become arrays."""
  value = jax.tree.map(
      lambda x: x, value, is_leaf=lambda x: isinstance(x, arrays_lib.Rate)
  )
  if key in _DTYPES:
    return jax.dtypes.canonicalize_dtype(value)
  if key in _TENSORS.split() and type(value) is list:
    return arrays_lib.in_32_bits(jnp.asarray(value), value)
  return value
