"""Asynchronous runs whose processes are killed end with the same bits."""

import contextlib
import functools
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time

from absl.testing import parameterized
import numpy as np
import optax
import psutil
import pytest

import asynchronous_cases
import python_command
from shard_transforms import asynchronous
from shard_transforms._src.asynchronous import job

TASK = asynchronous_cases.TASK
TX = optax.adam(0.1)
WORKER, DRIVER = 'ray::_Computer', job._CHILD
RUN = """
import os, sys, time, warnings
import asynchronous_cases, optax
forks = sys.argv[3:]
def on_progress(report):
  if forks:
    forks.clear()
    warnings.simplefilter('ignore')
    if not os.fork():
      time.sleep(600)
      os._exit(0)
  print(report.global_step, flush=True)
print(asynchronous_cases.train(
    asynchronous_cases.SLOW_TASK, optax.adam(0.1), cluster='local',
    num_workers=2, num_updates=int(sys.argv[2]), save_every=15,
    folder=sys.argv[1], on_progress=on_progress,
).report)
"""
TWO_NODES = """
import asynchronous_cases, numpy as np, optax, ray, ray.cluster_utils, sys
cluster = ray.cluster_utils.Cluster(
    initialize_head=True, head_node_args={'num_cpus': 2, 'resources': {'w': 1}})
second = cluster.add_node(num_cpus=2, resources={'w': 1})
killed = []
def on_progress(report):
  if report.global_step > 30 and not killed:
    killed.append(second)
    cluster.remove_node(second, allow_graceful=False)
asynchronous_cases.train(
    asynchronous_cases.SLOW_TASK, optax.adam(0.1), cluster=cluster.address,
    num_workers=2, num_updates=100, folder=sys.argv[1],
    resources={'num_cpus': 1, 'resources': {'w': 1}}, on_progress=on_progress)
cluster.shutdown()
print(len(killed))
"""


def find_raylets():
  """Returns the processes of Ray that start and end its workers."""
  return [
      process
      for process in psutil.Process().children(recursive=True)
      if process.name() == 'raylet'
  ]


def wait_until(condition, seconds=60):
  """Waits until something is true.

  Raises:
    TimeoutError: If it does not become so.
  """
  end = time.monotonic() + seconds
  while not condition():
    if time.monotonic() > end:
      raise TimeoutError
    time.sleep(0.05)


class Killer(threading.Thread):
  """Kills processes at random, a number of times, while the run progresses."""

  def __init__(self, seed, number):
    super().__init__(daemon=True)
    self._random = random.Random(seed)
    self._number = number
    self._progressed = threading.Event()
    self._step = 0
    self.kills = []

  def on_progress(self, report):
    # Not what a new driver reports while it computes the journal again.
    if report.global_step > self._step:
      self._step = report.global_step
      self._progressed.set()
    if report.global_step and not self.is_alive() and not self.kills:
      self.start()

  def run(self):
    while len(self.kills) < self._number:
      time.sleep(self._random.uniform(0.2, 2.5))
      # Four drivers that die in turn without a new update end the run.
      self._progressed.wait()
      name = self._random.choice([WORKER, WORKER, DRIVER])
      if name == DRIVER:
        self._progressed.clear()
      alive = asynchronous_cases.processes(name)
      if alive:
        self.kills.append(name)
        self._random.choice(alive).kill()


@pytest.mark.slow
class FaultsTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.folder = asynchronous_cases.folder(self)

  def train(self, task=TASK, **options):
    defaults = {
        'cluster': 'local',
        'num_workers': 3,
        'save_every': 100,
        'folder': self.folder,
    }
    return asynchronous_cases.train(task, TX, **(defaults | options))

  def check(self, result, task=TASK):
    """Checks that no update was lost and that no batch counts twice."""
    journal = asynchronous.read_journal(self.folder)
    accepted = asynchronous_cases.accepted(journal)
    num_updates = result.report.global_step
    np.testing.assert_array_equal(
        accepted['global_step'], np.arange(num_updates)
    )
    self.assertLen(set(accepted['batch'].tolist()), num_updates)
    asynchronous_cases.assert_same_bits(
        asynchronous.replay(self.folder, task, TX), result
    )

  def test_random_kills_lose_nothing(self):
    killer = Killer(seed=0, number=4)
    num_updates = 0
    while len(killer.kills) < 4:
      # The run continues until all have been killed.
      num_updates += 300
      result = self.train(
          num_updates=num_updates, on_progress=killer.on_progress
      )
    killer.join()

    self.check(result)

  def test_end_of_ray_and_a_worker_while_the_journal_is_rolled_forward(self):
    killed = []

    def on_progress(report):
      if report.global_step >= 60 and not killed:
        # With it end the driver and all workers.
        killed.extend(find_raylets())
        killed[0].kill()
      elif len(killed) == 1 and report.global_step < 40:
        # It is back, and behind where it was.
        killed.extend(asynchronous_cases.processes(WORKER)[:1])
        killed[-1].kill()
      is_over = len(killed) > 1 and report.num_recovered
      return 'stop' if is_over else None

    result = self.train(
        asynchronous_cases.SLOW_TASK,
        num_updates=10_000,
        num_workers=2,
        save_every=100_000,
        on_progress=on_progress,
    )

    self.assertLen(killed, 2)
    self.assertGreaterEqual(result.report.num_recovered, 60)
    self.check(result, asynchronous_cases.SLOW_TASK)

  def test_worker_that_hangs_is_replaced(self):
    path = self.folder.parent / 'hung'
    batch = functools.partial(asynchronous_cases.hang_once, path)
    task = asynchronous.Task(
        asynchronous_cases.init, asynchronous_cases.slow_gradient, batch
    )

    # A first gradient includes compilation.
    result = self.train(task, num_updates=100, num_workers=2, time_limit=8)

    journal = asynchronous.read_journal(self.folder)
    fates = journal['fate'][journal['batch'] == 30].tolist()
    self.assertEqual(fates, [2, 0])
    self.check(result, task)

  def test_cluster_that_is_not_there_is_reported(self):
    with self.assertRaisesRegex(ConnectionError, '`cluster` must be reached'):
      self.train(cluster='127.0.0.1:1')


