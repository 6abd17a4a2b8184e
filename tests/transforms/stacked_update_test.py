"""`update` of `on_mesh` with the gradients of the shards, under plain `jit`."""

from absl.testing import parameterized
import chex
from flax import nnx
import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np
import optax

import cases
import modes
import shard_transforms as st
from shard_transforms import contrib
from shard_transforms.contrib import compression

AXIS = modes.AXIS
ROWS = 64
RNG = np.random.default_rng(0)
PARAMS = {
    'up': np.float32(RNG.normal(size=(16, 24)) / 4),
    'down': np.float32(RNG.normal(size=(24, 16)) / 5),
}
BATCHES = np.float32(RNG.normal(size=(4, ROWS, 16)))
ADAM = optax.adam(1e-2)
CLIPPED = optax.chain(optax.clip_by_global_norm(0.1), ADAM)
TENSOR_PARALLEL = {'up': P(None, 'model'), 'down': P('model')}
LAYOUTS = {
    'tensor_parallel': TENSOR_PARALLEL,
    'fsdp': {'up': P(AXIS), 'down': P(AXIS)},
    'fsdp_and_tensor_parallel': {
        'up': P(AXIS, 'model'),
        'down': P('model', AXIS),
    },
}


def loss(params, x, **product):
  hidden = jnp.tanh(x @ params['up'])
  return jnp.mean((jnp.dot(hidden, params['down'], **product) - x) ** 2)


def mean(inner):
  return optax.chain(st.cross_shard_mean(AXIS), inner)


TRANSFORMS = {
    # The norm is that of whole gradients, wherever their slices are.
    'mean, clipped': (mean(CLIPPED), CLIPPED),
    'guard that excludes': (
        st.guard(mean(ADAM), AXIS, on_bad='exclude', min_shards=1),
        ADAM,
    ),
    'drop_stale': (st.drop_stale(2, mean(ADAM), axis_name=AXIS), ADAM),
    'window': (st.tower_reduce(4, mean(ADAM), axis_name=AXIS), None),
    'lossless compression': (
        optax.chain(
            compression.compressed_mean(
                AXIS, compression.cast('float32'), min_elements=1
            ),
            ADAM,
        ),
        ADAM,
    ),
}


def one_device(tx):
  """Returns the parameters after all batches; `None` is a window of Adam."""
  params = jax.tree.map(jnp.asarray, PARAMS)
  batches = [BATCHES.reshape(-1, 16)] if tx is None else BATCHES
  tx = ADAM if tx is None else tx
  state = tx.init(params)
  for x in batches:
    updates, state = tx.update(jax.grad(loss)(params, x), state, params)
    params = optax.apply_updates(params, updates)
  return jax.device_get(params)


def train(tx, mesh, specs):
  """Trains under plain `jax.jit` with sharded parameters.

  Returns:
    Parameters and state, and their shardings before and after the training.
  """
  options = {}
  if mesh.explicit_axes and 'model' in mesh.shape:
    options['out_sharding'] = P(None, None)
  bound = st.on_mesh(tx, mesh, AXIS)
  grad_fn = st.value_and_grad(
      lambda params, x: loss(params, x, **options), AXIS
  )

  @jax.jit
  def step(params, state, x, number):
    _, grads = grad_fn(params, x)
    updates, state = bound.update(grads, state, params, local_step=number)
    return optax.apply_updates(params, updates), state

  def shardings(tree):
    return [(x.sharding.spec, x.ndim) for x in jax.tree.leaves(tree)]

  with jax.set_mesh(mesh):
    params = jax.tree.map(
        lambda x, spec: modes.place(x, mesh, *spec), PARAMS, specs
    )
    state = bound.init(params)
    before = jax.tree.map(lambda x: x.sharding, (params, state))
    for i, x in enumerate(BATCHES):
      x = modes.place(x, mesh, AXIS)
      params, state = jax.block_until_ready(step(params, state, x, i))
  return before, (params, state)


def mesh_2d(mode):
  return jax.make_mesh((4, 2), (AXIS, 'model'), (modes.PLAIN[mode],) * 2)


