"""Tests of the element-wise check on all optimizers of Optax."""

import functools

from absl.testing import parameterized
import jax
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


# Element-wise optimizers.
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
SUMS = '`reduce_sum` may combine several elements, in its updates at'
# Optimizers that combine elements, draw a random value for each, or have state
# of other shapes, with the reason for which each is refused.
REFUSED = {
    'adafactor': (optax.adafactor(0.1), SUMS),
    'add_noise': (
        optax.add_noise(0.1, 0.5, jax.random.key(0)),
        r'an array \[5\] that has a different value for each position',
    ),
    'apply_if_finite': (
        optax.apply_if_finite(optax.sgd(0.1), 3),
        '`reduce_and` may combine several elements, in its updates',
    ),
    'clip_by_block_rms': (optax.clip_by_block_rms(0.1), SUMS),
    'clip_by_global_norm': (optax.clip_by_global_norm(0.1), SUMS),
    'dadapt_adamw': (
        contrib.dadapt_adamw(),
        r'`dot_general` may .* in its state at \.estim_lr',
    ),
    'dog': (contrib.dog(0.1), r'`reduce_sum` may .* state at .*\.max_dist'),
    'flatten': (
        optax.flatten(optax.adam(0.1)),
        r'its state at .*\.mu has the shape \(38,\)',
    ),
    'galore': (
        contrib.galore(0.1, 1),
        r"its state at .*\.mu\['w'\] has the shape \(3, 1\)",
    ),
    'lamb': (optax.lamb(0.1), SUMS),
    'lbfgs': (
        optax.lbfgs(0.1, linesearch=None),
        r'its state at .*memory.* has the shape \(10, 5\)',
    ),
    'mechanize': (contrib.mechanize(optax.sgd(0.1)), SUMS),
    'momo': (contrib.momo(0.1), SUMS),
    # Muon leaves vectors to Adam.
    'muon': (contrib.muon(0.1), SUMS + r" \['w'\]"),
    'novograd': (optax.novograd(0.1), SUMS),
    'polyak_sgd': (optax.polyak_sgd(), SUMS),
    'prodigy': (contrib.prodigy(0.1), '`dot_general` may .* in its updates'),
    'scale_by_factored_rms': (
        optax.scale_by_factored_rms(min_dim_size_to_factor=2),
        r'its state at \.v_row.* has the shape \(2, 2\)',
    ),
    'scale_by_param_block_norm': (optax.scale_by_param_block_norm(), SUMS),
    'skip_not_finite': (
        optax.MultiSteps(
            optax.sgd(0.1), 2, should_skip_update_fn=optax.skip_not_finite
        ),
        SUMS,
    ),
    'sm3': (
        optax.sm3(0.1),
        r"its state at .*\.mu\['v'\]\[0\] has the shape \(4,\)",
    ),
    'zero_nans': (
        optax.zero_nans(),
        r'`reduce_or` may .* in its state at \.found_nan',
    ),
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
  """Returns all updates and the final states."""
  results = []
  for inner in inners:
    state = inner.init(params)
    for grad in grads:
      updates, state = inner.update(grad, state, params)
      results.append(updates)
    results.append(state)
  return results


def cut(tree):
  return jax.tree.map(
      lambda x: leaves_lib.slice_evenly(x, SHARDS)
      if x.ndim
      else jnp.stack([x] * SHARDS),
      tree,
  )


def assert_equal_on_slices(unsliced, slices):
  """Checks that the joined slices of all shards are the unsliced results."""
  for x, rows in zip(*map(jax.tree.leaves, (unsliced, slices)), strict=True):
    if rows.shape[1:] == x.shape and x.size != 1:
      rows = rows[0]
    elif x.ndim:
      rows = leaves_lib.join_slices(rows, x)
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
    inner, reason = REFUSED[name]

    problem = problem_of(inner, **VALUES.get(name, {}))

    self.assertRegex(problem, reason)

  @pytest.mark.slow
  def test_accepted_optimizers_are_equal_on_slices(self):
    params, *grads = trees(1 + STEPS)
    train = functools.partial(trained, ACCEPTED.values())

    unsliced = jax.jit(train)(params, grads)
    slices = jax.jit(jax.vmap(train))(cut(params), cut(grads))

    assert_equal_on_slices(unsliced, slices)
