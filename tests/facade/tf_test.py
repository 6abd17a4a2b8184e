"""Functions of `tf`, with their names and arguments in TensorFlow 1."""

import copy
import inspect

from absl import logging
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cases
import graphs
from shard_transforms import facade
from shard_transforms.facade import tf

X = np.float32([[0.1, 0.5, 0.9], [0.2, 0.4, 0.7]])
Y = np.float32([[0.4, 0.5, 0.3], [0.9, 0.1, 0.6]])
LABELS = np.float32([[0, 1, 0], [1, 0, 0]])
losses, nn, R = tf.losses, tf.nn, tf.losses.Reduction
mse, difference = losses.mean_squared_error, losses.absolute_difference
softmax, sparse = (
    losses.softmax_cross_entropy,
    losses.sparse_softmax_cross_entropy,
)
SQUARES = (X - Y) ** 2
LOG_SUM = np.log(np.exp(X).sum(1))
LOSS = LOG_SUM - (X * LABELS).sum(1)
SIGMOID_LOSS = np.log1p(np.exp(X)) - X * Y
HALF = np.ones(70000, np.float16)
GIVEN, SPARSE = [{'labels': x, 'logits': X} for x in (LABELS, [1, 0])]
WEIGHTED = (SQUARES @ np.float32([2, 0, 1])).sum() / 4

