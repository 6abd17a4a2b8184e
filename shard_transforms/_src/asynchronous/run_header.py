"""The header of a run, by which its journal is recognized."""

from typing import Any

import jax
import numpy as np

from shard_transforms._src.asynchronous import machine
from shard_transforms._src.asynchronous import parameter_server
from shard_transforms._src.asynchronous import task as task_lib


def init_params(task: task_lib.Task) -> Any:
  """Returns the initial parameters of a task as NumPy arrays.

  Raises:
    RuntimeError: If it fails.
  """
  try:
    params = task.init()
  except Exception as error:  # Whatever a user's function raises.
    raise RuntimeError(
        f'`init` of `task` must work, got {type(error).__name__}: {error}'
    ) from error
  return jax.tree.map(np.asarray, params)


def header(
    params: Any, server: parameter_server.ParameterServer
) -> dict[str, Any]:
  """Returns what must be equal when a run resumes or is replayed.

  What the functions of a task do is seen from the gradients themselves.
  """
  return {
      'initial parameters': task_lib.checksum(params),
      'optimizer': server.fingerprint(),
      'machine': machine.describe(),
  }
