"""Slots: the state of an optimizer, such as an Optax state, as variables."""

from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Mapping
from collections.abc import Sequence
import threading
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy.typing as npt
import optax

from shard_transforms.facade import contexts
from shard_transforms.facade import frames
from shard_transforms.facade import graph as graph_lib
from shard_transforms.facade import scopes
from shard_transforms.facade import variables as variables_lib

Variable = variables_lib.Variable


class Slots:
  """The state of one optimizer, each leaf a variable.

  A leaf of an Optax state is identified by its path in the state of parameters
  that are a dict by name. The state for some of the variables is assembled from
  their leaves; leaves that do not belong to a variable, such as a count, are
  shared.

  Attributes:
    lock: Makes updates of the state exclusive.
  """

  def __init__(self):
    self.lock = threading.RLock()
    self._variables = {}
    self._leaves = {}
    self._slots = {}
    self._calls = {}

  def __reduce__(self):
    if self._slots:
      raise TypeError(
          'An optimizer with slots cannot be deep-copied or pickled, because'
          f' the slots are variables of a graph: {self.variables()!r}. Save'
          ' their values with `facade.get_values(opt.variables())`, and create'
          ' another optimizer.'
      )
    return Slots, ()

  def get(self, variable: Variable | None, name: str) -> Variable | None:
    """Returns a slot of a variable, or a shared one; `None` if missing."""
    return self._slots.get((variable, name))

  def names(self) -> list[str]:
    """Returns the names of all slots, sorted."""
    return sorted(
        {name for variable, name in list(self._slots) if variable is not None}
    )

  def variables(self) -> list[Variable]:
    """Returns all leaves, sorted by name."""
    return sorted(self._leaves.values(), key=lambda leaf: leaf.name)

  def counter(self, name: str) -> Variable:
    """Returns a counter outside of the Optax state; creates it at 0."""
    with self.lock:
      if (None, name) not in self._slots:
        with frames.outside_of_traces():
          zero = jnp.zeros([], jnp.int32)
          self._slots[None, name] = Variable(zero, trainable=False, name=name)
      return self._slots[None, name]

  def get_or_make(
      self,
      variable: Variable | None,
      name: str,
      op_name: str,
      initial: Callable[[], npt.ArrayLike],
      graph: graph_lib.Graph | None = None,
  ) -> Variable:
    """Returns a slot of a variable; creates it if needed.

    Args:
      variable: The variable, `None` for a shared slot.
      name: The name of the slot.
      op_name: The second part of the name of the slot's variable.
      initial: Returns the initial value.
      graph: The graph of a shared slot.

    Returns:
      The slot.

    Raises:
      ValueError: If the variable belongs to another graph than those that have
        slots already, if it has one value per shard before it has slots, or if
        the initial value is traced.
    """
    with self.lock:
      if (variable, name) not in self._slots:
        if variable is not None:
          self._check_graph([variable])
          _check_one_value(variable.op.name, variable.is_per_shard)
          self._variables[variable.op.name] = variable
          graph, op_name = variable.graph, f'{variable.op.name}/{op_name}'
        with (
            frames.outside_of_traces(),
            (graph or graph_lib.Graph()).as_default(),
        ):
          slot = _new(initial(), op_name)
        self._slots[variable, name] = self._leaves[variable, name] = slot
      return self._slots[variable, name]

  def make(
      self,
      transformation: Callable[[], optax.GradientTransformation],
      variables: Sequence[Variable],
      slot_names: Mapping[str, str],
      op_names: Mapping[str | None, str],
  ) -> None:
    """Creates the missing leaves of the state for some variables.

    Args:
      transformation: Returns the transformation.
      variables: The variables to update.
      slot_names: The names of slots that differ from the fields of the state,
        in their order of creation.
      op_names: The second part of the name of a slot's variable, by slot; the
        key `None` has the default.

    Raises:
      ValueError: If a variable belongs to another graph than those that have
        slots already, if it has one value per shard before it has slots, or if
        the state combines variables and these are different ones.
    """
    call = tuple(variables)
    with self.lock:
      if call not in self._calls:
        self._make(transformation, call, slot_names, op_names)

  def load(self, variables: Sequence[Variable]) -> optax.OptState:
    """Returns the state for some variables.

    Raises:
      ValueError: If `make` was not called for these variables.
    """
    if tuple(variables) not in self._calls:
      raise ValueError(
          'The optimizer has not created slots for'
          f' {[v.name for v in variables]}. If it overrides `_create_slots`,'
          ' also call `super()._create_slots(var_list)` there.'
      )
    treedef, leaves, _ = self._calls[tuple(variables)]
    return treedef.unflatten(map(frames.read, leaves))

  def store(
      self,
      variables: Sequence[Variable],
      state: optax.OptState,
      shared: bool = True,
  ) -> None:
    """Stores the next state for some variables.

    Args:
      variables: The variables.
      state: The state.
      shared: Whether to also store the leaves that do not belong to a variable.
    """
    _, leaves, owned = self._calls[tuple(variables)]
    values = jax.tree.leaves(state)
    for leaf, value, is_owned in zip(leaves, values, owned, strict=True):
      if shared or is_owned:
        leaf.assign(value)

  def _make(self, transformation, variables, slot_names, op_names):
    self._check_graph(variables)
    self._variables.update({v.op.name: v for v in variables})
    with frames.outside_of_traces():
      per_shard_names = {v.op.name for v in variables if v.is_per_shard}
      # A variable with one value per shard cannot be read. Its slots must exist
      # already, so only the shapes of the state matter.
      params = {
          v.op.name: (
              jnp.zeros(v.shape, v.dtype) if v.is_per_shard else v.value()
          )
          for v in variables
      }
      state = transformation().init(params)
      leaves_with_path, treedef = jax.tree_util.tree_flatten_with_path(state)
      state_leaves = [
          _Leaf(path, value, *_describe(path, params, slot_names))
          for path, value in leaves_with_path
      ]
      for leaf in _in_order(state_leaves, variables, slot_names):
        if leaf.path not in self._leaves:
          _check_one_value(leaf.variable, leaf.variable in per_shard_names)
          self._add(leaf, variables[0].graph, op_names)
        elif self._leaves[leaf.path].shape != jnp.shape(leaf.value):
          raise ValueError(
              f'The state {leaf.slot!r} of the optimizer combines all variables'
              f' of a call, and would have another shape for {list(params)}.'
              ' Update the same variables in each call.'
          )
    leaves = [self._leaves[leaf.path] for leaf in state_leaves]
    owned = [leaf.variable is not None for leaf in state_leaves]
    self._calls[variables] = treedef, leaves, owned

  def _check_graph(self, variables):
    for variable in variables:
      first = next(iter(self._variables.values()), variable)
      if variable.graph is not first.graph:
        raise ValueError(
            f'The optimizer has slots for {first.name!r}, but {variable.name!r}'
            ' belongs to another graph. Create one optimizer per graph.'
        )

  def _add(self, leaf, graph, op_names):
    op_name = op_names.get(leaf.slot, op_names[None])
    name = leaf.slot if leaf.variable is None else f'{leaf.variable}/{op_name}'
    with graph.as_default():
      new = _new(leaf.value, name)
    self._leaves[leaf.path] = new
    slot, number = leaf.slot, 0
    variable = None if leaf.variable is None else self._variables[leaf.variable]
    while (variable, slot) in self._slots:
      number += 1
      slot = f'{leaf.slot}_{number}'
    self._slots[variable, slot] = new


