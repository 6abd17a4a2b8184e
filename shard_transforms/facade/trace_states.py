"""The state of JAX's current trace."""

import functools
from typing import Any

import jax
from jax import core
import jax.extend


def trace_state() -> Any:
  """Returns a value that compares equal only within the same trace."""
  return jax.extend.core.get_opaque_trace_state(convention='flax')


@functools.cache
def _untraced_state():
  with jax.ensure_compile_time_eval():
    return trace_state()


def is_staged() -> bool:
  """Whether the current trace builds a jaxpr, as under `jax.jit`."""
  if trace_state() == _untraced_state():
    return False
  # If there is only `jax.vmap` or `jax.grad`, new arrays are concrete. Unlike
  # the computation of an array, `jax.device_put` compiles nothing.
  return isinstance(jax.device_put(0.0), core.Tracer)
