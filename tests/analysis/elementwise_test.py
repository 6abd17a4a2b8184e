"""Tests of element-wise operations; see also optax_optimizers_test."""

import functools

from absl.testing import parameterized
import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import optax

import cases
from shard_transforms._src.analysis import elementwise

AXIS = 'data'
PARAMS = {
    'w': jax.ShapeDtypeStruct((3, 5), jnp.float32),
    'b': jax.ShapeDtypeStruct((5,), jnp.float32),
    's': jax.ShapeDtypeStruct((), jnp.float32),
}
TABLE = np.array([0.0, 0.5, 2.0], np.float32)
RING = [(0, 1)]
HALVES = [[0, 1, 2, 3], [4, 5, 6, 7]]


def problem_of(inner, params=PARAMS, num_slices=4, **extra_args):
  inner = optax.with_extra_args_support(inner)
  update = functools.partial(inner.update, **extra_args)
  inner = inner._replace(update=update)
  return elementwise.find_problem(inner, params, params, (num_slices,))


def problem_with_sums(fn, shape=(3, 8)):
  """Returns the problem of a function of a leaf that may use collectives."""
  inner = optax.with_extra_args_support(optax.stateless(lambda u, p: fn(u)))
  problems = []

  # The axes are bound only while it is traced.
  def check(x):
    problems.append(elementwise.find_problem(inner, x, x, (8,), (AXIS,)))

  axes = [(AXIS, 8), ('model', 2)]
  jax.make_jaxpr(check, axis_env=axes)(jnp.ones(shape, jnp.float32))
  return problems[0]


def leafwise(fn):
  """Returns a transformation that applies `fn(update, param)` to each leaf."""
  return optax.stateless(lambda u, p: jax.tree.map(fn, u, p))


def of_matrix(fn):
  """Returns a function that changes only matrices."""
  return lambda u, p: fn(u, p) if u.ndim == 2 else u


def scalar_of(fn):
  """Returns a transformation that multiplies all leaves by `fn(updates)`."""
  return optax.stateless(lambda u, _: jax.tree.map(lambda x: x * fn(u), u))


def starting_with(init):
  """Returns an identity transformation with this initial state."""
  return optax.GradientTransformation(
      init, lambda u, state, params=None: (u, state)
  )


def twice_the_sum(x, y):
  return x + y + y


def noise(shape=()):
  return jax.random.normal(jax.random.key(0), shape)


def halved(x):
  return lax.fori_loop(0, 3, lambda _, x: x / 2, x)


def total(x):
  return lax.psum(jnp.sum(x), AXIS)


def axis_index():
  return lax.axis_index(AXIS)


def ones_of_a_row(x):
  # A vector of ones is a repeated value, but on a slice of one column, eight
  # ones would be broadcast.
  return x * total(x * jnp.ones((1,) * (x.ndim - 1) + (8,)))


