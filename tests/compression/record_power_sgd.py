"""Records the results of PyTorch's PowerSGD hook, as `power_sgd_hook.json`.

It runs two processes over gloo, each with its own gradients, on a CPU, with one
bucket, for seven steps, and records the gradients of each process, their mean,
and after each step the residual of each process and the right factors. The file
beside it is from PyTorch 1.13. The tests do not need PyTorch. Run it as `python
record_power_sgd.py power_sgd_hook.json`.
"""

import json
import os
import sys

import numpy as np
import torch
from torch import distributed
from torch import multiprocessing
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as hook

SHAPES = {'wide': (6, 9), 'tall': (8, 5), 'vector': (4,)}
WORLD, RANK, WARMUP, STEPS = 2, 2, 2, 7


class Model(torch.nn.Module):
  """Parameters whose gradient is what the loss is given."""

  def __init__(self):
    super().__init__()
    self.leaves = torch.nn.ParameterDict(
        {k: torch.nn.Parameter(torch.zeros(s)) for k, s in SHAPES.items()}
    )

  def forward(self, data):
    return sum((self.leaves[k] * data[k]).sum() for k in SHAPES)


def gradients(step, rank):
  """Returns gradients that have something in common, as those of batches do."""
  common, own = (np.random.RandomState(s) for s in (7, 100 * step + rank))
  return {
      k: (common.normal(size=s) + own.normal(size=s)).astype(np.float32)
      for k, s in SHAPES.items()
  }


def record(rank, path):
  """Runs one process; the first one writes the file."""
  os.environ.update(MASTER_ADDR='127.0.0.1', MASTER_PORT='29517')
  distributed.init_process_group('gloo', rank=rank, world_size=WORLD)
  model = torch.nn.parallel.DistributedDataParallel(Model())
  state = hook.PowerSGDState(
      None, RANK, start_powerSGD_iter=WARMUP, min_compression_rate=1
  )
  order = []

  def noting_order(state, bucket):
    names = {id(x): k for k, x in model.module.leaves.items()}
    order[:] = [names[id(x)] for x in bucket.parameters()]
    return hook.powerSGD_hook(state, bucket)

  model.register_comm_hook(state, noting_order)
  steps = []
  for step in range(WARMUP + STEPS):
    model.zero_grad()
    grads = gradients(step, rank)
    model({k: torch.from_numpy(x) for k, x in grads.items()}).backward()
    if step < WARMUP:
      continue
    (error,), (sketch,) = (
        state.error_dict.values(),
        state.q_memory_dict.values(),
    )
    errors = [torch.zeros_like(error) for _ in range(WORLD)]
    distributed.all_gather(errors, error)
    every = [gradients(step, i) for i in range(WORLD)]
    sizes = {k: int(np.prod(SHAPES[k])) for k in order}
    widths = {k: SHAPES[k][1] * RANK for k in order if len(SHAPES[k]) > 1}
    steps.append(
        {
            'grads': {k: [flat(x[k]) for x in every] for k in SHAPES},
            'mean': {k: flat(model.module.leaves[k].grad) for k in SHAPES},
            'errors': by_name([x.numpy() for x in errors], sizes),
            'sketch': by_name(sketch.numpy(), widths),
        }
    )
  if rank == 0:
    tape = {
        'schema': 1,
        'recorded_from': f'PyTorch {torch.__version__}, gloo, CPU',
        'shapes': SHAPES,
        'rank': RANK,
        'steps': steps,
    }
    with open(path, 'w') as file:
      json.dump(tape, file, separators=(',', ':'))
      file.write('\n')
  distributed.destroy_process_group()


def by_name(arrays, sizes):
  """Returns arrays, cut into parts of given sizes."""
  ends = np.cumsum(list(sizes.values()))[:-1]
  parts = np.split(np.asarray(arrays), ends, axis=-1)
  return {
      k: [flat(x) for x in part] if part.ndim > 1 else flat(part)
      for k, part in zip(sizes, parts, strict=True)
  }


def flat(x):
  """Returns the shortest decimals that give each float32 back."""
  return [float(str(v)) for v in np.asarray(x, np.float32).ravel()]


if __name__ == '__main__':
  multiprocessing.spawn(record, (sys.argv[1],), nprocs=WORLD)
