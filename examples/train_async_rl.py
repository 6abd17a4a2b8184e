"""Learns by reinforcement from rollouts that workers make without waiting.

Workers choose actions by the policy that they were given last, and send
contexts, actions, rewards and log probabilities. The driver computes importance
weights at the current policy, truncated, and takes a step of Adam. Four
rollouts in a row see the same contexts: they are a group, whose mean reward is
the baseline, and are accepted or dropped together. A second run takes the old
rollouts as if they were new, without the weights.
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
LARGEST_WEIGHT = 2.0
UPDATES = 150
# A policy that knows nothing gets a sixth.
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
    "'local' starts Ray; with 'none', workers take turns in this process.",
)
_OUTPUT_DIR = flags.DEFINE_string(
    'output_dir', 'rl_out', 'Folder that the figure is written to.'
)

optimizer = optax.adam(0.03)


def init() -> dict[str, np.ndarray]:
  """Returns the parameters of a policy that chooses at random."""
  return {
      'w': np.zeros((FEATURES, ACTIONS), np.float32),
      'b': np.zeros(ACTIONS, np.float32),
  }


def log_policy(params: Any, contexts: jax.Array) -> jax.Array:
  """Returns the log probabilities of all actions [contexts, actions]."""
  return jax.nn.log_softmax(contexts @ params['w'] + params['b'])


def rollout(wait: float, params: Any, number: int) -> tuple[Any, Any]:
  """Returns what happened, and the mean reward."""
  time.sleep(wait * np.random.default_rng([1, number]).lognormal())
  return act(params, number)


@jax.jit
def act(params: Any, number: jax.Array) -> tuple[Any, dict[str, jax.Array]]:
  """Chooses actions; the contexts are those of the group of a number."""
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
  seen = {
      'contexts': contexts,
      'actions': actions,
      'rewards': rewards,
      'log_probs': of_actions(log_probs, actions),
  }
  return seen, {'reward': rewards.mean()}


def of_actions(log_probs: jax.Array, actions: jax.Array) -> jax.Array:
  """Returns the log probabilities of the actions that were chosen."""
  return jnp.take_along_axis(log_probs, actions[:, None], axis=1)[:, 0]


def update(
    largest_weight: float | None,
    params: Any,
    state: optax.OptState,
    contributions: Sequence[Any],
    ages: jax.Array,
) -> tuple[Any, optax.OptState]:
  """Takes a step with rollouts, which older policies have made."""
  del ages
  seen = jax.tree.map(lambda *x: jnp.stack(x), *contributions)
  groups = seen['rewards'].reshape(-1, GROUP, CONTEXTS)
  advantages = groups - groups.mean(axis=1, keepdims=True)

  def loss(params):
    log_probs = jax.vmap(lambda c, a: of_actions(log_policy(params, c), a))(
        seen['contexts'], seen['actions']
    )
    weights = jnp.ones_like(log_probs)
    if largest_weight is not None:
      ratios = jnp.exp(jax.lax.stop_gradient(log_probs) - seen['log_probs'])
      weights = jnp.minimum(ratios, largest_weight)
    return -(weights * advantages.reshape(log_probs.shape) * log_probs).mean()

  updates, state = optimizer.update(jax.grad(loss)(params), state, params)
  return optax.apply_updates(params, updates), state


def train(
    largest_weight: float | None,
) -> tuple[asynchronous.Result, np.ndarray, str]:
  """Returns the result, updates and rewards [2, n], and whether it replays."""
  learner = asynchronous.Learner(
      optimizer.init, functools.partial(update, largest_weight)
  )
  task = asynchronous.Task(
      init=init, gradient=functools.partial(rollout, _WAIT.value), batch=int
  )
  # Waiting changes no bit, so the replay does not wait.
  quick = asynchronous.Task(init=init, gradient=act, batch=int)
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
    again = asynchronous.replay(folder, quick, learner)
  pairs = zip(
      jax.tree.leaves(result[:2]), jax.tree.leaves(again[:2]), strict=True
  )
  same = 'same bits' if all(np.array_equal(*x) for x in pairs) else 'other bits'
  return result, np.array(sorted(rewards.items())).T, same


def plot(runs: dict[str, Any], path: pathlib.Path) -> None:
  """Draws the rewards of runs over their updates."""
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
  """Trains with and without weights; returns what went wrong, if anything."""
  if len(argv) > 1:
    raise app.UsageError(f'There are flags only, got {argv[1:]}.')
  path = pathlib.Path(_OUTPUT_DIR.value) / 'train_async_rl.png'
  path.parent.mkdir(parents=True, exist_ok=True)
  runs = {
      'importance weights': train(LARGEST_WEIGHT),
      'no weights': train(None),
  }
  ends = []
  for name, (result, rewards, same) in runs.items():
    ends.append(rewards[1, -len(rewards[1]) // 4 :].mean())
    print(
        f'{name:20} reward at the end {ends[-1]:.3f}, mean age'
        f' {result.report.mean_age:.2f}, dropped {result.report.num_dropped},'
        f' replay: {same}'
    )
  plot(runs, path)
  print(f'Rewards: {path}')
  if _UPDATES.value >= UPDATES and ends[0] < MIN_REWARD:
    return f'FAILED: the reward must be at least {MIN_REWARD}.'
  return None


if __name__ == '__main__':
  app.run(main)
