"""What is accepted, by experiment: whole and in slices, it does the same."""

import functools

from absl.testing import absltest
from absl.testing import parameterized
import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import optax
from optax import contrib
import pytest

import cases
from shard_transforms._src.analysis import elementwise
from shard_transforms._src.base import leaves as leaves_lib

SHARDS, STEPS, AXIS = 4, 3, 'shards'
SHAPES = {'w': (3, 5), 'v': (4, 2, 2), 'b': (5,), 'one': (1,), 's': ()}
SCHEDULE = optax.warmup_cosine_decay_schedule(0.0, 0.1, 2, 9)
JOINED = optax.join_schedules(
    [SCHEDULE, optax.exponential_decay(0.1, 3, 0.9)], [2]
)
CYCLE = dict(init_value=0.0, peak_value=0.1, decay_steps=4, warmup_steps=1)
PIECES = optax.piecewise_interpolate_schedule('cosine', 0.1, {1: 0.5, 3: 0.1})


def trees(number):
  rng = np.random.default_rng(0)
  return [
      {
          name: jnp.asarray(rng.normal(size=shape), jnp.float32)
          for name, shape in SHAPES.items()
      }
      for _ in range(number)
  ]


def matrices(params):
  return jax.tree.map(lambda p: jnp.ndim(p) > 1, params)


def by_name(params):
  return jax.tree.map_with_path(lambda path, _: path[-1].key, params)


def is_even(step):
  return step % 2 == 0


# They treat each element alone.
ACCEPTED = {
    'adadelta': optax.adadelta(0.1),
    'adagrad': optax.adagrad(0.1),
    'adam': optax.adam(0.1),
    'adam in bfloat16': optax.adam(0.1, mu_dtype='bfloat16', nesterov=True),
    'adamax': optax.adamax(0.1),
    'adamw': optax.adamw(SCHEDULE, mask=matrices),
    'adan': optax.adan(0.1),
    'add_decayed_weights': optax.add_decayed_weights(0.1, matrices),
    'ademamix': contrib.ademamix(0.1),
    'adopt': contrib.adopt(0.1),
    'amsgrad': optax.amsgrad(0.1),
    'apply_every': optax.apply_every(2),
    'clip': optax.clip(0.1),
    'cocob': contrib.cocob(),
    'conditionally_mask': optax.conditionally_mask(optax.adam(0.1), is_even),
    'conditionally_transform': optax.conditionally_transform(
        optax.adam(0.1), is_even
    ),
    'ema': optax.ema(0.9),
    'freeze': optax.freeze({name: name in 'wb' for name in SHAPES}),
    'inject_hyperparams': optax.inject_hyperparams(optax.adamw)(
        learning_rate=SCHEDULE, b1=0.8
    ),
    'keep_params_nonnegative': optax.keep_params_nonnegative(),
    'lion': optax.lion(0.1),
    'madgrad': contrib.madgrad(0.1),
    'masked': optax.masked(optax.trace(0.9), matrices),
    'MultiSteps': optax.MultiSteps(optax.adam(0.1), 2),
    'partition': optax.partition(
        {
            'w': optax.adam(0.1),
            'v': optax.lion(0.1),
            'b': optax.sgd(0.1),
            'one': optax.set_to_zero(),
            's': optax.adam(0.1),
        },
        by_name,
    ),
    'radam': optax.radam(0.1),
    'rmsprop': optax.rmsprop(0.1, centered=True, momentum=0.9),
    'rprop': optax.rprop(0.1),
    'scale_by_factored_rms': optax.scale_by_factored_rms(),
    'scale_by_optimistic_gradient': optax.scale_by_optimistic_gradient(),
    'scale_by_schedule': optax.scale_by_schedule(JOINED),
    'schedule_free_adamw': contrib.schedule_free_adamw(0.1),
    'sgd': optax.sgd(optax.sgdr_schedule([CYCLE, CYCLE])),
    'sgd with momentum': optax.sgd(PIECES, momentum=0.9, nesterov=True),
    'split_real_and_imaginary': contrib.split_real_and_imaginary(
        optax.adam(0.1)
    ),
    'trace': optax.trace(0.9, accumulator_dtype='bfloat16'),
    'yogi': optax.yogi(0.1),
}
# They look across elements, or draw a number for each.
REFUSED = {
    'adafactor': optax.adafactor(0.1),
    'add_noise': optax.add_noise(0.1, 0.5, jax.random.key(0)),
    'apply_if_finite': optax.apply_if_finite(optax.sgd(0.1), 3),
    'clip_by_block_rms': optax.clip_by_block_rms(0.1),
    'clip_by_global_norm': optax.clip_by_global_norm(0.1),
    'dadapt_adamw': contrib.dadapt_adamw(),
    'dog': contrib.dog(0.1),
    'flatten': optax.flatten(optax.adam(0.1)),
    'galore': contrib.galore(0.1, 1),
    'lamb': optax.lamb(0.1),
    'lbfgs': optax.lbfgs(0.1, linesearch=None),
    'mechanize': contrib.mechanize(optax.sgd(0.1)),
    'momo': contrib.momo(0.1),
    'muon': contrib.muon(0.1),
    'novograd': optax.novograd(0.1),
    'polyak_sgd': optax.polyak_sgd(),
    'prodigy': contrib.prodigy(0.1),
    'scale_by_factored_rms': optax.scale_by_factored_rms(
        min_dim_size_to_factor=2
    ),
    'scale_by_param_block_norm': optax.scale_by_param_block_norm(),
    'skip_not_finite': optax.MultiSteps(
        optax.sgd(0.1), 2, should_skip_update_fn=optax.skip_not_finite
    ),
    'sm3': optax.sm3(0.1),
    'zero_nans': optax.zero_nans(),
}
VALUES = {'momo': {'value': 1.0}, 'polyak_sgd': {'value': 1.0}}


