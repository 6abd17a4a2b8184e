"""`accumulated_value_and_grad`; accumulation_docs_test has a measured table."""

import functools

from absl.testing import parameterized
import chex
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np

import cases
from shard_transforms import accumulated_value_and_grad

AUTO, EXPLICIT = jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit
TOWERS, WIDTH, HIDDEN = 4, 8, 16
RNG = np.random.default_rng(0)
X = RNG.normal(size=(32, WIDTH)).astype(np.float32)
PARAMS = {
    'up': RNG.normal(size=(WIDTH, HIDDEN)).astype(np.float32) / 4,
    'gain': np.ones(HIDDEN, np.float32),
    'down': RNG.normal(size=(HIDDEN, WIDTH)).astype(np.float32) / 8,
}


def make_mesh(sizes, kind=AUTO, names=('data', 'model', 'rest')):
  kinds = (kind,) * len(sizes)
  return jax.make_mesh(sizes, names[: len(sizes)], kinds)


def place(mesh, tree, specs):
  shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)
  return jax.device_put(tree, shardings)


def loss_fn(params, x):
  hidden = jax.nn.relu(x @ params['up']) * params['gain'][None]
  return jnp.mean((hidden @ params['down'] - x) ** 2)


class AccumulationTest(parameterized.TestCase):

  def assert_close(self, actual, expected, rtol=1e-5):
    chex.assert_trees_all_close(
        jax.device_get(actual), jax.device_get(expected), rtol=rtol, atol=1e-6
    )

  def test_supports_specs_that_mix_axes_in_a_dimension(self):
    mesh = make_mesh((4, 2))
    both = ('model', 'data')
    specs = {'up': P(None, both), 'gain': P(both), 'down': P(both, None)}
    params, x = place(mesh, PARAMS, specs), place(mesh, X, P('data'))
    fn = accumulated_value_and_grad(
        loss_fn, 'data', TOWERS, param_specs=specs, mesh=mesh
    )

    actual = jax.jit(fn)(params, x)

    self.assert_close(actual, jax.value_and_grad(loss_fn)(PARAMS, X))
    for name, x in actual[1].items():
      sharding = params[name].sharding
      self.assertTrue(x.sharding.is_equivalent_to(sharding, x.ndim))

  @cases.parameters('mean', 'sum')
  def test_weights_count_and_zero_excludes_nan(self, reduction):
    mesh = make_mesh((4,))
    tokens = np.asarray([3, 1, 0, 2, 5, 1, 0, 4], np.float32)
    x = X.reshape(8, 4, WIDTH).copy()
    x[2] = np.nan
    fn = accumulated_value_and_grad(
        lambda w, x, tokens: jnp.mean((x @ w) ** 2),
        'data',
        2,
        mesh=mesh,
        weight_fn=lambda x, tokens: tokens[0],
        reduction=reduction,
    )
    w = jnp.ones(WIDTH)

    actual = jax.jit(fn)(w, x.reshape(32, WIDTH), tokens)

    grad = jax.value_and_grad(lambda w, x: jnp.mean((x @ w) ** 2))
    of_towers = jax.vmap(grad, (None, 0))(w, x)
    counted = tokens > 0
    positive = tokens[counted]
    total = jax.tree.map(
        lambda x: np.tensordot(positive, x[counted], 1), of_towers
    )
    divisor = tokens.sum() if reduction == 'mean' else 1
    self.assert_close(actual, jax.tree.map(lambda x: x / divisor, total))
    nothing = jax.jit(fn)(w, x.reshape(32, WIDTH), 0 * tokens)
    self.assert_close(nothing, (0.0, np.zeros(WIDTH)))

  @cases.parameters(False, True)
  def test_returns_auxiliary_results_of_all_micro_batches(self, is_stacked):
    mesh = make_mesh((4,))

    def with_aux(w, x):
      return jnp.mean(x * w), {'rows': x, 'first': x[0]}

    fn = accumulated_value_and_grad(
        with_aux, 'data', None if is_stacked else 2, mesh=mesh, has_aux=True
    )
    x = np.arange(16.0, dtype=np.float32)
    batch = x.reshape(2, 8) if is_stacked else x

    (value, aux), grad = jax.jit(fn)(jnp.float32(2), batch)

    self.assert_close((value, grad), (15.0, 7.5))
    rows = x.reshape(2, 4, 2) if is_stacked else x.reshape(8, 2)
    self.assert_close(aux, {'rows': rows, 'first': rows[..., 0]})

  def test_sums_16_bit_gradients_in_float32(self):
    mesh = make_mesh((4,))
    # In bfloat16, 256 + 1 is 256.
    x = np.where(np.arange(64) % 16 == 0, 256, 1).astype(np.float32)
    fn = accumulated_value_and_grad(
        lambda w, x: jnp.mean(w.astype(jnp.float32) * x),
        'data',
        16,
        mesh=mesh,
        reduction='sum',
    )
    w = jnp.ones([], jnp.bfloat16)

    value, grad = jax.jit(fn)(w, x)

    self.assertEqual(grad.dtype, jnp.bfloat16)
    self.assertEqual(float(value), x.sum())
    self.assertEqual(float(grad), float(jnp.bfloat16(x.sum())))

  @cases.parameters(None, lambda x: jnp.sum(x))
  def test_the_value_has_the_dtype_of_the_loss(self, weight_fn):
    fn = accumulated_value_and_grad(
        lambda w, x: jnp.mean(w * x).astype(jnp.bfloat16),
        'data',
        2,
        mesh=make_mesh((4,)),
        weight_fn=weight_fn,
    )

    value, grad = jax.jit(fn)(jnp.float32(1), jnp.ones(16))

    self.assertEqual((value, value.dtype), (1, jnp.bfloat16))
    self.assertEqual((grad, grad.dtype), (1, jnp.float32))

  def test_passes_keyword_arguments_and_rematerializes(self):
    mesh = make_mesh((4, 2), EXPLICIT)

    @functools.partial(jax.checkpoint, static_argnums=())
    def predict(w, x, scale):
      return jnp.tanh(x @ w) * jnp.sum(scale)

    def loss(w, x, *, scale, offset, kind):
      self.assertEqual(kind, 'a')
      return jnp.mean((predict(w, x, scale) - offset) ** 2)

    fn = accumulated_value_and_grad(loss, 'data', 2)
    w, x, scale = place(
        mesh, (jnp.ones(WIDTH), X, jnp.arange(4.0)), (P(), P('data'), P('data'))
    )
    options = {'offset': 0.5, 'kind': 'a'}

    with jax.set_mesh(mesh):
      step = jax.jit(lambda w, x, scale: fn(w, x, scale=scale, **options))
      actual = step(w, x, scale)

    grad_fn = jax.value_and_grad(functools.partial(loss, **options))
    self.assert_close(
        actual, grad_fn(jnp.ones(WIDTH), X, scale=jnp.arange(4.0)), rtol=1e-4
    )

  @cases.parameters(
      (P(('data', 'model'), None),),
      # Slices over an axis of the batch and over another in turn.
      (P(('model', 'rest'), None),),
  )
  def test_shards_over_several_axes(self, spec):
    mesh = make_mesh((2, 2, 2))
    fn = accumulated_value_and_grad(
        lambda w, x: jnp.mean(jnp.tanh(x @ w) ** 2),
        ('data', 'model'),
        2,
        param_specs=spec,
        mesh=mesh,
    )
    w, x = place(mesh, (PARAMS['up'], X), (spec, P(('data', 'model'))))

    actual = jax.jit(fn)(w, x)

    grad_fn = jax.value_and_grad(lambda w, x: jnp.mean(jnp.tanh(x @ w) ** 2))
    self.assert_close(actual, grad_fn(PARAMS['up'], X))

  def test_runs_without_jit(self):
    mesh = make_mesh((4, 2))
    fn = accumulated_value_and_grad(loss_fn, 'data', TOWERS, mesh=mesh)

    self.assert_close(fn(PARAMS, X), jax.value_and_grad(loss_fn)(PARAMS, X))