# Calls as programs write them, each with what NumPy computes.
CALLS = {
    'sqrt': (lambda: tf.sqrt(X), np.sqrt(X)),
    'rsqrt': (lambda: tf.rsqrt(x=X, name='r'), 1 / np.sqrt(X)),
    'sigmoid': (lambda: nn.sigmoid(X), 1 / (1 + np.exp(-X))),
    'relu': (lambda: nn.relu(features=X - 0.5), np.maximum(X - 0.5, 0)),
    'leaky_relu': (lambda: nn.leaky_relu([-1.0, 2.0]), [-0.2, 2.0]),
    'add': (lambda: tf.add(X, Y, 'sum'), X + Y),
    'pow': (lambda: tf.pow(X, 2.0), X**2),
    'floordiv': (lambda: tf.floordiv([7, -7], 2), np.int32([3, -4])),
    'truediv': (lambda: tf.truediv([7, -7], 2), np.float32([3.5, -3.5])),
    'div': (lambda: tf.div([7, -7], 2), np.int32([3, -4])),
    'div of floats': (lambda: tf.div(X, 2.0), X / 2),
    'einsum': (lambda: tf.einsum('ij,kj->ik', tf.Variable(X), Y), X @ Y.T),
    'tensordot': (lambda: tf.tensordot(X, Y, [[1], [1]]), X @ Y.T),
    'pad': (
        lambda: tf.pad(X, [[1, 0], [0, 2]], constant_values=3.0),
        np.pad(X, [[1, 0], [0, 2]], constant_values=3),
    ),
    'pad mirrored': (
        lambda: tf.pad(X, [[0, 0], [1, 0]], 'REFLECT'),
        np.pad(X, [[0, 0], [1, 0]], 'reflect'),
    ),
    'slice of a list': (
        lambda: tf.slice([1, 2, 3], [1], [2]),
        np.int32([2, 3]),
    ),
    'split of a list': (
        lambda: tf.split([1, 2, 3, 4], 2)[1],
        np.int32([3, 4]),
    ),
    'unstack of a list': (lambda: tf.unstack([1, 2])[1], np.int32(2)),
    'bias_add of a list': (
        lambda: nn.bias_add([[1.0, 2.0]], [1.0, 1.0]),
        np.float32([[2, 3]]),
    ),
    'concat of lists': (
        lambda: tf.concat([[[1.0]], [[2.0]]], 1),
        np.float32([[1, 2]]),
    ),
    'initializer without arguments': (
        lambda: tf.random_uniform_initializer()(
            jax.random.key(0), [0], jnp.float32
        ),
        np.zeros(0, np.float32),
    ),
    'initializer with only an upper limit': (
        lambda: tf.random_uniform_initializer(maxval=0.0)(
            jax.random.key(0), [2], jnp.float32
        ),
        np.zeros(2, np.float32),
    ),
    'concat of shapes': (
        lambda: tf.concat([tf.shape(X)[:1], [1, -1]], 0),
        np.int32([2, 1, -1]),
    ),
    'slice': (lambda: tf.slice(X, [1, 0], [-1, 2]), X[1:, :2]),
    'gather_nd': (lambda: tf.gather_nd(X, [[1, 2], [0, 1]]), X[[1, 0], [2, 1]]),
    'gather_nd rows': (lambda: tf.gather_nd(X, [[1]]), X[[1]]),
    'lookup': (lambda: nn.embedding_lookup(X, [[1], [0]]), X[[1, 0]][:, None]),
    'map_fn': (
        lambda: tf.map_fn(lambda x: x * x.sum(), X),
        X * X.sum(1)[:, None],
    ),
    'cumsum': (lambda: tf.cumsum(X), np.cumsum(X, 0)),
    'cumsum axis': (lambda: tf.cumsum(X, 1), np.cumsum(X, 1)),
    'linspace': (lambda: tf.linspace(0.0, 1.0, 5), np.linspace(0, 1, 5)),
    'eye': (lambda: tf.eye(2, 3), np.eye(2, 3)),
    'reverse': (lambda: tf.reverse(X, [1]), X[:, ::-1]),
    'broadcast_to': (lambda: tf.broadcast_to(X[0], [2, 3]), X[[0, 0]]),
    'sequence_mask': (
        lambda: tf.sequence_mask([1, 3], 3, tf.float32),
        np.float32([[1, 0, 0], [1, 1, 1]]),
    ),
    'bias_add': (lambda: nn.bias_add(X, X[:1]), X + X[:1]),
    'swish': (lambda: nn.swish(X), X / (1 + np.exp(-X))),
    'l2_normalize': (
        lambda: nn.l2_normalize(X, 1),
        X / np.sqrt((X**2).sum(1))[:, None],
    ),
    'l2_normalize dim': (lambda: nn.l2_normalize(0 * X, dim=0), 0 * X),
    'reduce_std': (lambda: tf.math.reduce_std(X, 0), X.std(0)),
    'reduce_variance': (lambda: tf.math.reduce_variance(X), X.var()),
    'l1_regularizer': (
        lambda: tf.contrib.layers.l1_regularizer(0.5)(-X),
        X.sum() / 2,
    ),
    'l2_regularizer': (
        lambda: tf.contrib.layers.l2_regularizer(0.5)(tf.Variable(X)),
        (X**2).sum() / 4,
    ),
    'mod': (lambda: tf.floormod([7, -7], 4), np.int32([3, 1])),
    'greater': (lambda: tf.math.greater(X, Y), X > Y),
    'reduce_sum': (lambda: tf.reduce_sum(X), X.sum()),
    'reduce_sum axis': (lambda: tf.reduce_sum(X, 1, True), X.sum(1)[:, None]),
    'reduce_mean': (lambda: tf.reduce_mean(X, axis=[0]), X.mean(0)),
    'reduce_max': (
        lambda: tf.reduce_max(X, reduction_indices=0, keep_dims=True),
        X.max(0)[None],
    ),
    'reduce_logsumexp': (lambda: tf.reduce_logsumexp(X, -1), LOG_SUM),
    'count_nonzero': (lambda: tf.count_nonzero(X > 0.3, [1]), [2, 2]),
    'top_k': (lambda: nn.top_k(X, k=2).values, X[:, :0:-1]),
    'argmax': (lambda: tf.argmax(X), np.argmax(X, 0)),
    'argmax axis': (lambda: tf.argmax(X, 1), np.argmax(X, 1)),
    'argmin': (lambda: tf.argmin(X, dimension=1), np.argmin(X, 1)),
    'cast': (lambda: tf.cast(X * 4, tf.int32), np.int32(X * 4)),
    'to_float': (lambda: tf.to_float([1, 2]), np.float32([1, 2])),
    'concat': (lambda: tf.concat([X, Y], 1), np.concatenate([X, Y], 1)),
    'stack': (lambda: tf.stack([X, Y], axis=1), np.stack([X, Y], 1)),
    'constant': (lambda: tf.constant([1.0, 2.0]), np.float32([1, 2])),
    'shaped': (lambda: tf.constant(3, tf.float32, [2]), np.float32([3, 3])),
    'constant reshaped': (
        lambda: tf.constant([1, 2, 3, 4], shape=[2, 2]),
        np.int32([[1, 2], [3, 4]]),
    ),
    'expand_dims': (lambda: tf.expand_dims(X, -1), X[..., None]),
    'squeeze': (lambda: tf.squeeze(X[:, None], [1]), X),
    'reshape': (lambda: tf.reshape(X, [-1]), X.reshape(-1)),
    'transpose': (lambda: tf.transpose(X), X.T),
    'perm': (lambda: tf.transpose(X[None], [2, 0, 1]), X.T[:, None]),
    'tile': (lambda: tf.tile(X, [1, 2]), np.tile(X, [1, 2])),
    'fill': (lambda: tf.fill([2], 3.0), np.float32([3, 3])),
    'range': (lambda: tf.range(4), np.arange(4, dtype=np.int32)),
    'range delta': (lambda: tf.range(1, 7, 2), np.int32([1, 3, 5])),
    'range of a limit': (lambda: tf.range(5, delta=2), np.int32([0, 2, 4])),
    'matmul': (lambda: tf.matmul(X, Y.T.copy()), X @ Y.T),
    'matmul b': (lambda: tf.matmul(X, Y, transpose_b=True), X @ Y.T),
    'matmul a': (lambda: tf.matmul(X, Y, True), X.T @ Y),
    'gather': (lambda: tf.gather(X, [2, 0], axis=1), X[:, [2, 0]]),
    'scalar_mul': (lambda: tf.scalar_mul(2.0, X), 2 * X),
    'unstack': (lambda: tf.unstack(X, axis=1)[2], X[:, 2]),
    'one_hot': (lambda: tf.one_hot([1, 0], 2), np.float32([[0, 1], [1, 0]])),
    'zeros': (lambda: tf.zeros([2], tf.int32), np.int32([0, 0])),
    'ones_like': (lambda: tf.ones_like(X), np.ones_like(X)),
    'where': (lambda: tf.where(X > Y, X, Y), np.where(X > Y, X, Y)),
    'where row': (
        lambda: tf.where([True, False], X[0, :2], Y[0, :2]),
        [X[0, 0], Y[0, 1]],
    ),
    'norm': (lambda: tf.norm(X, ord=2), np.sqrt((X**2).sum())),
    'norm axis': (
        lambda: tf.norm(X, axis=1, keepdims=True),
        np.sqrt((X**2).sum(1))[:, None],
    ),
    'split': (lambda: tf.split(X, 3, 1)[1], X[:, 1:2]),
    'squared_difference': (lambda: tf.squared_difference(X, Y), SQUARES),
    'l2_loss': (lambda: nn.l2_loss(X), (X**2).sum() / 2),
    'mean_squared_error': (lambda: mse(X, predictions=Y), SQUARES.mean()),
    'weighted loss': (lambda: mse(X, Y, [[2.0, 0.0, 1.0]]), WEIGHTED),
    'huber_loss': (
        lambda: losses.huber_loss(X, 4 * X, delta=2.0),
        np.where(3 * X <= 2, (3 * X) ** 2 / 2, 6 * X - 2).mean(),
    ),
    'losses.softmax': (
        lambda: softmax(LABELS, X, label_smoothing=0.3),
        (LOG_SUM - (X * (0.7 * LABELS + 0.1)).sum(1)).mean(),
    ),
    'losses.sparse': (lambda: sparse([1, 0], X), LOSS.mean()),
    'loss of 16 bits': (lambda: mse(HALF, 0 * HALF), 1.0),
    'integers': (lambda: difference(np.uint8([3]), np.uint8([1])), 2.0),
    'softmax int': (lambda: softmax(np.int32(LABELS), X), LOSS.mean()),
    'sparse column': (lambda: sparse([[1], [0]], X), LOSS.mean()),
    'int8': (lambda: sparse(np.int8([1, -1]), np.zeros([2, 300])), np.nan),
    'hinge_loss': (
        lambda: losses.hinge_loss(LABELS, X),
        np.maximum(1 - (2 * LABELS - 1) * X, 0).mean(),
    ),
    'log_loss': (
        lambda: losses.log_loss(LABELS, X, epsilon=0.01),
        -np.log(np.where(LABELS, X, 1 - X) + 0.01).mean(),
    ),
    **{
        f'reduction {i}': (
            lambda r=r: mse(X, Y, [[2.0, 0.0, 1.0]], reduction=r),
            expected,
        )
        for i, (r, expected) in enumerate(
            {
                R.NONE: SQUARES * [2, 0, 1],
                R.SUM: WEIGHTED * 4,
                R.MEAN: WEIGHTED * 4 / 6,
                R.SUM_OVER_BATCH_SIZE: WEIGHTED * 4 / 6,
                R.SUM_BY_NONZERO_WEIGHTS: WEIGHTED,
            }.items()
        )
    },
    'no weights': (lambda: mse(X, Y, 0.0, reduction=R.MEAN), 0.0),
    'losses.sigmoid': (
        lambda: losses.sigmoid_cross_entropy(Y, X),
        SIGMOID_LOSS.mean(),
    ),
    'moments': (lambda: nn.moments(X, [0]), [X.mean(0), X.var(0)]),
    'add_n': (lambda: tf.add_n([X, Y, X]), 2 * X + Y),
    'softmax': (lambda: nn.softmax(X), np.exp(X) / np.exp(X).sum(1)[:, None]),
    'given': (lambda: nn.softmax_cross_entropy_with_logits(**GIVEN), LOSS),
    'v2': (lambda: nn.softmax_cross_entropy_with_logits_v2(**GIVEN), LOSS),
    'sparse_cross_entropy': (
        lambda: nn.sparse_softmax_cross_entropy_with_logits(**SPARSE),
        LOSS,
    ),
    'sigmoid_cross_entropy': (
        lambda: nn.sigmoid_cross_entropy_with_logits(labels=Y, logits=X),
        SIGMOID_LOSS,
    ),
}


