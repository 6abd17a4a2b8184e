import functools

from absl.testing import parameterized
import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import optax

import cases
from shard_transforms._src.analysis import elementwise

PARAMS = {
    'w': jax.ShapeDtypeStruct((3, 5), jnp.float32),
    'b': jax.ShapeDtypeStruct((5,), jnp.float32),
    's': jax.ShapeDtypeStruct((), jnp.float32),
}


def twice_the_sum(x, y):
  return x + y + y


def noise_like(x):
  return jax.random.normal(jax.random.key(0), x.shape)


def problem_of(inner, params=PARAMS, num_slices=4, **extra_args):
  inner = optax.with_extra_args_support(inner)
  update = functools.partial(inner.update, **extra_args)
  inner = inner._replace(update=update)
  return elementwise.find_problem(inner, params, params, (num_slices,))


AXIS = 'data'
TABLE = np.array([0.0, 0.5, 2.0], np.float32)


def halved(x):
  return lax.fori_loop(0, 3, lambda _, x: x / 2, x)


def leafwise(fn):
  """Returns a transformation that applies `fn(update, param)` to each leaf."""
  return optax.stateless(lambda u, p: jax.tree.map(fn, u, p))


def scalar_of(fn):
  """Returns one that multiplies all leaves by `fn(updates)`."""

  def update(updates, params):
    del params
    scale = fn(updates)
    return jax.tree.map(lambda u: u * scale, updates)

  return optax.stateless(update)


def problem_with_sums(fn, shape=(3, 8)):
  """Returns the problem of a function of a leaf, where shards may add up."""
  inner = optax.with_extra_args_support(optax.stateless(lambda u, p: fn(u)))
  found = []

  # The axes are bound only where it is traced.
  def check(x):
    found.append(elementwise.find_problem(inner, x, x, (8,), (AXIS,)))

  axes = [(AXIS, 8), ('model', 2)]
  jax.make_jaxpr(check, axis_env=axes)(jnp.ones(shape))
  return found[0]


def total(x):
  return lax.psum(jnp.sum(x), AXIS)


def ones_of_a_row(x):
  # Ones are one number; but for a slice of one column, eight are eight times.
  return x * total(x * jnp.ones((1,) * (x.ndim - 1) + (8,)))