class LayoutTest(parameterized.TestCase):
  """Parameters that are sharded train as on one device."""

  @cases.parameters(
      ('tensor_parallel', 'jit_explicit'),
      ('fsdp', 'jit'),
      ('fsdp_and_tensor_parallel', 'jit_explicit'),
      fast='fsdp_jit',
  )
  def test_trains_as_one_device_and_keeps_shardings(self, layout, mode):
    expected = {
        name: one_device(alone) for name, (_, alone) in TRANSFORMS.items()
    }
    for name, (tx, _) in TRANSFORMS.items():
      with self.subTest(name):
        before, after = train(tx, mesh_2d(mode), LAYOUTS[layout])

        chex.assert_trees_all_close(
            jax.device_get(after[0]), expected[name], rtol=1e-4, atol=1e-5
        )
        for sharding, leaf in zip(
            jax.tree.leaves(before), jax.tree.leaves(after), strict=True
        ):
          same = sharding.is_equivalent_to(leaf.sharding, leaf.ndim)
          self.assertTrue(same, (sharding, leaf.sharding))

  @cases.parameters(*modes.PLAIN)
  def test_state_is_sharded_like_tensor_parallel_parameters(self, mode):
    mesh = mesh_2d(mode)
    params = jax.tree.map(
        lambda x, spec: modes.place(x, mesh, *spec), PARAMS, TENSOR_PARALLEL
    )
    tx = st.on_mesh(st.tower_reduce(2, mean(ADAM), axis_name=AXIS), mesh, AXIS)

    for state in (
        tx.init(params),
        tx.init(
            jax.tree.map(
                lambda x: jax.ShapeDtypeStruct(
                    x.shape, x.dtype, sharding=x.sharding
                ),
                params,
            )
        ),
    ):
      get = optax.tree_utils.tree_get
      self.assertEqual(get(state, 'mu')['up'].sharding.spec, P(None, 'model'))
      self.assertEqual(
          get(state, 'total')['up'].sharding.spec, P(AXIS, None, 'model')
      )

  @cases.parameters(*modes.PLAIN, fast='jit_explicit')
  def test_slices_of_parameters_are_mapped_by_in_specs(self, mode):
    mesh = mesh_2d(mode)
    tx = st.on_mesh(st.shard_update(ADAM, AXIS), mesh, in_specs=TENSOR_PARALLEL)
    options = {}
    if mesh.explicit_axes:
      options['out_sharding'] = P(None, None)
    with jax.set_mesh(mesh):
      params = jax.tree.map(
          lambda x, spec: modes.place(x, mesh, *spec), PARAMS, TENSOR_PARALLEL
      )
      state = tx.init(params)
      x = modes.place(BATCHES[0], mesh, AXIS)

      @jax.jit
      def step(params, state, x):
        grad_fn = st.value_and_grad(lambda p, x: loss(p, x, **options), AXIS)
        return tx.update(grad_fn(params, x)[1], state, params)

      updates, after = jax.device_get(step(params, state, x))

    grads = jax.grad(loss)(PARAMS, BATCHES[0])
    expected, of_adam = ADAM.update(grads, ADAM.init(PARAMS), PARAMS)
    chex.assert_trees_all_close(updates, expected, rtol=1e-3, atol=1e-6)
    chex.assert_trees_all_close(
        after.inner_state[0].mu, of_adam[0].mu, rtol=1e-4, atol=1e-7
    )

  def test_requires_axis_name_if_parameters_are_sharded(self):
    mesh = mesh_2d('jit')
    params = jax.tree.map(
        lambda x, spec: modes.place(x, mesh, *spec), PARAMS, TENSOR_PARALLEL
    )

    with self.assertRaisesRegex(ValueError, r"`on_mesh\(tx, mesh, 'data'\)`"):
      st.on_mesh(mean(ADAM), mesh).init(params)

    st.on_mesh(mean(ADAM), mesh, AXIS).init(params)


class Bench(parameterized.TestCase):
  """Gradients of eight shards, and an update with them."""

  def setUp(self):
    super().setUp()
    self.mesh = modes.plain_mesh('jit')
    self.params = {'w': jnp.arange(3.0), 'b': jnp.float32(1)}
    self.grads = st.Stacked(
        {'w': jnp.ones((8, 3)), 'b': jnp.arange(8.0)}, (AXIS,)
    )

  def bound(self, tx):
    return st.on_mesh(tx, self.mesh)

  def update(self, tx, grads=None, **extra_args):
    grads = self.grads if grads is None else grads
    bound = self.bound(tx)
    state = bound.init(self.params)
    return bound.update(grads, state, self.params, **extra_args)[0]