class RefusalTest(parameterized.TestCase):

  @cases.parameters(
      ({'num_towers': 0}, '`num_towers` must be at least 1, got 0'),
      ({'reduction': 'max'}, "`reduction` must be 'mean' or 'sum', got 'max'"),
      ({'has_aux': 1}, '`has_aux` must be a boolean, got 1'),
      ({'param_specs': 'data'}, "`param_specs` of `accum.* got 'data'"),
  )
  def test_refuses_arguments(self, arguments, message):
    with self.assertRaisesRegex((TypeError, ValueError), message):
      accumulated_value_and_grad(loss_fn, 'data', **arguments)

  @cases.parameters(
      (2, X[:30], r'30 rows by 8 shards times 2 towers, got .* \(30, 8\) at'),
      (None, X[None, :30], r'30 rows by 8 shards in each tower'),
      (None, X[:, 0], r'axes \[towers, rows\], with 32 towers .* \(32,\) at'),
      (None, (X[None], X[None][:0]), r'with 1 towers .* \(0, 32, 8\) at \[0\]'),
      (2, 3.0, r'cannot divide 0 rows .* \(\) at .* keyword arguments'),
      (
          2,
          (),
          'without arrays. Pass the rows as positional arguments after',
      ),
  )
  def test_refuses_batches_that_cannot_be_divided(self, towers, batch, message):
    fn = accumulated_value_and_grad(
        lambda w, x: w, 'data', towers, mesh=make_mesh((8,))
    )

    with self.assertRaisesRegex(ValueError, message):
      fn(1.0, batch)

  @cases.parameters(
      ('batch', make_mesh((8,)), ValueError, r"axis 'batch', got .*'data'"),
      ('data', None, ValueError, r'`with jax.set_mesh\(mesh\)`'),
      (
          'data',
          make_mesh((8,), EXPLICIT),
          ValueError,
          '`Explicit`. Call it inside `with jax.set_mesh',
      ),
      ('data', 'data', TypeError, "`mesh` .* got 'data'"),
  )
  def test_refuses_a_mesh_without_the_axis(self, axis, mesh, error, message):
    fn = accumulated_value_and_grad(loss_fn, axis, 2, mesh=mesh)

    with self.assertRaisesRegex(error, message):
      fn(PARAMS, X)

  def test_refuses_an_axis_that_is_mapped(self):
    fn = accumulated_value_and_grad(loss_fn, 'data', 2)
    mapped = jax.shard_map(
        fn, mesh=make_mesh((8,)), in_specs=(P(), P('data')), out_specs=P()
    )

    with self.assertRaisesRegex(ValueError, 'outside of `jax.shard_map`'):
      mapped(PARAMS, X)

  def test_refuses_specs_with_an_axis_that_the_mesh_lacks(self):
    fn = accumulated_value_and_grad(
        lambda w, x: jnp.mean(w * x),
        *('data', 2),
        mesh=make_mesh((4,)),
        param_specs=P('dtaa'),
    )

    message = r"names the axes \['dtaa'\], but the mesh has \('data',\)"
    with self.assertRaisesRegex(ValueError, message):
      fn(jnp.ones(4), jnp.ones(8))

  def test_refuses_specs_of_another_tree(self):
    fn = accumulated_value_and_grad(
        loss_fn, 'data', 2, mesh=make_mesh((4,)), param_specs={'up': P()}
    )

    message = '`param_specs` of .* must have the tree of the parameters'
    with self.assertRaisesRegex(ValueError, message):
      fn(PARAMS, X)

  def test_refuses_a_weight_that_is_not_a_scalar(self):
    fn = accumulated_value_and_grad(
        loss_fn, 'data', 2, mesh=make_mesh((4,)), weight_fn=lambda x: x[:, 0]
    )

    with self.assertRaisesRegex(ValueError, r'`weight` of .* shape \(\), got'):
      fn(PARAMS, X)