# A sum over all slices is a scalar if the padding of its operand is zero.
SUMS = (
    lambda x: x * total(x**2),
    lambda x: x * total(-jnp.abs(x) + jnp.sqrt(x) + 3 * x / 7),
    lambda x: x * total(jnp.maximum(x, 2 * x)),
    lambda x: x * total(lax.complex(x, x).imag),
    lambda x: x * total(jnp.where(total(x) > 0, x, 2 * x)),
    lambda x: x * lax.psum(jnp.sum(x) + jnp.sum(2 * x), (AXIS, 'model')),
    lambda x: x * lax.psum(sum([jnp.sum(x), jnp.sum(2 * x)]), AXIS),
    lambda x: x * (total(x) / 7 * (1 / 8)),
    lambda x: x * jnp.sqrt(total(x).astype('bfloat16')).astype('float32'),
    lambda x: x * lax.cond(total(x) > 0, total, lambda x: 2 * total(x), x),
    lambda x: x * jnp.sort(jnp.arange(5) * total(x))[::-1][0],
    # The operand of a collective may be the same on all shards.
    lambda x: x * lax.pmax(jnp.float32(1), AXIS),
    lambda x: x * lax.psum(jnp.sum(jnp.ones(3)), 'model'),
)
PAD = 'the padding of the last slice may not be zero'
LOCAL = 'a sum over the slice of one shard is used like a sum over all slices'
TWICE = '`psum` sums values that are the same on all shards'
PER_SHARD = 'different values'
WRONG_SUMS = (
    # These functions have a different result if all shards hold the same leaf.
    (lambda x: x * lax.pmean(jnp.sum(x), AXIS), '`pmean` divides'),
    (lambda x: x * (total(x) * (1 / 8)), '`pmean` divides'),
    (lambda x: x * (0.125 * total(x)), '`pmean` divides'),
    (lambda x: x * lax.psum(jnp.sqrt(total(x)), AXIS), TWICE),
    (lambda x: lax.psum(x, AXIS), '`psum` .* several elements'),
    (lambda x: x * lax.psum_scatter(jnp.arange(8.0), AXIS), PER_SHARD),
    (lambda x: x * lax.all_to_all(jnp.arange(8.0), AXIS, 0, 0)[0], PER_SHARD),
    (lambda x: x * lax.ppermute(jnp.float32(1), AXIS, RING), PER_SHARD),
    (lambda x: x * axis_index(), PER_SHARD),
    (
        lambda x: x * lax.fori_loop(0, 2, lambda _, y: y + axis_index(), 1),
        PER_SHARD,
    ),
    (lambda x: x * (2 * jnp.sum(x)), LOCAL),
    (lambda x: x * lax.psum(jnp.sqrt(jnp.sum(x)), AXIS), LOCAL),
    (lambda x: x * lax.psum(1 + jnp.sum(x), AXIS), LOCAL),
    (lambda x: x * lax.pmax(jnp.sum(x), AXIS), LOCAL),
    (lambda x: x * lax.psum(jnp.sum(x).astype(int), AXIS), LOCAL),
    (lambda x: x * lax.psum(jnp.sum(x), 'model'), LOCAL),
    (lambda x: x * lax.psum(jnp.sum(x), AXIS, axis_index_groups=HALVES), LOCAL),
    (
        lambda x: x * lax.psum(jnp.sum(x, 0)[None], AXIS),
        '`reduce_sum` .* several',
    ),
    (lambda x: x * jnp.sum(x[None], 0), '`reduce_sum` .* several elements'),
    (lambda x: x * lax.cond(total(x) > 0, total, jnp.max, x), '`reduce_max` '),
    (lambda x: x * total(x + 1), PAD),
    (lambda x: x * total(x**0), PAD),
    (lambda x: x * total(x**-2), PAD),
    (lambda x: x * total(jnp.maximum(x, 1)), PAD),
    (lambda x: x * total(jnp.where(x == 0, 1, x)), PAD),
    # The bits of -0.0, which is also zero.
    (lambda x: x * total(lax.bitcast_convert_type(-x, 'int32')), PAD),
    # In the padding, the other factor may be infinite.
    (lambda x: x * total(x * (x + 1)), PAD),
    (lambda x: x * total(x / (x + 1)), PAD),
    (lambda x: x * total(lax.cond(total(x) > 0, halved, jnp.cos, x)), PAD),
    (lambda x: x * total(lax.fori_loop(0, 3, lambda _, c: c + 1, 0 * x)), PAD),
    (ones_of_a_row, 'its computation depends on the shapes'),
)