class UpdateTest(Bench):

  @cases.parameters((None,), (2.0,), (np.arange(8.0),))
  def test_a_weight_is_per_shard_or_for_all_shards(self, weight):
    updates = self.update(st.cross_shard_mean(AXIS), weight=weight)

    weights = np.ones(8) * (1 if weight is None else weight)
    expected = np.average(np.arange(8), weights=weights)
    np.testing.assert_allclose(updates['b'], expected, rtol=1e-6)

  @cases.parameters((0,), (np.array([0] * 7 + [3]),))
  def test_a_local_step_is_per_shard_or_for_all_shards(self, local_step):
    tx = self.bound(st.drop_stale(0, st.cross_shard_mean(AXIS), axis_name=AXIS))
    state = tx.init(self.params)
    state = state._replace(global_step=state.global_step + 3)

    updates, _ = tx.update(
        self.grads, state, self.params, local_step=jnp.asarray(local_step)
    )

    expected = 7 if np.ndim(local_step) else 0
    np.testing.assert_allclose(updates['b'], expected)

  def test_other_extra_arguments_are_the_same_for_all_shards(self):
    seen = {}

    def update_fn(updates, state, params=None, **extra_args):
      seen.update(extra_args)
      return lax.pmean(updates, AXIS), state

    tx = optax.GradientTransformationExtraArgs(
        lambda params: optax.EmptyState(), update_fn
    )
    self.update(
        tx,
        value=jnp.arange(8.0),
        matrix=jnp.ones((8, 2)),
        own=st.Stacked(jnp.ones((8, 2)), (AXIS,)),
        function=len,
    )

    shapes = {k: jnp.shape(x) for k, x in seen.items() if k != 'function'}
    self.assertEqual(shapes, dict(value=(), matrix=(8, 2), own=(2,)))
    self.assertIs(seen['function'], len)

  def test_parameters_may_be_left_out(self):
    tx = self.bound(mean(optax.sgd(1.0)))

    updates, _ = tx.update(self.grads, tx.init(self.params))

    np.testing.assert_allclose(updates['b'], -3.5)

  def test_accepts_the_mapping_that_nnx_makes_of_a_stack(self):
    updates = self.update(st.cross_shard_mean(AXIS), {'tree': self.grads.tree})

    np.testing.assert_allclose(updates['b'], 3.5)

  def test_weighted_gradients_from_nnx_need_their_weight(self):
    mesh = modes.plain_mesh('jit', axes=(AXIS, 'model'))
    model = nnx.Linear(3, 1, use_bias=False, rngs=nnx.Rngs(0))
    x, counts = BATCHES[0][:, :3], np.float32(np.arange(ROWS) % 7 < 3)

    def token_loss(model, x, counts):
      return jnp.sum(counts * model(x)[:, 0]) / jnp.sum(counts)

    grad_fn = st.value_and_grad(
        token_loss, AXIS, weight_fn=lambda x, counts: jnp.sum(counts), mesh=mesh
    )
    (_, weight), grads = grad_fn(model, x, counts)

    def optimizer(axis_name):
      tx = st.on_mesh(mean(optax.sgd(1.0)), mesh, axis_name)
      return nnx.Optimizer(model, tx, wrt=nnx.Param)

    with self.assertRaisesRegex(ValueError, 'Pass the `weight` that'):
      optimizer(AXIS).update(model, grads)
    with self.assertRaisesRegex(ValueError, 'axes of the batch as `axis_name`'):
      optimizer(None).update(model, grads, weight=weight)

    before = np.asarray(model.kernel[...])
    optimizer(AXIS).update(model, grads, weight=weight)
    step = before - np.asarray(model.kernel[...])
    expected = counts @ x / counts.sum()
    np.testing.assert_allclose(step[:, 0], expected, atol=1e-6)

  @cases.parameters((0,), (1,))
  def test_axes_of_the_batch_and_others_may_be_of_either_type(self, explicit):
    kinds = [jax.sharding.AxisType.Auto] * 2
    kinds[explicit] = jax.sharding.AxisType.Explicit
    mesh = jax.make_mesh((4, 2), (AXIS, 'model'), tuple(kinds))

    for axes in (AXIS, (AXIS, 'model')):
      grad_fn = st.value_and_grad(
          lambda w, x: jnp.mean(jnp.tanh(x @ w)), axes, mesh=mesh
      )
      tx = st.on_mesh(st.cross_shard_mean(axes), mesh, axes)
      w, x = np.ones(16, np.float32), BATCHES[0]
      _, grads = jax.jit(grad_fn)(
          modes.place(w, mesh), modes.place(x, mesh, axes)
      )
      placed = modes.place(w, mesh)
      updates, _ = jax.jit(tx.update)(grads, tx.init(placed), placed)

      expected = jax.grad(lambda w, x: jnp.mean(jnp.tanh(x @ w)))(w, x)
      np.testing.assert_allclose(updates, expected, atol=1e-6)

  def test_a_step_is_compiled_once_and_may_be_donated(self):
    mesh, compiled = self.mesh, []
    tx = self.bound(st.shard_update(ADAM, AXIS))
    grad_fn = st.value_and_grad(
        lambda params, x: jnp.mean(x @ params['w'] + params['b']), AXIS
    )

    def step(params, state, x):
      compiled.append(1)
      _, grads = grad_fn(params, x)
      updates, state = tx.update(grads, state, params)
      return optax.apply_updates(params, updates), state

    step = jax.jit(step, donate_argnums=(0, 1))
    with jax.set_mesh(mesh):
      x = modes.place(np.ones((16, 3), np.float32), mesh, AXIS)
      params = modes.place(self.params, mesh)
      state = tx.init(params)
      for _ in range(2):
        params, state = jax.block_until_ready(step(params, state, x))
      # As a checkpoint of the same form restores it.
      target = tx.init(jax.eval_shape(lambda: params))
      state = jax.tree.map(
          lambda x, like: jax.device_put(np.asarray(x), like.sharding),
          state,
          target,
      )
      step(params, state, x)

    self.assertLen(compiled, 1)

  @cases.parameters(*modes.PLAIN, fast='jit_explicit')
  def test_can_be_differentiated_and_mapped_over_a_population(self, mode):
    mesh = modes.plain_mesh(mode)
    tx = st.on_mesh(mean(optax.sgd(0.1)), mesh)

    def after(w, x):
      grad_fn = st.value_and_grad(lambda w, x: jnp.mean((x @ w) ** 2), AXIS)
      grads = jax.checkpoint(grad_fn)(w, x)[1]
      w = optax.apply_updates(w, tx.update(grads, tx.init(w), w)[0])
      return jnp.sum(w**2)

    def alone(w, x):
      w = w - 0.1 * jax.grad(lambda w, x: jnp.mean((x @ w) ** 2))(w, x)
      return jnp.sum(w**2)

    x = np.float32(np.random.default_rng(0).normal(size=(16, 3)))
    population = np.float32(np.random.default_rng(1).normal(size=(2, 3)))
    with jax.set_mesh(mesh):
      placed = modes.place(x, mesh, AXIS)
      actual = jax.jit(jax.vmap(jax.grad(after), (0, None)))(
          modes.place(population, mesh), placed
      )

    expected = jax.vmap(jax.grad(alone), (0, None))(population, x)
    np.testing.assert_allclose(actual, expected, rtol=1e-5)


