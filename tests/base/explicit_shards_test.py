"""Steps on axes of type `Explicit` that nothing maps, under plain `jax.jit`."""

import functools
import tempfile

from absl.testing import parameterized
import chex
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np
import optax
import orbax.checkpoint as ocp

import cases
import shard_transforms
from shard_transforms import monitoring

RNG = np.random.default_rng(0)
X = RNG.normal(size=(40, 32, 6)).astype(np.float32)
PARAMS = {
    'up': RNG.normal(size=(6, 8)).astype(np.float32) / 2,
    'gain': np.ones(8, np.float32),
    'down': RNG.normal(size=(8, 6)).astype(np.float32) / 3,
    'bias': np.zeros(6, np.float32),
}
WHOLE = dict.fromkeys(PARAMS, P())
TENSOR = {
    'up': P(None, 'model'),
    'gain': P('model'),
    'down': P('model', None),
    'bias': P(),
}
ADAM = optax.adam(1e-2, eps=1e-3)
MEAN = optax.chain(shard_transforms.cross_shard_mean('data'), ADAM)
WINDOW = functools.partial(shard_transforms.tower_reduce, 2, axis_name='data')
TRANSFORMATIONS = {
    'mean': MEAN,
    'window': WINDOW(MEAN),
    'zero': WINDOW(shard_transforms.shard_update(ADAM, 'data')),
    'guard': WINDOW(shard_transforms.guard(MEAN, 'data', on_bad='exclude')),
    'stale': shard_transforms.drop_stale(2, MEAN, axis_name='data'),
    'median': optax.chain(
        shard_transforms.aggregators.coordinate_median('data'), ADAM
    ),
}


def make_mesh(sizes=(8,), kind='Explicit'):
  kinds = (getattr(jax.sharding.AxisType, kind),) * len(sizes)
  devices = jax.devices()[: int(np.prod(sizes))]
  names = ('data', 'model')[: len(sizes)]
  return jax.make_mesh(sizes, names, kinds, devices=devices)


def place(mesh, tree, specs):
  shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)
  return jax.device_put(tree, shardings)


def loss_fn(params, x):
  # A gain and a bias: JAX refuses both for parameters typed `reduced`.
  hidden = jnp.tanh(x @ params['up']) * params['gain'][None]
  return jnp.mean((hidden @ params['down'] + params['bias'][None] - x) ** 2)


def step_of(tx):
  """Returns a step as it is written for one device, but for two names."""

  def step(params, state, x, **extra_args):
    loss, grads = shard_transforms.value_and_grad(loss_fn, 'data')(params, x)
    updates, state = tx.update(grads, state, params, **extra_args)
    after = optax.apply_updates(params, updates), state
    return *after, loss

  return step


def trained(tx, mesh, specs, batches, **extra_args):
  """Trains, one donating call a batch."""
  params = place(mesh, PARAMS, specs)
  tx = shard_transforms.on_mesh(tx, mesh, in_specs=specs)
  with jax.set_mesh(mesh):
    step = jax.jit(step_of(tx), donate_argnums=(0, 1))
    state = tx.init(params)
    for x in place(mesh, list(batches), [P('data')] * len(batches)):
      params, state, _ = step(params, state, x, **extra_args)
  return params, state


def restored(state):
  """Returns what orbax reads of a state that it has written, as NumPy."""
  like = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), state)
  with (
      tempfile.TemporaryDirectory() as folder,
      ocp.StandardCheckpointer() as saver,
  ):
    saver.save(f'{folder}/state', state)
    saver.wait_until_finished()
    return saver.restore(f'{folder}/state', like)


def trained_by_shard_map(tx, batches, **extra_args):
  mesh = make_mesh()
  specs = shard_transforms.state_specs(tx, PARAMS, mesh)
  mapped = jax.shard_map(
      lambda *args: step_of(tx)(*args, **extra_args)[:2],
      mesh=mesh,
      in_specs=(P(), specs, P('data')),
      out_specs=(P(), specs),
  )
  params = place(mesh, PARAMS, WHOLE)
  state = shard_transforms.init_state(tx, params, mesh)
  for x in place(mesh, list(batches), [P('data')] * len(batches)):
    params, state = jax.jit(mapped)(params, state, x)
  return params, state


