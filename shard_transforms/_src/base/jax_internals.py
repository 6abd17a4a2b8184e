"""What JAX has no public name for: clusters, their keys, and staging."""

from collections.abc import Sequence
import functools
import importlib
from typing import Any

import jax
from jax import core
import jax.extend


def detect_cluster(
    methods: Sequence[str], timeout: int
) -> tuple[str, int, int, Sequence[int] | None] | None:
  """Returns what JAX detects of the cluster that started this process.

  Args:
    methods: JAX's names of the ways of detection that may be taken.
    timeout: Seconds in which the host of process 0 must be known.

  Returns:
    The address of the coordinator, the number of processes, that of this one,
    and the devices that are its own, if not all; `None` for no cluster.
  """
  clusters = importlib.import_module('jax._src.clusters').ClusterEnv
  for kind in clusters._cluster_types:
    # The name of Kubernetes is empty in JAX.
    if (kind.name or 'k8s') in methods and kind.is_env_present():
      return clusters.auto_detect_unset_distributed_params(
          *(None, None, None, None), kind.name, timeout
      )
  return None


def publish(key: str, value: str) -> None:
  """Tells the processes that JAX has joined the value of a key, once."""
  _client().key_value_set(key, value)


def published(key: str, timeout: int) -> str:
  """Returns the value of a key, for which it waits some seconds."""
  return _client().blocking_key_value_get(key, 1000 * timeout)


def _client():
  return importlib.import_module('jax._src.distributed').global_state.client


def trace_state() -> Any:
  """Returns a value that is equal for two places in the same trace."""
  return jax.extend.core.get_opaque_trace_state(convention='flax')


@functools.cache
def _untraced_state():
  with jax.ensure_compile_time_eval():
    return trace_state()


def is_staged() -> bool:
  """Whether JAX traces here for a program that it caches, as `jax.jit` does."""
  if trace_state() == _untraced_state():
    return False
  # Under `jax.vmap` and `jax.grad` alone, new arrays are concrete. Placing one
  # compiles nothing; computing one would compile once a trace.
  return isinstance(jax.device_put(0.0), core.Tracer)
