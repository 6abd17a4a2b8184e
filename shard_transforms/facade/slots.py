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
from shard_transforms.facade import variables as variables_lib

Variable = variables_lib.Variable


class Slots:
  """The state of one optimizer, each leaf a variable.

  In the state of a transformation, a leaf is identified by its path in the
  state of parameters that are a dict by name. The state for some of the
  variables is assembled from their leaves, and shares with all others the
  leaves that belong to no variable, such as a count.

  Attributes:
    lock: The lock that makes updates of the state exclusive.
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
          'An optimizer that has slots must not be copied or pickled: they are'
          f' variables of a graph, {self.variables()!r}. Save their values with'
          ' `facade.get_values(opt.variables())`, and make another optimizer.'
      )
    return Slots, ()

  def get(self, variable: Variable | None, name: str) -> Variable | None:
    """Returns the slot of a variable, or of all; `None` if there is none."""
    return self._slots.get((variable, name))

  def names(self) -> list[str]:
    """Returns the names of all slots, sorted."""
    return sorted({name for of, name in list(self._slots) if of is not None})

  def variables(self) -> list[Variable]:
    """Returns all leaves, by name."""
    return sorted(self._leaves.values(), key=lambda leaf: leaf.name)

  def counter(self, name: str) -> Variable:
    """Returns a counter that is no part of the state; creates it at 0."""
    with self.lock:
      if (None, name) not in self._slots:
        with frames.outside():
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
    """Returns the slot of a name for a variable; makes it if needed.

    Args:
      variable: The variable, `None` for all of them.
      name: The name of the slot.
      op_name: The second part of the name of the slot's variable.
      initial: Returns the initial value.
      graph: The graph, if there is no variable.

    Returns:
      The slot.

    Raises:
      ValueError: If the variable is of another graph than those that have slots
        already, if it has a value per shard before it has slots, or if the
        initial value is not known yet.
    """
    with self.lock:
      if (variable, name) not in self._slots:
        if variable is not None:
          self._check_graph([variable])
          _check_one_value(variable.op.name, variable.is_per_shard)
          self._variables[variable.op.name] = variable
          graph, op_name = variable.graph, f'{variable.op.name}/{op_name}'
        with frames.outside(), (graph or graph_lib.Graph()).as_default():
          made = _new(initial(), op_name)
        self._slots[variable, name] = self._leaves[variable, name] = made
      return self._slots[variable, name]

  def make(
      self,
      transformation: Callable[[], optax.GradientTransformation],
      variables: Sequence[Variable],
      slot_names: Mapping[str, str],
      op_names: Mapping[str | None, str],
  ) -> None:
    """Makes the missing leaves of the state for some variables.

    Args:
      transformation: Returns the transformation.
      variables: The variables to update.
      slot_names: The names of slots that differ from the fields of the state,
        in the order in which they are made.
      op_names: The second part of the name of a slot's variable, by slot; under
        `None`, that of all other slots.

    Raises:
      ValueError: If a variable is of another graph than those that have slots
        already, if it has a value per shard before it has slots, or if the
        state mixes variables and these are others.
    """
    call = tuple(variables)
    with self.lock:
      if call not in self._calls:
        self._make(transformation, call, slot_names, op_names)

  def load(self, variables: Sequence[Variable]) -> optax.OptState:
    """Returns the state for some variables.

    Raises:
      ValueError: If `make` has not made it.
    """
    if tuple(variables) not in self._calls:
      raise ValueError(
          f'The slots of {[v.name for v in variables]} must be made first: an'
          ' optimizer that overrides `_create_slots` calls'
          ' `super()._create_slots(var_list)`, too.'
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
      shared: Whether to store the leaves that belong to no variable, too.
    """
    _, leaves, owned = self._calls[tuple(variables)]
    values = jax.tree.leaves(state)
    for leaf, value, is_owned in zip(leaves, values, owned, strict=True):
      if shared or is_owned:
        leaf.assign(value)

  def _make(self, transformation, variables, slot_names, op_names):
    self._check_graph(variables)
    self._variables.update({v.op.name: v for v in variables})
    with frames.outside():
      parted = {v.op.name for v in variables if v.is_per_shard}
      # A variable with one value per shard cannot be read. Its slots must exist
      # already, so that only the shapes of the state matter.
      params = {
          v.op.name: (
              jnp.zeros(v.shape, v.dtype) if v.is_per_shard else v.value()
          )
          for v in variables
      }
      state = transformation().init(params)
      found, treedef = jax.tree_util.tree_flatten_with_path(state)
      described = [
          _Leaf(path, value, *_describe(path, params, slot_names))
          for path, value in found
      ]
      for leaf in _in_order(described, variables, slot_names):
        if leaf.path not in self._leaves:
          _check_one_value(leaf.of, leaf.of in parted)
          self._add(leaf, variables[0].graph, op_names)
        elif self._leaves[leaf.path].shape != jnp.shape(leaf.value):
          raise ValueError(
              f'The state {leaf.slot!r} of the optimizer has another shape for'
              f' the variables {list(params)} than before. Always update the'
              ' same variables with it.'
          )
    leaves = [self._leaves[leaf.path] for leaf in described]
    owned = [leaf.of is not None for leaf in described]
    self._calls[variables] = treedef, leaves, owned

  def _check_graph(self, variables):
    for variable in variables:
      known = next(iter(self._variables.values()), variable)
      if variable.graph is not known.graph:
        raise ValueError(
            f'The optimizer already has slots of {known.name!r} of another'
            f' graph, got {variable.name!r}. Make an optimizer for each graph.'
        )

  def _add(self, leaf, graph, op_names):
    op_name = op_names.get(leaf.slot, op_names[None])
    name = leaf.slot if leaf.of is None else f'{leaf.of}/{op_name}'
    with graph.as_default():
      made = _new(leaf.value, name)
    self._leaves[leaf.path] = made
    slot, number = leaf.slot, 0
    of = None if leaf.of is None else self._variables[leaf.of]
    while (of, slot) in self._slots:
      number += 1
      slot = f'{leaf.slot}_{number}'
    self._slots[of, slot] = made