class GradientTest(parameterized.TestCase):

  @cases.parameters(((8,), WHOLE), ((4, 2), TENSOR))
  def test_is_that_of_each_shard_unreduced(self, sizes, specs):
    mesh = make_mesh(sizes)
    params, x = place(mesh, (PARAMS, X[0]), (specs, P('data')))
    grad_fn = shard_transforms.value_and_grad(loss_fn, 'data')

    with jax.set_mesh(mesh):
      losses, grads = jax.jit(grad_fn)(params, x)
      report = monitoring.wire_report(grad_fn, params, x, compiled=True)
      total = {k: jax.reshard(g, specs[k]) for k, g in grads.items()}

    for k, g in grads.items():
      spec = jax.typeof(g).sharding.spec
      self.assertEqual(spec.unreduced, {'data'})
      self.assertEqual(g.shape, PARAMS[k].shape)
    self.assertNotIn('data', {a for c in report.collectives for a in c.axes})
    own = X[0].reshape(sizes[0], -1, 6)
    expected = jax.vmap(jax.value_and_grad(loss_fn), (None, 0))(PARAMS, own)
    expected = expected[0], jax.tree.map(lambda g: g.sum(0), expected[1])
    chex.assert_trees_all_close(
        jax.device_get((losses, total)), expected, rtol=1e-5, atol=1e-6
    )

  def test_takes_other_arguments_and_gives_what_comes_with_the_loss(self):
    mesh = make_mesh()
    params, x = place(mesh, (PARAMS, X[0]), (WHOLE, P('data')))

    def fn(scale, params, x, *, kind):
      return scale * loss_fn(params, x), {kind: x[0], 'size': len(x)}

    grad_fn = shard_transforms.value_and_grad(
        fn, 'data', argnums=[1, 0], has_aux=True
    )
    with jax.set_mesh(mesh):
      (loss, aux), grads = grad_fn(2.0, params, x, kind='first')

    np.testing.assert_array_equal(aux['first'], X[0].reshape(8, 4, 6)[:, 0])
    np.testing.assert_array_equal(aux['size'], [4] * 8)
    self.assertEqual(loss.shape, (8,))
    self.assertEqual(jax.tree.structure(grads[0]), jax.tree.structure(PARAMS))
    self.assertEqual(jax.typeof(grads[1]).sharding.spec.unreduced, {'data'})

  def test_adds_up_without_communication(self):
    mesh = make_mesh()
    params, x = place(mesh, (PARAMS, X[:4]), (WHOLE, P(None, 'data')))
    grad_fn = shard_transforms.value_and_grad(loss_fn, 'data')

    def total(params, x):
      _, first = grad_fn(params, x[0])

      def tower(total, x):
        return jax.tree.map(jnp.add, total, grad_fn(params, x)[1]), None

      return jax.lax.scan(tower, first, x[1:])[0]

    with jax.set_mesh(mesh):
      report = monitoring.wire_report(total, params, x, compiled=True)

    self.assertEmpty(report.collectives)


class UpdateTest(parameterized.TestCase):

  @cases.product(
      name=TRANSFORMATIONS,
      always=lambda name: name in ('window', 'guard', 'stale'),
  )
  def test_is_that_under_shard_map(self, name):
    tx = TRANSFORMATIONS[name]
    batches = X[:4].copy()
    extra_args = {'local_step': 0} if name == 'stale' else {}
    if name == 'guard':
      batches[1, 5] = np.nan

    actual = trained(tx, make_mesh(), WHOLE, batches, **extra_args)

    expected = trained_by_shard_map(tx, batches, **extra_args)
    chex.assert_trees_all_close(
        *map(jax.device_get, (actual, expected)), rtol=1e-6, atol=1e-7
    )

  def test_a_weight_of_each_shard_counts(self):
    mesh = make_mesh()
    batches = X[:2].copy()
    batches[:, :4] = np.nan
    tokens = np.asarray([0, 3, 1, 2, 5, 1, 4, 2], np.float32)

    params, _ = trained(
        WINDOW(MEAN),
        mesh,
        WHOLE,
        batches,
        weight=place(mesh, tokens, P('data')),
    )

    own = batches.reshape(2, 8, 4, 6)[:, 1:]
    weigh = functools.partial(
        np.average, axis=0, weights=np.tile(tokens[1:], 2)
    )
    grads = jax.vmap(jax.grad(loss_fn), (None, 0))(
        PARAMS, own.reshape(14, 4, 6)
    )
    mean = jax.tree.map(weigh, grads)
    updates, _ = ADAM.update(mean, ADAM.init(PARAMS))
    chex.assert_trees_all_close(
        jax.device_get(params),
        jax.device_get(optax.apply_updates(PARAMS, updates)),
        rtol=1e-5,
        atol=1e-6,
    )

  def test_needs_no_update_and_apply(self):
    mesh = make_mesh()
    tx = shard_transforms.on_mesh(MEAN, mesh)
    params, x = place(mesh, (PARAMS, X[0]), (WHOLE, P('data')))

    with jax.set_mesh(mesh):
      _, grads = shard_transforms.value_and_grad(loss_fn, 'data')(params, x)
      updates, _ = tx.update(grads, tx.init(params))

    actual = optax.apply_updates(PARAMS, jax.device_get(updates))
    chex.assert_trees_all_close(
        jax.device_get(actual),
        jax.device_get(trained(MEAN, mesh, WHOLE, X[:1])[0]),
        rtol=1e-5,
    )

  @cases.parameters(4, 8, cases.Repeated(2))
  def test_a_saved_window_goes_on_with_another_number_of_shards(
      self, num_shards
  ):
    tx = shard_transforms.tower_reduce(4, MEAN, axis_name='data')
    _, state = trained(tx, make_mesh(), WHOLE, X[:2])
    mesh = make_mesh((num_shards,))
    bound = shard_transforms.on_mesh(tx, mesh)

    state = shard_transforms.resize_state(
        restored(state), bound, PARAMS, mesh, reduction='mean'
    )
    params = place(mesh, PARAMS, WHOLE)
    with jax.set_mesh(mesh):
      for x in X[2:4]:
        x = place(mesh, x, P('data'))
        params, state, _ = jax.jit(step_of(bound))(params, state, x)

    updates, _ = ADAM.update(
        jax.grad(loss_fn)(PARAMS, X[:4].reshape(-1, 6)), ADAM.init(PARAMS)
    )
    chex.assert_trees_all_close(
        jax.device_get(params),
        jax.device_get(optax.apply_updates(PARAMS, updates)),
        rtol=1e-5,
        atol=1e-6,
    )

  @cases.parameters(((8,), WHOLE), cases.Repeated(((4, 2), TENSOR)))
  def test_trains_twenty_windows_as_one_device(self, sizes, specs):
    batches = X.copy()
    batches[11, 7] = np.nan
    inner = optax.chain(
        shard_transforms.cross_shard_mean('data'), shard_transforms.guard(ADAM)
    )

    params, state = trained(WINDOW(inner), make_mesh(sizes), specs, batches)

    expected, kept = PARAMS, ADAM.init(PARAMS)
    for i, window in enumerate(batches.reshape(20, -1, 6)):
      if i != 5:
        grads = jax.grad(loss_fn)(expected, window)
        updates, kept = ADAM.update(grads, kept)
        expected = optax.apply_updates(expected, updates)
    chex.assert_trees_all_close(
        *map(jax.device_get, (params, expected)), rtol=1e-4, atol=1e-5
    )
    skipped = optax.tree_utils.tree_get(state, 'skipped_count')
    self.assertEqual(skipped, 1)