def problem_of(inner, **extra_args):
  inner = optax.with_extra_args_support(
      optax.GradientTransformationExtraArgs(inner.init, inner.update)
  )
  update = functools.partial(inner.update, **extra_args)
  (params,) = jax.eval_shape(lambda: trees(1))
  inner = inner._replace(update=update)
  return elementwise.find_problem(inner, params, params, (SHARDS,), ())


def trained(inners, params, grads):
  """Returns all updates, and the last states."""
  found = []
  for inner in inners:
    state = inner.init(params)
    for grad in grads:
      updates, state = inner.update(grad, state, params)
      found.append(updates)
    found.append(state)
  return found


def cut(tree):
  return jax.tree.map(
      lambda x: leaves_lib.cut(x, SHARDS)
      if x.ndim
      else jnp.stack([x] * SHARDS),
      tree,
  )


def assert_alike(whole, slices):
  """Checks that the slices of all shards, joined, are the whole."""
  for x, rows in zip(*map(jax.tree.leaves, (whole, slices)), strict=True):
    if rows.shape[1:] == x.shape and x.size != 1:
      rows = rows[0]
    elif x.ndim:
      rows = leaves_lib.join(rows, x)
    np.testing.assert_allclose(
        *np.broadcast_arrays(np.float64(rows), np.float64(x)),
        rtol=1e-5,
        atol=1e-6,
    )


class OptimizersTest(parameterized.TestCase):

  @cases.parameters(*ACCEPTED)
  def test_accepts(self, name):
    self.assertIsNone(problem_of(ACCEPTED[name]))

  @cases.parameters(*REFUSED)
  def test_refuses(self, name):
    problem = problem_of(REFUSED[name], **VALUES.get(name, {}))

    self.assertIsNotNone(problem)

  @pytest.mark.slow
  def test_those_that_are_accepted_do_the_same_on_slices(self):
    params, *grads = trees(1 + STEPS)
    train = functools.partial(trained, ACCEPTED.values())

    whole = jax.jit(train)(params, grads)
    slices = jax.jit(jax.vmap(train))(cut(params), cut(grads))

    assert_alike(whole, slices)


def total(x):
  return lax.psum(jnp.sum(x), AXIS)


def halved(x, y):
  return lax.fori_loop(0, 2, lambda _, c: c / 2 + y, x)


def summed(x, y):
  return lax.scan(lambda c, row: (c + row, row), 0.0, x.ravel())[0] + y


