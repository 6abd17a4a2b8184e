"""Reads the golden tapes and maps their optimizers to Optax."""

import json
import pathlib

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax

from shard_transforms.facade import transforms

FOLDER = pathlib.Path(__file__).parents[1] / 'golden'

# The loss of one shard, tower or worker, a term for each variable.
TERMS = {
    'linear': lambda variable, grad: jnp.sum(variable * grad),
    'half_squared_error': lambda v, target: 0.5 * jnp.sum((v - target) ** 2),
    'sparse_rows': lambda e, rows: jnp.sum(e[rows['ids']] * rows['grads']),
}


def assert_close(actual, expected):
  chex.assert_trees_all_close(
      actual, expected, rtol=1e-5, atol=1e-6, strict=True
  )


def read(pattern):
  """Returns the cases of all files of a pattern by their id, in order."""
  return {
      case['id']: case
      for path in sorted(FOLDER.glob(pattern))
      for case in json.loads(path.read_text(encoding='utf-8'))['cases']
  }


def arrays(tape, lists):
  """Returns the variables that `lists` has numbers for, in their shapes."""
  shapes = {v['name']: v['shape'] for v in tape['variables']}
  return {
      name: np.asarray(flat, np.float32).reshape(shapes[name])
      for name, flat in lists.items()
      if flat is not None
  }


def params(tape):
  return arrays(tape, {v['name']: v['init'] for v in tape['variables']})


def inners(tape):
  """Returns the inner optimizers, of which some tapes have two."""
  return tape['inners'] if 'inners' in tape else [tape['inner']]


def recorded(tape, state):
  """Returns a state of a tape, in the form of `observed`."""
  slots = state.get('slots_by_optimizer') or [state['slots']]
  non_slots = state.get('non_slots_by_optimizer') or [state.get('non_slots')]
  return {
      'vars': arrays(tape, state['vars']),
      'slots': [
          {slot: arrays(tape, lists) for slot, lists in of_optimizer.items()}
          for of_optimizer in slots
      ],
      # Tapes without the powers still record the number of updates.
      'non_slots': [
          _beta_powers(inner, state['global_step'])
          if powers is None
          else {name: np.float32(power) for name, power in powers.items()}
          for inner, powers in zip(inners(tape), non_slots, strict=True)
      ],
  }


def observed(tape, params, states):
  """Returns the names of variables and slots in TensorFlow.

  Args:
    tape: The case.
    params: The variables by name.
    states: The state of each inner optimizer, or a tree that holds it.

  Returns:
    The variables, the slots of each optimizer, and its powers of beta.
  """
  pairs = list(zip(inners(tape), states, strict=True))
  return jax.device_get(
      {
          'vars': params,
          'slots': [_slots(inner, state) for inner, state in pairs],
          'non_slots': [
              _beta_powers(inner, _num_updates(state)) for inner, state in pairs
          ],
      }
  )


def optimizer(inner):
  """Returns the Optax transformation of an optimizer of `tf.train`."""
  return _OPTIMIZERS[inner['class']](**inner['kwargs'])


def _slots(inner, state):
  slots = {}
  for slot, (field, sign) in _SLOTS[inner['class']].items():
    of_variables = optax.tree_utils.tree_get(state, field)
    if of_variables is not None:
      slots[slot] = {
          name: sign * array
          for name, array in of_variables.items()
          if not isinstance(array, optax.MaskedNode)
      }
  return slots


def _num_updates(state):
  adam = optax.tree_utils.tree_get(state, 'ScaleByAdamState')
  return 0 if adam is None else int(adam.count)


def _beta_powers(inner, num_updates):
  if inner['class'] != 'AdamOptimizer':
    return {}
  betas = {'beta1': 0.9, 'beta2': 0.999}
  return {
      f'{name}_power': np.float32(
          inner['kwargs'].get(name, default) ** (num_updates + 1)
      )
      for name, default in betas.items()
  }


def _momentum(learning_rate, momentum, use_nesterov=False):
  return optax.sgd(learning_rate, momentum=momentum, nesterov=use_nesterov)


def _adam(learning_rate=0.001, beta1=0.9, beta2=0.999, epsilon=1e-8):
  if epsilon <= 1e-8:
    return optax.adam(learning_rate, beta1, beta2, eps=epsilon)
  # TensorFlow adds epsilon before it corrects the bias of the second moment.
  return optax.inject_hyperparams(optax.adam, static_args=('b1', 'b2'))(
      learning_rate,
      b1=beta1,
      b2=beta2,
      eps=lambda count: jnp.float32(
          epsilon / jnp.sqrt(1 - beta2 ** (count + 1))
      ),
  )


def _adagrad(learning_rate, initial_accumulator_value=0.1):
  return optax.adagrad(learning_rate, initial_accumulator_value, eps=0.0)


def _rmsprop(
    learning_rate, decay=0.9, momentum=0.0, epsilon=1e-10, centered=False
):
  return optax.rmsprop(
      learning_rate,
      decay,
      eps=epsilon,
      initial_scale=1.0,
      eps_in_sqrt=True,
      centered=centered,
      momentum=momentum,
  )


_OPTIMIZERS = {
    'AdagradOptimizer': _adagrad,
    'AdamOptimizer': _adam,
    'FtrlOptimizer': transforms.ftrl,
    'GradientDescentOptimizer': optax.sgd,
    'MomentumOptimizer': _momentum,
    'RMSPropOptimizer': _rmsprop,
}

# The field of the Optax state that is a slot, and its sign.
_SLOTS = {
    'AdagradOptimizer': {'accumulator': ('sum_of_squares', 1)},
    'AdamOptimizer': {'m': ('mu', 1), 'v': ('nu', 1)},
    'FtrlOptimizer': {'accum': ('accum', 1), 'linear': ('linear', 1)},
    'GradientDescentOptimizer': {},
    'MomentumOptimizer': {'momentum': ('trace', 1)},
    # Optax's trace comes after the learning rate, whose sign it takes.
    'RMSPropOptimizer': {
        'rms': ('nu', 1),
        'mg': ('mu', 1),
        'momentum': ('trace', -1),
    },
}
