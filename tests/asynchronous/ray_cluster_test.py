"""Asynchronous runs whose processes are killed end with the same bits."""

import contextlib
import dataclasses
import functools
import os
import pathlib
import random
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
from unittest import mock

import numpy as np
import optax
import psutil
import pytest

import python_command
import runs
from shard_transforms import asynchronous
from shard_transforms._src.asynchronous import driver_process

TASK = runs.TASK
TX = optax.adam(0.1)
WORKER, DRIVER = 'ray::_Computer', driver_process._CHILD
RUN = """
import os, sys, time, warnings
import runs, optax
forked = []
def on_progress(report):
  if not forked:
    forked.append(True)
    warnings.simplefilter('ignore')
    if not os.fork():
      time.sleep(600)
      os._exit(0)
  print(report.global_step, flush=True)
runs.train(
    runs.SLOW_TASK, optax.adam(0.1), cluster='local',
    num_workers=2, num_updates=10**6, save_every=15, folder=sys.argv[1],
    on_progress=on_progress)
"""
TWO_NODES = """
import runs, numpy as np, optax, ray, ray.cluster_utils, sys
cluster = ray.cluster_utils.Cluster(
    initialize_head=True, head_node_args={'num_cpus': 2, 'resources': {'w': 1}})
second = cluster.add_node(num_cpus=2, resources={'w': 1})
killed = []
def on_progress(report):
  if report.global_step > 30 and not killed:
    killed.append(second)
    cluster.remove_node(second, allow_graceful=False)
runs.train(
    runs.SLOW_TASK, optax.adam(0.1), cluster=cluster.address,
    num_workers=2, num_updates=100, folder=sys.argv[1],
    resources={'num_cpus': 1, 'resources': {'w': 1}}, on_progress=on_progress)
cluster.shutdown()
print(len(killed))
"""

# Writes to the key store of Ray, if it may.
CLIENT = """
import sys
from ray._raylet import GcsClient
client = GcsClient(address=sys.argv[1])
client.internal_kv_put(b'key', b'value', True, None)
print('written')
"""
NOBODY = 65534


def descendants():
  """Returns the properties of each descendant of this process."""
  children = []
  for process in psutil.Process().children(recursive=True):
    # It may end meanwhile.
    with contextlib.suppress(psutil.Error):
      children.append(process.as_dict(['name', 'environ', 'cmdline']))
  return [child for child in children if child['environ'] is not None]


def run_outside(*command, user=None, **env):
  """Returns the output of a command that does not belong to the run."""
  done = subprocess.run(
      command,
      user=user,
      group=user,
      extra_groups=None if user is None else [],
      env={**env, 'PATH': os.environ['PATH']},
      capture_output=True,
      text=True,
      timeout=60,
  )
  return done.stdout + done.stderr


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
      # Four drivers that die without an update in between end the run.
      self._progressed.wait()
      name = self._random.choice([WORKER, WORKER, DRIVER])
      if name == DRIVER:
        self._progressed.clear()
      alive = runs.processes(name)
      if alive:
        self.kills.append(name)
        self._random.choice(alive).kill()


