"""Protocols: what `resize_state`, `check_health` and `metrics` ask a state."""

import abc
from collections.abc import Mapping
from typing import Protocol

from shard_transforms._src.base import state_rules


class ResizableState(Protocol):
  """A state, such as a `NamedTuple`, that tells `resize_state` its rules.

  Attributes:
    resize_rules: Takes the `reduction` that `resize_state` is given, and
      returns the rules of the fields by name.

  Examples:
    >>> import jax.numpy as jnp
    >>> import shard_transforms
    >>> state = shard_transforms.tower_reduce(4).init(jnp.zeros(2))
    >>> print(state.resize_rules('sum')['total'].kind)
    sum
  """

  @abc.abstractmethod
  def resize_rules(
      self, reduction: state_rules.Reduction | None
  ) -> Mapping[str, state_rules.ResizeRule]:
    """Returns the rules of its fields, by name.

    A field without a rule is kept, or asked itself if it is such a state.

    Args:
      reduction: How shards are reduced, as `resize_state` is told.

    Returns:
      A `ResizeRule` for each field that is not kept as it is.
    """


class MonitoredState(Protocol):
  """A state that tells `check_health` whether training is healthy.

  Attributes:
    health_problem: Takes nothing, and returns what is wrong, or `None`.

  Examples:
    >>> import jax.numpy as jnp
    >>> import optax
    >>> import shard_transforms
    >>> state = shard_transforms.guard(optax.sgd(0.1)).init(jnp.zeros(2))
    >>> print(state.health_problem())
    None
  """

  @abc.abstractmethod
  def health_problem(self) -> str | None:
    """Returns what is wrong, in sentences.

    It is called outside of traced code. An array may be spread over several
    processes: read its addressable shards only.

    Returns:
      The text of the error; `None` if training is healthy.
    """


class MeasuredState(Protocol):
  """A state that tells `metrics` which of its values a person may look at.

  Attributes:
    metric_rules: Takes nothing, and returns the rules of the metrics by name.

  Examples:
    >>> import jax.numpy as jnp
    >>> import shard_transforms
    >>> state = shard_transforms.drop_stale(2).init(jnp.zeros(2))
    >>> print(*state.metric_rules())
    global_step stale_count stale_shard_count stale_fraction
  """

  @abc.abstractmethod
  def metric_rules(self) -> Mapping[str, state_rules.MetricRule]:
    """Returns a rule for each attribute that is a metric, by name.

    An attribute may be a property, computed from fields. One that is a mapping
    gives a metric for each of its values.

    Returns:
      A `MetricRule` for each attribute.
    """
