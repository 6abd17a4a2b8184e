"""Methods that `local_updates` implements, as in papers, in float64.

Each takes what the shards have after each round and gives the anchor, with
nothing of Optax in it.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import optax

import modes
from shard_transforms import cross_shard_mean
from shard_transforms import local_updates

SHARDS = 8
RATE = 0.3


class Method(NamedTuple):
  """A row of the table of methods.

  Attributes:
    outer: What follows the mean.
    options: Those of `local_updates`.
    model: What it is to give: a function of the centres [steps, shards, size]
      that gives the anchor and the own parameters after each step.
  """

  outer: optax.GradientTransformation
  options: dict[str, Any]
  model: Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]

  def build(self, inner: Any = None) -> optax.GradientTransformationExtraArgs:
    outer = optax.chain(cross_shard_mean(modes.AXIS), self.outer)
    inner = optax.sgd(RATE) if inner is None else inner
    return local_updates(inner, outer, modes.AXIS, **self.options)


def step_alone(own, centre):
  """Is gradient descent on the squared distance to a shard's own centre."""
  return own - RATE * (own - centre)


def in_rounds(start, every=3):
  """Returns a model of rounds after which all shards go on from the anchor."""

  def model(centres):
    move = start()
    anchor = np.linspace(-1, 1, centres.shape[-1])
    own = np.stack([anchor] * centres.shape[1])
    anchors, owns = [], []
    for step, centre in enumerate(centres, 1):
      own = step_alone(own, centre)
      if step % every == 0:
        anchor, own = move(anchor, own)
      anchors.append(anchor)
      owns.append(own)
    return np.stack(anchors), np.stack(owns)

  return model


def everywhere(anchor, own):
  return anchor, np.broadcast_to(anchor, own.shape)


def local_sgd():
  return lambda anchor, own: everywhere(own.mean(0), own)


def diloco():
  velocity = 0.0

  def move(anchor, own):
    nonlocal velocity
    gradient = anchor - own.mean(0)
    velocity = 0.9 * velocity + gradient
    return everywhere(anchor - 0.7 * (gradient + 0.9 * velocity), own)

  return move


def streaming(centres, every=6, delay=1, own_part=0.25):
  """Sends the first two numbers at half of a round, the others at its end."""
  size = centres.shape[-1]
  anchor = np.linspace(-1, 1, size)
  own = np.stack([anchor] * centres.shape[1])
  velocity = np.zeros(size)
  parts = [slice(0, 2), slice(2, size)]
  anchors, owns = [], []
  for number, centre in enumerate(centres, 1):
    own = step_alone(own, centre)
    anchor = anchor.copy()
    for part, end in zip(parts, (every // 2, every), strict=True):
      if number % every == (end - delay) % every:
        gradient = anchor[part] - own[:, part].mean(0)
        velocity[part] = 0.9 * velocity[part] + gradient
        anchor[part] -= 0.7 * (gradient + 0.9 * velocity[part])
      if number % every == end % every:
        own[:, part] = own_part * own[:, part] + (1 - own_part) * anchor[part]
    anchors.append(anchor)
    owns.append(own.copy())
  return np.stack(anchors), np.stack(owns)


METHODS = {
    'local SGD': Method(optax.sgd(1.0), dict(every=3), in_rounds(local_sgd)),
    'DiLoCo': Method(
        optax.sgd(0.7, 0.9, nesterov=True), dict(every=3), in_rounds(diloco)
    ),
    'streaming DiLoCo': Method(
        optax.sgd(0.7, 0.9, nesterov=True),
        dict(every=6, mixing=0.25, delay=1, fragments={'a': 0, 'b': 1}),
        streaming,
    ),
}
