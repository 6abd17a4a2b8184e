"""Training scripts of TensorFlow 1, ported, train as TensorFlow trained them.

`tf1` has the training parts as their repositories write them, in our words and
with a small model; `ported` the same scripts after the table of the porting
page; `recorded` what TensorFlow 1.15.5 computed with the former (`record.py`).
"""

import difflib
import importlib
import json
import pathlib
import re

from absl.testing import parameterized
import jax
from legacy import runs
import numpy as np

from shard_transforms import facade

FOLDER = pathlib.Path(__file__).parent
TOLERANCE = {'rtol': 1e-5, 'atol': 1e-5}


def train(name):
  """Yields the variables by name after each step."""
  program = importlib.import_module(f'legacy.ported.{name}')
  kind = runs.PROGRAMS[name].kind
  params = {'initial': runs.initial_values(name)}
  mode = facade.ModeKeys.TRAIN
  facade.get_or_create_global_step()
  model_fn = program.model_fn
  if kind == 'towers':
    devices = ['/cpu:0'] * runs.NUM_SHARDS
    model_fn = facade.replicate_model_fn(model_fn, devices=devices)

  def shard(features, labels):
    return model_fn(features, labels, mode=mode, params=params).loss

  @facade.function
  def step(features, labels):
    num_shards = runs.NUM_SHARDS if kind == 'shards' else 1
    return facade.shard(shard, [features, labels], num_shards)

  for batch in runs.batches():
    step(*batch)
    yield {v.op.name: jax.device_get(v.value()) for v in everything()}


def everything():
  return facade.global_variables()


def recorded(name):
  """Returns the recorded variables after each step, all of them at the end."""
  lines = json.loads((FOLDER / 'recorded' / f'{name}.json').read_text())
  # Two names are those of a scope of operations.
  end = {re.sub('^(cond|training)/', '', k): v for k, v in lines[-1].items()}
  return lines[:-1], end


class ProgramsTest(parameterized.TestCase):

  @parameterized.named_parameters((name, name) for name in runs.PROGRAMS)
  def test_trains_as_tensorflow(self, name):
    steps, end = recorded(name)
    self.enterContext(facade.Graph().as_default())
    # TensorFlow adds a bias to rows without a word, and so do the scripts.
    self.enterContext(jax.numpy_rank_promotion('allow'))

    trained = list(train(name))

    self.assertLen(trained, runs.NUM_STEPS)
    for found, expected in zip(trained, steps, strict=True):
      for key, value in expected.items():
        np.testing.assert_allclose(
            np.ravel(found[key]), value, **TOLERANCE, err_msg=key
        )
    self.assertEmpty(set(end) ^ set(trained[-1]))
    for key, value in end.items():
      np.testing.assert_allclose(
          np.ravel(trained[-1][key]), value, **TOLERANCE, err_msg=key
      )