class RefusalTest(parameterized.TestCase):

  def unreduced(self, mesh, params=None):
    params, x = place(mesh, (PARAMS, X[0]), (WHOLE, P('data')))
    with jax.set_mesh(mesh):
      return shard_transforms.value_and_grad(loss_fn, 'data')(params, x)[1]

  def test_a_batch_that_is_not_sharded(self):
    params = place(make_mesh(), PARAMS, WHOLE)
    with (
        jax.set_mesh(make_mesh()),
        self.assertRaisesRegex(
            ValueError, r"batch that is sharded over \['data'\], got no such"
        ),
    ):
      shard_transforms.value_and_grad(loss_fn, 'data')(params, X[0])

  def test_a_batch_that_is_sharded_over_one_of_two_axes(self):
    mesh = make_mesh((4, 2))
    params, x = place(mesh, (PARAMS, X[0]), (WHOLE, P('data')))
    grad_fn = shard_transforms.value_and_grad(loss_fn, ('data', 'model'))
    with (
        jax.set_mesh(mesh),
        self.assertRaisesRegex(
            ValueError, r"over \['model'\], .*jax.P\(\('data', 'model'\)\)"
        ),
    ):
      grad_fn(params, x)

  def test_arguments_that_are_missing(self):
    mesh = make_mesh()
    params, x = place(mesh, (PARAMS, X[0]), (WHOLE, P('data')))
    grad_fn = shard_transforms.value_and_grad(loss_fn, 'data')
    with (
        jax.set_mesh(mesh),
        self.assertRaisesRegex(ValueError, 'by position, 0 by .*, got 0'),
    ):
      grad_fn(params=params, x=x)

  def test_a_state_of_another_tree(self):
    mesh = make_mesh()
    tx = shard_transforms.on_mesh(
        optax.chain(
            shard_transforms.cross_shard_mean('data'),
            optax.GradientTransformation(
                lambda params: (),
                lambda updates, state, params=None: (updates, jnp.zeros(2)),
            ),
        ),
        mesh,
    )
    state, grads = tx.init(PARAMS), self.unreduced(mesh)
    with (
        jax.set_mesh(mesh),
        self.assertRaisesRegex(
            ValueError, '`tx` of `on_mesh` must keep the tr'
        ),
    ):
      tx.update(grads, state)

  def test_axes_of_another_type(self):
    grad_fn = shard_transforms.value_and_grad(loss_fn, 'data')
    mesh = make_mesh(kind='Auto')
    params, x = place(mesh, (PARAMS, X[0]), (WHOLE, P('data')))
    with (
        jax.set_mesh(mesh),
        self.assertRaisesRegex(NameError, 'On axes of type `Explicit`'),
    ):
      grad_fn(params, x)
    kinds = jax.sharding.AxisType.Explicit, jax.sharding.AxisType.Auto
    mesh = jax.make_mesh((4, 2), ('data', 'model'), kinds)
    with (
        jax.set_mesh(mesh),
        self.assertRaisesRegex(ValueError, "all of type `Explicit`.*'model': "),
    ):
      grad_fn(place(mesh, PARAMS, WHOLE), place(mesh, X[0], P('data')))

  def test_a_mesh_that_is_not_in_use(self):
    mesh = make_mesh()
    grads = self.unreduced(mesh)
    tx = shard_transforms.on_mesh(MEAN, mesh)
    state = tx.init(PARAMS)
    with self.assertRaisesRegex(ValueError, r'with jax.set_mesh\(mesh\)'):
      tx.update(grads, state)

  def test_parameters_that_are_sharded_over_the_axis(self):
    mesh = make_mesh()
    fsdp = WHOLE | {'gain': P('data')}
    params, x = place(mesh, (PARAMS, X[0]), (fsdp, P('data')))
    words = r"sharded over \['data'\], got \['gain'\].*`.*accumulated_value_and"
    tx = shard_transforms.on_mesh(MEAN, mesh)
    state, grads = tx.init(PARAMS), self.unreduced(mesh)
    with jax.set_mesh(mesh):
      with self.assertRaisesRegex(ValueError, f'`value_and_grad` .*{words}'):
        shard_transforms.value_and_grad(loss_fn, 'data')(params, x)
      with self.assertRaisesRegex(ValueError, f'`on_mesh` .*{words}'):
        tx.update(grads, state, params)

  def test_parameters_that_change_their_sharding(self):
    mesh = make_mesh((4, 2))
    tx = shard_transforms.on_mesh(MEAN, mesh)
    state, grads = tx.init(PARAMS), self.unreduced(mesh)
    with (
        jax.set_mesh(mesh),
        self.assertRaisesRegex(
            ValueError,
            r"like `updates`, got P\('model', None\) .* at \['down'\]",
        ),
    ):
      tx.update(grads, state, place(mesh, PARAMS, TENSOR))

  def test_gradients_that_are_reduced_in_part(self):
    mesh = make_mesh()
    grads = self.unreduced(mesh)
    tx = shard_transforms.on_mesh(MEAN, mesh)
    state = tx.init(PARAMS)
    with jax.set_mesh(mesh):
      grads['bias'] = jax.reshard(grads['bias'], P())
      with self.assertRaisesRegex(
          ValueError, r"\['bias'\] \[6\], which is reduced over \['data'\]"
      ):
        tx.update(grads, state)

  def test_integers_among_parameters(self):
    mesh = make_mesh()
    params = PARAMS | {'number': np.int32(3)}
    params, x = place(
        mesh, (params, X[0]), (WHOLE | {'number': P()}, P('data'))
    )
    tx = shard_transforms.on_mesh(MEAN, mesh)
    state = tx.init(PARAMS)
    with (
        jax.set_mesh(mesh),
        self.assertRaisesRegex(ValueError, r"got float0 at \['number'\]"),
    ):
      _, grads = shard_transforms.value_and_grad(
          loss_fn, 'data', allow_int=True
      )(params, x)
      tx.update(grads, state)

  def test_gradients_that_are_reduced(self):
    mesh = make_mesh()
    tx = shard_transforms.on_mesh(MEAN, mesh)
    state = tx.init(PARAMS)
    with (
        jax.set_mesh(mesh),
        self.assertRaisesRegex(NameError, 'gradients are global already'),
    ):
      tx.update(place(mesh, PARAMS, WHOLE), state)

  @cases.parameters(
      (ADAM, r'updates that differ between shards at \['),
      (WINDOW(ADAM), 'that differ between shards at'),
  )
  def test_what_is_never_reduced(self, tx, words):
    with self.assertRaisesRegex(ValueError, f'`tx` of `on_mesh` .*{words}'):
      trained(tx, make_mesh(), WHOLE, X[:1])

  @cases.product(
      tx=(
          shard_transforms.tower_reduce(2, ADAM),
          shard_transforms.guard(ADAM),
          shard_transforms.clip_by_global_norm(1.0),
      )
  )
  def test_unreduced_updates_without_an_axis(self, tx):
    mesh = make_mesh()
    grads = self.unreduced(mesh)
    with (
        jax.set_mesh(mesh),
        self.assertRaisesRegex(
            ValueError, r"\['bias'\] \[6\], .*\['data'\] is"
        ),
    ):
      tx.update(grads, tx.init(PARAMS), PARAMS)