@pytest.mark.slow
class CallerTest(parameterized.TestCase):
  """The program that called `train` is killed."""

  def start(self, folder, home, num_updates, *more):
    return subprocess.Popen(
        [*python_command.STRICT, '-c', RUN, folder, str(num_updates), *more],
        env={
            **os.environ,
            'HOME': str(home),
            'TMPDIR': str(home.parent / 't'),
            'PYTHONPATH': os.pathsep.join(sys.path),
            'IS_ASYNCHRONOUS_TEST': str(folder),
        },
        cwd=home,
        stdout=subprocess.PIPE,
        text=True,
    )

  def marked(self, folder):
    """Returns all processes of a run, whoever their parents are."""
    found = []
    for process in psutil.process_iter():
      try:
        if process.environ().get('IS_ASYNCHRONOUS_TEST') == str(folder):
          found.append(process)
      except psutil.Error:
        pass
    return found

  def listening(self, folder):
    """Returns the addresses that processes of a run listen on."""
    found = []
    for process in self.marked(folder):
      # Some of Ray's end by themselves meanwhile.
      with contextlib.suppress(psutil.Error, OSError):
        connections = process.net_connections('inet')
        found += [
            connection.laddr.ip
            for connection in connections
            if connection.status == psutil.CONN_LISTEN
        ]
    return found

  def test_leaves_nothing_behind_and_resumes(self):
    folder = asynchronous_cases.folder(self)
    home = folder.parent / 'home'
    home.mkdir()
    temporary = folder.parent / 't'
    temporary.mkdir()
    process = self.start(folder, home, 100_000, 'forks')
    self.addCleanup(process.wait)
    self.addCleanup(process.kill)
    for line in process.stdout:
      if int(line) > 20:
        break
    process.stdout.close()
    listening = self.listening(folder)
    caller = psutil.Process(process.pid)
    # It has all that the caller had open when it was forked.
    (forked,) = (
        child
        for child in caller.children()
        if child.cmdline() == caller.cmdline()
    )
    self.addCleanup(forked.kill)

    process.send_signal(signal.SIGKILL)

    wait_until(lambda: self.marked(folder) == [forked], seconds=5)
    self.assertNotEmpty(listening)
    self.assertContainsSubset(
        set(listening), {'127.0.0.1', '::ffff:127.0.0.1', '::1'}
    )
    self.assertEmpty(list(home.iterdir()))
    self.assertEmpty(list(temporary.iterdir()))
    num_updates = len(
        asynchronous_cases.accepted(asynchronous.read_journal(folder))
    )
    second = self.start(folder, home, num_updates + 20)
    out, _ = second.communicate(timeout=200)
    self.assertRegex(out.splitlines()[-1], f'global_step={num_updates + 20}')
    result = asynchronous.replay(folder, asynchronous_cases.SLOW_TASK, TX)
    self.assertEqual(result.opt_state.global_step, num_updates + 20)


@pytest.mark.slow
class TwoNodesTest(parameterized.TestCase):

  def test_node_that_dies_takes_no_update_with_it(self):
    folder = asynchronous_cases.folder(self)

    # Ray's sockets are there. Their paths must be shorter than 108 bytes.
    with tempfile.TemporaryDirectory(dir='/tmp') as temporary:
      printed = subprocess.run(
          [sys.executable, '-c', TWO_NODES, folder],
          env={
              **os.environ,
              'PYTHONPATH': os.pathsep.join(sys.path),
              'RAY_TMPDIR': temporary,
          },
          stdout=subprocess.PIPE,
          text=True,
          timeout=300,
          check=True,
      ).stdout

    self.assertEqual(printed.splitlines()[-1], '1')
    journal = asynchronous.read_journal(folder)
    self.assertContainsSubset({0, 1}, set(journal['worker'].tolist()))
    result = asynchronous.replay(folder, asynchronous_cases.SLOW_TASK, TX)
    self.assertEqual(result.opt_state.global_step, 100)
