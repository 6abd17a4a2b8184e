"""Settings that all tests share, made before JAX starts a backend."""

import os

import jax

# The environment is for the processes that tests start.
os.environ.update(JAX_PLATFORMS='cpu', MPLBACKEND='Agg')
jax.config.update('jax_platforms', 'cpu')
jax.config.update('jax_num_cpu_devices', 8)
jax.config.update('jax_numpy_rank_promotion', 'raise')
