"""`Task`: its functions, the failures that workers report, and checksums."""

from absl.testing import parameterized
import jax.numpy as jnp
import numpy as np

import cases
import runs
from shard_transforms import asynchronous
from shard_transforms._src.asynchronous import task as task_lib


class TaskTest(parameterized.TestCase):

  @cases.parameters(
      ({'init': 3}, TypeError, '`init` of `Task` must be a function'),
      ({'gradient': None}, TypeError, '`gradient` of `Task` must be'),
      ({'batch': 'data'}, TypeError, '`batch` of `Task` must be'),
  )
  def test_refuses_wrong_functions(self, change, error, message):
    functions = {'init': max, 'gradient': max, 'batch': max}

    with self.assertRaisesRegex(error, message):
      asynchronous.Task(**(functions | change))

  @cases.parameters(
      (lambda: {}['w'], RuntimeError, "`init` of the task raised KeyError: 'w"),
      # Models have parameters only.
      (
          lambda: {'count': np.int32(0)},
          TypeError,
          r"dtype int32 at \['count'\]. Return",
      ),
  )
  def test_refuses_failures_and_wrong_results_of_init(
      self, init, error, message
  ):
    with self.assertRaisesRegex(error, message):
      task_lib.init_params(asynchronous.Task(init, max, max))

  @cases.parameters(
      (lambda p, b: p, r'not a tuple \(gradient, metrics\)'),
      (
          lambda p, b: ([p], {}),
          'a gradient without the tree, .* got nothing instead',
      ),
      (
          lambda p, b: ((p, None), {}),
          'a gradient without the tree, .* got nothing instead',
      ),
      (lambda p, b: (p[:1], {}), r'float32\[1\] instead of float32\[3\]'),
      (lambda p, b: (p.astype(jnp.int32), {}), r'int32\[3\] instead'),
      (lambda p, b: (p, {'loss': p}), 'metrics that are not a dict of scalars'),
      (lambda p, b: (p, 3), 'metrics that are not a dict of scalars'),
      (
          lambda p, b: (p, {'loss': 'low'}),
          'metrics that are not a dict of scalars',
      ),
  )
  def test_wrong_gradient_is_a_failure(self, gradient, message):
    task = asynchronous.Task(max, gradient, lambda number: number)

    reply, grads = task_lib.evaluate(task, np.ones(3, np.float32), 0)

    self.assertIsNone(grads)
    self.assertRegex(reply.failure, message)

  def test_failure_names_function_and_line(self):
    task = asynchronous.Task(max, max, runs.poison)

    reply, _ = task_lib.evaluate(task, np.ones(3, np.float32), 7)

    self.assertEqual(
        reply.failure,
        '`batch` of the task raised OSError: no such shard of the data',
    )
    self.assertIn('runs.py', reply.trace)


class ChecksumTest(parameterized.TestCase):

  @cases.parameters(np.float32, np.float16, np.int8, np.complex64)
  def test_depends_on_each_bit(self, dtype):
    x = np.arange(1, 12).astype(dtype)
    before = task_lib.checksum({'x': x})
    data = x.view(np.uint8)

    for i in range(8 * data.size):
      data[i // 8] ^= 1 << i % 8
      self.assertNotEqual(task_lib.checksum({'x': x}), before)
      data[i // 8] ^= 1 << i % 8
    self.assertEqual(task_lib.checksum({'x': x}), before)

  # The last case has full rows of words only, and an even number of rows.
  @cases.parameters((np.float32, 4), (np.float32, 100_000), (np.float64, 4084))
  def test_depends_on_the_signs(self, dtype, size):
    # As many positive as negative values, so that sums of words do not change.
    x = np.tile([1.5, 2.5, -1.5, -2.5], size // 4).astype(dtype)

    for other in -x, np.where(np.arange(size) % 2, x, -x), x[::-1]:
      self.assertNotEqual(task_lib.checksum(x), task_lib.checksum(other))

  def test_depends_on_the_order_of_leaves(self):
    a, b = np.arange(3.0), np.arange(3.0) + 1

    self.assertNotEqual(task_lib.checksum([a, b]), task_lib.checksum([b, a]))

  def test_takes_scalars_and_empty_leaves(self):
    tree = [np.zeros((0, 3)), np.float32(1.0), np.asfortranarray(np.eye(3))]

    self.assertEqual(task_lib.checksum(tree), task_lib.checksum(tree))
