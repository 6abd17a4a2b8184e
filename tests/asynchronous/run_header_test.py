import unittest

import numpy as np
import optax

import asynchronous_cases
from shard_transforms import asynchronous
from shard_transforms._src.asynchronous import parameter_server
from shard_transforms._src.asynchronous import run_header

TASK = asynchronous_cases.TASK


def header(tx, params):
  server = parameter_server.ParameterServer(tx, params)
  return run_header.header(params, server)


class RunHeaderTest(unittest.TestCase):

  def test_parameters_are_numpy_arrays(self):
    params = run_header.init_params(TASK)

    self.assertIsInstance(params['w'], np.ndarray)
    self.assertEqual(params['b'].tolist(), np.ones((2, 3)).tolist())

  def test_says_that_init_has_failed(self):
    task = asynchronous.Task(lambda: {}['w'], TASK.gradient, TASK.batch)

    with self.assertRaisesRegex(
        RuntimeError, "`init` of `task` .* KeyError: 'w"
    ):
      run_header.init_params(task)

  def test_tells_parameters_and_optimizers_apart(self):
    params = run_header.init_params(TASK)
    other = params | {'w': params['w'] + 1}
    first = header(optax.sgd(0.1), params)

    self.assertEqual(header(optax.sgd(0.1), params), first)
    self.assertNotEqual(header(optax.sgd(0.2), params), first)
    self.assertNotEqual(header(optax.sgd(0.1), other), first)
