"""Reinforcement learning from rollouts of asynchronous workers.

Workers choose actions by the latest published policy, and send contexts,
actions, rewards and log probabilities. The driver computes truncated importance
weights at the current policy, and takes a step of Adam. Four consecutive
rollouts have the same contexts: they are a group, whose mean reward is the
baseline, and which is accepted or dropped as a whole. A second run uses no
importance weights, as if all rollouts were from the current policy.
"""

from collections.abc import Sequence
import functools
import pathlib
import tempfile
import time
from typing import Any

from absl import app
from absl import flags
import jax
import jax.numpy as jnp
import matplotlib.figure
import numpy as np
import optax

from shard_transforms import asynchronous

CONTEXTS, FEATURES, ACTIONS = 32, 8, 6
GROUP = 4
NUM_WORKERS = 8
MERGE = 8
STALENESS = 8
MAX_WEIGHT = 2.0
UPDATES = 150
# The reward of a random policy is 1/6.
MIN_REWARD = 0.7

_UPDATES = flags.DEFINE_integer(
    'updates', UPDATES, 'Number of updates.', lower_bound=2
)
_WAIT = flags.DEFINE_float(
    'wait', 0.05, 'Median seconds that a rollout takes.', lower_bound=0
)
_CLUSTER = flags.DEFINE_string(
    'cluster',
    'none',
    "'local' starts Ray; 'none' computes in this process, without Ray.",
)
_OUTPUT_DIR = flags.DEFINE_string(
    'output_dir', 'rl_out', 'Folder that the figure is written to.'
)

optimizer = optax.adam(0.03)


def init() -> dict[str, np.ndarray]:
  """Returns the parameters of a uniformly random policy."""
  return {
      'w': np.zeros((FEATURES, ACTIONS), np.float32),
      'b': np.zeros(ACTIONS, np.float32),
  }


def log_policy(params: Any, contexts: jax.Array) -> jax.Array:
  """Returns the log probabilities of all actions [contexts, actions]."""
  return jax.nn.log_softmax(contexts @ params['w'] + params['b'])


def rollout(wait: float, params: Any, number: int) -> tuple[Any, Any]:
  """Sleeps, and returns a rollout and its mean reward."""
  time.sleep(wait * np.random.default_rng([1, number]).lognormal())
  return act(params, number)


