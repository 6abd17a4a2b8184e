"""Times a compiled step of the façade against the functional step.

Both train one perceptron with momentum, alternating in one process, over
virtual CPU devices: the façade with `CrossShardOptimizer.minimize` in `shard`
in a `function`, the other with `cross_shard_sum` and Optax under
`jax.shard_map`.

A round calls each step twice, so that neither finds warmer processor caches.
Next to the ratio of the medians is the ratio of the functional step to itself
in the same rounds (A/A); a ratio inside its interval is noise. The last columns
are the number of times that Python ran the loss of the façade, and whether both
steps compute the same parameters.
"""

from collections.abc import Callable
from collections.abc import Sequence
import itertools
import re
from typing import Any

from absl import app
from absl import flags
import jax
import jax.numpy as jnp
import numpy as np
import optax
import timing

import shard_transforms
from shard_transforms import facade
from shard_transforms.facade import tf

_MODELS = flags.DEFINE_list(
    'models',
    ['2x32', '10x128', '4x512'],
    'Perceptrons to train: the number of layers and their width.',
)
_SHARDS = flags.DEFINE_list('shards', ['1', '8'], 'Numbers of shards.')
_REPEATS = flags.DEFINE_integer(
    'repeats', 201, 'Timed calls of each step.', lower_bound=2
)
_ROWS = flags.DEFINE_integer('rows', 256, 'Rows of a batch.', lower_bound=8)

_NUM_CLASSES = 10
_MODEL = re.compile(r'([1-9]\d*)x([1-9]\d*)')


@flags.validator('models', message="must hold models such as '10x128'")
def _are_models(names):
  return all(_MODEL.fullmatch(name) for name in names or [''])


@flags.validator('shards', message='must hold positive numbers')
def _are_numbers(numbers):
  return all(n.isdecimal() and int(n) > 0 for n in numbers or [''])


def random_params(name: str) -> list[np.ndarray]:
  """Returns the weights of a perceptron, each [inputs, outputs]."""
  num_layers, width = map(int, name.split('x'))
  rng = np.random.default_rng(0)
  sizes = [*num_layers * [width], _NUM_CLASSES]
  return [
      (rng.standard_normal(shape) / np.sqrt(shape[0])).astype(np.float32)
      for shape in itertools.pairwise(sizes)
  ]


def loss_fn(params: Sequence[Any], x: jax.Array, labels: jax.Array) -> Any:
  """Returns the mean cross entropy of a perceptron."""
  *hidden, last = params
  for w in hidden:
    x = jax.nn.relu(x @ w)
  losses = optax.softmax_cross_entropy_with_integer_labels(x @ last, labels)
  return jnp.mean(losses)


def facade_step(
    name: str, num_shards: int, batch: Sequence[np.ndarray]
) -> tuple[Callable[[], Any], list[int]]:
  """Returns a call of the façade's step, and a list that grows with traces."""
  traces = []
  with tf.Graph().as_default():
    params = [tf.Variable(p, name='w') for p in random_params(name)]
    global_step = tf.train.get_or_create_global_step()
    opt = facade.CrossShardOptimizer(tf.train.MomentumOptimizer(0.01, 0.9))

    def computation(x, labels):
      def loss():
        traces.append(1)
        return loss_fn(params, x, labels)

      opt.minimize(loss, global_step, params)

    @facade.function
    def step(x, labels):
      facade.shard(computation, [x, labels], num_shards)

  def call():
    step(*batch)
    return [p.value() for p in params]

  return call, traces


def functional_step(
    name: str, num_shards: int, batch: Sequence[np.ndarray]
) -> Callable[[], Any]:
  """Returns a call of the functional step."""
  mesh = jax.sharding.Mesh(np.array(jax.devices()[:num_shards]), ('shard',))
  tx = optax.chain(
      shard_transforms.cross_shard_sum('shard'), optax.sgd(0.01, momentum=0.9)
  )
  spec = jax.P('shard')

  @jax.jit
  @jax.shard_map(mesh=mesh, in_specs=(jax.P(), spec, spec), out_specs=jax.P())
  def step(carry, x, labels):
    params, state, global_step = carry
    grads = shard_transforms.value_and_grad(
        lambda params: loss_fn(params, x, labels) / num_shards, 'shard'
    )(params)[1]
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state, global_step + 1

  params = random_params(name)
  carry = [(params, tx.init(params), jnp.int32(0))]
  carry = jax.device_put(carry, jax.NamedSharding(mesh, jax.P()))

  def call():
    carry[0] = step(carry[0], *batch)
    return carry[0][0]

  return call


def row(name: str, num_shards: int) -> str:
  """Measures one model and returns its line of the table."""
  rng = np.random.default_rng(1)
  width = int(name.split('x')[1])
  batch = (
      rng.standard_normal([_ROWS.value, width], np.float32),
      rng.integers(_NUM_CLASSES, size=_ROWS.value),
  )
  by_facade, traces = facade_step(name, num_shards, batch)
  functional = functional_step(name, num_shards, batch)
  same = jax.tree.map(np.array_equal, by_facade(), functional())
  seconds = timing.seconds_in_turn([functional, by_facade] * 2, _REPEATS.value)
  reference, measured, again, _ = seconds
  milliseconds = 1e3 * np.median(seconds, 1)
  return (
      f'{name:8}{num_shards:6}{milliseconds[0]:11.2f}{milliseconds[1]:9.2f}  '
      f'{timing.ratio(measured, reference):^19}'
      f'{timing.ratio(again, reference):^19}'
      f'{len(traces):7}{"same" if all(same) else "DIFFER":>8}'
  )


def main(argv: Sequence[str]) -> None:
  """Prints the table, line by line as it is measured."""
  timing.begin(argv, max(map(int, _SHARDS.value)))
  print(
      f'{timing.setting(f"{_ROWS.value} rows")}\n'
      f'Medians of {_REPEATS.value} calls in milliseconds.\n\n'
      f'{"model":8}{"shards":>6}{"functional":>11}{"façade":>9}  '
      f'{"façade / func.":^19}{"func. / func.":^19}{"traces":>7}{"bits":>8}'
  )
  for name in _MODELS.value:
    for num_shards in map(int, _SHARDS.value):
      print(row(name, num_shards), flush=True)


if __name__ == '__main__':
  app.run(main)
