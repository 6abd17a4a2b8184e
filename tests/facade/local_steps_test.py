import threading

from absl.testing import absltest
import jax.numpy as jnp

from shard_transforms import facade
from shard_transforms.facade import local_steps


class LocalStepTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    self.graph = self.enterContext(facade.Graph().as_default())
    self.local_step = local_steps.LocalStep()

  def test_starts_with_none(self):
    self.assertEqual(int(self.local_step.step), local_steps.NO_STEP)

  def test_is_in_no_collection(self):
    self.assertEmpty(facade.global_variables())

  def test_the_oldest_since_the_last_use_counts(self):
    steps = []
    for step in (5, 3, 4):
      self.local_step.record(step)
      steps.append(int(self.local_step.step))
    self.local_step.use()
    steps.append(int(self.local_step.step))
    self.local_step.record(7)
    steps.append(int(self.local_step.step))

    self.assertEqual(steps, [5, 3, 3, 3, 7])

  def test_goes_on_from_what_is_set(self):
    self.local_step.set(5)
    self.local_step.record(7)

    self.assertEqual(int(self.local_step.step), 5)

  def test_each_thread_has_its_own(self):
    self.local_step.record(5)
    seen = []

    def other():
      seen.append(int(self.local_step.step))
      self.local_step.record(1)

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()

    self.assertEqual(seen, [local_steps.NO_STEP])
    self.assertEqual(int(self.local_step.step), 5)

  def test_is_recorded_by_what_is_compiled(self):
    record = facade.function(self.local_step.record)

    record(jnp.int32(4))
    record(jnp.int32(2))

    self.assertEqual(int(self.local_step.step), 2)