class CheckpointTest(parameterized.TestCase):
  """A state does not tell how it was trained, nor on how many devices."""

  @cases.parameters(
      ('jit_explicit', 'shard_map'), ('shard_map', 'jit'), fast='shard_map_jit'
  )
  def test_resumes_in_another_mode_on_fewer_devices(self, first, second):
    tx = st.shard_update(ADAM, AXIS)
    start = jax.tree.map(jnp.asarray, PARAMS)

    eight, four = (modes.plain_mesh('jit', n) for n in (8, 4))
    params, state = self.train(first, tx, 8, start, None, BATCHES[:2])
    full = jax.device_get(st.unshard_state(state, tx, params, eight))
    params = jax.device_get(params)
    state = st.shard_state(full, tx, params, four)
    params, _ = self.train(second, tx, 4, params, state, BATCHES[2:])

    chex.assert_trees_all_close(
        jax.device_get(params), one_device(ADAM), rtol=1e-4, atol=1e-5
    )

  def train(self, way, tx, num_shards, params, state, batches):
    mesh = modes.plain_mesh(way if way in modes.PLAIN else 'jit', num_shards)
    bound = st.on_mesh(tx, mesh)
    grad_fn = st.value_and_grad(loss, AXIS)

    def step(params, state, x):
      _, grads = grad_fn(params, x)
      updates, state = bound.update(grads, state, params)
      return optax.apply_updates(params, updates), state

    with jax.set_mesh(mesh):
      params = modes.place(params, mesh)
      state = bound.init(params) if state is None else state
      if way == 'shard_map':
        specs = P(), st.state_specs(tx, params, mesh)
        step = jax.shard_map(
            step, mesh=mesh, in_specs=(*specs, P(AXIS)), out_specs=specs
        )
      step = jax.jit(step)
      for x in batches:
        x = modes.place(x, mesh, AXIS)
        params, state = jax.block_until_ready(step(params, state, x))
    return params, state