RING = [(0, 1)]
HALVES = [[0, 1, 2, 3], [4, 5, 6, 7]]
# A sum over all slices is one number, if what it adds up ends in zeros.
SUMS = (
    lambda x: x * total(x**2),
    lambda x: x * total(-jnp.abs(x) + jnp.sqrt(x) + 3 * x / 7),
    lambda x: x * total(jnp.maximum(x, 2 * x)),
    lambda x: x * total(lax.complex(x, x).imag),
    lambda x: x * total(jnp.where(total(x) > 0, x, 2 * x)),
    lambda x: x * lax.psum(jnp.sum(x) + jnp.sum(2 * x), (AXIS, 'model')),
    lambda x: x * lax.psum(sum([jnp.sum(x), jnp.sum(2 * x)]), AXIS),
    lambda x: x * (total(x) / 7 * (1 / 8)),
    lambda x: x * (total(x) * 0.5),
    lambda x: x * jnp.sqrt(total(x).astype('bfloat16')).astype('float32'),
    lambda x: x * lax.cond(total(x) > 0, total, lambda x: 2 * total(x), x),
    lambda x: x * jnp.sort(jnp.arange(5) * total(x))[::-1][0],
    # What is sent may be the same on all shards.
    lambda x: x * lax.pmax(jnp.float32(1), AXIS),
    lambda x: x * lax.psum(jnp.sum(jnp.ones(3)), 'model'),
)
NOT_ZERO = 'padding behind the last element may not be zero'
OF_A_SLICE = 'a sum over the slice of one shard is used as if over all'
TWICE = '`psum` adds up what is the same on all shards'
WRONG_SUMS = (
    # Each of them gives another number where all shards hold the whole.
    (lambda x: x * lax.pmean(jnp.sum(x), AXIS), '`pmean` divides'),
    (lambda x: x * lax.pmean(jnp.sum(x), (AXIS, 'model')), '`pmean` divides'),
    (lambda x: x * (total(x) * (1 / 8)), '`pmean` divides'),
    (lambda x: x * (0.125 * total(x)), '`pmean` divides'),
    (lambda x: x * lax.psum(total(x), AXIS), TWICE),
    (lambda x: x * lax.psum(jnp.sqrt(total(x)), AXIS), TWICE),
    (lambda x: lax.psum(x, AXIS), '`psum` takes several'),
    (lambda x: x * lax.psum_scatter(jnp.arange(8.0), AXIS), 'of their own'),
    (lambda x: x * lax.all_to_all(jnp.arange(8.0), AXIS, 0, 0)[0], 'their own'),
    (lambda x: x * lax.ppermute(jnp.float32(1), AXIS, RING), 'of their own'),
    (lambda x: x * lax.axis_index(AXIS), 'numbers of their own'),
    (
        lambda x: x * lax.fori_loop(0, 2, lambda _, y: y + axis_index(), 1),
        'numbers of their own',
    ),
    (lambda x: x * (2 * jnp.sum(x)), OF_A_SLICE),
    (lambda x: x * jnp.sqrt(jnp.sum(x)), OF_A_SLICE),
    (lambda x: x * (1 + jnp.sum(x)), OF_A_SLICE),
    (lambda x: x * lax.pmax(jnp.sum(x), AXIS), OF_A_SLICE),
    (lambda x: x * lax.psum(jnp.sum(x).astype(int), AXIS), OF_A_SLICE),
    (lambda x: x * lax.psum(jnp.sum(x), 'model'), OF_A_SLICE),
    (
        lambda x: x * lax.psum(jnp.sum(x), AXIS, axis_index_groups=HALVES),
        OF_A_SLICE,
    ),
    (
        lambda x: x * lax.psum(jnp.sum(x, 0)[None], AXIS),
        '`reduce_sum` takes several',
    ),
    (lambda x: x * jnp.sum(x[None], 0), '`reduce_sum` takes several'),
    (lambda x: x * lax.cond(total(x) > 0, total, jnp.max, x), '`reduce_max` '),
    (lambda x: x * total(x + 1), NOT_ZERO),
    (lambda x: x * total(jnp.exp(x)), NOT_ZERO),
    (lambda x: x * total(x**0), NOT_ZERO),
    (lambda x: x * total(x**-2), NOT_ZERO),
    (lambda x: x * total(jnp.maximum(x, 1)), NOT_ZERO),
    (lambda x: x * total(jnp.where(x == 0, 1, x)), NOT_ZERO),
    # Of -0.0, which is zero, too.
    (lambda x: x * total(lax.bitcast_convert_type(-x, 'int32')), NOT_ZERO),
    # Behind its end, the other may be infinite.
    (lambda x: x * total(x * (x + 1)), NOT_ZERO),
    (lambda x: x * total(x / (x + 1)), NOT_ZERO),
    (
        lambda x: x
        * total(lax.cond(total(x) > 0, lambda x: x, lambda x: x + 1, x)),
        NOT_ZERO,
    ),
    (
        lambda x: x * total(lax.fori_loop(0, 3, lambda _, c: c + 1, 0 * x)),
        NOT_ZERO,
    ),
    (ones_of_a_row, 'what it does depends on their shapes'),
)


def axis_index():
  return lax.axis_index(AXIS)


class SumTest(parameterized.TestCase):

  @cases.parameters(*SUMS)
  def test_accepts(self, fn):
    self.assertIsNone(problem_with_sums(fn))

  @cases.parameters(*WRONG_SUMS)
  def test_refuses(self, fn, problem):
    self.assertRegex(problem_with_sums(fn), problem)

  def test_refuses_a_vector_that_is_repeated(self):
    self.assertRegex(problem_with_sums(ones_of_a_row, (8,)), 'on their shapes')


