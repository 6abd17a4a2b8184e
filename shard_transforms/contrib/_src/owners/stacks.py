"""Stacks of matrices of one shape and layout, and their owners.

A matrix is a leaf, or one layer of a leaf of stacked layers. Those of one
shape, dtype and layout stand in a stack [K, ...], whose first rows belong to
the first owner, the next ones to the second owner, and so on.
"""

import collections
from collections.abc import Callable
from collections.abc import Hashable
from collections.abc import Mapping
from collections.abc import Sequence
from collections.abc import Set
import dataclasses
import functools
import itertools
import math
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from shard_transforms._src.base import axes as axes_lib
from shard_transforms._src.base import leaves as leaves_lib
from shard_transforms._src.base import partition_specs as specs_lib
from shard_transforms._src.reduction import sharded_reduction
from shard_transforms._src.state import state_types
from shard_transforms.contrib._src.owners import dependence

Axes = tuple[Hashable, ...]


@dataclasses.dataclass(frozen=True)
class Layout:
  """The layout of the matrices of a stack.

  Attributes:
    shape: The shape of a whole matrix, with leading ones for a layer.
    dtype: The dtype of the parameters.
    slicing: For each dimension, the axes that slice it, the major one first.
    reduced: The axes over which gradients are reduced, in mesh order.
    apart: The axes over which layers lie, in mesh order.
  """

  shape: tuple[int, ...]
  dtype: str
  slicing: tuple[Axes, ...]
  reduced: Axes
  apart: Axes

  @property
  def sliced(self) -> Axes:
    """The axes that slice a matrix, in mesh order."""
    return axes_lib.in_mesh_order(tuple(itertools.chain(*self.slicing)))

  @property
  def owned_over(self) -> Axes:
    """The axes among whose shards matrices are divided: those reduced first."""
    return (*self.reduced, *self.sliced)

  @property
  def axes(self) -> Axes:
    """All axes over which the matrices of a shard differ, in mesh order."""
    return axes_lib.in_mesh_order((*self.owned_over, *self.apart))

  @property
  def local_shape(self) -> tuple[int, ...]:
    """The shape of the slice of a matrix that a shard holds."""
    return tuple(
        size // math.prod(map(lax.axis_size, axes))
        for size, axes in zip(self.shape, self.slicing, strict=True)
    )


