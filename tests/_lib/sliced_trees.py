"""Trees that are sliced over a mesh with two axes."""

import itertools

import jax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np

import modes

AXIS = modes.AXIS


def mesh():
  return jax.make_mesh((4, 2), (AXIS, 'model'))


def on_mesh(fn, specs, check_vma=True, out_specs=P()):
  """Maps a function of trees over a mesh of two axes."""

  def call(tree):
    tree = jax.tree.map(
        lambda x, spec: jax.device_put(x, NamedSharding(mesh(), spec)),
        tree,
        specs,
    )
    mapped = jax.shard_map(
        fn,
        mesh=mesh(),
        in_specs=(specs,),
        out_specs=out_specs,
        check_vma=check_vma,
    )
    return jax.jit(mapped)(tree)

  return call


def tree_of(dtype=np.float32):
  rng = np.random.default_rng(0)
  tree = {'a': (8, 3), 'b': (2, 4), 'c': (5,), 's': ()}
  return {k: np.asarray(rng.normal(size=v), dtype) for k, v in tree.items()}


def norm_of(tree):
  leaves = [np.ravel(x) for x in jax.tree.leaves(tree)]
  return np.linalg.norm(np.concatenate(leaves))


# Every mix of leaves that are whole or sliced over one axis, another, or both.
MIXES = [
    dict(a=a, b=b, c=P(), s=P())
    for a, b in itertools.product(
        (P(), P(AXIS), P('model'), P((AXIS, 'model')), P(None, None)),
        (P(), P(None, AXIS), P('model', AXIS)),
    )
]
