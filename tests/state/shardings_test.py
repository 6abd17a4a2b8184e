"""Tests of `state_shardings`: divided state under plain `jit`."""

import math
import warnings

from absl.testing import parameterized
import chex
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np
import optax

import cases
import shard_transforms as st
from shard_transforms import monitoring

AUTO = jax.sharding.AxisType.Auto
EXPLICIT = jax.sharding.AxisType.Explicit
SPECS = {'w': P(None, 'model'), 'v': P('model'), 'k': P(), 'b': P()}


def make_mesh(sizes=(4, 2), kind=AUTO):
  devices = jax.devices()[: math.prod(sizes)]
  return jax.make_mesh(sizes, ('data', 'model'), (kind,) * 2, devices=devices)


def make_params(mesh=None):
  """Returns parameters, placed on a mesh if there is one."""
  params = {
      'w': np.random.default_rng(1).normal(size=(16, 8)),
      'v': np.ones(8),
      'k': np.ones((3, 4, 5)),
      'b': np.ones(3),
  }
  params = jax.tree.map(np.float32, params)
  if mesh is None:
    return params
  return {
      name: jax.device_put(x, NamedSharding(mesh, SPECS[name]))
      for name, x in params.items()
  }


class StateShardingsTest(parameterized.TestCase):

  @cases.parameters(
      # The first unsharded dimension, or else one that is already sharded.
      ((8, 8), P('model'), P('model', 'data')),
      ((3, 8, 4), P(None, 'model'), P(None, 'model', 'data')),
      ((3, 8, 5), P(None, 'model'), P(None, ('model', 'data'), None)),
      ((16, 8), P(None, 'model'), P('data', 'model')),
      ((8,), P('model'), P(('model', 'data'))),
      ((3, 4, 5), P(), P(None, 'data', None)),
      # Leaves that are already divided over the axis.
      ((4, 8), P(None, 'data'), P(None, 'data')),
      # 4 elements cannot be divided over 4 x 2 devices.
      ((4,), P('model'), P('model')),
      ((0,), P(), P(None)),
      ((), P(), P()),
  )
  def test_divides_the_first_divisible_dimension(self, shape, spec, expected):
    mesh = make_mesh()
    param = jax.device_put(jnp.ones(shape), NamedSharding(mesh, spec))

    shardings = st.state_shardings(
        optax.adam(0.1), param, mesh, on_replicated='ignore'
    )

    self.assertEqual(shardings[0].mu.spec, expected)
    self.assertEqual(shardings[0].count.spec, P())

  def test_warning_names_statistics_shaped_unlike_parameters(self):
    mesh = make_mesh()

    with self.assertWarnsRegex(UserWarning, r"v_row\['w'\] float32\[8\]"):
      st.state_shardings(
          optax.adafactor(0.1, min_dim_size_to_factor=4),
          {'w': make_params(mesh)['w']},
          mesh,
      )

  def test_each_device_keeps_and_computes_one_part(self):
    mesh = jax.make_mesh((8,), ('data',), (AUTO,))
    tx = optax.adam(0.1)
    params = jax.device_put(
        {'w': jnp.ones((512, 128)), 'v': jnp.ones(2048)},
        NamedSharding(mesh, P()),
    )
    shardings = st.state_shardings(tx, params, mesh, on_replicated='raise')

    init = jax.jit(tx.init, out_shardings=shardings).lower(params).compile()
    state = init(params)

    whole = 2 * sum(x.nbytes for x in jax.tree.leaves(params))
    memory = init.memory_analysis()
    held = memory.output_size_in_bytes + memory.temp_size_in_bytes
    part = sum(
        x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(state)
    )
    self.assertLessEqual(held, whole * 1.01 / 8)
    self.assertLessEqual(part, whole * 1.01 / 8)

  def test_no_step_gathers_the_state(self):
    mesh = jax.make_mesh((8,), ('data',), (AUTO,))
    tx = optax.adam(0.1)
    params = {'w': jax.device_put(jnp.ones((16, 8)), NamedSharding(mesh, P()))}
    shardings = st.state_shardings(tx, params, mesh)
    state = jax.jit(tx.init, out_shardings=shardings)(params)

    def step(params, state, x):
      grads = jax.grad(lambda p: jnp.sum((x @ p['w']) ** 2))(params)
      updates, state = tx.update(grads, state, params)
      return optax.apply_updates(params, updates), state

    x = jax.device_put(jnp.ones((8, 16)), NamedSharding(mesh, P('data')))
    placed = jax.tree.map(lambda p: p.sharding, params), shardings
    report = monitoring.communication_report(
        jax.jit(step, out_shardings=placed), params, state, x, compiled=True
    )

    gathered = [c for c in report.collectives if c.primitive == 'all_gather']
    # The updates or the parameters are gathered once, and no moment is.
    self.assertLen(gathered, 1)

  @cases.parameters(
      (optax.contrib.muon(0.1),),
      (optax.adafactor(0.1, min_dim_size_to_factor=4),),
      fast='partition',
  )
  def test_trains_like_a_replicated_state(self, tx):
    mesh = make_mesh()
    params = make_params(mesh)
    shardings = st.state_shardings(tx, params, mesh, on_replicated='ignore')

    def step(params, state):
      grads = jax.tree.map(jnp.cos, params)
      updates, state = tx.update(grads, state, params)
      return optax.apply_updates(params, updates), state

    def trained(params, shardings=None):
      state = jax.jit(tx.init, out_shardings=shardings)(params)
      places = shardings and (
          jax.tree.map(lambda p: p.sharding, params),
          shardings,
      )
      for _ in range(3):
        params, state = jax.jit(step, out_shardings=places)(params, state)
      return jax.device_get((params, state))

    found, expected = trained(params, shardings), trained(make_params())
    chex.assert_trees_all_close(found, expected, rtol=1e-5, atol=1e-6)

  @cases.parameters(
      ((8, 12, 16), 2, P('data', None, None)),
      ((6, 12, 16), 2, P(None, None, None)),
      ((6, 12, 16), 1, P(None, 'data', None)),
      ((12, 16), 2, P(None, None)),
      ((16,), 2, P('data')),
      ((), 0, P()),
  )
  def test_keeps_the_last_dimensions_whole(self, shape, whole_dims, expected):
    params = {'w': jnp.ones(shape), 'other': jnp.ones(8)}

    shardings = st.state_shardings(
        optax.trace(0.9),
        params,
        make_mesh(),
        on_replicated='ignore',
        whole_dims=whole_dims,
    )

    self.assertEqual(P(*shardings.trace['w'].spec), expected)

  def test_warning_names_divided_matrices_that_the_optimizer_multiplies(self):
    numbers = optax.contrib.MuonDimensionNumbers(1, 2)
    muon = optax.contrib.muon(
        0.1,
        muon_weight_dimension_numbers=lambda p: jax.tree.map(
            lambda x: numbers if x.ndim > 2 else None, p
        ),
    )
    params = {'w': np.ones((6, 12, 16), 'f'), 'v': np.ones((8, 20), 'f')}

    def told(shape, **kwargs):
      stacked = params | {'w': np.ones(shape, 'f')}
      with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter('always')
        st.state_shardings(muon, stacked, make_mesh(), **kwargs)
      return ' '.join(str(warning.message) for warning in found)

    self.assertRegex(
        told((6, 12, 16)),
        r"multiplies .* divided over 'data', .*mu\['w'\]\. .* 4,608 bytes",
    )
    self.assertNotIn('multiplies', told((6, 12, 16), on_replicated='ignore'))
    self.assertNotIn('multiplies', told((8, 12, 16), whole_dims=2))

  def test_finds_the_leaves_of_parameters_in_a_tree_of_labels(self):
    numbers = optax.contrib.MuonDimensionNumbers(1, 2)
    params = {'w': jnp.ones((8, 12, 16)), 'v': jnp.ones((8, 20))}

    found = [
        st.state_shardings(
            optax.contrib.muon(0.1, muon_weight_dimension_numbers=labels),
            params,
            make_mesh(),
            on_replicated='ignore',
            whole_dims=2,
        )
        for labels in ({'w': numbers, 'v': None}, lambda params: numbers)
    ]

    states = [x.inner_states['muon'].inner_state[0].mu['w'] for x in found]
    self.assertEqual([x.spec for x in states], [P('data', None, None)] * 2)

  def test_accepts_abstract_parameters(self):
    mesh = make_mesh()
    params = make_params(mesh)
    abstract = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding),
        params,
    )

    found, expected = (
        st.state_shardings(optax.adam(0.1), given, mesh, on_replicated='ignore')
        for given in (abstract, params)
    )

    self.assertEqual(found, expected)

  def test_explicit_axes_train_as_one_device(self):
    mesh = make_mesh(kind=EXPLICIT)
    tx = optax.adam(0.1)
    with jax.set_mesh(mesh):
      params = {'w': jax.device_put(jnp.ones((16, 8)), P(None, 'model'))}
      x = jax.device_put(jnp.arange(64.0).reshape(4, 16) / 64, P('data'))
      shardings = st.state_shardings(tx, params, mesh)
      specs = jax.tree.map(lambda sharding: sharding.spec, shardings)
      update = jax.sharding.auto_axes(
          tx.update, out_sharding=(st.specs_of(params), specs)
      )

      def loss(params, x):
        return jnp.mean((x @ params['w']) ** 2)

      @jax.jit
      def step(params, state):
        updates, state = update(jax.grad(loss)(params, x), state, params)
        return optax.apply_updates(params, updates), state

      state = jax.jit(tx.init, out_shardings=shardings)(params)
      alone, of_alone = jax.device_get((params, tx.init(params)))
      for _ in range(3):
        params, state = jax.block_until_ready(step(params, state))

    x = np.asarray(x)
    for _ in range(3):
      updates, of_alone = tx.update(jax.grad(loss)(alone, x), of_alone)
      alone = optax.apply_updates(alone, updates)
    chex.assert_trees_all_close(
        jax.device_get((params, state)),
        jax.device_get((alone, of_alone)),
        rtol=1e-5,
    )
    self.assertEqual(params['w'].sharding.spec, P(None, 'model'))
    self.assertEqual(state[0].mu['w'].sharding.spec, P('data', 'model'))

  def test_warning_names_replicated_leaves_and_their_bytes(self):
    mesh = make_mesh()
    args = optax.adam(0.1), make_params(mesh), mesh

    with self.assertWarnsRegex(
        UserWarning,
        r"2 leaves .* 24 of .* bytes, .*\[0\].mu\['b'\] float32\[3\]",
    ):
      st.state_shardings(*args)
    with self.assertRaisesRegex(ValueError, r"2 leaves .* over 'data'"):
      st.state_shardings(*args, on_replicated='raise')

  @cases.parameters(
      # Both dimensions are used, and neither can be divided any further.
      ((2, 2), P('model', 'other')),
      ((2,), P('model')),
      ((3, 5), P()),
  )
  def test_refuses_an_axis_that_divides_no_leaf(self, shape, spec):
    mesh = jax.make_mesh((2,) * 3, ('data', 'model', 'other'), (AUTO,) * 3)
    w = jax.device_put(jnp.ones(shape), NamedSharding(mesh, spec))
    args = optax.adam(0.1), {'w': w, 'scale': jnp.ones([])}, mesh

    with self.assertRaisesRegex(
        ValueError, r"2 leaves .* over 'data', .* Choose another `axis_name`"
    ):
      st.state_shardings(*args)

    shardings = st.state_shardings(*args, on_replicated='ignore')
    padded = spec if len(spec) else P(None, None)
    self.assertEqual(shardings[0].mu['w'].spec, padded)

  @cases.parameters(
      ({'mesh': 3}, TypeError, '`mesh` must be a `jax.sharding.Mesh`, got 3'),
      ({'axis_name': 'x'}, ValueError, "must be an axis of the mesh, .*'x'"),
      ({'on_replicated': 'hide'}, ValueError, "`on_replicated` must be 'warn'"),
      ({'whole_dims': 2.0}, TypeError, '`whole_dims` must be an integer'),
      ({'whole_dims': -1}, ValueError, 'at least 0, got -1'),
      ({'mesh': lambda: make_mesh((2, 4))}, ValueError, 'are on the mesh'),
      (
          {'tx': st.tower_reduce(2, axis_name='data')},
          NameError,
          "needs the axis 'data'",
      ),
  )
  def test_refuses_bad_input(self, change, error, message):
    mesh = make_mesh()
    given = {'tx': optax.adam(0.1), 'mesh': mesh, 'params': make_params(mesh)}
    given |= {k: x() if callable(x) else x for k, x in change.items()}

    with self.assertRaisesRegex(error, message):
      st.state_shardings(**given)