@dataclasses.dataclass(frozen=True)
class Stack:
  """Matrices of one layout, each with an owner.

  Attributes:
    layout: Their layout.
    members: The number of the parameter of each matrix, and of its layer among
      those that a shard holds.
    num_owners: The number of owners.
    by_rows: Whether gradients are reduce-scattered by rows of the stack;
      otherwise each is by slices, which are exchanged.
  """

  layout: Layout
  members: tuple[tuple[int, int], ...]
  num_owners: int
  by_rows: bool

  @property
  def length(self) -> int:
    """The number of rows of each owner; the last rows may be padding."""
    return -(-len(self.members) // self.num_owners)

  @property
  def params(self) -> list[int]:
    """The numbers of the parameters, each once."""
    return list(dict.fromkeys(param for param, _ in self.members))

  def of_owner(self, owner: int) -> list[int]:
    """Returns the numbers of the members of an owner, in order."""
    start = owner * self.length
    return [*range(len(self.members))][start : start + self.length]


@dataclasses.dataclass(frozen=True)
class Leaf:
  """How one parameter is laid out.

  Attributes:
    shape: Its shape as a whole.
    local_layers: The leading dimensions of its layers on a shard.
    of_layers: For each leading dimension, the axes that divide it.
    layout: The layout of a matrix, or `None` for a leaf that all shards update.
    slicing: For each dimension, the axes that slice it.
  """

  shape: tuple[int, ...]
  local_layers: tuple[int, ...]
  layout: Layout | None
  slicing: tuple[Axes, ...]

  @property
  def num_layers(self) -> int:
    """The number of its matrices on a shard."""
    return math.prod(self.local_layers)

  @property
  def shown(self) -> tuple[int, ...]:
    """The shape that `inner` is shown: that of one layer, or of the leaf."""
    lead = len(self.local_layers)
    return (1,) * lead + self.shape[lead:]


@dataclasses.dataclass(frozen=True)
class Stacks:
  """The stacks of a tree of parameters.

  Attributes:
    leaves: The layout of each parameter, in the order of their tree.
    names: The name of each parameter.
    stacks: All stacks.
    reduction: How gradients are reduced.
  """

  leaves: Sequence[Leaf]
  names: Sequence[str]
  stacks: Sequence[Stack]
  reduction: sharded_reduction.ShardedReduction

  @functools.cached_property
  def places(self) -> Mapping[int, list[tuple[int, int]]]:
    """The stack and the row of each layer, for parameters that have owners."""
    found = collections.defaultdict(dict)
    for s, stack in enumerate(self.stacks):
      for row, (param, layer) in enumerate(stack.members):
        found[param][layer] = s, row
    return {
        param: [places[layer] for layer in sorted(places)]
        for param, places in found.items()
    }

  @functools.cached_property
  def axes(self) -> Axes:
    """All axes over which gradients are reduced, or parameters sliced."""
    slicing = itertools.chain(*(leaf.slicing for leaf in self.leaves))
    every = (*self.reduction.axes, *itertools.chain(*slicing))
    return axes_lib.in_mesh_order(tuple(dict.fromkeys(every)))

  def axes_of(self, number: int) -> Axes:
    """Returns the axes over which what belongs to a parameter differs."""
    if number == dependence.MIXED:
      return self.axes
    if number not in self.places:
      return ()
    (stack, _), *_ = self.places[number]
    return self.stacks[stack].layout.axes

  def of(self, tree: Any) -> list[int]:
    """Returns the number of the parameter of each leaf.

    It is -1 for one without a gradient, and for a scalar.

    Raises:
      ValueError: If there is no such parameter.
    """
    paths = jax.tree.leaves_with_path(tree)
    numbers = [self._number_of(leaves_lib.name_of(path)) for path, _ in paths]
    is_cut = [self.leaves[i].layout is not None for i in numbers]
    return [
        i if cut else dependence.SHARED
        for i, cut in zip(numbers, is_cut, strict=True)
    ]

  @functools.cached_property
  def _numbers(self):
    return {name: i for i, name in enumerate(self.names)}

  def _number_of(self, name):
    if name not in self._numbers:
      raise ValueError(
          '`updates` of `owned_update` must be of the parameters, got'
          f' {name}, which is none of them.'
      )
    return self._numbers[name]

  def laid_out(self, tree: Any) -> list[Leaf]:
    """Returns how the parameter of each leaf is laid out."""
    paths = jax.tree.leaves_with_path(tree)
    names = (leaves_lib.name_of(path) for path, _ in paths)
    return [self.leaves[self._number_of(name)] for name in names]

  def members(
      self, stack: Stack, arrays: Mapping[int, jax.Array]
  ) -> list[jax.Array]:
    """Returns the matrices of a stack, as a shard holds them.

    They have one dtype, to which gradients of several dtypes are promoted.

    Args:
      stack: The stack.
      arrays: The arrays of parameters by number; zeros for one that is missing.

    Raises:
      ValueError: If one has not the shape of its parameter.
    """
    shape, found = stack.layout.local_shape, []
    for number, layer in stack.members:
      leaf = self.leaves[number]
      if number not in arrays:
        found.append(jnp.zeros(shape, stack.layout.dtype))
        continue
      x = jnp.asarray(arrays[number])
      expected = (*leaf.local_layers, *shape[len(leaf.local_layers) :])
      if x.shape != expected:
        raise ValueError(
            f'`updates` of `{self.reduction.caller}` must have the shapes of'
            f' the parameters, got {list(x.shape)} instead of'
            f' {list(expected)} at {self.names[number]}.'
        )
      found.append(x.reshape(-1, *shape)[layer])
    with jax.numpy_dtype_promotion('standard'):
      dtype = jnp.result_type(*found)
    return [leaves_lib.as_dtype(x, dtype) for x in found]

  def types(self, tree: Any, all_layers: bool = False) -> Any:
    """Returns the types of whole leaves, the same on all shards.

    Args:
      tree: A tree of parameters or gradients, as a shard holds them.
      all_layers: Whether leaves have all their layers, and not one.
    """
    leaves, treedef = jax.tree.flatten(tree)
    ignored = () if self.reduction.groups else self.axes
    make = type_maker()

    def typed(x, leaf):
      kind = jax.typeof(x)
      shape = leaf.shape if all_layers else leaf.shown
      over = axes_lib.varying_axes(kind).difference(ignored)
      if leaves_lib.is_float0(x):
        return kind
      return make(shape, kind.dtype, over)

    return treedef.unflatten(map(typed, leaves, self.laid_out(tree)))

  def shards_of(self, number: int) -> list[tuple[int, int, int]]:
    """Returns where the layers of a parameter are, in their order.

    Returns:
      For each layer the number of its stack, that of the shard over the axes of
      the stack, and that of the row among those of the shard.
    """
    leaf, places = self.leaves[number], self.places[number]
    lead = len(leaf.local_layers)
    found = []
    for layer in np.ndindex(leaf.shape[:lead]):
      at, local = {}, []
      for i, n, axes in zip(
          layer, leaf.local_layers, leaf.slicing[:lead], strict=True
      ):
        local.append(i % n)
        sizes = tuple(map(lax.axis_size, axes))
        at |= zip(axes, np.unravel_index(i // n, sizes), strict=True)
      index = _ravel(local, leaf.local_layers)
      s, row = places[index]
      stack = self.stacks[s]
      layout = stack.layout
      owner, slot = divmod(row, stack.length)
      if self.reduction.groups is None:
        sizes = tuple(map(lax.axis_size, layout.owned_over))
        owner_at = np.unravel_index(owner, sizes)
        at |= zip(layout.owned_over, owner_at, strict=True)
        axes = layout.axes
        owner = _ravel([at[a] for a in axes], list(map(lax.axis_size, axes)))
      found.append((s, owner, slot))
    return found


def type_maker() -> Callable[[tuple[int, ...], Any, Set[Hashable]], Any]:
  """Returns a function that makes the type of an array."""

  # Trees have many leaves of few types, and tracing takes long.
  @functools.cache
  def make(shape, dtype, axes):
    return jax.eval_shape(
        lambda: axes_lib.to_varying(jnp.zeros(shape, dtype), (*axes,))
    )

  return lambda shape, dtype, axes: make(shape, dtype, frozenset(axes))


def _ravel(index, sizes):
  number = 0
  for i, size in zip(index, sizes, strict=True):
    number = number * size + int(i)
  return number


def find(
    params: Any,
    param_specs: specs_lib.SpecTree,
    reduction: sharded_reduction.ShardedReduction,
    whole_dims: int | None,
    are_params: bool = True,
) -> Stacks:
  """Returns the stacks of parameters, as a shard holds these.

  Args:
    params: The parameters, as a shard holds them.
    param_specs: Their `PartitionSpec`s.
    reduction: How gradients are reduced.
    whole_dims: The number of the last dimensions of a matrix, or `None` if
      each leaf is one.
    are_params: Whether these are the parameters, whose types tell which are
      slices, and not their gradients.

  Raises:
    ValueError: If specs do not agree with the parameters or their types.
  """
  found = jax.tree.leaves_with_path(params)
  specs = _specs_of(params, param_specs, reduction)
  leaves = [
      _leaf(path, x, spec, reduction, whole_dims, are_params)
      for (path, x), spec in zip(found, specs, strict=True)
  ]
  members = collections.defaultdict(list)
  for i, leaf in enumerate(leaves):
    if leaf.layout is not None:
      layers = ((i, layer) for layer in range(leaf.num_layers))
      members[leaf.layout].extend(layers)
  stacks = [
      stack
      for layout, of_layout in members.items()
      for stack in _split(layout, of_layout, leaves, reduction)
  ]
  names = [leaves_lib.name_of(path) for path, _ in found]
  return Stacks(leaves, names, stacks, reduction)


def _split(layout, members, leaves, reduction):
  """Yields the stacks of the matrices of one layout."""
  num_reduced = math.prod(map(lax.axis_size, layout.reduced))
  num_owners = num_reduced * math.prod(map(lax.axis_size, layout.sliced))
  if reduction.groups is not None:
    num_reduced = num_owners = reduction.num_shards()
  num_rest = len(members) % num_owners
  alone = members[-1:] if len(members) == 1 or num_rest == 1 else []
  # All shards update one leaf alone: that sends less than an owner would.
  if alone and not leaves[alone[0][0]].local_layers:
    members, num_rest = members[:-1], 0
  # Rows of padding are reduce-scattered, too. Slices are not padded until they
  # are exchanged, and then a shard holds 1 / `num_reduced` of the rows.
  in_rows = num_owners <= num_rest + num_owners / num_reduced
  if in_rows or not num_rest or reduction.groups is not None:
    num_rest = 0
  full, rest = members[: len(members) - num_rest], members[-num_rest:]
  if full:
    yield Stack(layout, tuple(full), num_owners, True)
  if num_rest:
    yield Stack(layout, tuple(rest), num_owners, False)


def _specs_of(params, param_specs, reduction):
  """Returns the spec of each parameter.

  Raises:
    ValueError: If they are not of the tree of the parameters.
  """
  try:
    specs = jax.tree.broadcast(param_specs, params, is_leaf=specs_lib.is_spec)
  except ValueError as error:
    raise ValueError(
        f'`param_specs` of `{reduction.caller}` must have the tree of the'
        f' parameters, or the head of it, got {param_specs!r} for'
        f' {jax.tree.structure(params)}.'
    ) from error
  return jax.tree.leaves(specs, is_leaf=specs_lib.is_spec)


def _leaf(path, x, spec, reduction, whole_dims, are_params):
  """Returns how one parameter is laid out."""
  shape, entries = jnp.shape(x), specs_lib.entries(spec)
  name = leaves_lib.name_of(path)
  if len(entries) > len(shape):
    raise ValueError(
        f'`param_specs` of `{reduction.caller}` must have at most an entry for'
        f' each dimension, got {spec!r} for {name} {list(shape)}.'
    )
  entries += [()] * (len(shape) - len(entries))
  axes = specs_lib.axes_of(spec)
  if len(axes) < sum(map(len, entries)):
    raise ValueError(
        f'`param_specs` of `{reduction.caller}` must name each axis at most'
        f' once, got {spec!r} for {name}.'
    )
  axes_lib.size(tuple(axes), reduction.caller)
  if are_params:
    _check_types(name, x, axes, reduction)
    _check_specs_in_use(name, shape, spec, reduction.caller)
  sizes = [math.prod(map(lax.axis_size, e)) for e in entries]
  whole = tuple(n * size for n, size in zip(shape, sizes, strict=True))
  lead = 0 if whole_dims is None else max(0, len(shape) - whole_dims)
  apart = axes_lib.in_mesh_order(tuple(itertools.chain(*entries[:lead])))
  layout = None
  if leaves_lib.is_sliced(x, 2):
    reduced = (axis for axis in reduction.axes if axis not in axes)
    layout = Layout(
        (1,) * lead + whole[lead:],
        leaves_lib.dtype_of(x).name,
        ((),) * lead + tuple(entries[lead:]),
        axes_lib.in_mesh_order(tuple(reduced)),
        apart,
    )
  return Leaf(whole, shape[:lead], layout, tuple(entries))


def _check_specs_in_use(name, shape, spec, caller):
  """Checks that a spec slices a parameter like `in_specs`.

  Parameters of which no specs are in use, such as those of another tree, are
  not checked.

  Raises:
    ValueError: If the specs differ.
  """
  traced_shape, in_spec = state_types.specs_in_use().get(name, (None, None))
  if in_spec is None or traced_shape != shape:
    return

  def axes_of_dims(spec):
    entries = specs_lib.entries(spec)
    entries += [()] * (len(shape) - len(entries))
    return [[a for a in entry if lax.axis_size(a) > 1] for entry in entries]

  if axes_of_dims(spec) != axes_of_dims(in_spec):
    raise ValueError(
        f'`param_specs` of `{caller}` must be the `in_specs` of the step, got'
        f' {spec!r} for {name}, which `in_specs` shards by {in_spec!r}. Pass'
        ' the same specs to `param_specs`, `init_state`, `state_specs`,'
        ' `on_mesh` and `jax.shard_map`.'
    )


def _check_types(name, x, axes, reduction):
  """Checks a spec against the type of a parameter.

  Raises:
    ValueError: If they disagree.
  """
  # Groups hold different parameters.
  if reduction.groups is not None or not isinstance(x, jax.Array):
    return
  varying = {a for a in axes_lib.varying_axes(x) if lax.axis_size(a) > 1}
  if missing := sorted(varying - axes, key=str):
    raise ValueError(
        f'`param_specs` of `{reduction.caller}` must name the axes over which'
        f' parameters are sliced, got a spec without {missing} for {name}'
        f' {list(jnp.shape(x))}, typed varying: each shard has another slice'
        ' (FSDP, tensor parallelism), or has marked it by `per_shard`. Give'
        ' the `PartitionSpec`s that `in_specs` has, and to `init` and `update`'
        ' what they slice. With `local_updates`, reduce in `outer`.'
    )
  same = [a for a in sorted(axes - varying, key=str) if axes_lib.is_tracked(a)]
  if same and any(lax.axis_size(a) > 1 for a in same):
    raise ValueError(
        f'`param_specs` of `{reduction.caller}` must agree with the types of'
        f' the parameters, got a spec with {same} for {name}'
        f' {list(jnp.shape(x))}, typed invariant: all shards have the same.'
        ' Give the same specs as `in_specs` of `jax.shard_map`, `init_state`'
        ' and `on_mesh`.'
    )
