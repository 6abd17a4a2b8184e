"""Runs a TensorFlow 1 training script on JAX, with old lines next to new ones.

Handwritten digits, a `CrossShardOptimizer`, and clipping between
`compute_gradients` and `apply_gradients`. Training over shards is saved
in the middle and resumed in another graph, where it must end with the same
bits. Without clipping, which acts on single shards, it must equal one device.
"""

from collections.abc import Sequence
import pathlib
from typing import Any, NamedTuple

from absl import app
from absl import flags
import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
import sklearn.datasets
import tqdm

from shard_transforms import facade
from shard_transforms.facade import tf

NUM_SHARDS = 8
BATCH_SIZE = 256
STEPS = 300
CLIP_NORM = 0.1
NEVER_CLIP = 1e6
MIN_ACCURACY = 0.97
MAX_DIFFERENCE = 1e-5

# TF1: tf.app.flags.DEFINE_string('output_dir', 'digits_out', '...')
_OUTPUT_DIR = flags.DEFINE_string(
    'output_dir', 'digits_out', 'Folder that the checkpoint is written to.'
)


class Run(NamedTuple):
  """The results of a run."""

  name: str
  values: dict[str, np.ndarray]
  accuracy: float


def load_data() -> tuple[list[np.ndarray], list[np.ndarray]]:
  """Returns images [n, 64] and labels [n] to train on, and to test."""
  images, labels = sklearn.datasets.load_digits(return_X_y=True)
  images = np.asarray(images, np.float32) / 8 - 1
  labels = np.asarray(labels, np.int32)
  order = np.random.default_rng(0).permutation(len(labels))
  test, train = np.split(order, [len(order) // 5])
  return [images[train], labels[train]], [images[test], labels[test]]


def build(num_shards: int, clip_norm: float) -> tuple[Any, Any, Any]:
  """Returns the optimizer, the training step and the model of a new graph."""
  # TF1: w_0 = tf.Variable(tf.random_normal([64, 96], stddev=0.1), name='w_0')
  # TF1: b_0 = tf.Variable(tf.zeros([96]), name='b_0')  # And so on.
  keys = jax.random.split(jax.random.key(0))
  w_0 = tf.Variable(0.1 * jax.random.normal(keys[0], [64, 96]), name='w_0')
  b_0 = tf.Variable(jnp.zeros([96]), name='b_0')
  w_1 = tf.Variable(0.1 * jax.random.normal(keys[1], [96, 10]), name='w_1')
  b_1 = tf.Variable(jnp.zeros([10]), name='b_1')

  # TF1: logits = tf.matmul(tf.tanh(tf.matmul(images, w_0) + b_0), w_1) + b_1
  @facade.function
  def predict(images):
    return jnp.tanh(images @ w_0 + b_0) @ w_1 + b_1

  # TF1: opt = tf.contrib.tpu.CrossShardOptimizer(
  # TF1:     tf.train.MomentumOptimizer(0.1, 0.9))
  # TF1: global_step = tf.train.get_or_create_global_step()
  opt = facade.CrossShardOptimizer(tf.train.MomentumOptimizer(0.1, 0.9))
  global_step = tf.train.get_or_create_global_step()

  # TF1: loss = tf.losses.sparse_softmax_cross_entropy(labels, logits)
  # TF1: grads, tvars = zip(*opt.compute_gradients(loss))
  # TF1: grads, norm = tf.clip_by_global_norm(grads, clip_norm)
  # TF1: train_op = opt.apply_gradients(zip(grads, tvars), global_step)
  def computation(images, labels):
    def loss():
      return optax.softmax_cross_entropy_with_integer_labels(
          predict(images), labels
      ).mean()

    grads, tvars = zip(*opt.compute_gradients(loss), strict=True)
    grads, norm = tf.clip_by_global_norm(grads, clip_norm)
    before = loss()  # After the update, it would give the new loss.
    opt.apply_gradients(zip(grads, tvars, strict=True), global_step)
    return before, norm

  # TF1: step = tf.contrib.tpu.shard(
  # TF1:     computation, [images, labels], num_shards=8)
  @facade.function
  def step(images, labels):
    return facade.shard(computation, [images, labels], num_shards=num_shards)

  return opt, step, predict


def batch_of(step: int, data: list[np.ndarray]) -> list[np.ndarray]:
  """Returns the batch of a step, the same in every run."""
  rng = np.random.default_rng([0, step])
  chosen = rng.choice(len(data[0]), BATCH_SIZE, replace=False)
  return [x[chosen] for x in data]


def train(
    name: str,
    num_shards: int,
    clip_norm: float,
    save_to: pathlib.Path | None = None,
    resume_from: pathlib.Path | None = None,
) -> Run:
  """Trains in a new graph; saves in the middle, or resumes from there."""
  data, (images, labels) = load_data()
  # TF1: with tf.Graph().as_default(), tf.Session() as sess:
  with tf.Graph().as_default():
    opt, step, predict = build(num_shards, clip_norm)
    # TF1: tf.train.Saver().restore(sess, path)
    step.build(*batch_of(0, data))  # Creates the slots to restore.
    if resume_from is not None:
      values = facade.get_values(tf.global_variables())
      values = flax.serialization.from_bytes(values, resume_from.read_bytes())
      facade.set_values(tf.global_variables(), values)

    # TF1: sess.run([train_op, loss, norm], {images: ..., labels: ...})
    start = int(tf.train.get_or_create_global_step())
    bar = tqdm.trange(start, STEPS, desc=name)
    for i in bar:
      loss, norm = step(*batch_of(i, data))
      # Virtual devices can hang with many calls in flight: wait for each.
      metrics = f'loss {np.mean(loss):.3f}, norm {np.mean(norm):.3f}'
      bar.set_postfix_str(metrics, refresh=False)
      # TF1: tf.train.Saver().save(sess, path)
      if save_to is not None and i + 1 == STEPS // 2:
        values = facade.get_values(tf.global_variables())
        save_to.write_bytes(flax.serialization.to_bytes(values))

    # TF1: opt.get_slot(var, 'momentum')
    if save_to is not None:
      for var in tf.trainable_variables():
        for slot_name in opt.get_slot_names():
          slot = opt.get_slot(var, slot_name)
          norm = jnp.linalg.norm(slot.value())
          print(f'{slot.name:16}{slot.shape!s:>9}  norm {norm:.6f}')
    values = jax.device_get(facade.get_values(tf.global_variables()))
    accuracy = np.mean(predict(images).argmax(axis=-1) == labels)
  return Run(name, values, float(accuracy))


def main(argv: Sequence[str]) -> str | None:
  """Trains in four ways that agree; returns what went wrong, if anything."""
  if len(argv) > 1:
    raise app.UsageError(f'There are flags only, got {argv[1:]}.')
  # A CPU can pretend to be eight devices, which few accelerators have.
  jax.config.update('jax_platforms', 'cpu')
  jax.config.update('jax_num_cpu_devices', NUM_SHARDS)
  folder = pathlib.Path(_OUTPUT_DIR.value)
  folder.mkdir(parents=True, exist_ok=True)
  saved = folder / 'legacy_digits.msgpack'

  a = train('(a) 8 shards', NUM_SHARDS, CLIP_NORM, save_to=saved)
  b = train('(b) resumed', NUM_SHARDS, CLIP_NORM, resume_from=saved)
  c = train('(c) 8 shards, never clipped', NUM_SHARDS, NEVER_CLIP)
  d = train('(d) 1 shard, never clipped', 1, NEVER_CLIP)
  same = all(b.values[k].tobytes() == a.values[k].tobytes() for k in a.values)
  apart = np.max([abs(d.values[k] - c.values[k]).max() for k in c.values])
  print('{:30}{:>13}   {}'.format('', 'test accuracy', 'difference'))
  bits = 'bit-identical to (a)' if same else 'differs from (a)'
  notes = '-', bits, '-', f'{apart:.1e} from (c)'
  for run, note in zip((a, b, c, d), notes, strict=True):
    print(f'{run.name:30}{run.accuracy:>13.2%}   {note}')
  print(f'Checkpoint of step {STEPS // 2}: {saved}')
  if not same or not apart <= MAX_DIFFERENCE:
    return f'FAILED: (b) must equal (a), and (d) (c) to {MAX_DIFFERENCE:g}.'
  if min(run.accuracy for run in (a, b, c, d)) < MIN_ACCURACY:
    return f'FAILED: the test accuracy must be at least {MIN_ACCURACY:.0%}.'
  return None


if __name__ == '__main__':
  app.run(main)
