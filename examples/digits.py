"""The handwritten digits that scikit-learn ships, and a model of them."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax


@functools.cache
def load_data(seed: int) -> tuple[list[np.ndarray], list[np.ndarray]]:
  """Returns images [n, 8, 8, 1] and labels [n] to train on, and to test."""
  # Takes long, and a process that only starts others needs none of it.
  import sklearn.datasets

  images, labels = sklearn.datasets.load_digits(return_X_y=True)
  images = np.asarray(images, np.float32).reshape(-1, 8, 8, 1) / 8 - 1
  labels = np.asarray(labels, np.int32)
  order = np.random.default_rng(seed).permutation(len(labels))
  test, train = np.split(order, [len(order) // 5])
  return [images[train], labels[train]], [images[test], labels[test]]


def init_params(seed: int) -> dict[str, jax.Array]:
  """Returns the parameters of a convolution and a dense layer."""
  keys = jax.random.split(jax.random.key(seed))
  return {
      'kernel': jax.random.normal(keys[0], (5, 5, 1, 32)) / 5,
      'offset': jnp.zeros((1, 1, 1, 32)),
      'w': jax.random.normal(keys[1], (512, 10)) / 512**0.5,
      'b': jnp.zeros((1, 10)),
  }


def predict(params: Any, images: jax.Array) -> jax.Array:
  """Returns logits [n, 10] for images [n, 8, 8, 1]."""
  hidden = jax.lax.conv_general_dilated(
      images,
      params['kernel'],
      window_strides=(2, 2),
      padding='SAME',
      dimension_numbers=('NHWC', 'HWIO', 'NHWC'),
  )
  # Smooth, because at a kink rounding would turn into real differences.
  hidden = jax.nn.gelu(hidden + params['offset'])
  return hidden.reshape(len(images), -1) @ params['w'] + params['b']


def loss_fn(params: Any, images: jax.Array, labels: jax.Array) -> jax.Array:
  """Returns the mean cross entropy of a batch."""
  return optax.softmax_cross_entropy_with_integer_labels(
      predict(params, images), labels
  ).mean()


def accuracy(params: Any, images: np.ndarray, labels: np.ndarray) -> float:
  """Returns the part of the examples that is classified correctly."""
  logits = predict(params, jnp.asarray(images))
  return float(np.mean(logits.argmax(axis=-1) == labels))
