"""Records what TensorFlow 1.15 computes for the originals of `programs`.

Run it by hand, with Python 3.7 and TensorFlow 1.15.5. The tests do not.
`CrossShardOptimizer` has no kernel on CPUs for its sum: each shard is a graph
with a session in a thread, and the sum is made by NumPy, in the order of the
shards. Towers and stale gradients are TensorFlow's own.
"""

import concurrent.futures
import json
import pathlib
import sys
import threading

import numpy as np
import tensorflow as tf
from tensorflow.contrib.tpu.python.tpu import tpu_function
from tensorflow.python.tpu.ops import tpu_ops

FOLDER = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(FOLDER.parent))

from legacy import ports  # noqa: E402
from legacy import runs  # noqa: E402

WRITES = 'Assign', 'ResourceApply'
TRAIN = tf.estimator.ModeKeys.TRAIN


class Sum:
  """Sums what all shards hand in under one name; each waits for the others."""

  def __init__(self):
    self._barrier = threading.Barrier(runs.NUM_SHARDS)
    self._parts = [None] * runs.NUM_SHARDS

  def __call__(self, shard, part):
    self._parts[shard] = part
    self._barrier.wait(60)
    total = self._parts[0].copy()
    for other in self._parts[1:]:
      total += other
    self._barrier.wait(60)
    return total


def build_shard(program, params, shard, sums):
  """Returns a shard's graph, its batch and its step."""
  counted = iter(range(1000))

  def cross_replica_sum(x, group_assignment=None, name=None):
    del group_assignment, name
    total = sums[next(counted)]
    out = tf.py_func(lambda part: total(shard, part), [x], x.dtype)
    out.set_shape(x.shape)
    return out

  tpu_ops.cross_replica_sum = cross_replica_sum
  with tf.Graph().as_default() as graph:
    shapes = (runs.ROWS_OF_SHARD, 5), (runs.ROWS_OF_SHARD, 2)
    batch = [tf.placeholder(tf.float32, shape) for shape in shapes]
    tf.get_variable_scope().set_use_resource(True)
    tf.train.get_or_create_global_step()  # As an estimator does.
    with tpu_function.tpu_shard_context(runs.NUM_SHARDS):
      spec = program.model_fn(batch[0], batch[1], TRAIN, params)
    read_before_writing(graph)
    return graph, batch, spec.train_op


def read_before_writing(graph):
  """Makes each assignment wait for the reads in lines before it, as a TPU."""
  reads = {}
  initializers = {v.initializer for v in tf.global_variables()}
  for op in graph.get_operations():
    handles = [x for x in op.inputs if x.dtype == tf.resource]
    context = op._get_control_flow_context()
    for handle in handles:
      earlier = reads.setdefault((handle.name, context), [])
      if op.type == 'ReadVariableOp':
        earlier.append(op)
      elif op not in initializers and op.type.startswith(WRITES):
        op._add_control_inputs(earlier)


def train_shards(program, params):
  """Yields the values of all variables in all shards, after each step."""
  sums = [Sum() for _ in range(100)]
  built = [
      build_shard(program, params, shard, sums)
      for shard in range(runs.NUM_SHARDS)
  ]
  config = tf.ConfigProto(
      inter_op_parallelism_threads=24, use_per_session_threads=True
  )
  sessions = [tf.Session(graph=graph, config=config) for graph, _, _ in built]
  for session in sessions:
    with session.graph.as_default():
      session.run(tf.global_variables_initializer())
  for x, y in runs.batches():

    def step(shard, x=x, y=y):
      _, batch, train_op = built[shard]
      rows = slice(shard * runs.ROWS_OF_SHARD, (shard + 1) * runs.ROWS_OF_SHARD)
      sessions[shard].run(train_op, {batch[0]: x[rows], batch[1]: y[rows]})

    with concurrent.futures.ThreadPoolExecutor(runs.NUM_SHARDS) as threads:
      list(threads.map(step, range(runs.NUM_SHARDS)))
    yield [values_in(session) for session in sessions]


def train_alone(program, params, num_towers=1):
  """Yields the values of all variables, after each step."""
  with tf.Graph().as_default() as graph:
    rows = runs.NUM_SHARDS * runs.ROWS_OF_SHARD
    shapes = (rows, 5), (rows, 2)
    batch = [tf.placeholder(tf.float32, shape) for shape in shapes]
    model_fn = program.model_fn
    if num_towers > 1:
      model_fn = tf.contrib.estimator.replicate_model_fn(
          model_fn, devices=['/device:CPU:%d' % i for i in range(num_towers)]
      )
    config = tf.estimator.RunConfig()
    arguments = {'config': config} if num_towers > 1 else {}
    spec = model_fn(batch[0], batch[1], TRAIN, params, **arguments)
    config = tf.ConfigProto(device_count={'CPU': num_towers})
    with tf.Session(graph=graph, config=config) as session:
      session.run(tf.global_variables_initializer())
      session.run(tf.local_variables_initializer())
      for x, y in runs.batches():
        session.run(spec.train_op, {batch[0]: x, batch[1]: y})
        yield [values_in(session)]


def values_in(session):
  """Returns the values of all variables, by name."""
  with session.graph.as_default():
    return session.run({v.op.name: v for v in tf.global_variables()})


def merged(shards, statistics):
  """Returns the values that all shards share, and the mean of the others."""
  values = {}
  for name in shards[0]:
    parts = [shard[name] for shard in shards]
    if name not in statistics:
      for part in parts[1:]:
        np.testing.assert_array_equal(part, parts[0], name)
    # A mean of integers would become a float.
    values[name] = np.mean(parts, axis=0) if name in statistics else parts[0]
  return values


def as_json(values):
  """Returns lists of the shortest decimals that give the same float32."""
  return {
      name: (
          np.asarray(value).tolist()
          if np.asarray(value).dtype.kind == 'i'
          else [float(str(np.float32(x))) for x in np.ravel(value)]
      )
      for name, value in sorted(values.items())
  }


def main(names):
  """Records the programs of these names, all by default."""
  for name in names or runs.PROGRAMS:
    kind, _, statistics = runs.PROGRAMS[name]
    program = ports.module(name, ports.original)
    params = {'initial': runs.initial_values(name)}
    if kind == 'shards':
      steps = train_shards(program, params)
    else:
      towers = runs.NUM_SHARDS if kind == 'towers' else 1
      steps = train_alone(program, params, towers)
    merges = [merged(shards, statistics) for shards in steps]
    trained = [
        {key: values[key] for key in params['initial']} for values in merges
    ]
    lines = [json.dumps(as_json(values)) for values in [*trained, merges[-1]]]
    path = FOLDER / 'recorded' / (name + '.json')
    path.write_text('[\n' + ',\n'.join(lines) + '\n]\n')
    moved = {
        key: float(np.abs(trained[-1][key] - value).max())
        for key, value in params['initial'].items()
    }
    print(name, moved, sorted(merges[-1]))


if __name__ == '__main__':
  main(sys.argv[1:])