class SumTest(parameterized.TestCase):

  @cases.parameters(*SUMS)
  def test_accepts(self, fn):
    self.assertIsNone(problem_with_sums(fn))

  def test_accepted_functions_are_equal_on_slices(self):
    def shard(x):
      return jax.vmap(lambda x: [fn(x) for fn in SUMS], axis_name='model')(x)

    shards = jax.jit(jax.vmap(shard, axis_name=AXIS))
    x = np.random.default_rng(0).uniform(1, 2, (2, 3, 8)).astype(np.float32)

    unsliced = shards(x[None])
    slices = shards(np.stack(np.split(x, 8, -1)))

    for expected, slices_of_x in zip(unsliced, slices, strict=True):
      joined = np.concatenate(slices_of_x, -1)
      np.testing.assert_allclose(joined, expected[0], rtol=1e-2)

  @cases.parameters(*WRONG_SUMS)
  def test_refuses(self, fn, problem):
    self.assertRegex(problem_with_sums(fn), problem)

  def test_refuses_a_broadcast_vector(self):
    self.assertRegex(
        problem_with_sums(ones_of_a_row, (8,)), 'on the shapes of the'
    )


# Element-wise functions of an update and a parameter.
FUNCTIONS_OF_ELEMENTS = (
    lambda u, p: 2 * u + p**3 - u / (p + 1),
    lambda u, p: jnp.where(u > 0, jnp.clip(p, -1, 1), jnp.sign(u)),
    lambda u, p: u.astype(jnp.bfloat16).astype(jnp.float32) + p,
    lambda u, p: jnp.zeros_like(u),
    lambda u, p: jnp.full(u.shape, 3.0, u.dtype),
    lambda u, p: jax.jit(jnp.multiply)(u, jax.checkpoint(jnp.sin)(p)),
    lambda u, p: lax.cond(True, lambda: u, lambda: 2 * p),
    lambda u, p: jnp.nextafter(u, p),
    lambda u, p: lax.fori_loop(0, 3, lambda _, x: x + p, u),
    # An equation without results.
    lambda u, p: (jax.debug.print('{} {}', u, jnp.sum(p)), u)[1],
    # A loop of constant length.
    lambda u, p: lax.while_loop(
        lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1] * p), (0, u)
    )[1],
    lambda u, p: lax.cond(True, halved, jnp.sin, u),
    lambda u, p: lax.bitcast_convert_type(
        lax.bitcast_convert_type(u, jnp.int32) & ~0xFFFF, jnp.float32
    ),
    lambda u, p: jnp.where(jnp.signbit(u), u, p),
    lambda u, p: lax.optimization_barrier((u, p))[0],
    lambda u, p: jnp.polyval(TABLE, u),
    lambda u, p: (u[None] * 2)[0],
    lambda u, p: jax.scipy.special.zeta(2 + u**2, 1.0),
)
PLACE = 'a different value for each position'
SIZE = 'on the shapes of the parameters'
UNKNOWN = ' may combine several elements'
# Other functions, and their problems.
FUNCTIONS_OF_SEVERAL_ELEMENTS = (
    # Unknown primitives.
    (lambda u, p: jnp.stack([u, p]).max(0), 'moves elements'),
    (lambda u, p: jnp.concatenate([u[None], p[None]])[1], '`concatenate` move'),
    (lambda u, p: jnp.array(TABLE)[(u > 0).astype(int)] * u, '`gather` moves'),
    (lambda u, p: jax.pure_callback(np.abs, u, u), '`pure_callback`' + UNKNOWN),
    (
        lambda u, p: u * lax.reduce(jnp.ones(3), 0.0, twice_the_sum, (0,)),
        '`reduce`' + UNKNOWN,
    ),
    (lambda u, p: u - jnp.sum(u), '`reduce_sum` .* several elements'),
    (of_matrix(lambda u, p: u @ p[0]), 'the shapes of the updates'),
    (
        of_matrix(lambda u, p: u @ np.ones((u.shape[-1], 5))),
        '`dot_general` may',
    ),
    (lambda u, p: jnp.roll(u, 1), '`slice` moves elements'),
    (of_matrix(lambda u, p: u[..., ::-1]), '`rev` moves'),
    (
        lambda u, p: lax.fori_loop(0, 3, lambda _, x: jnp.roll(x, 1) + p, u),
        '`slice` moves elements',
    ),
    (
        lambda u, p: lax.scan(lambda c, x: (c + x, c), 0.0, u.ravel())[0] * u,
        'a loop processes elements one by one',
    ),
    (
        lambda u, p: lax.while_loop(
            lambda x: jnp.max(x) > 1, lambda x: x / 2, u
        ),
        '`reduce_max` .* several elements',
    ),
    (
        of_matrix(lambda u, p: jnp.reshape(u, (1, 3, 5))[0]),
        'raises an error on slices: ',
    ),
    # Slices along columns would be combined with other elements.
    (
        lambda u, p: (u.reshape(1, -1) * TABLE[1]).reshape(u.shape),
        '`reshape` mov',
    ),
    (lambda u, p: u * jnp.arange(u.size, dtype='f').reshape(u.shape), PLACE),
    (
        lambda u, p: u * jnp.arange(5.0) if u.ndim == 1 else u,
        r'`mul` combines .* an array \[5\] that has a different value',
    ),
    (lambda u, p: u + noise(u.shape), PLACE),
    (lambda u, p: noise(u.shape), SIZE),
    (
        lambda u, p: u
        * lax.reduce(u, np.zeros([], u.dtype), twice_the_sum, range(u.ndim)),
        '`reduce.*` .* several elements',
    ),
    # Use of the size as a constant, a table, a choice, a bit, a sign and a
    # dtype.
    (lambda u, p: u / u.size, SIZE),
    (lambda u, p: u**u.size, SIZE),
    (lambda u, p: 2 * u if u.size > 3 else u, SIZE),
    (lambda u, p: u * jnp.mean(jnp.ones((2, *u.shape)) + u.size), SIZE),
    (lambda u, p: lax.fori_loop(0, 3, lambda _, x: x * u.size, u), SIZE),
    (lambda u, p: u * lax.fori_loop(0, u.size, lambda _, x: 2 * x, 1.0), SIZE),
    (lambda u, p: u if u.size > 3 else p, SIZE),
    (lambda u, p: u + u * p if u.size > 3 else p + u * p, SIZE),
    (lambda u, p: jax.jit(lambda u: u * sum(np.ones(3) + u.size))(u), SIZE),
    (
        lambda u, p: u * np.nextafter(np.float32(1), np.float32(u.size > 3)),
        SIZE,
    ),
    (lambda u, p: u * (0.0 if u.size > 3 else -0.0), SIZE),
    (lambda u, p: u * p.astype('bfloat16' if u.size > 3 else 'float16'), SIZE),
    (lambda u, p: u if p.shape[-1:] == (5,) else 2 * u, SIZE),
    (
        lambda u, p: lax.cond(True, lambda: u, lambda: u - jnp.sum(p)),
        '`reduce_sum` .* several elements',
    ),
)


