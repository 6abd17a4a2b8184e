"""Recorded results of single parts of TensorFlow 1.15.5.

`parts.json` contains decays of a rate of 0.5 at `steps`, by name and further
arguments, and all variables after each of some steps with the gradients
`grads`: for the optimizers that `optimizers_test.py` creates with the same
calls, and for an average with the decay 0.9 after gradient descent with the
rate 0.5, plain and with the global step as `num_updates`.
"""

import json
import pathlib

import numpy as np

from shard_transforms.facade import tf

_PATH = pathlib.Path(__file__).parents[1] / 'facade' / 'parts.json'
RECORDED = json.loads(_PATH.read_text(encoding='utf-8'))
START = {k: np.float32(x) for k, x in RECORDED['start'].items()}
GRADS = [
    {k: np.float32(x) for k, x in of_step.items()}
    for of_step in RECORDED['grads']
]


def check(test, train, recorded, tolerance):
  """Trains; compares all variables after each step with what is recorded."""
  for grads, expected in zip(GRADS, recorded, strict=False):
    train(grads)
    actual = test.values()
    # The second slot of a name has a number, as in TensorFlow.
    test.assertEqual(actual.keys(), expected.keys())
    for key, value in expected.items():
      atol = tolerance * np.max(np.abs(value))
      np.testing.assert_allclose(
          actual[key], value, tolerance, atol, err_msg=key
      )


def variables():
  """Returns the variables in the state of the beginning, by name."""
  return {name: tf.Variable(x, name=name) for name, x in START.items()}
