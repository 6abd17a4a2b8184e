"""Reference implementations in float64 of the methods of `local_updates`.

Each computes the anchor from the local parameters after each round, without
Optax.
"""

from collections.abc import Callable
import functools
from typing import Any, NamedTuple

import numpy as np
import optax

import modes
from shard_transforms import cross_shard_mean
from shard_transforms.contrib import local_updates

SHARDS = 8
RATE = 0.3
# Of SlowMo: the learning rate and the momentum of the outer optimizer.
ALPHA, BETA = 0.8, 0.6


class Method(NamedTuple):
  """A row of the table of methods in docs/local_updates.md.

  Attributes:
    documented: How the table gives `outer`.
    outer: The transformation after the mean.
    options: The options of `local_updates`.
    model: The reference: a function of the centres [steps, shards, size] that
      returns the anchor and the local parameters after each step.
  """

  documented: str
  outer: optax.GradientTransformation
  options: dict[str, Any]
  model: Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]

  def build(self, inner: Any = None) -> optax.GradientTransformationExtraArgs:
    outer = optax.chain(cross_shard_mean(modes.AXIS), self.outer)
    inner = optax.sgd(RATE) if inner is None else inner
    return local_updates(inner, outer, modes.AXIS, **self.options)


def descend(local, centre):
  """Gradient descent on the squared distance to the centre of a shard."""
  return local - RATE * (local - centre)


def in_rounds(start, every=3):
  """Returns a model of rounds after which shards continue from the anchor."""

  def model(centres):
    move = start()
    anchor = np.linspace(-1, 1, centres.shape[-1])
    local = np.stack([anchor] * centres.shape[1])
    anchors, locals_of_steps = [], []
    for step, centre in enumerate(centres, 1):
      local = descend(local, centre)
      if step % every == 0:
        anchor, local = move(anchor, local)
      anchors.append(anchor)
      locals_of_steps.append(local)
    return np.stack(anchors), np.stack(locals_of_steps)

  return model


def everywhere(anchor, local):
  return anchor, np.broadcast_to(anchor, local.shape)


def local_sgd():
  return lambda anchor, local: everywhere(local.mean(0), local)


def diloco():
  velocity = 0.0

  def move(anchor, local):
    nonlocal velocity
    gradient = anchor - local.mean(0)
    velocity = 0.9 * velocity + gradient
    return everywhere(anchor - 0.7 * (gradient + 0.9 * velocity), local)

  return move


def bmuf(nesterov=False):
  block, eta, model = 0.0, 1 - 1 / SHARDS, None

  def move(anchor, local):
    nonlocal block, model
    model = anchor if model is None else model
    block = eta * block + (local.mean(0) - anchor)
    model = model + block
    # With Nesterov's momentum, shards start the next block further along.
    return everywhere(model + nesterov * eta * block, local)

  return move


def slow_momentum():
  slow = 0.0

  def move(anchor, local):
    nonlocal slow
    slow = BETA * slow + (anchor - local.mean(0)) / RATE
    return everywhere(anchor - ALPHA * RATE * slow, local)

  return move


def streaming(centres, every=6, delay=1, mixing=0.25):
  """Sends two elements in the middle of a round, and the others at its end."""
  size = centres.shape[-1]
  anchor = np.linspace(-1, 1, size)
  local = np.stack([anchor] * centres.shape[1])
  velocity = np.zeros(size)
  parts = [slice(0, 2), slice(2, size)]
  anchors, locals_of_steps = [], []
  for number, centre in enumerate(centres, 1):
    local = descend(local, centre)
    anchor = anchor.copy()
    for part, end in zip(parts, (every // 2, every), strict=True):
      if number % every == (end - delay) % every:
        gradient = anchor[part] - local[:, part].mean(0)
        velocity[part] = 0.9 * velocity[part] + gradient
        anchor[part] -= 0.7 * (gradient + 0.9 * velocity[part])
      if number % every == end % every:
        local[:, part] = mixing * local[:, part] + (1 - mixing) * anchor[part]
    anchors.append(anchor)
    locals_of_steps.append(local.copy())
  return np.stack(anchors), np.stack(locals_of_steps)


def in_rounds_of_three(documented, outer, start):
  return Method(documented, outer, dict(every=3), in_rounds(start))


METHODS = {
    'local SGD': in_rounds_of_three('`sgd(1.0)`', optax.sgd(1.0), local_sgd),
    'DiLoCo': in_rounds_of_three(
        '`sgd(0.7, 0.9, nesterov=True)`',
        optax.sgd(0.7, 0.9, nesterov=True),
        diloco,
    ),
    'BMUF': in_rounds_of_three(
        '`sgd(1.0, 1 - 1 / N)`', optax.sgd(1.0, 1 - 1 / SHARDS), bmuf
    ),
    'Nesterov BMUF': in_rounds_of_three(
        '`sgd(1.0, 1 - 1 / N, nesterov=True)`',
        optax.sgd(1.0, 1 - 1 / SHARDS, nesterov=True),
        functools.partial(bmuf, nesterov=True),
    ),
    'SlowMo, at a constant rate': in_rounds_of_three(
        '`sgd(alpha, beta)`', optax.sgd(ALPHA, BETA), slow_momentum
    ),
    'streaming DiLoCo': Method(
        'as DiLoCo',
        optax.sgd(0.7, 0.9, nesterov=True),
        dict(every=6, mixing=0.25, delay=1, fragments={'a': 0, 'b': 1}),
        streaming,
    ),
}