class UnreducedTest(parameterized.TestCase):
  """Gradients that JAX types as unreduced: parts whose sum is the gradient."""

  def gradients(self, mesh):
    params = {
        'w': jax.device_put(np.eye(4, dtype='f'), P(None, None)),
        'v': jax.device_put(np.ones((4, 4), 'f'), P(None, None)),
    }
    x = jax.device_put(BATCHES[0][:, :4], P(AXIS))

    def loss_fn(params, x):
      return jnp.mean(jnp.tanh(x @ params['w'] @ params['v']))

    def unreduced(params, x):
      typed = jax.tree.map(
          lambda x: jax.reshard(x, P(None, None, reduced={AXIS})), params
      )
      return jax.grad(loss_fn)(typed, x)

    expected = jax.grad(loss_fn)(jax.device_get(params), BATCHES[0][:, :4])
    return params, jax.jit(unreduced)(params, x), expected

  @cases.parameters((None,), (np.arange(1, 9, dtype=np.float32),))
  def test_on_mesh_accepts_unreduced_gradients(self, weight):
    mesh = modes.plain_mesh('jit_explicit')
    with jax.set_mesh(mesh):
      params, grads, expected = self.gradients(mesh)
    tx = st.on_mesh(st.guard(mean(optax.identity()), AXIS), mesh)
    extra_args = {} if weight is None else {'weight': weight}
    # The mesh need not be in use.
    updates, _ = tx.update(grads, tx.init(params), params, **extra_args)

    chex.assert_trees_all_close(updates, expected, atol=1e-6)

  def test_other_transformations_refer_to_on_mesh(self):
    mesh = modes.plain_mesh('jit_explicit')
    with jax.set_mesh(mesh):
      params, grads, _ = self.gradients(mesh)
      for tx in (st.guard(ADAM), st.tower_reduce(2, ADAM)):
        with self.assertRaisesRegex(
            ValueError, r'unreduced over .*`shard_transforms.on_mesh\(tx, mesh'
        ):
          tx.update(grads, tx.init(params), params)

  def test_refuses_leaves_that_are_unreduced_over_different_axes(self):
    mesh = modes.plain_mesh('jit_explicit')
    with jax.set_mesh(mesh):
      params, grads, _ = self.gradients(mesh)
      grads['v'] = jax.reshard(grads['v'], P(None, None))
      tx = st.on_mesh(mean(ADAM), mesh)
      with self.assertRaisesRegex(ValueError, 'unreduced over different axes'):
        tx.update(grads, tx.init(params), params)


