from absl.testing import parameterized
import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np

import cases
import modes
from shard_transforms import monitoring
from shard_transforms._src.base import axes as axes_lib
from shard_transforms._src.reduction import vmapped_collectives

AXIS = modes.AXIS
SHARDS, ELEMENTS = 8, 3
GROUPS = ((0, 3), (1, 2), (4, 5), (6, 7))
OF_SHARD = np.asarray([0, 1, 1, 0, 2, 2, 3, 3])
on_mesh = vmapped_collectives.on_mesh

# Each collective of rows [SHARDS, ELEMENTS] of each shard, what it returns for
# [SHARDS, SHARDS, ELEMENTS], and the number of rows that a device sends.
COLLECTIVES = {
    'psum': (
        lambda x: on_mesh(lax.psum, x, AXIS, axis_index_groups=GROUPS),
        lambda x: x[np.asarray(GROUPS)].sum(1)[OF_SHARD],
        8,
    ),
    'psum_scatter': (
        lambda x: on_mesh(lax.psum_scatter, x, AXIS),
        lambda x: x.sum(0),
        7,
    ),
    'all_gather': (
        lambda x: on_mesh(lax.all_gather, x[0], AXIS, axis=0, is_same=True),
        lambda x: np.stack([x[:, 0]] * SHARDS),
        7,
    ),
    'all_to_all': (
        lambda x: on_mesh(lax.all_to_all, x, AXIS, 0, 0),
        lambda x: np.swapaxes(x, 0, 1),
        7,
    ),
}


# Those that JAX has under `vmap` without a mesh, too.
ALONE = {name: fn for name, (fn, _, _) in COLLECTIVES.items() if name != 'psum'}
ALONE['psum'] = lambda x: on_mesh(lax.psum, x, AXIS, is_same=True)

WITHIN = {
    'itself': lambda fn: fn,
    'jit': jax.jit,
    'scan': lambda fn: lambda x: lax.map(fn, x[None])[0],
    'cond': lambda fn: lambda x: lax.cond(x[0, 0] < 9, fn, jnp.zeros_like, x),
    'checkpoint': jax.checkpoint,
}


def make_rows(*lead):
  shape = (*lead, SHARDS, SHARDS, ELEMENTS)
  return np.random.default_rng(0).normal(size=shape).astype(np.float32)


def vmap(fn, axis=AXIS, **kwargs):
  return jax.vmap(fn, axis_name=axis, spmd_axis_name=axis, **kwargs)


def place(x, *spec, names=(AXIS,), sizes=(SHARDS,)):
  kinds = (jax.sharding.AxisType.Auto,) * len(names)
  mesh = jax.make_mesh(sizes, names, kinds)
  return jax.device_put(x, NamedSharding(mesh, P(*spec)))


