import threading

from absl.testing import parameterized
import chex
import jax
import jax.numpy as jnp
import numpy as np

from shard_transforms import facade
from shard_transforms.facade import frames


class FramesTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.enterContext(facade.Graph().as_default())
    self.w = facade.Variable(1.0, name='w')
    self.b = facade.Variable(2.0, name='b')

  def test_what_is_written_is_gone_with_the_frame(self):
    with frames.frame():
      self.w.assign(5.0)
      inside = float(self.w)

    self.assertEqual([inside, float(self.w)], [5, 1])

  def test_what_is_written_is_gone_after_an_exception(self):
    with self.assertRaises(KeyError), frames.frame():
      self.w.assign(5.0)
      raise KeyError

    self.assertEqual(float(self.w), 1)
    self.assertFalse(frames.is_tracing())

  def test_what_is_committed_stays(self):
    with frames.frame() as frame:
      self.w.assign(5.0)
    frames.commit(frame.written, [frame.values[self.w]])

    self.assertEqual(float(self.w), 5)

  def test_commits_into_the_frame_around(self):
    with frames.frame():
      with frames.frame() as inner:
        self.w.assign(5.0)
      frames.commit(inner.written, [inner.values[self.w]])
      around = float(self.w)

    self.assertEqual([around, float(self.w)], [5, 1])

  def test_variables_stand_for_what_a_frame_is_given(self):
    with frames.frame('plain', [(self.w, jnp.float32(7))]):
      inside = float(self.w), float(self.b)

    self.assertEqual(inside, (7, 2))

  def test_enters_what_comes_from_outside(self):
    with frames.frame(
        'plain',
        [(self.w, jnp.float32(7))],
        enter=lambda variable, array: -array,
    ):
      inside = float(self.w), float(self.b), float(self.b)

    self.assertEqual(inside, (-7, -2, -2))

  def test_tells_what_was_used_and_written(self):
    with frames.frame('plain', [(self.w, jnp.float32(7))]) as frame:
      unused = list(frame.used)
      self.b.assign(3.0)
      self.w.value()

    self.assertEqual(unused, [])
    self.assertEqual(list(frame.used), [self.b, self.w])
    self.assertEqual(list(frame.written), [self.b])

  def test_what_is_read_inside_is_used_around(self):
    with frames.frame() as outer, frames.frame():
      self.w.value()

    self.assertEqual(list(outer.used), [self.w])

  def test_tells_whether_it_is_traced(self):
    with frames.frame('discovered'), frames.frame():
      inside = frames.is_tracing()
      with frames.outside():
        outside = frames.is_tracing()

    self.assertEqual([inside, outside, frames.is_tracing()], [1, 0, 0])

  def test_other_threads_do_not_see_it(self):
    seen = []

    with frames.frame('discovered'):
      self.w.assign(5.0)
      thread = threading.Thread(
          target=lambda: seen.extend([float(self.w), frames.is_tracing()])
      )
      thread.start()
      thread.join()

    self.assertEqual(seen, [1, False])

  def test_what_is_computed_outside_is_concrete(self):
    found = []

    @jax.jit
    def traced(x):
      with frames.frame('traced', [(self.w, x)]):
        with frames.outside():
          found.append(2 * self.w + jnp.ones(2))
        return self.w + 1

    result = traced(jnp.float32(7))

    chex.assert_trees_all_equal(
        (found[0], result), (jnp.float32([3, 3]), jnp.float32(8)), strict=True
    )

  def test_a_tracer_must_not_outlive_its_trace(self):
    @jax.jit
    def traced(x):
      frames.write(self.w, x)

    with self.assertRaisesRegex(ValueError, "'w:0' must not be assigned"):
      traced(np.float32(7))

  def test_a_lock_is_held_and_known_to_the_frames_around(self):
    lock = threading.Lock()

    with frames.frame() as outer, frames.frame() as inner, frames.held(lock):
      locked = lock.locked()

    self.assertEqual([locked, lock.locked()], [True, False])
    self.assertEqual([list(outer.locks), list(inner.locks)], [[lock], [lock]])

  def test_frames_around_know_the_mesh(self):
    with frames.frame() as outer, frames.frame() as inner:
      frames.mark_mapped('mesh')

    self.assertEqual([outer.mesh, inner.mesh], ['mesh', 'mesh'])