class ElementwiseTest(parameterized.TestCase):

  @parameterized.named_parameters(
      ('arithmetic', lambda u, p: 2 * u + p**3 - u / (p + 1)),
      ('functions', lambda u, p: jnp.tanh(jnp.exp(u)) + jax.nn.gelu(p)),
      (
          'choices',
          lambda u, p: jnp.where(u > 0, jnp.clip(p, -1, 1), jnp.sign(u)),
      ),
      ('casts', lambda u, p: u.astype(jnp.bfloat16).astype(jnp.float32) + p),
      ('nothing', lambda u, p: jnp.zeros_like(u)),
      ('a number', lambda u, p: jnp.full(u.shape, 3.0, u.dtype)),
      (
          'calls',
          lambda u, p: jax.jit(jnp.multiply)(u, jax.checkpoint(jnp.sin)(p)),
      ),
      ('a branch', lambda u, p: lax.cond(True, lambda: u, lambda: 2 * p)),
      ('bits', lambda u, p: jnp.nextafter(u, p)),
      ('a loop', lambda u, p: lax.fori_loop(0, 3, lambda _, x: x + p, u)),
      (
          'a loop whose length is a number',
          lambda u, p: lax.while_loop(
              lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1] * p), (0, u)
          )[1],
      ),
      ('loops in branches', lambda u, p: lax.cond(True, halved, jnp.sin, u)),
      (
          'bits in integers',
          lambda u, p: lax.bitcast_convert_type(
              lax.bitcast_convert_type(u, jnp.int32) & ~0xFFFF, jnp.float32
          ),
      ),
      ('a sign', lambda u, p: jnp.where(jnp.signbit(u), u, p)),
      ('a barrier', lambda u, p: lax.optimization_barrier((u, p))[0]),
      ('a polynomial', lambda u, p: jnp.polyval(TABLE, u)),
      ('a new axis', lambda u, p: (u[None] * 2)[0]),
      ('zeta', lambda u, p: jax.scipy.special.zeta(2 + u**2, 1.0)),
  )
  def test_accepts(self, fn):
    self.assertIsNone(problem_of(leafwise(fn)))

  @parameterized.named_parameters(
      ('a stack', lambda u, p: jnp.stack([u, p]).max(0), 'moves them'),
      (
          'a concatenation',
          lambda u, p: jnp.concatenate([u[None], p[None]])[1],
          '`concatenate` moves them',
      ),
      (
          'a table',
          lambda u, p: jnp.array(TABLE)[(u > 0).astype(int)] * u,
          '`gather` moves them',
      ),
      (
          'what is not known',
          lambda u, p: jax.pure_callback(np.abs, u, u),
          '`pure_callback` takes several of them together, as far as is known',
      ),
      (
          'a solver of its own',
          lambda u, p: u * lax.reduce(jnp.ones(3), 0.0, twice_the_sum, (0,)),
          '`reduce` takes several of them together, as far as is known',
      ),
  )
  def test_refuses_what_it_does_not_understand(self, fn, problem):
    self.assertRegex(problem_of(leafwise(fn)), problem)

  @parameterized.named_parameters(
      ('numbers of its own', scalar_of(lambda u: jnp.sum(jnp.arange(3.0)))),
      (
          'noise for all',
          scalar_of(lambda u: jax.random.normal(jax.random.key(0))),
      ),
      ('a table like a leaf', scalar_of(lambda u: jnp.sum(np.arange(5.0)))),
      ('a small leaf', scalar_of(lambda u: jnp.sum(u['s']))),
  )
  def test_accepts_transformations(self, inner):
    self.assertIsNone(problem_of(inner))

  @parameterized.named_parameters(
      ('a sum', lambda u, p: u - jnp.sum(u), '`reduce_sum` takes several'),
      ('a maximum', lambda u, p: u / jnp.max(p), '`reduce_max` takes several'),
      (
          'a product',
          lambda u, p: u @ (u.T @ p) if u.ndim == 2 else u,
          '`transpose` moves them',
      ),
      (
          'a matrix',
          lambda u, p: u @ p[0] if u.ndim == 2 else u,
          'the shapes of the updates',
      ),
      (
          'a matrix of rows',
          lambda u, p: u * p[:1] if u.ndim == 2 else u,
          '`slice` moves',
      ),
      (
          'a square',
          lambda u, p: jnp.einsum('ij,kj->ik', u, u) @ u if u.ndim == 2 else u,
          '`dot_general` takes several',
      ),
      (
          'a product with a table',
          lambda u, p: u @ np.ones((u.shape[-1], 5)) if u.ndim else u,
          '`dot_general` takes several',
      ),
      (
          'frequencies',
          lambda u, p: jnp.fft.fft(u).real if u.ndim else u,
          '`fft` takes several',
      ),
      ('order', lambda u, p: jnp.sort(u.ravel()).reshape(u.shape), 'several'),
      ('a neighbour', lambda u, p: jnp.roll(u, 1), '`slice` moves them'),
      ('an element', lambda u, p: u * u.ravel()[0], '`slice` moves them'),
      ('running sums', lambda u, p: jnp.cumsum(u).reshape(u.shape), 'several'),
      ('a reversal', lambda u, p: u[..., ::-1] if u.ndim else u, '`rev` moves'),
      (
          'a loop over neighbours',
          lambda u, p: lax.fori_loop(0, 3, lambda _, x: jnp.roll(x, 1) + p, u),
          '`slice` moves them',
      ),
      (
          'a loop over elements',
          lambda u, p: lax.scan(lambda c, x: (c + x, c), 0.0, u.ravel())[0] * u,
          'a loop takes them one by one',
      ),
      (
          'a loop until all are small',
          lambda u, p: lax.while_loop(
              lambda x: jnp.max(x) > 1, lambda x: x / 2, u
          ),
          '`reduce_max` takes several',
      ),
      (
          'its size in a loop',
          lambda u, p: lax.fori_loop(0, 3, lambda _, x: x * u.size, u),
          'on their shapes',
      ),
      (
          'its size as a mean of copies',
          lambda u, p: u * jnp.mean(jnp.ones((2, *u.shape)) + u.size),
          'on their shapes',
      ),
      (
          'a shape by hand',
          lambda u, p: jnp.reshape(u, (1, 3, 5))[0] if u.ndim == 2 else u,
          'on slices it raises',
      ),
      (
          'another shape',
          lambda u, p: jnp.tanh(u.ravel()).reshape(u.shape) if u.ndim else u,
          '`reshape` moves them',
      ),
      # Slices along columns would meet others.
      (
          'pairs',
          lambda u, p: (u.reshape(1, -1) * TABLE[1]).reshape(u.shape),
          '`reshape` moves them',
      ),
      (
          'places',
          lambda u, p: u * jnp.arange(u.size, dtype=u.dtype).reshape(u.shape),
          'a number of its own for each place',
      ),
      (
          'columns',
          lambda u, p: u * jnp.arange(5.0) if u.ndim == 1 else u,
          r'`mul` brings .* an array \[5\] that has a number of its own',
      ),
      (
          'noise',
          lambda u, p: u + jax.random.normal(jax.random.key(0), u.shape),
          'a number of its own for each place',
      ),
      (
          'noise alone',
          lambda u, p: jax.random.normal(jax.random.key(0), u.shape),
          'depends on their shapes',
      ),
      (
          'a mean of ones',
          lambda u, p: u * jnp.sum(jnp.ones(u.shape)),
          'depends on their shapes',
      ),
      (
          'a reduction of its own',
          lambda u, p: u * lax.reduce(u, 0.0, twice_the_sum, range(u.ndim)),
          '`reduce.*` takes several',
      ),
      ('its size', lambda u, p: u / u.size, 'depends on their shapes'),
      ('its size as a power', lambda u, p: u**u.size, 'on their shapes'),
      (
          'its size as turns',
          lambda u, p: u * lax.fori_loop(0, u.size, lambda _, x: 2 * x, 1.0),
          'on their shapes',
      ),
      (
          'its size as a sum',
          lambda u, p: u * jnp.sum(jnp.ones((u.size, 2))),
          'on their shapes',
      ),
      (
          'its size as a table',
          lambda u, p: u * np.arange(u.size).max(),
          'on their shapes',
      ),
      (
          'its size as a limit',
          lambda u, p: 2 * u if u.size > 3 else u,
          'on their shapes',
      ),
      (
          'its size as a choice',
          lambda u, p: u if u.size > 3 else p,
          'on their shapes',
      ),
      (
          'its size as a way',
          lambda u, p: u + u * p if u.size > 3 else p + u * p,
          'on their shapes',
      ),
      (
          'its size as a table of what it calls',
          lambda u, p: jax.jit(
              lambda u: u * jnp.sum(np.ones(3) + (u.size > 3))
          )(u),
          'on their shapes',
      ),
      (
          'its size as the last bit of a number',
          lambda u, p: u * np.nextafter(np.float32(1), np.float32(u.size > 3)),
          'on their shapes',
      ),
      (
          'its size as the sign of zero',
          lambda u, p: u * (0.0 if u.size > 3 else -0.0),
          'on their shapes',
      ),
      (
          'its size as a dtype',
          lambda u, p: u * p.astype('bfloat16' if u.size > 3 else 'float16'),
          'on their shapes',
      ),
      (
          'its size as a table in a branch',
          lambda u, p: lax.cond(True, lambda: u * u.size, lambda: u),
          'on their shapes',
      ),
      (
          'its length',
          lambda u, p: u if p.shape[-1:] == (5,) else 2 * u,
          'depends on their shapes',
      ),
      (
          'a deep sum',
          lambda u, p: lax.cond(True, lambda: u, lambda: u - jnp.sum(p)),
          '`reduce_sum` takes several',
      ),
  )
  def test_refuses(self, fn, problem):
    self.assertRegex(problem_of(leafwise(fn)), problem)

  @parameterized.named_parameters(
      (
          'a norm',
          lambda p: optax.tree_utils.tree_norm(p),
          '`reduce_sum` .* in its state at',
      ),
      (
          'centered',
          lambda p: jax.tree.map(lambda x: x - jnp.mean(x), p),
          '`reduce_sum` .* in its state at',
      ),
      (
          'noise',
          lambda p: jax.tree.map(noise_like, p),
          'its state at .* each place has its own number',
      ),
      (
          'sizes',
          lambda p: jnp.float32(sum(x.size for x in jax.tree.leaves(p))),
          'what it does depends on their shapes',
      ),
  )
  def test_looks_at_how_state_starts(self, init, problem):
    inner = optax.GradientTransformation(
        init, lambda updates, state, params=None: (updates, state)
    )

    self.assertRegex(problem_of(inner), problem)

  def test_refuses_a_table_of_a_number_for_each_element(self):
    table = np.arange(15.0, dtype=np.float32).reshape(3, 5)

    def update(updates, params):
      del params
      return {**updates, 'w': updates['w'] * table}

    self.assertRegex(
        problem_of(optax.stateless(update)),
        'a number of its own for each place',
    )

  @parameterized.named_parameters(
      (
          'norm',
          optax.clip_by_global_norm(1.0),
          r"`reduce_sum`.* updates at \['b'\]",
      ),
      ('nans', optax.zero_nans(), r"`reduce_or`.* state at .*found_nan\['b'\]"),
      (
          'memory',
          optax.lbfgs(),
          r'its state at .* has a shape of its own, \(10',
      ),
      (
          'factors',
          optax.scale_by_factored_rms(min_dim_size_to_factor=2),
          'state',
      ),
      (
          'a tree by shapes',
          optax.masked(
              optax.trace(0.9),
              lambda p: jax.tree.map(lambda x: x.shape == (3, 5), p),
          ),
          'its state depends on their shapes',
      ),
  )
  def test_names_what_is_wrong(self, inner, problem):
    self.assertRegex(problem_of(inner), problem)

  def test_looks_at_what_is_used_alone(self):
    def update(updates, params):
      del params
      _ = jax.tree.map(jnp.sum, updates)
      return updates

    self.assertIsNone(problem_of(optax.stateless(update)))

  def test_looks_at_the_state_too(self):
    def init(params):
      del params
      return jnp.zeros(())

    def update(updates, state, params=None):
      del state, params
      return updates, optax.tree_utils.tree_norm(updates)

    inner = optax.GradientTransformation(init, update)
    self.assertRegex(problem_of(inner), '`reduce_sum` .* in its state')

  def test_knows_extra_arguments(self):
    def update(updates, state, params=None, *, value, **extra_args):
      del params, extra_args
      return jax.tree.map(lambda u: u * value, updates), state

    inner = optax.GradientTransformationExtraArgs(
        lambda params: optax.EmptyState(), update
    )
    self.assertIsNone(problem_of(inner, value=jnp.float32(2)))
    self.assertRegex(
        problem_of(inner, {'b': PARAMS['b']}, value=jnp.arange(5.0)),
        'a number of its own for each place',
    )

  def test_a_leaf_of_one_element_is_cut_as_well(self):
    params = {**PARAMS, 'b': jax.ShapeDtypeStruct((1,), jnp.float32)}

    self.assertIsNone(problem_of(optax.adam(0.1), params))
    self.assertRegex(
        problem_of(scalar_of(lambda u: u['b'][0]), params),
        '`squeeze` moves them to other places',
    )

  def test_looks_at_a_tree_that_is_another_for_slices_alone(self):
    def is_large(params):
      return jax.tree.map(lambda x: x.size > 10, params)

    inner = optax.masked(optax.trace(0.9), is_large)

    self.assertRegex(problem_of(inner), 'its state depends on their shapes')

  # Slices of one size lie along different dimensions.
  @parameterized.parameters(
      ((6, 4), (1,), (1, 1)),
      ((6, 4), (1, 4), (1, 4)),
  )
  def test_refuses_elements_of_leaves_of_other_shapes(self, of_w, of_b, shape):
    w, b = (jax.ShapeDtypeStruct(x, jnp.float32) for x in (of_w, of_b))
    inner = optax.stateless(
        lambda u, _: {**u, 'w': u['w'] * u['b'].reshape(shape)}
    )

    self.assertRegex(
        problem_of(inner, {'w': w, 'b': b}), 'leaves of other shapes, .* meet'
    )

  def test_refuses_a_leaf_of_the_elements_of_another(self):
    w, b = (jax.ShapeDtypeStruct(x, jnp.float32) for x in ((1, 8), (8,)))
    inner = optax.stateless(lambda u, _: {**u, 'w': u['b'].reshape(1, 8)})

    problem = problem_of(inner, {'w': w, 'b': b})

    self.assertRegex(problem, r"at \['w'\] depends on elements .* \(8,\)")

  def test_refuses_another_tree(self):
    inner = optax.stateless(lambda updates, params: list(updates.values()))

    self.assertRegex(problem_of(inner), 'changes the trees')