class SlotMaker:
  """The methods by which a subclass of an optimizer makes its slots."""

  _name: str
  _own_slots: Slots

  @property
  def slots(self) -> Slots:
    """The variables that hold its state.

    Raises:
      AttributeError: If the constructor of a subclass has made none.
    """
    try:
      return self._own_slots
    except AttributeError as error:
      raise AttributeError(
          f'{type(self).__name__} must call `super().__init__(use_locking,'
          ' name)` to have slots of its own.'
      ) from error

  def _new_slots(self) -> Slots:
    """Returns the slots of this optimizer; those of a call that runs again."""
    return contexts.persistent((type(self).__name__, self._name), Slots)

  def _get_or_make_slot(
      self, var: Variable, val: npt.ArrayLike, slot_name: str, op_name: str
  ) -> Variable:
    """Returns a slot; makes it with an initial value if needed."""
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
    """Returns a slot; makes it by a function of shape and dtype if needed."""
    return self.slots.get_or_make(
        var, slot_name, op_name, lambda: initializer(tuple(shape), dtype)
    )

  def _zeros_slot(
      self, var: Variable, slot_name: str, op_name: str
  ) -> Variable:
    """Returns a slot; makes it with zeros if needed."""
    return self.slots.get_or_make(
        var, slot_name, op_name, lambda: jnp.zeros(var.shape, var.dtype)
    )

  def _create_non_slot_variable(
      self, initial_value: npt.ArrayLike, name: str, colocate_with: Variable
  ) -> Variable:
    """Returns a variable for all variables; makes it if needed."""
    return self.slots.get_or_make(
        None, name, name, lambda: initial_value, colocate_with.graph
    )

  def _get_non_slot_variable(
      self, name: str, graph: Any = None
  ) -> Variable | None:
    """Returns that variable, `None` if there is none."""
    return self.slots.get(None, name)


def _new(value, name):
  """Returns a variable that is named in the scopes of `get_variable`.

  Name scopes have another number whenever they are entered.
  """
  with graph_lib.slot_scope():
    return Variable(value, trainable=False, name=name)


def _check_one_value(name, is_per_shard):
  if is_per_shard:
    raise ValueError(
        f'The slots of {name!r} must be made before it gets a value per shard:'
        ' let one optimizer update it, from the start.'
    )


class _Leaf(NamedTuple):
  """A leaf of a state as `init` gives it.

  Attributes:
    path: Where it is in the state.
    value: Its initial value.
    of: The name of the variable that it belongs to, `None` if to all.
    slot: The name of the slot, or of the shared leaf.
  """

  path: tuple[Any, ...]
  value: Any
  of: str | None
  slot: str


def _in_order(leaves, variables, slot_names):
  """Returns leaves in the order in which TensorFlow 1 makes them.

  Leaves that belong to no variable come first, then the slots of one variable
  after the other.
  """
  order = {name: i for i, name in enumerate(slot_names.values())}
  rank = {None: -1} | {v.op.name: i for i, v in enumerate(variables)}
  return sorted(
      leaves,
      key=lambda leaf: (rank[leaf.of], order.get(leaf.slot, len(order))),
  )


def _describe(path, params, slot_names):
  """Returns the variable that a leaf belongs to, and its name."""
  keys = [getattr(k, 'name', getattr(k, 'key', None)) for k in path]
  # The innermost dict is that of the parameters. One around it may have the
  # same keys: `optax.partition` keeps a dict by label.
  places = (
      i
      for i, (key, k) in enumerate(zip(path, keys, strict=True))
      if isinstance(key, jax.tree_util.DictKey) and k in params
  )
  place = max(places, default=None)
  of = None if place is None else keys[place]
  names = [k for i, k in enumerate(keys) if isinstance(k, str) and i != place]
  field = names[-1] if names else 'state'
  return of, slot_names.get(field, field)