def by_shape(params):
  return jax.tree.map(lambda x: x.shape == (3, 5), params)


def by_size(params):
  return jax.tree.map(lambda x: x.size > 10, params)


def norm_in_the_state(updates, state, params=None):
  del state, params
  return updates, optax.tree_utils.tree_norm(updates)


def times(name, table):
  """Returns a transformation that multiplies one leaf by a table."""
  return optax.stateless(lambda u, _: {**u, name: u[name] * table})


# Functions of whole trees.
ACCEPTED = {
    'a constant': scalar_of(lambda u: jnp.sum(jnp.arange(3.0))),
    'noise for all': scalar_of(lambda u: noise()),
    'a table like a leaf': scalar_of(lambda u: jnp.sum(np.arange(5.0))),
    'a small leaf': scalar_of(lambda u: jnp.sum(u['s'])),
    'not used': optax.stateless(lambda u, _: (u, jax.tree.map(jnp.sum, u))[0]),
}
REFUSED = (
    (starting_with(optax.tree_utils.tree_norm), '`reduce_sum` .* in its state'),
    (
        starting_with(lambda p: jax.tree.map(lambda x: noise(x.shape), p)),
        'its state at .* has a different value for each position',
    ),
    (
        starting_with(lambda p: 1.0 * sum(x.size for x in jax.tree.leaves(p))),
        'its computation depends on the shapes',
    ),
    (times('w', np.arange(15.0, dtype='float32').reshape(3, 5)), PLACE),
    (optax.clip_by_global_norm(1.0), r"`reduce_sum`.* updates at \['b'\]"),
    (optax.zero_nans(), r"`reduce_or`.* state at .*found_nan\['b'\]"),
    (optax.lbfgs(), r'its state at .* has the shape \(10.* no parameter has'),
    (optax.scale_by_factored_rms(min_dim_size_to_factor=2), 'state'),
    (
        optax.masked(optax.trace(0.9), by_shape),
        'its state depends on the shapes',
    ),
    # On slices, the mask has a different tree.
    (
        optax.masked(optax.trace(0.9), by_size),
        'its state depends on the shapes',
    ),
    (
        optax.GradientTransformation(
            lambda _: jnp.zeros(()), norm_in_the_state
        ),
        '`reduce_sum` .* in its state',
    ),
    (optax.stateless(lambda u, _: list(u.values())), 'changes the trees'),
)


