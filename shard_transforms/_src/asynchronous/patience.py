"""How long a gradient may take, from how long others took."""

import collections
from collections.abc import Iterable
import math
import statistics

import numpy as np

# A worker hangs once it takes this many times what is allowed, but at least
# this many seconds, because the whole machine may pause.
_HANGS = 5
_LEAST_HANG = 5.0
# Seconds that the first gradient of a worker may take longer.
_COMPILATION = 120.0
# Number of the latest durations of which the median is taken.
_NUM_DURATIONS = 101


class Patience:
  """The limits of gradients, multiples of the median duration.

  Nothing is late before a gradient has come back: how long one takes is not
  known then. Each attempt at a batch has twice the time of the one before,
  because the batch itself may be slow.
  """

  def __init__(self, times: float, durations: Iterable[float] = ()):
    """Begins with what is known.

    Args:
      times: After how many times the median a gradient is late.
      durations: The seconds of earlier gradients.
    """
    self._times = times
    self._durations = collections.deque(durations, _NUM_DURATIONS)
    self._first_durations = collections.deque[float](maxlen=_NUM_DURATIONS)
    self._compiled: set[int] = set()

  def note(self, worker: int, seconds: float) -> None:
    """Takes in how long a gradient took."""
    if worker in self._compiled:
      self._durations.append(seconds)
    else:
      self._first_durations.append(seconds)
      self._compiled.add(worker)

  def forget(self, worker: int) -> None:
    """Takes in that a worker has died, so that it compiles again."""
    self._compiled.discard(worker)

  def late_after(self, worker: int, attempt: int) -> float:
    """Returns the seconds after which a worker's gradient is late."""
    return self._start(worker) + self._allowed(attempt)

  def hung_after(self, worker: int, attempt: int) -> float:
    """Returns the seconds after which a worker hangs."""
    allowed = max(_HANGS * self._allowed(attempt), _LEAST_HANG)
    return self._start(worker) + allowed

  def _start(self, worker):
    return 0.0 if worker in self._compiled else _COMPILATION

  def _allowed(self, attempt):
    # With compilation rather than not at all.
    known = self._durations or self._first_durations
    if not known:
      return math.inf
    return self._times * statistics.median(known) * 2 ** (attempt - 1)


def durations(records: np.ndarray) -> list[float]:
  """Returns about how long the gradients of a journal took, in seconds.

  These are the times between the records of a worker, which include those in
  which it had to wait.
  """
  found = []
  for worker in np.unique(records['worker']):
    found += np.diff(records['seconds'][records['worker'] == worker]).tolist()
  # Each start of the program counts from zero.
  return [seconds for seconds in found if seconds > 0]
