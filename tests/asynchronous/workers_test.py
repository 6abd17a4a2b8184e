import unittest

import jax.numpy as jnp

from shard_transforms import asynchronous
from shard_transforms._src.asynchronous import task as task_lib


class LocalWorkersTest(unittest.TestCase):

  def test_computes_in_the_order_of_the_start(self):
    task = asynchronous.Task(
        init=max,
        gradient=lambda params, batch: (params + batch, {'batch': batch}),
        batch=lambda number: number,
    )
    workers = task_lib.LocalWorkers(task, 3)
    params = workers.publish(jnp.zeros(()))

    for worker, batch in (2, 5), (0, 7):
      workers.start(worker, params, batch)
    events = [*workers.wait(0), *workers.wait(0), *workers.wait(0)]

    self.assertEqual(workers.ready(), {0, 1, 2})
    self.assertEqual([event.worker for event in events], [2, 0])
    self.assertEqual([event.fetch() for event in events], [5.0, 7.0])
    self.assertEqual(events[1].reply.metrics, {'batch': 7.0})
