"""Asynchronous runs whose processes are killed end with the same bits."""

import contextlib
import dataclasses
import functools
import os
import signal
import subprocess
import sys
import tempfile
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

# The same gradients, some of them after a while: they replay each other's runs.
TASK, SLOW_TASK = asynchronous_cases.TASK, asynchronous_cases.SLOW_TASK
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
  if report.global_step > 20 and not killed:
    killed.append(second)
    cluster.remove_node(second, allow_graceful=False)
asynchronous_cases.train(
    asynchronous_cases.SLOW_TASK, optax.adam(0.1), cluster=cluster.address,
    num_workers=2, num_updates=60, folder=sys.argv[1],
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


def wait_until(condition):
  """Waits until something is true.

  Raises:
    TimeoutError: If it does not become so.
  """
  end = time.monotonic() + 60
  while not condition():
    if time.monotonic() > end:
      raise TimeoutError
    time.sleep(0.05)


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

  def check(self, result):
    """Checks that no update was lost and that no batch counts twice."""
    journal = asynchronous.read_journal(self.folder)
    accepted = asynchronous_cases.accepted(journal)
    num_updates = result.report.global_step
    np.testing.assert_array_equal(
        accepted['global_step'], np.arange(num_updates)
    )
    self.assertLen(set(accepted['batch'].tolist()), num_updates)
    asynchronous_cases.assert_same_bits(
        asynchronous.replay(self.folder, TASK, TX), result
    )

  def test_hung_and_killed_processes_lose_nothing(self):
    path = self.folder.parent / 'hung'
    batch = functools.partial(asynchronous_cases.hang_once, path)
    task = dataclasses.replace(SLOW_TASK, batch=batch)
    doomed = [WORKER, WORKER, DRIVER]

    def on_progress(report):
      due = 50 * (4 - len(doomed))
      if doomed and report.global_step >= due:
        alive = asynchronous_cases.processes(doomed[0])
        if alive:
          alive[0].kill()
          del doomed[0]

    num_updates = 0
    while not num_updates or doomed:
      num_updates += 200
      # A first gradient includes compilation.
      result = self.train(
          task, num_updates=num_updates, time_limit=8, on_progress=on_progress
      )

    journal = asynchronous.read_journal(self.folder)
    fates = journal['fate'][journal['batch'] == 30].tolist()
    self.assertEqual(fates, [2, 0])
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
        SLOW_TASK,
        num_updates=10_000,
        num_workers=2,
        save_every=100_000,
        on_progress=on_progress,
    )

    self.assertLen(killed, 2)
    self.assertGreaterEqual(result.report.num_recovered, 60)
    self.check(result)

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
    # Not before, for a caller that cannot print any more ends by itself.
    process.stdout.close()

    wait_until(lambda: self.marked(folder) == [forked])
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
    result = asynchronous.replay(folder, TASK, TX)
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
              # On a busy machine, the 30 s that Ray waits are too short.
              'RAY_raylet_start_wait_time_s': '120',
          },
          stdout=subprocess.PIPE,
          text=True,
          timeout=300,
          check=True,
      ).stdout

    self.assertEqual(printed.splitlines()[-1], '1')
    journal = asynchronous.read_journal(folder)
    self.assertContainsSubset({0, 1}, set(journal['worker'].tolist()))
    result = asynchronous.replay(folder, TASK, TX)
    self.assertEqual(result.opt_state.global_step, 60)