class SlotMaker:
  """The methods with which a subclass of an optimizer creates its slots."""

  _name: str
  _slots_of_optimizer: Slots

  @property
  def slots(self) -> Slots:
    """The variables of the optimizer state.

    Raises:
      AttributeError: If a subclass did not call the constructor.
    """
    try:
      return self._slots_of_optimizer
    except AttributeError as error:
      raise AttributeError(
          f'{type(self).__name__} does not have slots. Call'
          ' `super().__init__(use_locking, name)` in its constructor.'
      ) from error

  def _new_slots(self) -> Slots:
    """Returns new slots, or those of earlier calls of the same line."""
    return contexts.persistent((type(self).__name__, self._name), Slots)

  def _get_or_make_slot(
      self, var: Variable, val: npt.ArrayLike, slot_name: str, op_name: str
  ) -> Variable:
    """Returns a slot; creates it with an initial value if needed."""
    return self.slots.get_or_make(var, slot_name, op_name, lambda: val)

  def _get_or_make_slot_with_initializer(
      self,
      var: Variable,
      initializer: Callable[..., npt.ArrayLike],
      shape: Iterable[int],
      dtype: jax.typing.DTypeLike,
      slot_name: str,
      op_name: str,
  ) -> Variable:
    """Returns a slot; creates it with an initializer if needed."""
    return self.slots.get_or_make(
        var, slot_name, op_name, lambda: initializer(tuple(shape), dtype)
    )

  def _zeros_slot(
      self, var: Variable, slot_name: str, op_name: str
  ) -> Variable:
    """Returns a slot; creates it with zeros if needed."""
    return self.slots.get_or_make(
        var, slot_name, op_name, lambda: jnp.zeros(var.shape, var.dtype)
    )

  def _create_non_slot_variable(
      self, initial_value: npt.ArrayLike, name: str, colocate_with: Variable
  ) -> Variable:
    """Returns a shared variable of the optimizer; creates it if needed."""
    return self.slots.get_or_make(
        None, name, name, lambda: initial_value, colocate_with.graph
    )

  def _get_non_slot_variable(
      self, name: str, graph: Any = None
  ) -> Variable | None:
    """Returns a shared variable of the optimizer, or `None`."""
    return self.slots.get(None, name)


