"""What TensorFlow 1.15 computed for single parts; see `record_parts.py`."""

import json
import pathlib

import numpy as np

from shard_transforms import facade

_PATH = pathlib.Path(__file__).with_name('parts.json')
RECORDED = json.loads(_PATH.read_text(encoding='utf-8'))
START = {k: np.float32(x) for k, x in RECORDED['start'].items()}
GRADS = [
    {k: np.float32(x) for k, x in of_step.items()}
    for of_step in RECORDED['grads']
]


def variables():
  """Returns the variables in the state of the beginning, by name."""
  return {name: facade.Variable(x, name=name) for name, x in START.items()}