class CollectivesTest(parameterized.TestCase):

  @cases.parameters(*COLLECTIVES)
  def test_are_those_of_the_mesh(self, name):
    fn, expected, num_rows = COLLECTIVES[name]
    rows = make_rows()
    x = place(rows, AXIS)
    mapped = jax.jit(vmap(fn))

    report = monitoring.wire_report(mapped, x, compiled=True)

    np.testing.assert_allclose(mapped(x), expected(rows), rtol=1e-5)
    [sent] = report.collectives
    self.assertEqual(sent.primitive, name.replace('psum_s', 'reduce_s'))
    self.assertEqual(sent.sent_bytes, num_rows * ELEMENTS * 4)

  @cases.product(name=COLLECTIVES, where=('inside', 'outside'))
  def test_of_another_vmap(self, name, where):
    fn, expected, _ = COLLECTIVES[name]
    rows = make_rows(2)
    if where == 'inside':
      mapped = vmap(jax.vmap(fn, -1, -1))
      x = place(rows.transpose(1, 2, 3, 0), AXIS)
      result = np.asarray(jax.jit(mapped)(x))
      found = np.moveaxis(result, -1, 0)
    else:
      found = jax.jit(jax.vmap(vmap(fn)))(place(rows, None, AXIS))

    np.testing.assert_allclose(found, np.stack([*map(expected, rows)]), 1e-5)

  @cases.parameters(*COLLECTIVES)
  def test_of_what_is_the_same_for_all_shards(self, name):
    fn, expected, _ = COLLECTIVES[name]
    rows = make_rows()

    def of_first(x):
      del x
      return fn(jnp.asarray(rows[0]))

    x = place(rows, AXIS)
    with jax.set_mesh(x.sharding.mesh):
      found = jax.jit(vmap(of_first))(x)

    rows[:] = rows[0]
    np.testing.assert_allclose(found, expected(rows), rtol=1e-5)

  @cases.product(
      name=ALONE,
      where=('inside', 'outside', 'twice', 'between'),
      of=(
          'itself',
          cases.Repeated('jit'),
          'scan',
          cases.Repeated('checkpoint'),
      ),
  )
  def test_has_the_gradient_of_vmap_without_a_mesh(self, name, where, of):
    fn = ALONE[name]

    def loss(x):
      return jnp.sum((1 + lax.axis_index(AXIS)) * WITHIN[of](fn)(x**2) ** 2)

    def square_of_grad(x):
      return jnp.sum(jax.grad(loss)(x) ** 2)

    def of_sum(fn):
      return jax.grad(lambda x: fn(x).sum())

    mapped = {
        'inside': vmap(jax.grad(loss)),
        'outside': of_sum(vmap(loss)),
        'twice': of_sum(vmap(square_of_grad)),
        'between': lambda x: vmap(of_sum(jax.vmap(loss)))(x[:, None])[:, 0],
    }[where]
    rows = make_rows()

    found = jax.jit(mapped)(place(rows, AXIS))

    np.testing.assert_allclose(found, mapped(rows), rtol=1e-4)

  @cases.parameters(*WITHIN)
  def test_inside_other_transformations(self, name):
    fn, expected, _ = COLLECTIVES['all_to_all']
    rows = make_rows()

    found = jax.jit(vmap(WITHIN[name](fn)))(place(rows, AXIS))

    np.testing.assert_array_equal(found, expected(rows))

  def test_outside_of_jit(self):
    fn, expected, _ = COLLECTIVES['psum']
    rows = make_rows()

    np.testing.assert_allclose(
        vmap(fn)(place(rows, AXIS)), expected(rows), rtol=1e-5
    )


AXES = 'host', 'core'