@pytest.mark.slow
class FaultsTest(runs.FolderTest):

  def train(self, task=TASK, **options):
    defaults = {
        'cluster': 'local',
        'num_workers': 2,
        'save_every': 100,
        'folder': self.folder,
    }
    return runs.train(task, TX, **(defaults | options))

  def check(self, result, task=TASK):
    """Checks that no update was lost and that no batch counts twice."""
    journal = asynchronous.read_journal(self.folder)
    accepted = runs.accepted(journal)
    merged = accepted['merged'][accepted['merged'] > 0]
    self.assertLen(merged, result.report.global_step)
    self.assertEqual(merged.sum(), len(accepted))
    np.testing.assert_array_equal(
        accepted['global_step'], np.repeat(np.arange(len(merged)), merged)
    )
    self.assertLen(set(accepted['batch'].tolist()), len(accepted))
    runs.assert_same_bits(asynchronous.replay(self.folder, task, TX), result)

  def test_random_kills_lose_nothing(self):
    # So large that Ray keeps the task in its object store.
    data = np.zeros(1_000_000, np.float32)
    gradient = functools.partial(runs.with_momentum_and_data, data)
    task = dataclasses.replace(runs.KEEPING_TASK, gradient=gradient)
    killer = Killer(seed=0, number=3)
    num_updates = 0
    while len(killer.kills) < 3:
      # The run continues until all have been killed.
      num_updates += 100
      result = self.train(
          task,
          num_updates=num_updates,
          num_workers=3,
          merge=3,
          on_progress=killer.on_progress,
      )
    killer.join()

    self.check(result, task)

  def test_killed_worker_is_replaced(self):
    killed = []

    def on_progress(report):
      if report.global_step >= 10 and not killed:
        killed.extend(runs.processes(WORKER)[:1])
        killed[0].kill()

    result = self.train(
        runs.SLOW_TASK, num_updates=200, on_progress=on_progress
    )

    self.assertLen(killed, 1)
    self.assertEqual(result.report.global_step, 200)
    workers = asynchronous.read_journal(self.folder)['worker'][-50:]
    self.assertEqual(set(workers.tolist()), {0, 1})

  def test_end_of_ray_and_a_worker_while_the_journal_is_rolled_forward(self):
    killed = []

    def on_progress(report):
      if report.global_step >= 30 and not killed:
        # With the raylet end the driver and all workers.
        children = psutil.Process().children(recursive=True)
        killed.extend(child for child in children if child.name() == 'raylet')
        killed[0].kill()
      elif len(killed) == 1 and report.global_step < 20:
        # It is back, and behind where it was.
        killed.extend(runs.processes(WORKER)[:1])
        killed[-1].kill()
      is_over = len(killed) > 1 and report.num_recovered
      return 'stop' if is_over else None

    result = self.train(
        runs.SLOW_TASK,
        num_updates=10_000,
        save_every=100_000,
        on_progress=on_progress,
    )

    self.assertLen(killed, 2)
    self.assertGreaterEqual(result.report.num_recovered, 30)
    self.check(result, runs.SLOW_TASK)

  def test_cluster_that_is_not_there_is_reported(self):
    with self.assertRaisesRegex(
        ConnectionError, 'could not be reached with `cluster='
    ):
      self.train(cluster='127.0.0.1:1')


