"""Training scripts of TensorFlow 1, ported, train as TensorFlow trained them.

`programs` has the training parts as their repositories write them, in our words
and with a small model, and what the porting page changes in them; `recorded`
the batches and what TensorFlow 1.15.5 computed with the originals: the initial
variables, those after each step, and at last all of them. There, each shard was
a graph with a session in a thread, whose assignments waited for the reads in
lines before them, as on a TPU; NumPy made the sum, in the order of the shards,
as `CrossShardOptimizer` has no kernel on CPUs. Towers and stale gradients were
TensorFlow's own. The moving averages of batch normalization, which each shard
kept for itself, are means.
"""

import collections
import json

from absl.testing import parameterized
import jax
import numpy as np

import cases
from legacy import ports
from shard_transforms import facade

NUM_SHARDS = 4
# Where each trains: on shards, in towers, or the whole batch alone.
PROGRAMS = {
    **dict.fromkeys(('bert', 'xlnet', 'mnist_tpu', 'resnet'), 'shards'),
    **dict.fromkeys(('amoeba_net', 'tensor2tensor', 'gpt2'), 'shards'),
    **{'compare_gan': 'shards', 'official_mnist': 'towers', 'ssd': 'towers'},
    'stale_user': 'alone',
}


def recorded(name):
  path = ports.FOLDER / 'recorded' / f'{name}.json'
  return json.loads(path.read_text(encoding='utf-8'))


def train(name, initial):
  """Yields the variables by name after each step, and once more at last."""
  facade.get_or_create_global_step()
  model_fn = ports.module(name).model_fn
  params = {'initial': {k: np.float32(x) for k, x in initial.items()}}
  kind = PROGRAMS[name]
  if kind == 'towers':
    model_fn = facade.replicate_model_fn(
        model_fn, devices=['/cpu:0'] * NUM_SHARDS
    )

  def computation(features, labels):
    mode = facade.ModeKeys.TRAIN
    return model_fn(features, labels, mode=mode, params=params).loss

  @facade.function
  def step(features, labels):
    num_shards = NUM_SHARDS if kind == 'shards' else 1
    return facade.shard(computation, [features, labels], num_shards)

  for batch in recorded('batches'):
    step(*map(np.float32, batch))
    values = jax.device_get(facade.get_values(facade.global_variables()))
    yield values
  yield values


class ProgramsTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.enterContext(facade.Graph().as_default())
    # TensorFlow adds a bias to rows without a word, and so do the scripts.
    self.enterContext(jax.numpy_rank_promotion('allow'))

  @cases.parameters(*PROGRAMS)
  def test_trains_as_tensorflow(self, name):
    initial, *steps, end = recorded(name)
    # The scope of a `tf.cond` is in names of TensorFlow.
    end = {k.removeprefix('cond/'): v for k, v in end.items()}

    trained = [*train(name, initial)]

    self.assertEqual(set(end), set(trained[-1]))
    for found, expected in zip(trained, [*steps, end], strict=True):
      for key, value in expected.items():
        # Of the largest number of each array: slots may be small.
        tolerance = 2e-5 if name == 'compare_gan' else 2e-6
        np.testing.assert_allclose(
            np.ravel(found[key]),
            value,
            rtol=tolerance,
            atol=tolerance * np.max(np.abs(value)),
            err_msg=key,
        )


class PortsTest(parameterized.TestCase):

  def test_change_as_few_lines_as_the_page_says(self):
    changes = []
    for name in PROGRAMS:
      before, after = (
          collections.Counter(filter(None, map(str.strip, text.splitlines())))
          for text in ports.texts(name)
      )
      lines = (before - after).total(), (after - before).total()
      changes.append(max(lines))

    self.assertEqual([len(changes), min(changes), max(changes)], [11, 4, 18])

  @cases.parameters('bert', 'gpt2')
  def test_keep_the_class_of_the_optimizer(self, name):
    before, after = map(ports.classes, ports.texts(name))

    self.assertNotEmpty(before)
    self.assertEqual(before, after)
