"""Reference implementations in float64 of the methods of `local_updates`.

Each computes the anchor from the local parameters after each round, without
Optax.
"""

from collections.abc import Callable
import functools
import pathlib
import re
from typing import Any, NamedTuple

import numpy as np
import optax

import modes
from shard_transforms import cross_shard_mean
from shard_transforms.contrib import local_updates

SHARDS = 8
RATE = 0.3


class Method(NamedTuple):
  """A row of the table of methods.

  Attributes:
    outer: The transformation after the mean.
    options: The options of `local_updates`.
    model: The reference: a function of the centres [steps, shards, size] that
      returns the anchor and the local parameters after each step.
  """

  outer: optax.GradientTransformation
  options: dict[str, Any]
  model: Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]

  def build(self, inner: Any = None) -> optax.GradientTransformationExtraArgs:
    outer = optax.chain(cross_shard_mean(modes.AXIS), self.outer)
    inner = optax.sgd(RATE) if inner is None else inner
    return local_updates(inner, outer, modes.AXIS, **self.options)


def step_alone(own, centre):
  """Gradient descent on the squared distance to the centre of a shard."""
  return own - RATE * (own - centre)


def in_rounds(start, every=3):
  """Returns a model of rounds after which shards continue from the anchor."""

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


def bmuf(nesterov=False):
  block, eta, model = 0.0, 1 - 1 / SHARDS, None

  def move(anchor, own):
    nonlocal block, model
    model = anchor if model is None else model
    block = eta * block + (own.mean(0) - anchor)
    model = model + block
    # With Nesterov's momentum, shards start the next block further along.
    return everywhere(model + nesterov * eta * block, own)

  return move


def slow_momentum():
  slow, rate, alpha, beta = 0.0, RATE, 0.8, 0.6

  def move(anchor, own):
    nonlocal slow
    slow = beta * slow + (anchor - own.mean(0)) / rate
    return everywhere(anchor - alpha * rate * slow, own)

  return move


def streaming(centres, every=6, delay=1, own_part=0.25):
  """Sends two elements in the middle of a round, and the others at its end."""
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


def of_page():
  """Returns the column `outer` of the table in docs/local_updates.md."""
  page = pathlib.Path(__file__).parents[2] / 'docs' / 'local_updates.md'
  text = page.read_text(encoding='utf-8')
  rows = re.findall(r'^\| (.*?) \| `(sgd\([^`]*\))` \|', text, re.MULTILINE)
  names = {'sgd': optax.sgd, 'N': SHARDS, 'alpha': 0.8, 'beta': 0.6}
  return {name: eval(outer, names) for name, outer in rows}


MODELS = {
    'local SGD': local_sgd,
    'DiLoCo': diloco,
    'BMUF': bmuf,
    'Nesterov BMUF': functools.partial(bmuf, nesterov=True),
    'SlowMo, at a constant rate': slow_momentum,
}
METHODS = {
    name: Method(outer, dict(every=3), in_rounds(MODELS[name]))
    for name, outer in of_page().items()
}
METHODS['streaming DiLoCo'] = Method(
    METHODS['DiLoCo'].outer,
    dict(every=6, mixing=0.25, delay=1, fragments={'a': 0, 'b': 1}),
    streaming,
)
