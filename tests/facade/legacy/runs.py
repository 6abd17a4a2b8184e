"""The programs, and what both TensorFlow 1 and the façade train them on."""

import typing

import numpy as np

NUM_STEPS = 8
NUM_SHARDS = 4
ROWS_OF_SHARD = 4
SHAPES = {
    'model/embeddings/kernel': (5, 4),
    'model/layer_0/kernel': (4, 4),
    'model/layer_0/bias': (4,),
    'model/layer_1/kernel': (4, 3),
    'model/layer_1/LayerNorm/gamma': (3,),
    'model/layer_1/LayerNorm/beta': (3,),
    'head/kernel': (3, 2),
    'unused': (2,),
}
SHAPES_OF_GAN = {
    'generator/hidden/kernel': (5, 4),
    'generator/hidden/bias': (4,),
    'generator/output/kernel': (4, 2),
    'discriminator/hidden/kernel': (2, 3),
    'discriminator/hidden/bias': (3,),
    'discriminator/output/kernel': (3, 1),
    'discriminator/output/bias': (1,),
    'unused': (2,),
}


class Program(typing.NamedTuple):
  """A training script.

  Attributes:
    kind: 'shards', 'towers' or 'alone' (one session, the whole batch).
    source: Where such a script is found.
    statistics: Variables that each shard keeps for itself: their mean counts.
  """

  kind: str
  source: str
  statistics: tuple = ()


BATCH_NORM = (
    'model/layer_1/LayerNorm/moving_mean',
    'model/layer_1/LayerNorm/moving_variance',
)
PROGRAMS = {
    'bert': Program('shards', 'google-research/bert'),
    'xlnet': Program('shards', 'zihangdai/xlnet'),
    'mnist_tpu': Program('shards', 'tensorflow/tpu: mnist_tpu'),
    'resnet': Program('shards', 'tensorflow/tpu: resnet', BATCH_NORM),
    'amoeba_net': Program('shards', 'tensorflow/tpu: amoeba_net', BATCH_NORM),
    'tensor2tensor': Program('shards', 'tensorflow/tensor2tensor'),
    'gpt2': Program('shards', 'ConnorJL/GPT2'),
    'compare_gan': Program('shards', 'google/compare_gan'),
    'official_mnist': Program('towers', 'tensorflow/models: official/mnist'),
    'ssd': Program('towers', 'HiKapok/SSD.TensorFlow'),
    'stale_user': Program('alone', 'a user of stale gradients'),
}


def initial_values(name):
  """Returns the values before the first step, by name."""
  shapes = SHAPES_OF_GAN if name == 'compare_gan' else SHAPES
  random = np.random.RandomState(0)
  return {
      key: random.uniform(-0.8, 0.8, shape).astype(np.float32)
      for key, shape in shapes.items()
  }


def batches():
  """Returns the features [16, 5] and labels [16, 2] of each step."""
  random = np.random.RandomState(1)
  rows = NUM_SHARDS * ROWS_OF_SHARD
  target = random.normal(size=(5, 2))
  found = []
  for _ in range(NUM_STEPS):
    features = random.normal(size=(rows, 5))
    labels = np.tanh(features @ target)
    found.append((features.astype(np.float32), labels.astype(np.float32)))
  return found
