"""A small transformer that predicts handwritten digits pixel by pixel."""

from collections.abc import Mapping
from typing import Any

import digits
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np
import optax

LEVELS, LENGTH = 17, 64
WIDTH, HEADS, HIDDEN, LAYERS = 32, 4, 128, 2

# A layer's matrices are stacked, or in a list.
Params = Mapping[str, Any]

# Attention heads and hidden units are sharded; the leading axis is of layers.
SPECS = {
    'embed': P(),
    'place': P(),
    'qkv': P(None, None, None, 'model'),
    'out': P(None, 'model'),
    'up': P(None, None, 'model'),
    'down': P(None, 'model'),
}


# Which dimensions of a layer are the input and the output of its matrix.
MATRICES = {
    'qkv': optax.contrib.MuonDimensionNumbers(0, (1, 2, 3)),
    'out': optax.contrib.MuonDimensionNumbers((0, 1), 2),
    'up': optax.contrib.MuonDimensionNumbers(0, 1),
    'down': optax.contrib.MuonDimensionNumbers(0, 1),
}


def load_data(seed: int) -> np.ndarray:
  """Returns the images to train on as sequences of pixels, int32 [n, 64]."""
  (images, _), _ = digits.load_data(seed)
  return np.asarray(8 * (images + 1), np.int32).reshape(-1, LENGTH)


def init_params(seed: int, layers: int = LAYERS) -> dict[str, jax.Array]:
  """Returns the parameters, those of all layers stacked."""
  keys = iter(jax.random.split(jax.random.key(seed), len(SPECS)))

  def normal(fan_in, *shape):
    return jax.random.normal(next(keys), shape) / fan_in**0.5

  size = WIDTH // HEADS
  return {
      'embed': normal(1, LEVELS, WIDTH) / 4,
      'place': normal(1, LENGTH, WIDTH) / 4,
      'qkv': normal(WIDTH, layers, WIDTH, 3, HEADS, size),
      'out': normal(WIDTH, layers, HEADS, size, WIDTH),
      'up': normal(WIDTH, layers, WIDTH, HIDDEN),
      'down': normal(HIDDEN, layers, HIDDEN, WIDTH),
  }


def unstacked(params: Params) -> Params:
  """Returns the parameters with a leaf for each matrix of each layer."""
  return {k: list(x) if k in MATRICES else x for k, x in params.items()}


def muon(learning_rate: float) -> optax.GradientTransformation:
  """Returns Muon for the matrices of layers, and Adam for the rest."""

  def numbers_of(params):
    return jax.tree.map_with_path(
        lambda path, _: MATRICES.get(path[0].key), params
    )

  return optax.contrib.muon(
      learning_rate,
      adam_learning_rate=learning_rate / 2,
      muon_weight_dimension_numbers=numbers_of,
  )


def _normalize(x):
  return x * jax.lax.rsqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-6)


def _attend(x, qkv, out):
  query, key, value = jnp.einsum('nld,dchs->cnlhs', x, qkv)
  mixed = jax.nn.dot_product_attention(query, key, value, is_causal=True)
  return jnp.einsum('nlhs,hsd->nld', mixed, out)


def predict(params: Params, pixels: jax.Array) -> jax.Array:
  """Returns logits [n, 63, 17] for the pixels behind those of [n, 64]."""
  x = params['embed'][pixels[:, :-1]] + params['place'][None, :-1]
  for layer in range(len(params['qkv'])):
    qkv, out, up, down = (
        params[name][layer] for name in ('qkv', 'out', 'up', 'down')
    )
    x = x + _attend(_normalize(x), qkv, out)
    x = x + jax.nn.gelu(_normalize(x) @ up) @ down
  return _normalize(x) @ params['embed'].T


def loss_fn(params: Params, pixels: jax.Array) -> jax.Array:
  """Returns the mean cross entropy of a batch."""
  return optax.softmax_cross_entropy_with_integer_labels(
      predict(params, pixels), pixels[:, 1:]
  ).mean()
