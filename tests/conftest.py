"""Settings that all tests share, made before JAX starts a backend."""

import collections
import gc
import os

import jax
import pytest

# Flags with which XLA compiles faster, but not as for users: the contract in
# `jax.shard_map` took 16 s of a processor instead of 41 s. With an empty
# `XLA_FLAGS` in the environment, the tests run what users run.
FAST_COMPILATION = [
    '--xla_backend_optimization_level=0',
    '--xla_cpu_parallel_codegen_split_count=1',
]
FAST_COMPILATION.append(
    '--xla_cpu_use_fusion_emitters=false'
    if jax.__version_info__[:2] == (0, 10)
    else '--xla_cpu_opt_preset=FAST_COMPILE'
)
# A virtual device waits for the others in a collective. XLA ends the process
# after 40 s, which eight of them on a busy machine of two cores may need.
PATIENCE = [
    '--xla_cpu_collective_call_warn_stuck_timeout_seconds=60',
    '--xla_cpu_collective_call_terminate_timeout_seconds=600',
]

# The environment is for the processes that tests start.
flags = os.environ.get('XLA_FLAGS', ' '.join(FAST_COMPILATION))
os.environ['XLA_FLAGS'] = ' '.join([flags, *PATIENCE]).strip()
os.environ['MPLBACKEND'] = 'Agg'
for name, value in {
    # Whatever accelerator there is.
    'jax_platforms': 'cpu',
    # Where XLA for CPUs reads a program from the cache, independent collectives
    # no longer have one order on all devices: the process aborts or hangs.
    'jax_enable_compilation_cache': False,
}.items():
  os.environ[name.upper()] = str(value)
  jax.config.update(name, value)
# Eight shards on any machine.
jax.config.update('jax_num_cpu_devices', 8)
# An error instead of a wrong result if shapes differ by accident.
jax.config.update('jax_numpy_rank_promotion', 'raise')


# Before those that `-m` does not select are left out.
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
  for item in items:
    if item.name in getattr(item.function, 'thorough', ()):
      item.add_marker('thorough')
  # Each worker is given consecutive tests, and takes others' last ones when it
  # is done: each begins with its part of the slow files, so that none is left
  # with these at the end.
  slow, quick = collections.defaultdict(list), []
  for item in items:
    is_slow = item.get_closest_marker('slow')
    (slow[item.path] if is_slow else quick).append(item)
  num_workers = int(os.environ.get('PYTEST_XDIST_WORKER_COUNT', 1))
  parts = [[] for _ in range(num_workers)]
  for file in sorted(slow.values(), key=len, reverse=True):
    min(parts, key=len).extend(file)
  share = len(items) // num_workers
  items[:] = []
  for part in parts:
    size = max(share - len(part), 0)
    items += part + quick[:size]
    del quick[:size]
  items += quick


def pytest_runtest_teardown(item, nextitem):
  # No test uses what one of another file compiled, which takes memory.
  if nextitem is None or nextitem.path != item.path:
    jax.clear_caches()


def pytest_collection_finish():
  # Tracing makes many objects that stay: looking through them, and all that was
  # imported, each time takes an eighth of the tests' time.
  gc.collect()
  gc.freeze()
  gc.set_threshold(50_000, 20, 50)
