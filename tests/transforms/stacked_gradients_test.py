"""`value_and_grad` under plain `jax.jit`: gradients of the shards, stacked."""

from absl.testing import parameterized
import chex
import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import optax

import cases
import modes
import shard_transforms as st

AXIS = modes.AXIS
SHARDS, ROWS, FEATURES = 8, 64, 3
W = np.random.default_rng(0).normal(size=(FEATURES, 2)).astype(np.float32)
X = np.random.default_rng(1).normal(size=(ROWS, FEATURES)).astype(np.float32)
# Shards have between none and all of their rows.
COUNTS = np.float32(np.arange(ROWS) % 8 < np.arange(ROWS) // 8)


def loss(w, x):
  return jnp.mean(jnp.tanh(x @ w) ** 2)


def token_loss(w, x, counts):
  rows = jnp.sum(jnp.tanh(x @ w) ** 2, axis=1)
  return jnp.sum(counts * rows) / jnp.sum(counts)


def num_tokens(x, counts):
  del x
  return jnp.sum(counts)


def run(mode, fn, *args, mesh=None):
  """Runs a function under `jax.jit`, with the first argument on all devices."""
  mesh = modes.plain_mesh(mode) if mesh is None else mesh
  params, *batch = args
  with jax.set_mesh(mesh):
    placed = modes.place(params, mesh), *modes.place(batch, mesh, AXIS)
    return jax.device_get(jax.jit(fn)(*placed))


def of_each_shard(fn, *batch):
  """Returns what a function gives for the rows of each shard."""
  parts = [np.split(x, SHARDS) for x in batch]
  results = [fn(W, *rows) for rows in zip(*parts, strict=True)]
  return jax.tree.map(lambda *x: np.stack(x), *results)


class StackedGradientsTest(parameterized.TestCase):

  @cases.parameters(*modes.PLAIN)
  def test_returns_the_mean_loss_and_the_gradient_of_each_shard(self, mode):
    value, grads = run(mode, st.value_and_grad(loss, AXIS), W, X)

    expected = of_each_shard(jax.grad(loss), X)
    np.testing.assert_allclose(value, loss(W, X), rtol=1e-6)
    self.assertEqual(grads.axes, (AXIS,))
    chex.assert_trees_all_close(grads.tree, expected, atol=1e-7, strict=True)

  @cases.parameters(*modes.PLAIN)
  def test_a_gradient_stays_on_the_devices_of_its_shard(self, mode):
    mesh = modes.plain_mesh(mode)
    grad_fn = st.value_and_grad(loss, AXIS, mesh=mesh)

    compiled = (
        jax.jit(lambda w, x: grad_fn(w, x)[1])
        .lower(modes.place(W, mesh), modes.place(X, mesh, AXIS))
        .compile()
    )

    self.assertNotRegex(compiled.as_text(), 'all-reduce|all-gather')
    (sharding,) = jax.tree.leaves(compiled.output_shardings)
    self.assertEqual(sharding.spec[0], AXIS)

  @cases.parameters(*modes.PLAIN)
  def test_weights_count_tokens(self, mode):
    grad_fn = st.value_and_grad(token_loss, AXIS, weight_fn=num_tokens)
    tx = st.cross_shard_mean(AXIS)

    def step(w, x, counts):
      (value, weight), grads = grad_fn(w, x, counts)
      bound = st.on_mesh(tx, modes.plain_mesh(mode))
      updates, _ = bound.update(grads, bound.init(w), w, weight=weight)
      return value, weight, updates

    value, weight, updates = run(mode, step, W, X, COUNTS)

    expected = jax.value_and_grad(token_loss)(W, X, COUNTS)
    chex.assert_trees_all_close((value, updates), expected, atol=1e-6)
    np.testing.assert_array_equal(weight, COUNTS.reshape(SHARDS, -1).sum(1))

  @cases.parameters(*modes.PLAIN)
  def test_weights_count_outside_of_jit_without_a_mesh_in_use(self, mode):
    mesh = modes.plain_mesh(mode)
    grad_fn = st.value_and_grad(
        token_loss, AXIS, weight_fn=num_tokens, mesh=mesh
    )
    batch = modes.place((X, COUNTS), mesh, AXIS)

    (value, _), _ = grad_fn(modes.place(W, mesh), *batch)

    np.testing.assert_allclose(value, token_loss(W, X, COUNTS), rtol=1e-5)

  @cases.parameters((4, 8), (8, 4))
  def test_refuses_another_mesh_than_that_in_use(self, in_use, given):
    grad_fn = st.value_and_grad(loss, AXIS, mesh=modes.mesh(given))

    with (
        jax.set_mesh(modes.mesh(in_use)),
        self.assertRaisesRegex(
            ValueError, '`mesh` of `value_and_grad` must be'
        ),
    ):
      grad_fn(W, X)

  def test_weighted_gradients_need_their_weight(self):
    mesh = modes.plain_mesh('jit')
    grad_fn = st.value_and_grad(
        token_loss, AXIS, has_aux=False, weight_fn=num_tokens, mesh=mesh
    )
    tx = st.on_mesh(st.cross_shard_mean(AXIS), mesh)
    (_, weight), grads = grad_fn(W, X, COUNTS)

    with self.assertRaisesRegex(ValueError, 'Pass the `weight` that'):
      tx.update(grads, tx.init(W), W)

    tx.update(grads, tx.init(W), W, weight=weight)

  @cases.parameters(*modes.PLAIN)
  def test_stacks_auxiliary_results(self, mode):
    def with_aux(w, x):
      return loss(w, x), {'sum': x.sum(0), 'number': 3, 'key': jnp.int32(1)}

    grad_fn = st.value_and_grad(with_aux, AXIS, has_aux=True)
    (_, aux), _ = run(mode, grad_fn, W, X)

    sums = X.reshape(SHARDS, -1, FEATURES).sum(1)
    np.testing.assert_allclose(aux['sum'], sums, rtol=1e-5)
    np.testing.assert_array_equal(aux['number'], [3] * SHARDS)
    self.assertEqual(aux['key'].shape, (SHARDS,))

  @cases.parameters(*modes.PLAIN)
  def test_loops_and_closed_over_numbers_need_no_types(self, mode):
    scale = np.full((1, FEATURES), 2, np.float32)

    def looped(w, x):
      def add(i, total):
        return total + loss(w, i * x * scale)

      return lax.fori_loop(0, 3, add, 0.0)

    value, grads = run(mode, st.value_and_grad(looped, AXIS), W, X)

    expected = jax.value_and_grad(looped)(W, X)
    actual = value, grads.tree.mean(0)
    chex.assert_trees_all_close(actual, expected, rtol=1e-5, atol=1e-6)

  @cases.parameters(*modes.PLAIN)
  def test_a_sum_over_the_shards_in_the_loss_is_differentiated(self, mode):
    def total(w, x):
      return lax.psum(jnp.sum(jnp.tanh(x @ w)), AXIS)

    value, grads = run(mode, st.value_and_grad(total, AXIS), W, X)

    def alone(w, x):
      return jnp.sum(jnp.tanh(x @ w))

    expected = jax.value_and_grad(alone)(W, X)
    actual = value, grads.tree.mean(0)
    chex.assert_trees_all_close(actual, expected, rtol=1e-4, atol=1e-4)

  @cases.parameters(*modes.PLAIN)
  def test_in_axes_determines_which_arrays_are_split(self, mode):
    table = np.arange(16, dtype=np.float32)

    def lookup(w, batch, scale):
      return loss(w, batch['x']) * batch['table'].max() * scale

    grad_fn = st.value_and_grad(
        lookup, AXIS, in_axes=(None, {'x': 0, 'table': None}, None)
    )
    mesh = modes.plain_mesh(mode)
    with jax.set_mesh(mesh):
      x = modes.place(X, mesh, AXIS)
      value, grads = jax.jit(grad_fn)(W, {'x': x, 'table': table}, 2.0)

    expected = jax.value_and_grad(lookup)(W, {'x': X, 'table': table}, 2.0)
    actual = value, grads.tree.mean(0)
    chex.assert_trees_all_close(actual, expected, rtol=1e-5, atol=1e-6)

  def test_positional_arrays_are_split_and_keywords_are_not(self):
    seen = {}

    def record(w, x, key, scale, *, table):
      seen.update(x=x.shape, key=key.shape, scale=scale, table=table.shape)
      return loss(w, x)

    grad_fn = st.value_and_grad(record, AXIS, mesh=modes.plain_mesh('jit'))
    grad_fn(W, X, jax.random.key(0), 'text', table=np.zeros(5))

    expected = dict(x=(8, FEATURES), key=(), scale='text', table=(5,))
    self.assertEqual(seen, expected)

  def test_types_determine_which_arrays_are_split(self):
    mesh = modes.plain_mesh('jit_explicit')
    seen = {}

    def record(w, x, table, *, labels):
      seen.update(x=x.shape, table=table.shape, labels=labels.shape)
      return loss(w, x)

    with jax.set_mesh(mesh):
      x, labels = modes.place((X, np.zeros(ROWS)), mesh, AXIS)
      st.value_and_grad(record, AXIS)(W, x, jnp.zeros(16), labels=labels)

    self.assertEqual(seen, dict(x=(8, FEATURES), table=(16,), labels=(8,)))

  @cases.parameters(*modes.PLAIN)
  def test_several_arguments_may_be_parameters(self, mode):
    def scaled(x, w, b):
      return loss(w, x) * b

    mesh = modes.plain_mesh(mode)
    grad_fn = st.value_and_grad(scaled, AXIS, argnums=(1, -1))
    with jax.set_mesh(mesh):
      value, grads = jax.jit(grad_fn)(modes.place(X, mesh, AXIS), W, 3.0)

    expected = jax.value_and_grad(scaled, argnums=(1, 2))(X, W, 3.0)
    actual = value, jax.tree.map(lambda x: x.mean(0), grads.tree)
    chex.assert_trees_all_close(actual, expected, rtol=1e-5, atol=1e-6)

  def test_an_integer_parameter_has_an_empty_gradient(self):
    mesh = modes.plain_mesh('jit')
    params = {'w': jnp.asarray(W), 'steps': jnp.arange(3)}
    tx = st.on_mesh(st.cross_shard_mean(AXIS), mesh)
    grad_fn = st.value_and_grad(
        lambda params, x: loss(params['w'], x), AXIS, allow_int=True, mesh=mesh
    )

    _, grads = grad_fn(params, X)
    updates, _ = tx.update(grads, tx.init(params), params)

    self.assertEqual(grads.tree['steps'].shape, (SHARDS, 3))
    self.assertEqual(updates['steps'].dtype, jax.dtypes.float0)
    self.assertEqual(updates['steps'].shape, (3,))

  @cases.parameters(*modes.PLAIN)
  def test_stacks_can_be_mapped_and_added(self, mode):
    def norms(w, x):
      _, grads = st.value_and_grad(loss, AXIS)(w, x)
      total = jax.tree.map(jnp.add, grads, grads)
      return jax.vmap(optax.tree.norm)(total)

    norms_of_shards = run(mode, norms, W, X)

    expected = 2 * of_each_shard(
        lambda w, x: optax.tree.norm(jax.grad(loss)(w, x)), X
    )
    np.testing.assert_allclose(norms_of_shards, expected, rtol=1e-5)

  @cases.parameters(
      ('adam', lambda: optax.adam(0.1)),
      ('momentum', lambda: optax.sgd(0.1, momentum=0.9)),
      ('sgd', lambda: optax.sgd(0.1)),
      ('lion', lambda: optax.lion(0.1)),
      ('MultiSteps', lambda: optax.MultiSteps(optax.sgd(0.1), 2)),
  )
  def test_a_plain_optimizer_cannot_take_a_stack(self, name, make):
    del name
    params, tx = {'w': jnp.asarray(W)}, make()
    stack = st.Stacked({'w': jnp.zeros((SHARDS, *W.shape))}, (AXIS,))

    with self.assertRaisesRegex(ValueError, r'shard_transforms\.Stacked'):
      updates, _ = tx.update(stack, tx.init(params), params)
      optax.apply_updates(params, updates)


def _grad(fn=loss, **options):
  return st.value_and_grad(fn, AXIS, **options)


REFUSED = {
    'a batch that is closed over': (
        ValueError,
        'got no argument that is split .* Pass the batch as a positional',
        lambda: _grad(lambda w: loss(w, X))(W),
    ),
    'unequal numbers of rows': (
        ValueError,
        r'different numbers of rows: .*16.*`in_axes`',
        lambda: _grad(lambda w, x, t: loss(w, x))(W, X, np.zeros(16)),
    ),
    'rows that cannot be split': (
        ValueError,
        r'split argument 1 over 8 shards, .* shape is \(60, 3\). Pad',
        lambda: _grad()(W, X[:60]),
    ),
    'parameters of another number of shards': (
        ValueError,
        'has 2 entries per shard.*`shard_transforms.resize_state`',
        lambda: _grad()(st.Stacked(np.stack([W] * 16)), X),
    ),
    'parameters that are split': (
        ValueError,
        '`in_axes` .* None for parameters.*`shard_transforms.Stacked`',
        lambda: _grad(in_axes=(0, 0))(W, X),
    ),
    'another dimension': (
        ValueError,
        '`in_axes` .* must be 0 .*, got 1',
        lambda: _grad(in_axes=(None, 1))(W, X),
    ),
    'another tree': (
        ValueError,
        '`in_axes` .* must have the tree',
        lambda: _grad(in_axes=(None, {'x': 0}))(W, X),
    ),
    'too few entries': (
        TypeError,
        '`in_axes` .* each of the 2 positional',
        lambda: _grad(in_axes=(None,))(W, X),
    ),
    'no tuple of entries': (
        TypeError,
        "`in_axes` .* must be a tuple .*, got 'nonsense'",
        lambda: _grad(in_axes='nonsense'),
    ),
    'an axis of another kind': (
        ValueError,
        "`in_axes` .* must be 0 .*, got 'x'",
        lambda: _grad(in_axes=(None, 'x')),
    ),
    'no mesh with the axis': (
        NameError,
        "`value_and_grad` needs the axis 'model'.*`jax.set_mesh",
        lambda: st.value_and_grad(loss, 'model')(W, X),
    ),
    'a mesh that is none': (
        TypeError,
        '`mesh` must be a `jax.sharding.Mesh`',
        lambda: _grad(mesh='data'),
    ),
    'a weight that is no number': (
        TypeError,
        '`weight` of `value_and_grad` must be a real number',
        lambda: _grad(weight_fn=lambda x: 'many')(W, X),
    ),
}


class RefusalTest(parameterized.TestCase):

  @cases.parameters(*REFUSED)
  def test_refuses(self, name):
    error, words, call = REFUSED[name]

    with (
        jax.set_mesh(modes.plain_mesh('jit')),
        self.assertRaisesRegex(error, words),
    ):
      call()

  def test_error_for_closed_over_arrays_names_a_remedy(self):
    mesh = modes.plain_mesh('jit_explicit')
    with jax.set_mesh(mesh):
      x, scale = modes.place(X, mesh, AXIS), jnp.ones((1, FEATURES))

      with self.assertRaisesRegex(ValueError, 'closes over arrays.*keyword'):
        _grad(lambda w, x: loss(w, x * scale))(W, x)

      def by_keyword(w, x, scale):
        return loss(w, x * scale)

      value, _ = _grad(by_keyword)(W, x, scale=scale)
    np.testing.assert_allclose(value, loss(W, X), rtol=1e-6)

  def test_error_for_an_unplaced_batch_names_a_remedy(self):
    mesh = modes.plain_mesh('jit_explicit')
    with jax.set_mesh(mesh):
      with self.assertRaisesRegex(
          ValueError, r'`jax.device_put\(batch, jax.P\(axis_name\)\)`'
      ):
        _grad()(W, X)

      value, _ = _grad()(W, jax.device_put(X, jax.P(AXIS)))
    np.testing.assert_allclose(value, loss(W, X), rtol=1e-6)