# By name: a function of zero, and the gradient that TensorFlow 1.15.5 gives.
TIES = {
    'abs': (tf.abs, 0.0),
    'maximum left': (lambda x: tf.maximum(x, 0.0), 1.0),
    'maximum right': (lambda x: tf.maximum(0.0, x), 0.0),
    'maximum of both': (lambda x: tf.maximum(0.5 * x, x), 0.5),
    'minimum left': (lambda x: tf.minimum(x, 0.0), 1.0),
    'minimum right': (lambda x: tf.minimum(0.0, x), 0.0),
    'leaky_relu': (nn.leaky_relu, 0.2),
    'selu': (nn.selu, 1.0507010),
    'relu': (nn.relu, 0.0),
    'relu6': (lambda x: nn.relu6(x + 6.0), 0.0),
    'elu': (nn.elu, 1.0),
    'reduce_max': (lambda x: tf.reduce_max(tf.stack([x, 3 * x])), 2.0),
    'absolute_difference': (lambda x: difference(2.0, x + 2.0), 0.0),
}


class FunctionsTest(graphs.GraphTest):

  @cases.parameters(*TIES)
  def test_matches_the_gradient_of_tensorflow_at_a_tie(self, name):
    function, expected = TIES[name]
    w = tf.Variable(0.0)

    [grad] = tf.gradients(lambda: function(w), [w])

    self.assert_close(grad, jnp.float32(expected))

  @cases.parameters(tf.abs, nn.leaky_relu, nn.selu)
  def test_matches_jax_away_from_a_tie(self, function):
    x = np.float32([-2, -0.5, 0, 0.5, 3, np.inf, np.nan])
    of_jax = {tf.abs: jnp.abs, nn.selu: jax.nn.selu}.get(
        function, lambda x: jnp.where(x < 0, 0.2 * x, x)
    )

    self.assert_close(function(x), of_jax(x))

  @cases.parameters('maximum', 'minimum')
  def test_an_extreme_of_nan_is_nan(self, name):
    x, y = np.float32([1, 2, np.nan, 3]), np.float32([2, 1, 3, np.nan])

    actual = getattr(tf, name)(x, y)

    self.assert_equal(actual, getattr(jnp, name)(x, y))

  @cases.parameters(sorted(CALLS))
  def test_matches_numpy(self, name):
    call, expected = CALLS[name]

    actual = call()

    np.testing.assert_allclose(actual, expected, 1e-5, 1e-6)
    self.assertEqual(np.shape(actual), np.shape(expected))
    dtype_kinds = np.asarray(actual).dtype.kind, np.asarray(expected).dtype.kind
    self.assertEqual(*dtype_kinds)

  def test_takes_variables_also_in_lists_and_assigns_them(self):
    w = tf.Variable(X)

    self.assert_equal(tf.rsqrt(w), tf.rsqrt(X))
    self.assert_equal(tf.concat([w, Y], 0), jnp.concatenate([X, Y]))
    with tf.colocate_with(w):
      tf.assign(w, X + 2)
      tf.assign_add(w, X)
      tf.assign_sub(w, Y, name='less')
    self.assert_holds(w, X + 2 + X - Y)

  def test_constants_are_constants_in_a_step(self):
    actual = facade.function(lambda x: (tf.constant(0.5) * x, tf.constant([1])))

    self.assert_equal(actual(3.0), (jnp.float32(1.5), jnp.int32([1])))

  def test_64_bit_types_are_canonicalized(self):
    integer, floating = jnp.result_type(int), jnp.result_type(float)
    self.assertEqual(tf.cast([1.5], tf.int64).dtype, integer)
    self.assertEqual(tf.constant(1, dtype=tf.float64).dtype, floating)
    self.assertEqual(tf.argmax(X, output_type=tf.int64).dtype, integer)
    self.assertEqual(tf.argmin(X, 1, output_type=tf.int8).dtype, jnp.int8)

  def test_python_numbers_have_32_bits_with_x64(self):
    self.enterContext(jax.enable_x64(True))
    variables = [
        *(tf.constant(0.5), tf.zeros([2]), tf.fill([2], 1.0), tf.ones([2])),
        *(tf.convert_to_tensor([1.0]), tf.add([[0.5]], X)),
        *(tf.Variable(tf.zeros([2])), tf.Variable(3.0)),
    ]
    others = tf.range(5), tf.Variable([1, 2]), tf.Variable(2**40)
    wide = tf.sqrt(np.float64(2.0)), tf.Variable(np.float64(0.5))

    self.assertEqual({x.dtype for x in variables}, {jnp.dtype('float32')})
    self.assertEqual([x.dtype for x in others], ['int32', 'int32', 'int64'])
    self.assertEqual([x.dtype for x in wide], ['float64'] * 2)

  @pytest.mark.thorough
  def test_creates_variables_with_its_initializers(self):
    initializers = [
        *(tf.zeros_initializer(), tf.ones_initializer()),
        *(tf.constant_initializer(3.0), tf.random_normal_initializer()),
        tf.truncated_normal_initializer(stddev=0.02),
        *(tf.glorot_uniform_initializer(), tf.orthogonal_initializer(gain=2.0)),
        tf.variance_scaling_initializer(4.0, 'fan_avg', distribution='normal'),
        tf.random_uniform_initializer(-3.0, 3.0),
        *(tf.glorot_normal_initializer(), tf.initializers.he_normal()),
        *(
            tf.contrib.layers.xavier_initializer(uniform=u)
            for u in (True, False)
        ),
    ]
    variables = [
        tf.get_variable(f'w{i}', [20, 30], tf.float32, initializer)
        for i, initializer in enumerate(initializers)
    ]

    means = [float(jnp.mean(w)) for w in variables[:3]]
    spreads = [float(jnp.std(w)) for w in variables[3:]]
    self.assertEqual(means, [0, 1, 3])
    expected = 1, 0.0176, 0.2, 0.365, 0.4, 3**0.5, 0.2, 0.1**0.5, 0.2, 0.2
    np.testing.assert_allclose(spreads, expected, 0.1)
    self.assertIs(tf.initializers.zeros, tf.zeros_initializer)

  def test_collects_the_losses_of_a_step(self):
    tf.get_variable('w', [2], tf.float32, jnp.ones, regularizer=tf.reduce_sum)

    @facade.function
    def step(x):
      losses.add_loss(2 * x)
      losses.mean_squared_error(jnp.float32([1, 3]), jnp.float32([1, 1]))
      return losses.get_losses(), losses.get_regularization_losses()

    for x in (1.0, np.float32(3)):
      actual = step(x)

    self.assert_equal(
        actual, ([jnp.float32(6), jnp.float32(2)], [jnp.float32(2)])
    )
    self.assertEmpty(losses.get_losses())

  def test_aliases_are_the_same_object(self):
    for alias, expected in {
        tf.contrib.tpu.CrossShardOptimizer: facade.CrossShardOptimizer,
        tf.tpu.CrossShardOptimizer: facade.CrossShardOptimizer,
        tf.contrib.opt.DropStaleGradientOptimizer: (
            facade.DropStaleGradientOptimizer
        ),
        tf.contrib.estimator.TowerOptimizer: facade.TowerOptimizer,
        tf.tpu.shard: facade.shard,
        tf.compat.v1.train.Optimizer: tf.train.Optimizer,
        tf.logging.INFO: logging.INFO,
        tf.math.reduce_sum: tf.reduce_sum,
    }.items():
      self.assertIs(alias, expected)

  def test_shapes_are_static_in_a_compiled_step(self):
    @facade.function
    def step(x):
      shape = tf.concat([tf.shape(x)[:1], [3, -1]], 0)
      return tf.reshape(x, shape), tf.reshape(x, tf.stack([-1, tf.size(x)]))

    self.assertEqual(
        [y.shape for y in step(jnp.ones((4, 6)))], [(4, 3, 2), (1, 24)]
    )

  def test_namespaces_can_be_copied(self):
    copied = copy.deepcopy({'module': tf.train})['module']

    self.assertIs(copied.AdamOptimizer, tf.train.AdamOptimizer)
    self.assertEqual(repr(tf.contrib.opt), '<namespace tf.contrib.opt>')

  def test_completion_and_help_show_the_names_of_tensorflow(self):
    names = [name for name in vars(tf) if not name.startswith('_')]
    parameters = 'input_tensor axis keepdims name reduction_indices keep_dims'
    modules = {'jax', 'jnp', 'sys', 'functools', 'shards', 'towers'}

    self.assertContainsSubset(modules | {'train', 'reduce_mean'}, names)
    self.assertContainsSubset({'train', 'reduce_mean', 'Variable'}, dir(tf))
    self.assertEmpty(modules & set(dir(tf)))
    self.assertEqual(
        list(inspect.signature(tf.reduce_mean).parameters), parameters.split()
    )
    for name, function in vars(tf.nn).items():
      with self.subTest(name):
        if not name.startswith('_'):
          self.assertNotEmpty(inspect.signature(function).parameters)