def _new(value, name):
  """Creates a variable whose name has the prefixes of variable scopes only.

  Name scopes get another number whenever they are entered.
  """
  with scopes.slot_scope():
    return Variable(value, trainable=False, name=name)


def _check_one_value(name, is_per_shard):
  if is_per_shard:
    raise ValueError(
        f'Variable {name!r} has one value per shard, but this optimizer has not'
        ' created slots for it. Use the same optimizer as for the first update,'
        ' or first set one value on all shards with `assign`.'
    )


class _Leaf(NamedTuple):
  """A leaf of the state that `init` returns.

  Attributes:
    path: Its path in the state.
    value: Its initial value.
    variable: The name of the variable that it belongs to, `None` if it is
      shared.
    slot: The name of the slot, or of the shared leaf.
  """

  path: tuple[Any, ...]
  value: Any
  variable: str | None
  slot: str


def _in_order(leaves, variables, slot_names):
  """Returns leaves in the order in which TensorFlow 1 creates them.

  Shared leaves come first, then the slots of one variable after another.
  """
  order = {name: i for i, name in enumerate(slot_names.values())}
  rank = {None: -1} | {v.op.name: i for i, v in enumerate(variables)}
  return sorted(
      leaves,
      key=lambda leaf: (rank[leaf.variable], order.get(leaf.slot, len(order))),
  )


def _describe(path, params, slot_names):
  """Returns the name of the variable that a leaf belongs to, and the slot."""
  keys = [getattr(k, 'name', getattr(k, 'key', None)) for k in path]
  # The innermost dict is that of the parameters. An outer one may have the same
  # keys: `optax.partition` keeps a dict by label.
  positions = (
      i
      for i, (key, k) in enumerate(zip(path, keys, strict=True))
      if isinstance(key, jax.tree_util.DictKey) and k in params
  )
  position = max(positions, default=None)
  variable = None if position is None else keys[position]
  names = [
      k for i, k in enumerate(keys) if isinstance(k, str) and i != position
  ]
  field = names[-1] if names else 'state'
  return variable, slot_names.get(field, field)