class ElementwiseTest(parameterized.TestCase):

  @cases.parameters(*FUNCTIONS_OF_ELEMENTS)
  def test_accepts(self, fn):
    self.assertIsNone(problem_of(leafwise(fn)))

  @cases.parameters(*FUNCTIONS_OF_SEVERAL_ELEMENTS)
  def test_refuses(self, fn, problem):
    self.assertRegex(problem_of(leafwise(fn)), problem)

  @cases.parameters(*ACCEPTED)
  def test_accepts_transformations(self, name):
    self.assertIsNone(problem_of(ACCEPTED[name]))

  @cases.parameters(*REFUSED)
  def test_refuses_transformations(self, inner, problem):
    self.assertRegex(problem_of(inner), problem)

  def test_supports_extra_arguments(self):
    def update(updates, state, params=None, *, value, **extra_args):
      del params, extra_args
      return jax.tree.map(lambda u: u * value, updates), state

    inner = optax.GradientTransformationExtraArgs(
        lambda params: optax.EmptyState(), update
    )
    self.assertIsNone(problem_of(inner, value=jnp.float32(2)))
    vector = {'b': PARAMS['b']}
    problem = problem_of(inner, vector, value=jnp.arange(5.0))
    self.assertRegex(problem, PLACE)

  def test_a_leaf_of_one_element_is_sliced_too(self):
    params = {**PARAMS, 'b': jax.ShapeDtypeStruct((1,), jnp.float32)}

    self.assertIsNone(problem_of(optax.adam(0.1), params))
    problem = problem_of(scalar_of(lambda u: u['b'][0]), params)
    self.assertRegex(problem, '`squeeze` moves elements to other positions')

  # Slices of equal size along different dimensions.
  @cases.parameters(
      (
          (6, 4),
          (1,),
          lambda u: u['w'] * u['b'].reshape(1, 1),
          'different shapes, .* are c',
      ),
      ((6, 4), (1, 4), lambda u: u['w'] * u['b'], 'different shapes,'),
      (
          *((1, 8), (8,), lambda u: u['b'].reshape(1, 8)),
          r"at \['w'\] depends on a leaf of another shape, \(8,\)",
      ),
  )
  def test_refuses_elements_of_other_leaves(self, of_w, of_b, fn, words):
    w, b = (jax.ShapeDtypeStruct(x, jnp.float32) for x in (of_w, of_b))
    inner = optax.stateless(lambda u, _: {**u, 'w': fn(u)})

    self.assertRegex(problem_of(inner, {'w': w, 'b': b}), words)
