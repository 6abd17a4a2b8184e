"""A parameter server of PyTorch's RPC, for `asynchronous.py`.

As PyTorch's documentation lays one out: workers send their gradients by a
remote call, which applies them and answers with the parameters. Needs `torch`,
which is imported in the processes alone.
"""

import functools
import importlib
import multiprocessing
import os
import pathlib
import tempfile
import threading
import time
from typing import Any

import asynchronous_programs as programs
import numpy as np

_SERVER = 'server'


def torch_rpc(model: str, num_workers: int, num_updates: int) -> float:
  """Trains with a server and workers of PyTorch; returns updates a second."""
  rpc = importlib.import_module('torch.distributed.rpc')
  context = multiprocessing.get_context('spawn')
  with tempfile.TemporaryDirectory() as folder:
    join = functools.partial(_join, folder, num_workers + 1)
    workers = [
        context.Process(target=_work, args=(join, model, i), daemon=True)
        for i in range(num_workers)
    ]
    for worker in workers:
      worker.start()
    try:
      server = _Server(model, num_updates)
      _servers[:] = [server]
      join(_SERVER, 0)
      # Returns when all workers have ended.
      rpc.shutdown()
    finally:
      for worker in workers:
        worker.kill()
        worker.join()
  return programs.rate(server.times, list(range(1, num_updates + 1)))


class _Server:
  """Parameters and their optimizer, which calls of workers move."""

  def __init__(self, model: str, num_updates: int):
    torch = importlib.import_module('torch')
    self._lock = threading.Lock()
    self._num_updates = num_updates
    self._network = _network(model)
    self._optimizer = torch.optim.SGD(
        self._network.parameters(), lr=1e-3, momentum=0.9
    )
    self.times: list[float] = []

  def apply_gradients(self, grads: Any) -> Any:
    """Moves the parameters and returns them; None after the last update."""
    with self._lock:
      if len(self.times) == self._num_updates:
        return None
      for param, grad in zip(self._network.parameters(), grads, strict=True):
        param.grad = grad
      self._optimizer.step()
      self.times.append(time.perf_counter())
      # Others move them while these are on their way.
      return [param.detach().clone() for param in self._network.parameters()]


# The server of this process, where it has one: remote calls name functions.
_servers: list[_Server] = []


def _apply_gradients(grads):
  return _servers[0].apply_gradients(grads)


def _work(join, model, number):
  """Computes one gradient after the other, until the server has enough."""
  torch = importlib.import_module('torch')
  rpc = importlib.import_module('torch.distributed.rpc')
  join(f'worker{number}', number + 1)
  network = _network(model)
  call = number * 1_000_000
  while True:
    inputs = torch.from_numpy(programs.batch(model, call))
    loss = ((network(inputs) - 1) ** 2).mean()
    grads = torch.autograd.grad(loss, list(network.parameters()))
    params = rpc.rpc_sync(_SERVER, _apply_gradients, (list(grads),))
    if params is None:
      break
    with torch.no_grad():
      for param, value in zip(network.parameters(), params, strict=True):
        param.copy_(value)
    call += 1
  rpc.shutdown()


def _join(folder: str, num_processes: int, name: str, rank: int) -> None:
  """Meets the others on the loopback interface."""
  os.environ['TP_SOCKET_IFNAME'] = os.environ['GLOO_SOCKET_IFNAME'] = 'lo'
  rpc = importlib.import_module('torch.distributed.rpc')
  # With two threads in each of the three processes, on two cores, training made
  # a tenth of the updates a second (digits).
  importlib.import_module('torch').set_num_threads(1)
  rpc.init_rpc(
      name,
      rank=rank,
      world_size=num_processes,
      rpc_backend_options=rpc.TensorPipeRpcBackendOptions(
          init_method=(pathlib.Path(folder) / 'meeting').as_uri()
      ),
  )


def _network(model: str) -> Any:
  """Returns the network of `asynchronous_programs`, with its parameters."""
  torch = importlib.import_module('torch')
  layers: list[Any] = []
  for layer in programs.init(model):
    linear = torch.nn.Linear(*layer['w'].shape)
    with torch.no_grad():
      weight = np.ascontiguousarray(layer['w'].T)
      linear.weight.copy_(torch.from_numpy(weight))
      linear.bias.copy_(torch.from_numpy(layer['b']))
    layers += [linear, torch.nn.ReLU()]
  return torch.nn.Sequential(*layers[:-1])
