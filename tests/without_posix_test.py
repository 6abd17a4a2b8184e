"""Tests without the modules of POSIX, as on Windows."""

import subprocess

from absl.testing import absltest
import pytest

import python_command

# Without Ray, and without the POSIX modules of Python. Other modules are
# imported before, because they decide by the name of the system.
BEGINNING = """
import sys
import jax
import jax.numpy as jnp
import optax
jax.config.update('jax_num_cpu_devices', 2)
for name in (
    'fcntl', 'grp', 'pty', 'pwd', 'ray', 'resource', 'syslog', 'termios'):
  sys.modules[name] = None
import shard_transforms
later = 'shard_transforms._src.launch', 'shard_transforms._src.asynchronous'
assert not [name for name in sys.modules if name.startswith(later)]
"""
# A task for `asynchronous.train`, on which workers take turns.
TASK = """
from shard_transforms import asynchronous
task = asynchronous.Task(
    init=lambda: jnp.zeros(2),
    gradient=lambda params, batch: (params - batch, {}),
    batch=lambda number: jnp.full(2, number % 2, jnp.float32))
def train(**kwargs):
  return asynchronous.train(
      task, optax.sgd(0.5), num_updates=4, num_workers=2, staleness=2, **kwargs)
"""


def run(code):
  done = subprocess.run(
      [*python_command.STRICT, '-c', BEGINNING + code],
      capture_output=True,
      text=True,
      timeout=120,
      check=False,
  )
  if done.returncode:
    raise AssertionError(done.stderr)
  return done.stdout


class WithoutPosixTest(absltest.TestCase):

  @pytest.mark.slow
  def test_imports_every_namespace_and_trains(self):
    printed = run("""
from shard_transforms import asynchronous, contrib, facade
from shard_transforms import monitoring, state_rules
assert shard_transforms.launch.join_processes() == 1
tx = optax.chain(shard_transforms.cross_shard_mean('data'), optax.sgd(1.0))
def step(params, x):
  loss = lambda params: jnp.sum(params * x)
  _, grads = shard_transforms.value_and_grad(loss, 'data')(params)
  updates, _ = tx.update(grads, tx.init(params), params)
  return optax.apply_updates(params, updates)
mesh = jax.make_mesh((2,), ('data',))
mapped = jax.shard_map(
    step, mesh=mesh, in_specs=(jax.P(), jax.P('data')), out_specs=jax.P())
split = jax.NamedSharding(mesh, jax.P('data'))
print(mapped(jnp.zeros(()), jax.device_put(jnp.array([1.0, 3.0]), split)))
""")

    self.assertEqual(printed, '-2.0\n')

  @pytest.mark.slow
  def test_train_runs_in_one_process_and_reports_posix_features(self):
    printed = run(TASK + """
print(train(cluster=None)[1].global_step)
for options in dict(cluster=None, folder='run'), dict(cluster='local'):
  try:
    train(**options)
  except OSError as error:
    print(error)
""")

    steps, of_folder, of_cluster = printed.splitlines()
    words = 'needs a POSIX system'
    self.assertEqual(steps, '4')
    self.assertStartsWith(of_folder, f'`folder` {words}')
    self.assertStartsWith(of_cluster, f"`cluster='local'` {words}")
