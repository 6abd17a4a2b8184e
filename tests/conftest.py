"""Settings that all tests share, made before JAX starts a backend."""

import os
import pathlib
import re
import shutil

import jax

# Programs stay compiled from run to run, until they take a gigabyte.
CACHE = pathlib.Path(__file__).parents[1] / '.jax_cache'
CACHE_LIMIT = 2**30
# What XLA compiles several times as fast, but not as users have it. With an
# empty `XLA_FLAGS` in the environment, the tests run what users run.
FAST_COMPILATION = [
    '--xla_backend_optimization_level=0',
    '--xla_cpu_parallel_codegen_split_count=1',
]
if jax.__version_info__[:2] == (0, 10):
  FAST_COMPILATION.append('--xla_cpu_use_fusion_emitters=false')

os.environ.setdefault('XLA_FLAGS', ' '.join(FAST_COMPILATION))
# The environment is for the processes that tests start.
os.environ['MPLBACKEND'] = 'Agg'
for name, value in {
    'jax_platforms': 'cpu',
    'jax_compilation_cache_dir': str(CACHE),
    'jax_persistent_cache_min_compile_time_secs': 0,
    'jax_persistent_cache_min_entry_size_bytes': -1,
}.items():
  os.environ[name.upper()] = str(value)
  jax.config.update(name, value)
jax.config.update('jax_num_cpu_devices', 8)
jax.config.update('jax_numpy_rank_promotion', 'raise')


def pytest_configure(config):
  # The workers of pytest-xdist share what their controller has left.
  if not hasattr(config, 'workerinput'):
    size = sum(path.stat().st_size for path in CACHE.glob('*'))
    if size > CACHE_LIMIT:
      shutil.rmtree(CACHE)


def pytest_itemcollected(item):
  mark = item.get_closest_marker('slow_unless')
  if mark is not None and not re.search(mark.args[0], item.name):
    item.add_marker('slow')
