"""Training scripts of TensorFlow 1, ported, train as TensorFlow trained them.

`programs` has the training parts as their repositories write them, in our words
and with a small model, and what the porting page changes in them; `recorded`
what TensorFlow 1.15.5 computed with the originals (`record_programs.py`).
"""

import json

from absl.testing import parameterized
import jax
import numpy as np

import cases
from legacy import ports
from legacy import runs
from shard_transforms import facade

# A short script changes more than a fifth: the import, the function around the
# loss and the loss as a result are there in all.
FEW_LINES = 8


def train(name):
  """Returns the variables by name after each step."""
  facade.get_or_create_global_step()
  model_fn = ports.module(name).model_fn
  params = {'initial': runs.initial_values(name)}
  kind = runs.PROGRAMS[name].kind
  if kind == 'towers':
    devices = ['/cpu:0'] * runs.NUM_SHARDS
    model_fn = facade.replicate_model_fn(model_fn, devices=devices)

  def computation(features, labels):
    mode = facade.ModeKeys.TRAIN
    return model_fn(features, labels, mode=mode, params=params).loss

  @facade.function
  def step(features, labels):
    num_shards = runs.NUM_SHARDS if kind == 'shards' else 1
    return facade.shard(computation, [features, labels], num_shards)

  found = []
  for batch in runs.batches():
    step(*batch)
    values = {v.op.name: v.value() for v in facade.global_variables()}
    found.append(jax.device_get(values))
  return found


def recorded(name):
  """Returns the recorded variables after each step, and all of them at last."""
  path = ports.FOLDER / 'recorded' / f'{name}.json'
  *steps, end = json.loads(path.read_text(encoding='utf-8'))
  # The scope of a `tf.cond` is in names of TensorFlow.
  return steps, {k.removeprefix('cond/'): v for k, v in end.items()}


class ProgramsTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.enterContext(facade.Graph().as_default())
    # TensorFlow adds a bias to rows without a word, and so do the scripts.
    self.enterContext(jax.numpy_rank_promotion('allow'))

  @cases.parameters(*runs.PROGRAMS)
  def test_trains_as_tensorflow(self, name):
    steps, end = recorded(name)

    trained = train(name)

    self.assertLen(trained, runs.NUM_STEPS)
    self.assertEqual(set(end), set(trained[-1]))
    for found, expected in zip(
        [*trained, trained[-1]], [*steps, end], strict=True
    ):
      for key, value in expected.items():
        np.testing.assert_allclose(
            np.ravel(found[key]), value, rtol=1e-5, atol=1e-5, err_msg=key
        )


class PortsTest(parameterized.TestCase):

  def test_change_one_line_in_five_at_most_unless_they_are_few(self):
    counts = {name: ports.count(name) for name in runs.PROGRAMS}

    few = {
        name for name, (total, changed) in counts.items() if changed > total / 5
    }

    self.assertLessEqual(max(counts[name][1] for name in few), FEW_LINES)
    self.assertLessEqual(len(few), len(counts) / 3)
    changes = [changed for _, changed in counts.values()]
    # What the page says.
    self.assertEqual((len(counts), min(changes), max(changes)), (11, 4, 20))

  @cases.parameters('bert', 'gpt2')
  def test_keep_the_class_of_the_optimizer(self, name):
    before, after = map(
        ports.classes, (ports.original(name), ports.ported(name))
    )

    self.assertNotEmpty(before)
    self.assertEqual(before, after)