@jax.jit
def act(params: Any, number: jax.Array) -> tuple[Any, dict[str, jax.Array]]:
  """Returns a rollout, with the contexts of its group, and its mean reward."""
  key = jax.random.key(0)
  best = jax.random.normal(key, (FEATURES, ACTIONS))
  contexts = jax.random.normal(
      jax.random.fold_in(key, number // GROUP), (CONTEXTS, FEATURES)
  )
  log_probs = log_policy(params, contexts)
  actions = jax.random.categorical(
      jax.random.fold_in(jax.random.key(1), number), log_probs
  )
  rewards = (actions == (contexts @ best).argmax(1)).astype(jnp.float32)
  trajectory = {
      'contexts': contexts,
      'actions': actions,
      'rewards': rewards,
      'log_probs': select_actions(log_probs, actions),
  }
  return trajectory, {'reward': rewards.mean()}


def select_actions(log_probs: jax.Array, actions: jax.Array) -> jax.Array:
  """Returns the log probabilities of the chosen actions."""
  return jnp.take_along_axis(log_probs, actions[:, None], axis=1)[:, 0]


def update(
    max_weight: float | None,
    params: Any,
    state: optax.OptState,
    contributions: Sequence[Any],
    ages: jax.Array,
) -> tuple[Any, optax.OptState]:
  """Takes a step of Adam with rollouts, which may be from older policies."""
  del ages
  rollouts = jax.tree.map(lambda *x: jnp.stack(x), *contributions)
  groups = rollouts['rewards'].reshape(-1, GROUP, CONTEXTS)
  advantages = groups - groups.mean(axis=1, keepdims=True)

  def loss(params):
    log_probs = jax.vmap(lambda c, a: select_actions(log_policy(params, c), a))(
        rollouts['contexts'], rollouts['actions']
    )
    weights = jnp.ones_like(log_probs)
    if max_weight is not None:
      ratios = jnp.exp(jax.lax.stop_gradient(log_probs) - rollouts['log_probs'])
      weights = jnp.minimum(ratios, max_weight)
    return -(weights * advantages.reshape(log_probs.shape) * log_probs).mean()

  updates, state = optimizer.update(jax.grad(loss)(params), state, params)
  return optax.apply_updates(params, updates), state


def train(
    max_weight: float | None,
) -> tuple[asynchronous.Result, np.ndarray, str]:
  """Returns the result, the rewards [2, n] by update, and the replay's bits."""
  learner = asynchronous.Learner(
      optimizer.init, functools.partial(update, max_weight)
  )
  task = asynchronous.Task(
      init=init, gradient=functools.partial(rollout, _WAIT.value), batch=int
  )
  # Without sleeping, which does not change the bits.
  fast_task = asynchronous.Task(init=init, gradient=act, batch=int)
  rewards = {}

  def on_progress(report):
    rewards[report.global_step] = report.metrics['reward']

  with tempfile.TemporaryDirectory() as folder:
    result = asynchronous.train(
        task,
        learner,
        num_updates=_UPDATES.value,
        num_workers=NUM_WORKERS,
        merge=MERGE,
        group=GROUP,
        staleness=STALENESS,
        cluster=None if _CLUSTER.value == 'none' else _CLUSTER.value,
        folder=folder,
        on_progress=on_progress,
    )
    replayed = asynchronous.replay(folder, fast_task, learner)
  pairs = zip(
      jax.tree.leaves(result[:2]), jax.tree.leaves(replayed[:2]), strict=True
  )
  are_equal = all(np.array_equal(a, b) for a, b in pairs)
  bits = 'same bits' if are_equal else 'other bits'
  return result, np.array(sorted(rewards.items())).T, bits


def plot(runs: dict[str, Any], path: pathlib.Path) -> None:
  """Plots the rewards of runs over their updates."""
  figure = matplotlib.figure.Figure(figsize=(7, 4), layout='constrained')
  axes = figure.subplots()
  for name, (result, rewards, _) in runs.items():
    label = f'{name} (mean age {result.report.mean_age:.1f})'
    axes.plot(*rewards, label=label, linewidth=1)
  axes.axhline(1 / ACTIONS, color='0.5', linestyle=':', label='at random')
  axes.set(xlabel='updates', ylabel='mean reward', ylim=(0, 1))
  axes.set(title=f'{NUM_WORKERS} workers, {MERGE} rollouts in an update')
  axes.legend(loc='lower right')
  figure.savefig(path, dpi=120)


def main(argv: Sequence[str]) -> str | None:
  """Trains with and without weights; returns a message if a check fails."""
  if len(argv) > 1:
    raise app.UsageError(f'Unknown arguments: {argv[1:]}. Pass flags only.')
  path = pathlib.Path(_OUTPUT_DIR.value) / 'train_async_rl.png'
  path.parent.mkdir(parents=True, exist_ok=True)
  runs = {
      'importance weights': train(MAX_WEIGHT),
      'no weights': train(None),
  }
  ends = []
  for name, (result, rewards, bits) in runs.items():
    ends.append(rewards[1, -len(rewards[1]) // 4 :].mean())
    print(
        f'{name:20} reward at the end {ends[-1]:.3f}, mean age'
        f' {result.report.mean_age:.2f}, dropped {result.report.num_dropped},'
        f' replay: {bits}'
    )
  plot(runs, path)
  print(f'Rewards: {path}')
  if _UPDATES.value >= UPDATES and ends[0] < MIN_REWARD:
    return f'FAILED: the reward {ends[0]:.3f} is below {MIN_REWARD}.'
  return None


if __name__ == '__main__':
  app.run(main)
