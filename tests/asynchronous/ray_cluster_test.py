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
import cases
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
    num_workers=2, num_updates=int(sys.argv[2]), save_every=40,
    folder=sys.argv[1], on_progress=on_progress,
).report)
"""


def kill(*names):
  """Kills one process of each name that exists."""
  for name in names:
    for process in asynchronous_cases.processes(name)[:1]:
      process.kill()


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

  @cases.parameters(0, 1, 2)
  @pytest.mark.slow_after(1)
  @pytest.mark.repeated(8)
  def test_random_kills_lose_nothing(self, seed):
    killer = Killer(seed, number=7)
    num_updates = 500
    result = self.train(num_updates=num_updates, on_progress=killer.on_progress)
    while len(killer.kills) < 7:
      # The run continues until all have been killed.
      num_updates += 500
      result = self.train(
          num_updates=num_updates, on_progress=killer.on_progress
      )
    killer.join()

    self.check(result)

  @pytest.mark.repeated(8)
  def test_driver_and_all_workers_at_once(self):
    killed = []

    def on_progress(report):
      if report.global_step > 120 and not killed:
        killed.extend(asynchronous_cases.processes(WORKER))
        killed.extend(asynchronous_cases.processes(DRIVER))
        for process in killed:
          process.kill()

    result = self.train(num_updates=600, on_progress=on_progress)

    self.assertLen(killed, 4)
    self.check(result)

  @pytest.mark.repeated(8)
  def test_worker_that_dies_while_the_journal_is_rolled_forward(self):
    kills = []

    def on_progress(report):
      if report.global_step >= 60 and not kills:
        kills.append(DRIVER)
        kill(DRIVER)
      elif len(kills) == 1 and report.global_step < 40:
        # It is back, and behind where it was.
        kills.append(WORKER)
        kill(WORKER)

    result = self.train(
        asynchronous_cases.SLOW_TASK,
        num_updates=120,
        num_workers=2,
        save_every=1000,
        on_progress=on_progress,
    )

    self.assertEqual(kills, [DRIVER, WORKER])
    self.assertGreaterEqual(result.report.num_recovered, 60)
    self.check(result, asynchronous_cases.SLOW_TASK)

  @pytest.mark.repeated(8)
  def test_worker_that_hangs_is_replaced(self):
    path = self.folder.parent / 'hung'
    batch = functools.partial(asynchronous_cases.hang_once, path)
    task = asynchronous.Task(
        asynchronous_cases.init, asynchronous_cases.slow_gradient, batch
    )

    # A first gradient includes compilation.
    result = self.train(task, num_updates=300, num_workers=2, time_limit=15)

    journal = asynchronous.read_journal(self.folder)
    fates = journal['fate'][journal['batch'] == 30].tolist()
    self.assertEqual(fates, [2, 0])
    self.check(result, task)

  @pytest.mark.repeated(8)
  def test_driver_that_dies_without_a_folder_ends_the_run(self):
    def on_progress(report):
      if report.global_step:
        kill(DRIVER)

    with self.assertRaisesRegex(RuntimeError, 'or have a `folder` to go on'):
      self.train(
          asynchronous_cases.SLOW_TASK,
          num_updates=1000,
          folder=None,
          on_progress=on_progress,
      )

  @pytest.mark.repeated(8)
  def test_end_of_ray_itself_loses_nothing(self):
    drivers, ended, last = set(), [], 0

    def on_progress(report):
      nonlocal last
      before, last = last, max(last, report.global_step)
      drivers.update(asynchronous_cases.processes(DRIVER))
      if report.global_step > 120 and not ended:
        ended.extend(find_raylets())
        ended[0].kill()
      # Ray notices it after a while; then the journal is rolled forward.
      return 'stop' if len(drivers) > 1 and last > before else None

    result = self.train(
        asynchronous_cases.SLOW_TASK,
        num_updates=10_000,
        num_workers=2,
        on_progress=on_progress,
    )

    self.assertLen(drivers, 2)
    self.assertLess(result.report.global_step, 10_000)
    self.check(result, asynchronous_cases.SLOW_TASK)

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
      if int(line) > 50:
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

  def run_program(self, code, folder):
    """Returns what a program with a cluster of its own prints."""
    # Ray's sockets are there. Their paths must be shorter than 108 bytes.
    with tempfile.TemporaryDirectory(dir='/tmp') as temporary:
      return subprocess.run(
          [sys.executable, '-c', code, folder],
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

  @pytest.mark.repeated(8)
  def test_node_that_dies_takes_no_update_with_it(self):
    folder = asynchronous_cases.folder(self)
    code = """
import asynchronous_cases, numpy as np, optax, ray, ray.cluster_utils, sys
cluster = ray.cluster_utils.Cluster(
    initialize_head=True, head_node_args={'num_cpus': 2, 'resources': {'w': 1}})
second = cluster.add_node(num_cpus=2, resources={'w': 1})
killed = []
def on_progress(report):
  if report.global_step > 100 and not killed:
    killed.append(second)
    cluster.remove_node(second, allow_graceful=False)
asynchronous_cases.train(
    asynchronous_cases.SLOW_TASK, optax.adam(0.1), cluster=cluster.address,
    num_workers=2, num_updates=300, folder=sys.argv[1],
    resources={'num_cpus': 1, 'resources': {'w': 1}}, on_progress=on_progress)
cluster.shutdown()
print(len(killed))
"""
    printed = self.run_program(code, folder)

    self.assertEqual(printed.splitlines()[-1], '1')
    journal = asynchronous.read_journal(folder)
    self.assertContainsSubset({0, 1}, set(journal['worker'].tolist()))
    result = asynchronous.replay(folder, asynchronous_cases.SLOW_TASK, TX)
    self.assertEqual(result.opt_state.global_step, 300)

  @pytest.mark.repeated(8)
  def test_nodes_with_other_sources_are_refused(self):
    folder = asynchronous_cases.folder(self)
    for number in 1, 2:
      (folder / str(number)).mkdir(parents=True)
      source = f'from asynchronous_cases import TASK\nnumber = {number}\n'
      (folder / str(number) / 'of_user.py').write_text(
          f'{source}def batch(number): return TASK.batch(number)\n'
      )
    code = """
import os, sys
path = os.environ['PYTHONPATH']
os.environ['PYTHONPATH'] = sys.argv[1] + '/1:' + path
import asynchronous_cases as cases, optax, ray, ray.cluster_utils
cluster = ray.cluster_utils.Cluster(
    initialize_head=True, head_node_args={'num_cpus': 2})
os.environ['PYTHONPATH'] = sys.argv[1] + '/2:' + path
cluster.add_node(num_cpus=2, resources={'w': 1})
sys.path.insert(0, sys.argv[1] + '/1')
import of_user
task = cases.asynchronous.Task(cases.init, cases.gradient, of_user.batch)
try:
  cases.train(task, optax.adam(0.1), cluster=cluster.address, num_workers=1,
              resources={'num_cpus': 1, 'resources': {'w': 1}})
except ValueError as error:
  print(error)
cluster.shutdown()
"""

    printed = self.run_program(code, folder)

    self.assertRegex(printed, '`cluster` must have .* got module of_user ')