class TwoAxesTest(parameterized.TestCase):

  def run_over_two(self, fn, x, spec, **kwargs):
    x = place(x, *spec, names=AXES, sizes=(2, 4))
    outer, inner = kwargs.pop('out_axes', (0, 0))
    outer_in, inner_in = kwargs.pop('in_axes', (0, 0))
    mapped = vmap(fn, 'core', in_axes=inner_in, out_axes=inner)
    mapped = vmap(mapped, 'host', in_axes=outer_in, out_axes=outer, **kwargs)
    mapped = jax.jit(mapped)
    report = monitoring.wire_report(mapped, x, compiled=True)
    return np.asarray(mapped(x)), report

  def test_sums_over_both_at_once(self):
    x = np.arange(24.0, dtype=np.float32).reshape(2, 4, 3)

    found, report = self.run_over_two(
        lambda x: on_mesh(lax.psum, x, AXES, is_same=True),
        x,
        AXES,
        # It is the same on all shards for `vmap`, too.
        out_axes=(None, None),
    )

    np.testing.assert_array_equal(found, x.sum((0, 1)))
    [sent] = report.collectives
    self.assertEqual(sent.sent_bytes, 2 * 7 / 8 * 12)

  @cases.parameters(*AXES)
  def test_gathers_over_one(self, axis):
    x = np.arange(24.0, dtype=np.float32).reshape(2, 4, 3)

    found, report = self.run_over_two(
        lambda x: on_mesh(lax.all_gather, x, axis, is_same=True),
        x,
        AXES,
        out_axes=(None, 0) if axis == 'host' else (0, None),
    )

    expected = np.swapaxes(x, 0, 1) if axis == 'host' else x
    np.testing.assert_array_equal(found, expected)
    self.assertEqual(report.total_bytes, 12 if axis == 'host' else 36)

  def test_is_the_same_where_its_argument_is(self):
    x = np.arange(12.0, dtype=np.float32).reshape(4, 3)

    found, report = self.run_over_two(
        lambda x: on_mesh(lax.psum_scatter, jnp.stack([x] * 4), 'core'),
        x,
        ('core',),
        in_axes=(None, 0),
        out_axes=(None, 0),
        axis_size=2,
    )

    np.testing.assert_array_equal(found, np.stack([x.sum(0)] * 4))
    self.assertEqual(report.total_bytes, 36)

  @cases.parameters('inside', 'between', 'outside')
  def test_has_the_gradient_of_vmap_without_a_mesh(self, where):
    def loss(x):
      total = on_mesh(lax.psum, x**2, AXES, is_same=True)
      row = on_mesh(lax.all_gather, x**2, 'core', is_same=True)
      own = 1 + lax.axis_index('host') + 2 * lax.axis_index('core')
      return jnp.sum(own * (total[None] + row) ** 2)

    def of_sum(fn):
      return jax.grad(lambda x: fn(x).sum())

    mapped = {
        'inside': vmap(vmap(jax.grad(loss), 'core'), 'host'),
        'between': vmap(of_sum(vmap(loss, 'core')), 'host'),
        'outside': of_sum(vmap(vmap(loss, 'core'), 'host')),
    }[where]
    x = np.random.default_rng(0).normal(size=(2, 4, 3)).astype(np.float32)

    found = jax.jit(mapped)(place(x, *AXES, names=AXES, sizes=(2, 4)))

    np.testing.assert_allclose(found, mapped(x), rtol=1e-4)

  def test_inside_a_vmap_of_another_axis_without_its_name(self):
    x = np.arange(96.0, dtype=np.float32).reshape(2, 4, 4, 3)
    mapped = vmap(lambda x: on_mesh(lax.psum_scatter, x, 'core'), 'core')
    mapped = jax.jit(jax.vmap(mapped, spmd_axis_name='host'))
    placed = place(x, *AXES, names=AXES, sizes=(2, 4))

    np.testing.assert_array_equal(mapped(placed), x.sum(1))


class OtherModesTest(parameterized.TestCase):

  @cases.parameters('vmap', 'pmap', 'shard_map', 'spmd_vmap')
  def test_leave_the_collective_to_jax(self, mode):
    found = []

    def fn(_, x):
      # With a mesh, there are two shards on a device.
      found.append(axes_lib.vmapped_mesh(x, (AXIS,)))
      return on_mesh(lax.psum_scatter, x, AXIS)

    rows = make_rows()
    sums = modes.map_shards(mode, fn)(0.0, rows)

    self.assertEqual(set(found), {None})
    np.testing.assert_allclose(sums, rows.sum(0), rtol=1e-5)


class OnEachShardTest(parameterized.TestCase):

  @cases.parameters(('core',), AXES)
  def test_sends_nothing(self, *axes):
    def fn(x):
      return vmapped_collectives.on_each_shard(
          lambda x: lax.top_k(x, 2)[0], axes, x
      )

    rows = make_rows().reshape(2, 4, SHARDS, ELEMENTS)
    x = place(rows, *AXES, names=AXES, sizes=(2, 4))
    mapped = jax.jit(vmap(vmap(fn, 'core'), 'host'))

    report = monitoring.wire_report(mapped, x, compiled=True)

    self.assertEqual(report.total_bytes, 0)
    np.testing.assert_array_equal(mapped(x), -np.sort(-rows)[..., :2])