REFUSED = {
    'an array in the shape of the parameter': (
        lambda test: test.update(mean(ADAM), test.params),
        r'each shard, but got an array of the shape .* already be reduced',
    ),
    'an array without its type': (
        lambda test: test.update(mean(ADAM), test.grads.tree),
        r'`shard_transforms.Stacked\(grads, axes\)`',
    ),
    'another number of shards': (
        lambda test: test.update(
            mean(ADAM), jax.tree.map(lambda x: x[:4], test.grads)
        ),
        r'each of the 8 shards .*, got the shape \(4,\) instead of \(8,\)',
    ),
    'gradients of other parameters': (
        lambda test: test.update(
            mean(ADAM),
            jax.tree.map(lambda x: x[:, :1] if x.ndim > 1 else x, test.grads),
        ),
        r"\(8, 1\) instead of \(8, 3\) at \['w'\]",
    ),
    'gradients of towers': (
        lambda test: test.update(
            mean(optax.sgd(0.1)),
            jax.tree.map(lambda x: x[:, None], test.grads),
        ),
        r'shape \(1,\) instead of \(\) .*`shard_transforms.reduce_stacked_tow',
    ),
    'a mean that was taken before': (
        lambda test: test.update(
            mean(ADAM), jax.tree.map(lambda x: x.mean(0), test.grads)
        ),
        r'instead of \(8,',
    ),
    'gradients over another axis': (
        lambda test: test.update(
            mean(ADAM), st.Stacked(test.grads.tree, ('model',))
        ),
        r"stacked over .* \('model',\).* binds only \('data',\).*`axis_name`",
    ),
    'gradients over no axis': (
        lambda test: test.update(mean(ADAM), st.Stacked(test.grads.tree)),
        r"must be the tuple of axes .* `.*Stacked\(grads, \('data',\)\)`",
    ),
    'gradients over the letters of an axis': (
        lambda test: test.update(mean(ADAM), st.Stacked(test.grads.tree, AXIS)),
        "must be the tuple of axes .* got 'data'",
    ),
    'parameters that are slices over the axis of the batch': (
        lambda test: st.on_mesh(
            mean(ADAM), test.mesh, in_specs={'w': P(), 'b': P(AXIS)}
        ).update(test.grads, (), test.params),
        '`in_specs` of `on_mesh` shards .* over axes of the batch.*Leave',
    ),
    'a transformation without a reduction': (
        lambda test: test.update(ADAM),
        r"does not reduce the gradients over 'data': .* of the updates differs",
    ),
    'state that differs between shards': (
        lambda test: test.update(
            optax.chain(optax.trace(0.9), st.cross_shard_mean(AXIS))
        ),
        r'\[0\].trace.* of the state differs between shards',
    ),
    'too few weights': (
        lambda test: test.update(mean(ADAM), weight=jnp.ones(4)),
        r'each of the 8 shards, got the shape \(4,\)',
    ),
    'another state': (
        lambda test: test.bound(mean(ADAM)).update(test.grads, (), test.params),
        '`state` of `on_mesh` does not have the tree .* the state that `init`',
    ),
    'state per shard': (
        lambda test: st.on_mesh(mean(ADAM), test.mesh, stacked=True).update(
            test.grads, (), test.params
        ),
        'where no axis is mapped.* Call it inside `jax.shard_map`',
    ),
}


class RefusalTest(Bench):

  @cases.parameters(*REFUSED)
  def test_refuses(self, name):
    call, words = REFUSED[name]

    with self.assertRaisesRegex(ValueError, words):
      call(self)

  @cases.parameters('weight', 'local_step', 'value')
  def test_refuses_a_list_of_numbers(self, name):
    message = rf'`{name}` of `on_mesh` .* got \[1, .*`jnp.array\({name}\)`'
    with self.assertRaisesRegex(TypeError, message):
      self.update(mean(ADAM), **{name: [1] * 8})

  def test_refuses_a_transformation_that_closes_over_arrays(self):
    mesh = modes.plain_mesh('jit_explicit')

    def bound(learning_rate):
      return st.on_mesh(mean(optax.sgd(learning_rate)), mesh)

    params = modes.place(self.params, mesh)
    grads = modes.place(self.grads, mesh, AXIS)
    tx = optax.inject_hyperparams(bound)(0.1)
    # A number that a step returns is an array on the mesh.
    state = modes.place(tx.init(params), mesh)
    with self.assertRaisesRegex(
        ValueError, 'closes over arrays.*`optax.inject_hyperparams` inside of'
    ):
      jax.jit(tx.update)(grads, state, params)

    tx = st.on_mesh(mean(optax.inject_hyperparams(optax.sgd)(0.1)), mesh)
    updates, _ = jax.jit(tx.update)(grads, tx.init(params), params)
    np.testing.assert_allclose(updates['b'], -0.35, rtol=1e-6)

  def test_refuses_an_axis_that_the_mesh_lacks(self):
    with self.assertRaisesRegex(ValueError, r"must have the axes \['model'\]"):
      st.on_mesh(mean(ADAM), self.mesh, 'model')

  def test_owned_update_needs_all_axes(self):
    mesh = mesh_2d('jit')
    tx = st.on_mesh(
        contrib.owned_update(optax.contrib.muon(0.1), AXIS), mesh, AXIS
    )
    params = modes.place(PARAMS, mesh)
    grads = jax.tree.map(lambda x: np.stack([x] * 4), PARAMS)

    with self.assertRaisesRegex(ValueError, 'axes that are not mapped'):
      tx.update(st.Stacked(grads, (AXIS,)), tx.init(params), params)