@pytest.mark.slow
class CallerTest(runs.FolderTest):
  """The program that called `train` is killed."""

  def start(self, folder, home):
    return subprocess.Popen(
        [*python_command.STRICT, '-c', RUN, folder],
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
    processes = []
    for process in psutil.process_iter():
      try:
        if process.environ().get('IS_ASYNCHRONOUS_TEST') == str(folder):
          processes.append(process)
      except psutil.Error:
        pass
    return processes

  def listening(self, folder):
    """Returns the addresses that processes of a run listen on."""
    addresses = []
    for process in self.marked(folder):
      # Some of Ray's end by themselves meanwhile.
      with contextlib.suppress(psutil.Error, OSError):
        connections = process.net_connections('inet')
        addresses += [
            connection.laddr.ip
            for connection in connections
            if connection.status == psutil.CONN_LISTEN
        ]
    return addresses

  def test_leaves_nothing_behind_and_resumes_closed_to_others(self):
    home = self.folder.parent / 'home'
    home.mkdir()
    temporary = self.folder.parent / 't'
    temporary.mkdir()
    process = self.start(self.folder, home)
    self.addCleanup(process.wait)
    self.addCleanup(process.kill)
    for line in process.stdout:
      if int(line) > 20:
        break
    process.stdout.close()
    listening = self.listening(self.folder)
    caller = psutil.Process(process.pid)
    # It has the open files of the caller.
    (forked,) = (
        child
        for child in caller.children()
        if child.cmdline() == caller.cmdline()
    )
    self.addCleanup(forked.kill)

    process.send_signal(signal.SIGKILL)

    end = time.monotonic() + 5
    while self.marked(self.folder) != [forked]:
      self.assertLess(time.monotonic(), end)
      time.sleep(0.05)
    self.assertNotEmpty(listening)
    self.assertContainsSubset(
        set(listening), {'127.0.0.1', '::ffff:127.0.0.1', '::1'}
    )
    self.assertEmpty(list(home.iterdir()))
    self.assertEmpty(list(temporary.iterdir()))
    num_updates = len(runs.accepted(asynchronous.read_journal(self.folder)))
    self.resume_watched(self.folder, num_updates + 20)
    result = asynchronous.replay(self.folder, runs.SLOW_TASK, TX)
    self.assertGreaterEqual(result.opt_state.global_step, num_updates + 20)

  def resume_watched(self, folder, num_updates):
    """Resumes; other programs and users look at it; the caller then raises."""
    # Everybody may enter what is around the temporary folder of the run.
    temporary = pathlib.Path(tempfile.mkdtemp(dir='/tmp'))
    self.addCleanup(shutil.rmtree, temporary)
    temporary.chmod(0o755)
    seen = {}

    def on_progress(report):
      if report.global_step >= num_updates:
        seen.update(self.look(temporary))
        raise ZeroDivisionError

    environment = {'RAY_AUTH_MODE': 'disabled', 'TMPDIR': str(temporary)}
    with (
        mock.patch.dict(os.environ, environment),
        mock.patch.object(tempfile, 'tempdir', None),
        self.assertRaises(ZeroDivisionError),
    ):
      runs.train(
          runs.SLOW_TASK,
          TX,
          cluster='local',
          num_workers=2,
          num_updates=10**6,
          folder=folder,
          on_progress=on_progress,
      )

    self.assertEmpty(runs.processes('ray::'))
    self.assertEmpty(seen['unmarked'])
    self.assertEqual(seen['mode'], 0o700)
    if 'entered' in seen:
      self.assertIn('Permission denied', seen['entered'])
    self.assertEqual(seen['owner'], 'written\n')
    self.assertIn('AuthenticationError', seen['stranger'])

  def look(self, temporary):
    """Returns who may enter the folder of a run, and write to its key store."""
    (folder,) = temporary.iterdir()
    seen = {'mode': stat.S_IMODE(folder.stat().st_mode)}
    if os.geteuid() == 0:
      seen['entered'] = run_outside('ls', folder / 'ray', user=NOBODY)
    children = []
    end = time.monotonic() + 30
    # It gives itself this name, over what its environment was, if it may.
    while 'ray::DashboardAgent' not in [child['name'] for child in children]:
      self.assertLess(time.monotonic(), end)
      children = descendants()
    # The watchdog finds processes by their mark.
    seen['unmarked'] = [
        child['name']
        for child in children
        if 'SHARD_TRANSFORMS_RUN' not in child['environ']
    ]
    (raylet,) = (child for child in children if child['name'] == 'raylet')
    (address,) = (
        argument.removeprefix('--gcs-address=')
        for argument in raylet['cmdline']
        if argument.startswith('--gcs-address=')
    )
    client = functools.partial(
        run_outside, sys.executable, '-c', CLIENT, address
    )
    token = raylet['environ']['RAY_AUTH_TOKEN']
    seen['owner'] = client(RAY_AUTH_MODE='token', RAY_AUTH_TOKEN=token)
    seen['stranger'] = client(RAY_AUTH_MODE='disabled')
    return seen


@pytest.mark.slow
class TwoNodesTest(runs.FolderTest):

  def test_node_that_dies_takes_no_update_with_it(self):
    # Ray's sockets are there. Their paths must be shorter than 108 bytes.
    with tempfile.TemporaryDirectory(dir='/tmp') as temporary:
      printed = subprocess.run(
          [sys.executable, '-c', TWO_NODES, self.folder],
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
    journal = asynchronous.read_journal(self.folder)
    self.assertContainsSubset({0, 1}, set(journal['worker'].tolist()))
    result = asynchronous.replay(self.folder, runs.SLOW_TASK, TX)
    self.assertEqual(result.opt_state.global_step, 100)
