"""Ported training scripts of TensorFlow 1 train like the originals.

`programs` contains the training parts of public repositories, in our words and
with a small model, and the changes of the porting page. `recorded` contains the
batches and the results of the originals in TensorFlow 1.15.5: the initial
variables, the variables after each step, and all variables at the end. In
TensorFlow, each shard was a graph with a session in a thread, whose assignments
waited for the reads in earlier lines, like on a TPU. NumPy summed over the
shards in their order, because `CrossShardOptimizer` does not have a CPU kernel.
Towers and stale gradients used the classes of TensorFlow. The moving averages
of batch normalization are means over the shards.
"""

import collections
import json

from absl.testing import parameterized
import jax
import numpy as np

import cases
from legacy import ports
from shard_transforms import facade
from shard_transforms.facade import tf

NUM_SHARDS = 4
# Where each program trains: on shards, in towers, or on one device.
PROGRAMS = {
    **dict.fromkeys(('bert', 'xlnet', 'mnist_tpu', 'resnet'), 'shards'),
    **dict.fromkeys(('amoeba_net', 'tensor2tensor', 'gpt2'), 'shards'),
    **{'compare_gan': 'shards', 'official_mnist': 'towers', 'ssd': 'towers'},
    'stale_user': 'single',
}


def recorded(name):
  path = ports.FOLDER / 'recorded' / f'{name}.json'
  return json.loads(path.read_text(encoding='utf-8'))


def train(name, initial):
  """Yields the variables by name after each step, and once more at last."""
  tf.train.get_or_create_global_step()
  model_fn = ports.module(name).model_fn
  params = {'initial': {k: np.float32(x) for k, x in initial.items()}}
  kind = PROGRAMS[name]
  if kind == 'towers':
    model_fn = tf.contrib.estimator.replicate_model_fn(
        model_fn, devices=['/cpu:0'] * NUM_SHARDS
    )

  def computation(features, labels):
    mode = tf.estimator.ModeKeys.TRAIN
    return model_fn(features, labels, mode=mode, params=params).loss

  @facade.function
  def step(features, labels):
    num_shards = NUM_SHARDS if kind == 'shards' else 1
    return facade.shard(computation, [features, labels], num_shards)

  for batch in recorded('batches'):
    step(*map(np.float32, batch))
    values = jax.device_get(facade.get_values(tf.global_variables()))
    yield values
  yield values


class ProgramsTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.enterContext(tf.Graph().as_default())
    # TensorFlow adds a bias to rows without a word, and so do the scripts.
    self.enterContext(jax.numpy_rank_promotion('allow'))

  @cases.parameters(*PROGRAMS, fast=['stale_user', 'mnist_tpu'])
  def test_trains_like_tensorflow(self, name):
    initial, *steps, end = recorded(name)
    # The scope of a `tf.cond` is in names of TensorFlow.
    end = {k.removeprefix('cond/'): v for k, v in end.items()}

    trained = [*train(name, initial)]

    self.assertEqual(set(end), set(trained[-1]))
    for actual, expected in zip(trained, [*steps, end], strict=True):
      for key, value in expected.items():
        # Of the largest number of each array: slots may be small.
        tolerance = 2e-5 if name == 'compare_gan' else 2e-6
        np.testing.assert_allclose(
            np.ravel(actual[key]),
            value,
            rtol=tolerance,
            atol=tolerance * np.max(np.abs(value)),
            err_msg=key,
        )


class PortsTest(parameterized.TestCase):

  def test_ports_change_as_few_lines_as_the_page_says(self):
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
  def test_ports_keep_the_optimizer_classes(self, name):
    before, after = map(ports.classes, ports.texts(name))

    self.assertNotEmpty(before)
    self.assertEqual(before, after)
