"""Times training steps of PyTorch at an end of the link of `wire.py`.

The model and the batch size are those of `wire.py`; gradients are averaged by
`DistributedDataParallel` over PyTorch's own gloo, with and without hooks that
compress. `PyTorch, local` sends nothing. Needs `torch`; `wire.py` starts it.
"""

from collections.abc import Sequence
import datetime
import importlib
import json
import time
from typing import Any

from absl import app
from absl import flags
import numpy as np

_MEETING = flags.DEFINE_string(
    'meeting', None, 'Address and port of the first.', required=True
)
_RANK = flags.DEFINE_integer(
    'rank', None, 'Which of the two processes it is.', required=True
)
_LAYERS = flags.DEFINE_integer(
    'layers', None, 'Layers of the MLP.', required=True
)
_WIDTH = flags.DEFINE_integer('width', None, 'Their width.', required=True)
_BATCH_SIZE = flags.DEFINE_integer(
    'batch_size', None, 'Rows of each process.', required=True
)
_STEPS = flags.DEFINE_integer('steps', None, 'Timed steps.', required=True)
_RESULTS = flags.DEFINE_string(
    'results', None, 'The file of the times.', required=True
)

# PyTorch sends whole gradients in the first steps of PowerSGD, at least two.
_WHOLE_STEPS = 2
_HOOKS = 'torch.distributed.algorithms.ddp_comm_hooks'


def make_local(model: Any) -> Any:
  """Returns a model that trains alone."""
  return model


def make_ddp(model: Any) -> Any:
  """Returns a model whose gradients are averaged as they are."""
  parallel = importlib.import_module('torch.nn.parallel')
  return parallel.DistributedDataParallel(model)


def make_fp16(model: Any) -> Any:
  """Returns a model whose gradients are sent in 16 bits."""
  hooks = importlib.import_module(f'{_HOOKS}.default_hooks')
  parallel = make_ddp(model)
  parallel.register_comm_hook(None, hooks.fp16_compress_hook)
  return parallel


def make_power_sgd(model: Any) -> Any:
  """Returns a model whose gradients are sent as factors of rank 4."""
  hooks = importlib.import_module(f'{_HOOKS}.powerSGD_hook')
  parallel = importlib.import_module('torch.nn.parallel')
  # Over gloo, the hook aborts with several buckets.
  model = parallel.DistributedDataParallel(model, bucket_cap_mb=10_000)
  state = hooks.PowerSGDState(
      None, matrix_approximation_rank=4, start_powerSGD_iter=_WHOLE_STEPS
  )
  model.register_comm_hook(state, hooks.powerSGD_hook)
  return model


PROGRAMS = {
    'PyTorch, local': make_local,
    'PyTorch, DDP': make_ddp,
    'PyTorch, fp16': make_fp16,
    'PyTorch, PowerSGD 4': make_power_sgd,
}


def make_model(torch: Any) -> Any:
  """Returns the MLP, the same on all processes."""
  torch.manual_seed(0)
  width = _WIDTH.value
  layers = []
  for _ in range(_LAYERS.value):
    layers += [torch.nn.Linear(width, width), torch.nn.Tanh()]
  return torch.nn.Sequential(*layers)


def seconds_a_step(torch: Any, model: Any) -> float:
  """Returns the time that this process measures."""
  optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
  shape = _BATCH_SIZE.value, _WIDTH.value
  inputs = np.random.default_rng(_RANK.value).normal(size=shape)
  inputs = torch.from_numpy(np.float32(inputs))

  def step():
    optimizer.zero_grad()
    model(inputs).square().mean().backward()
    optimizer.step()

  for _ in range(_WHOLE_STEPS + 2):
    step()
  torch.distributed.barrier()
  start = time.perf_counter()
  for _ in range(_STEPS.value):
    step()
  return (time.perf_counter() - start) / _STEPS.value


def main(argv: Sequence[str]) -> None:
  """Times all programs in one of the processes."""
  del argv
  torch = importlib.import_module('torch')
  importlib.import_module('torch.distributed')
  torch.set_num_threads(1)
  torch.distributed.init_process_group(
      'gloo',
      init_method=f'tcp://{_MEETING.value}',
      rank=_RANK.value,
      world_size=2,
      timeout=datetime.timedelta(seconds=60),
  )
  found = {
      name: seconds_a_step(torch, make(make_model(torch)))
      for name, make in PROGRAMS.items()
  }
  with open(_RESULTS.value, 'w') as file:
    json.dump(found, file)
  torch.distributed.destroy_process_group()


if __name__ == '__main__':
  app.run(main)
