"""The parameter server: its state is that of `drop_stale`."""

import weakref

from absl.testing import parameterized
import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax

import cases
import runs
import shard_transforms
from shard_transforms._src.asynchronous import parameter_server

STALENESS = 1
Contribution = parameter_server.Contribution

OPTIMIZERS = (
    ('towers', lambda: shard_transforms.tower_reduce(3, optax.adam(0.1))),
    ('guard', lambda: shard_transforms.guard(optax.adam(0.1))),
)


def gradients():
  """Returns gradients of some ages, one of which is not finite."""
  grads_of_batches = []
  for number in range(9):
    batch = runs.batch(number)
    grads, _ = runs.gradient(runs.init(), batch)
    grads_of_batches.append(jax.tree.map(np.array, grads))
  grads_of_batches[4]['w'][2] = np.nan
  return grads_of_batches


def accept(server, grads, local_step=0):
  """Makes an update of one gradient."""
  _, read = server.publish()
  server.update([Contribution(grads, local_step, {}, read)])


def step_of(tx):
  @jax.jit
  def step(params, state, grads, **extra_args):
    updates, state = tx.update(grads, state, params, **extra_args)
    return optax.apply_updates(params, updates), state

  return step


class ParameterServerTest(parameterized.TestCase):

  @parameterized.named_parameters(*OPTIMIZERS)
  def test_state_is_that_of_drop_stale(self, make):
    tx = shard_transforms.drop_stale(STALENESS, make())
    params = runs.init()
    state = tx.init(params)
    step = step_of(tx)
    server = parameter_server.ParameterServer(
        make(), params, staleness=STALENESS
    )

    for number, grads in enumerate(gradients()):
      local_step = max(server.global_step - number % 3, 0)
      params, state = step(params, state, grads, local_step=local_step)
      if server.is_fresh(local_step):
        accept(server, grads, local_step)

    self.assertGreater(server.state.stale_count, 1)
    # The compiler rounds differently where a gate selects.
    chex.assert_trees_all_close(
        (server.params, server.state),
        jax.tree.map(np.asarray, (params, state)),
        rtol=1e-5,
    )

  def test_published_parameters_do_not_change(self):
    server = parameter_server.ParameterServer(optax.sgd(1.0), jnp.zeros(2))
    params, state = server.params, server.state
    published, read = server.publish()

    server.update([Contribution(np.ones(2, np.float32), 0, {}, read)])

    np.testing.assert_array_equal(params, [0, 0])
    np.testing.assert_array_equal(published, [0, 0])
    self.assertFalse(published.flags.writeable)
    self.assertEqual(state.global_step, 0)

  def test_optimizer_gets_the_parameters_that_were_read(self):
    tx = optax.chain(
        shard_transforms.contrib.compensate_delay(2.0, decay=0.5),
        optax.sgd(0.5),
    )
    server = parameter_server.ParameterServer(tx, jnp.ones(3))
    params, state, read = jnp.ones(3), tx.init(jnp.ones(3)), []
    published = []
    step = step_of(tx)

    for number in range(6):
      read.append(params)
      published.append(server.publish()[1])
      local_step = max(number - number % 3, 0)
      grads = np.float32([0.3, -0.2, 0.1]) * (number + 1)
      old = published[local_step]
      server.update([Contribution(grads, local_step, {}, old)])
      params, state = step(params, state, grads, read_params=read[local_step])

    runs.assert_same_bits(
        (server.params, server.state.inner_state),
        jax.tree.map(np.asarray, (params, state)),
    )

  def test_servers_of_one_optimizer_share_the_compiled_step(self):
    num_traces = []

    def update(updates, state, params=None):
      num_traces[-1] += 1
      return updates, state

    tx = optax.GradientTransformation(optax.identity().init, update)
    for _ in range(2):
      num_traces.append(0)
      server = parameter_server.ParameterServer(tx, np.zeros(2, np.float32))
      server.update([Contribution(np.ones(2, np.float32))])

    # The second server is only analyzed.
    self.assertLess(num_traces[1], num_traces[0])

  def test_reads_a_value_that_has_changed_since_the_last_server(self):
    rate = [1.0]
    tx = optax.stateless_with_tree_map(lambda update, _: update * rate[0])
    found = []
    for rate[0] in 1.0, 3.0:
      server = parameter_server.ParameterServer(tx, np.zeros(2, np.float32))
      server.update([Contribution(np.ones(2, np.float32))])
      found.append(float(server.params[0]))

    # The fingerprint in the journal is that of the present value.
    self.assertEqual(found, [1.0, 3.0])

  @cases.parameters(
      (shard_transforms.contrib.compensate_delay(2.0), True),
      (optax.sgd(0.1), False),
  )
  def test_keeps_read_parameters_only_if_the_optimizer_uses_them(
      self, tx, is_kept
  ):
    server = parameter_server.ParameterServer(tx, jnp.zeros(2))
    params, read = server.publish()
    published = weakref.ref(params)

    del params

    self.assertEqual(read is not None, is_kept)
    self.assertEqual(published() is not None, is_kept)

  def test_fingerprint_differs_between_optimizers_and_trees(self):
    # A number in a function that is called.
    def scale(factor):
      factors = np.full(3, factor, np.float32)
      return optax.stateless_with_tree_map(jax.jit(lambda g, _: factors * g))

    def fingerprint(*args):
      return parameter_server.ParameterServer(*args).fingerprint

    in_state = optax.inject_hyperparams(optax.sgd)
    fingerprints = [
        fingerprint(tx, params)
        for tx, params in (
            (optax.sgd(0.1), [jnp.zeros(3)]),
            (optax.sgd(0.2), [jnp.zeros(3)]),
            (optax.sgd(0.1), [jnp.zeros(3), jnp.zeros(1)]),
            (optax.sgd(optax.constant_schedule(0.1)), [jnp.zeros(3)]),
            (in_state(0.1), [jnp.zeros(3)]),
            (in_state(0.2), [jnp.zeros(3)]),
            (scale(0.1), [jnp.zeros(3)]),
            (scale(0.2), [jnp.zeros(3)]),
        )
    ]

    self.assertEqual(
        fingerprint(optax.sgd(0.1), [jnp.zeros(3)]), fingerprints[0]
    )
    self.assertLen(set(fingerprints), len(fingerprints))
