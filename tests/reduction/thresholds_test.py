"""Programs that differ by platform: what is packed, sorted or multiplied."""

import dataclasses
from unittest import mock

from absl.testing import parameterized
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import optax

import cases
import modes
import shard_transforms as st
from shard_transforms import contrib
from shard_transforms._src.base import axes as axes_lib
from shard_transforms.contrib import compression
from shard_transforms.contrib import reproducible

EXCHANGED = 'coordinate_median', 'trimmed_mean', 'majority_vote'
PACKED = {'tpu': ('shard_update', 'tree', *EXCHANGED), 'gpu': EXCHANGED}
PARAMS = [jnp.zeros(100, jnp.float32)] * 5
TRANSFORMATIONS = {
    'cross_shard_mean': st.cross_shard_mean(modes.AXIS),
    'shard_update': st.shard_update(optax.sgd(0.1), modes.AXIS),
    'coordinate_median': contrib.coordinate_median(modes.AXIS),
    'trimmed_mean': contrib.trimmed_mean(modes.AXIS, 1),
    'majority_vote': contrib.majority_vote(modes.AXIS),
    'compressed_mean': compression.compressed_mean(
        modes.AXIS, compression.quantize(8)
    ),
    'tree': reproducible.cross_shard_mean(modes.AXIS),
}


def _mesh_of(platform):
  """Returns a mesh over devices of a platform that need not be here."""
  mesh = modes.mesh().abstract_mesh
  device = dataclasses.replace(mesh.abstract_device, platform=platform)
  return jax.sharding.AbstractMesh(
      mesh.axis_sizes, mesh.axis_names, mesh.axis_types, abstract_device=device
  )


def _program(update, mesh, params):
  """Returns the text of the jaxpr of an update on shards."""
  mapped = jax.shard_map(
      update, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False
  )
  return str(jax.make_jaxpr(mapped)(params))


def _num_sent(program):
  names = 'psum', 'reduce_scatter', 'all_gather', 'all_to_all', 'ppermute'
  return sum(program.count(f'= {name}[') for name in names)


def _updated(tx):
  return lambda params: tx.update(params, tx.init(params), params)[0]


class ThresholdsTest(parameterized.TestCase):

  @cases.product(name=tuple(TRANSFORMATIONS), platform=tuple(PACKED))
  def test_packs_only_collectives_that_xla_does_not_combine(
      self, name, platform
  ):
    program = _program(
        _updated(TRANSFORMATIONS[name]), _mesh_of(platform), PARAMS
    )

    is_packed = name in PACKED[platform]
    self.assertEqual(_num_sent(program) < len(PARAMS), is_packed)

  @cases.parameters(('cpu', 0), ('gpu', 1))
  def test_median_uses_a_sorting_network_on_cpus(self, platform, num_sorts):
    update = _updated(TRANSFORMATIONS['coordinate_median'])

    program = _program(update, _mesh_of(platform), PARAMS[:1])

    self.assertEqual(program.count('= sort['), num_sorts)

  def test_adasum_handles_rows_one_by_one_only_on_cpus(self):
    update = _updated(contrib.adasum(modes.AXIS))

    cpu, gpu = (
        _program(update, _mesh_of(platform), PARAMS)
        for platform in ('cpu', 'gpu')
    )

    for program in cpu, gpu:
      self.assertEqual(program.count('= all_to_all['), 1)
    self.assertTrue(':f32[4,5,13] = mul' in gpu)
    self.assertFalse(':f32[4,5,13] = mul' in cpu)
    self.assertTrue(':f32[5,13] = mul' in cpu)

  def test_stacks_of_adasum_are_bounded_between_processes(self):
    update = _updated(contrib.adasum(modes.AXIS))
    shapes = 40 * [8] + 2 * [40_000]
    params = [jnp.zeros(shape, jnp.float32) for shape in shapes]

    with mock.patch.object(axes_lib, 'between_processes', return_value=True):
      program = _program(update, _mesh_of('cpu'), params)

    # A shard's parts of 32 and 8 small leaves, and of a large one.
    for shape in '32,1', '8,1', '1,5000':
      self.assertTrue(f':f32[{shape}] = mul' in program)
    self.assertFalse(':f32[2,5000] = mul' in program)

  @cases.parameters(('cpu', 2), ('tpu', 2), ('gpu', 4))
  def test_power_sgd_multiplies_outer_products_and_decomposes_together(
      self, platform, num_products
  ):
    tx = compression.power_sgd(modes.AXIS, 2)
    shapes = (64, 48), (64, 48), (32, 48)

    program = _program(
        _updated(tx), _mesh_of(platform), list(map(jnp.zeros, shapes))
    )

    self.assertEqual(program.count('= dot_general['), 3 * num_products)
    # One for each shape.
    self.assertEqual(program.count('name=qr'), 2)
