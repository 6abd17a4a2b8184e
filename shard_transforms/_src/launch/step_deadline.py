"""`StepDeadline`: all processes end if a step takes too long."""

import atexit
import contextlib
import json
import os
import sys
import threading
import time
import traceback
from typing import Any

import jax

from shard_transforms._src.base import arguments
from shard_transforms._src.base import jax_internals

_PULSES, _VERDICT = 'step_deadline/pulses', 'step_deadline/verdict'
# Seconds between two signs of life; to wait for an answer of the coordinator,
# which may have stopped; and in which each process that lives gives a sign.
_PULSE, _ANSWER, _SILENCE = 0.25, 0.5, 1.0
# Seconds in which the others read the verdict. Process 0 keeps it, so it ends
# last: the others would otherwise only report a lost connection.
_FAREWELL = 0.5
# Seconds that a program waits for these threads when it ends.
_LEAVE = 3.0


class StepDeadline:
  """Ends all processes if a step of any of them takes too long.

  A process that hangs while it sends signs of life makes all others wait for
  ever. This context measures the time of each step, with the wait for its
  result. Within 5 seconds after the deadline all processes exit with status 1,
  and say which of them has not arrived at the step, or has stopped, and where
  the others wait. A process that has stopped (SIGSTOP) cannot exit by itself:
  `run_processes` kills it and names it first; elsewhere the scheduler must end
  the whole job as soon as one task fails.

  Create one in each process after `join_processes`, and enter it equally often
  in all. Code outside of it, such as reading a batch, has no deadline of its
  own, but the others wait for it inside. A call that compiles takes longer:
  leave it outside, or choose a deadline that covers it. A thread of each
  process sends a sign of life to the coordinator four times a second; the
  training does not wait for it. Process 0 runs the coordinator: if it has
  stopped, JAX may end the others first, because they miss its heartbeats.

  Args:
    seconds: How long a step may take.

  Raises:
    TypeError: If `seconds` is not a real number.
    ValueError: If it is not positive.

  Examples:
    >>> import jax.numpy as jnp
    >>> import shard_transforms
    >>> deadline = shard_transforms.launch.StepDeadline(60)
    >>> for _ in range(3):
    ...   with deadline:
    ...     loss = jnp.square(3.0).block_until_ready()
    >>> print(loss)
    9.0
  """

  def __init__(self, seconds: float):
    self._seconds = arguments.as_positive('seconds', seconds)
    self._step = 0
    self._ends_at: float | None = None
    self._beat = 0
    self._watcher: threading.Thread | None = None
    self._asking: threading.Thread | None = None
    self._is_over = threading.Event()

  def __enter__(self) -> None:
    """Starts the time of one step.

    Raises:
      RuntimeError: If it has been entered before it was left.
    """
    if self._ends_at is not None:
      raise RuntimeError('`StepDeadline` must be left before the next step.')
    if self._watcher is None:
      self._start()
    self._step += 1
    self._ends_at = time.monotonic() + self._seconds

  def __exit__(self, *_: object) -> None:
    """Ends the time of the step."""
    self._ends_at = None

  def _start(self):
    self._own, self._num = jax.process_index(), jax.process_count()
    self._client: Any = jax_internals.coordination_client()
    self._main = threading.get_ident()
    self._watcher = threading.Thread(target=self._watch, daemon=True)
    self._watcher.start()
    atexit.register(self._stop)

  def _stop(self):
    """Ends the threads: one that is in JAX when Python ends aborts it."""
    if self._client is not None:
      # Waits for the other processes, one of which may be late in a step.
      jax.distributed.shutdown()
    self._is_over.set()
    for name in '_watcher', '_asking':
      if (thread := getattr(self, name)) is not None:
        thread.join(_LEAVE)

  def _watch(self):
    while not self._is_over.wait(_PULSE):
      verdict = self._pulse()
      ends_at = self._ends_at
      if ends_at is not None and time.monotonic() > ends_at:
        step = self._step
        verdict = verdict or self._judge()
        # A step may still have ended while the others were asked.
        if self._ends_at is not None and self._step == step:
          self._end(verdict)
      elif verdict:
        self._end(verdict)

  def _pulse(self):
    """Gives a sign of life; returns the verdict if there is one."""
    self._beat += 1
    pulse = {
        'step': self._step,
        'inside': self._ends_at is not None,
        'beat': self._beat,
        'where': _where(self._main),
    }
    if self._client is None:
      self._pulses = {0: pulse}
      return None

    def send():
      self._client.key_value_set(
          f'{_PULSES}/{self._own}', json.dumps(pulse), allow_overwrite=True
      )
      # Its folder is empty as long as nobody has judged.
      return [text for _, text in self._client.key_value_dir_get(_VERDICT)]

    return next(iter(self._ask(send) or ()), None)

  def _judge(self):
    """Says who is late, by the signs of life that all give."""
    before = self._read()
    until = time.monotonic() + _SILENCE
    while time.monotonic() < until:
      self._pulse()
      time.sleep(_PULSE)
    after = self._read()
    return (
        f'A step must end within {self._seconds:g} seconds, got step'
        f' {self._step} that did not: '
    ) + '; '.join(_reasons(before, after, self._step, self._num))

  def _read(self):
    """Returns the last sign of life of each process; `None` for no answer."""
    if self._client is None:
      return self._pulses
    found = self._ask(lambda: self._client.key_value_dir_get(_PULSES))
    if found is None:
      return None
    return {int(k.rpartition('/')[2]): json.loads(text) for k, text in found}

  def _ask(self, question):
    """Returns the answer of a function, or `None` if there is none in time."""
    answers = []

    def ask():
      # Without a coordinator, JAX ends the process by itself.
      with contextlib.suppress(RuntimeError):
        answers.append(question())

    if self._asking is None or not self._asking.is_alive():
      self._asking = threading.Thread(target=ask, daemon=True)
      self._asking.start()
    self._asking.join(_ANSWER)
    return answers[0] if answers else None

  def _end(self, verdict):
    """Tells the others, and ends this process."""
    print(
        f'Process {self._own} of {self._num} ends. {verdict}', file=sys.stderr
    )
    sys.stdout.flush()
    sys.stderr.flush()
    if self._client is not None:
      name = f'{_VERDICT}/{self._own}'
      self._ask(lambda: self._client.key_value_set(name, verdict))
      time.sleep(_FAREWELL * (1 if self._own else 2))
    os._exit(1)


def _reasons(before, after, step, num):
  """Returns who is late, and then where the others are."""
  if before is None or after is None:
    return ['process 0, which runs the coordinator, does not answer']
  late, others = [], []
  for process in range(num):
    pulse = after.get(process)
    name = f'process {process} of {num}'
    if pulse is None:
      late.append(f'{name} has not arrived at any step')
      continue
    where = f'step {pulse["step"]} in {pulse["where"]}'
    if pulse == before.get(process) and num > 1:
      late.append(f'{name} has stopped or died, last seen at {where}')
    elif pulse['step'] < step:
      late.append(f'{name} has not arrived, it is after {where}')
    else:
      others.append(f'{name} waits at {where}')
  return [*(late or ['all have arrived']), *others]


def _where(thread):
  """Returns the line of the program that a thread runs, and what it calls."""
  frame = sys._current_frames().get(thread)
  stack = traceback.extract_stack(frame) if frame else []
  library = os.path.dirname(os.__file__)
  own = [x for x in stack if not x.filename.startswith(library)]
  if not own:
    return 'a thread that has ended'
  last = own[-1]
  return (
      f'{os.path.basename(last.filename)}:{last.lineno} (`{last.line}`, which'
      f' is in `{stack[-1].name}`)'
  )