# Of two arrays of one shape, which may be slices.
ALONE = (
    lambda x, y: x + y,
    lambda x, y: 2 * x - y,
    lambda x, y: x * y,
    lambda x, y: jnp.where(x > 0, x, y),
    lambda x, y: jnp.maximum(x, 0.5),
    lambda x, y: jnp.exp(-jnp.abs(x)),
    lambda x, y: jnp.zeros_like(x) + y,
    lambda x, y: lax.cond(jnp.arange(3)[1] > 0, lambda: x + 1, lambda: y),
    lambda x, y: x * jnp.full(x.shape, 0.5),
    lambda x, y: (x[None] * y[None])[0],
    halved,
)
# The first of them are right, if what they add up has zeros behind its end.
TOGETHER = (
    lambda x, y: x + total(jnp.square(x) - jnp.abs(y)),
    lambda x, y: x / (1 + total(y * y)),
    lambda x, y: x + total(y) / SHARDS,
    lambda x, y: x + jnp.sum(y),
    lambda x, y: x * x.size,
    lambda x, y: jnp.roll(x, 1) + y,
    lambda x, y: jnp.sort(x, axis=-1),
    lambda x, y: x - jnp.max(y),
    lambda x, y: x + jnp.arange(x.size, dtype=x.dtype).reshape(x.shape),
    lambda x, y: x * jnp.ones(x.shape).sum(),
    lambda x, y: x * y.ravel()[0],
    lambda x, y: jnp.cumsum(x.ravel()).reshape(x.shape),
    lambda x, y: x + lax.axis_index(AXIS),
    lambda x, y: x if x.size > 4 else y,
    lambda x, y: jnp.swapaxes(x, 0, -1).reshape(x.shape),
    lambda x, y: x * total(1.0),
    summed,
)


def random_steps(seed):
  """Returns a function of update, state and parameter: update and state."""
  rng = np.random.default_rng(seed)
  steps = [ALONE[i] for i in rng.integers(len(ALONE), size=rng.integers(1, 5))]
  if seed % 2:
    place = rng.integers(len(steps) + 1)
    steps.insert(place, TOGETHER[seed // 2])
  given = [rng.integers(0, 3 + i, size=2) for i in range(len(steps))]

  def run(*values):
    values = list(values)
    for step, (i, k) in zip(steps, given, strict=True):
      values.append(step(values[i], values[k]))
    return values[-1], values[-2]

  return run


def random_transformation(seed):
  run = random_steps(seed)

  def update(updates, state, params):
    # A scalar is not cut.
    pairs = {
        name: run(updates[name], state[name], params[name])
        if x.ndim
        else (x, state[name])
        for name, x in updates.items()
    }
    return tuple({k: pair[i] for k, pair in pairs.items()} for i in (0, 1))

  return optax.GradientTransformation(
      lambda params: jax.tree.map(jnp.ones_like, params), update
  )


class RandomTest(absltest.TestCase):

  def test_what_is_accepted_does_the_same_on_slices(self):
    seeds = [*range(8), *range(9, 2 * len(TOGETHER), 2)]
    made = {seed: random_transformation(seed) for seed in seeds}
    params, *grads = trees(1 + STEPS)
    problems = {}

    # The axis is bound only where it is traced.
    def check():
      for seed, inner in made.items():
        checked = optax.with_extra_args_support(inner)
        problems[seed] = elementwise.find_problem(
            checked, params, params, (SHARDS,), (AXIS,)
        )

    jax.make_jaxpr(check, axis_env=[(AXIS, SHARDS)])()
    accepted = [seed for seed in seeds if problems[seed] is None]
    self.assertContainsSubset([0, 2, 4, 6], accepted)
    train = functools.partial(trained, [made[seed] for seed in accepted])
    train = jax.jit(jax.vmap(train, axis_name=AXIS))
    # On one shard, a sum over all shards is that over the whole.
    whole = train(*jax.tree.map(lambda x: x[None], (params, grads)))
    slices = train(cut(params), cut(grads))

    assert_alike(jax.tree.map(lambda x: x[0], whole), slices)
