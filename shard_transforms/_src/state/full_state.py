"""`full_state` and `place_state`: what a checkpoint of sharded state holds."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np
import optax

from shard_transforms._src.base import full_rules
from shard_transforms._src.base import leaves as leaves_lib
from shard_transforms._src.base import partition_specs
from shard_transforms._src.base import states
from shard_transforms._src.state import placement
from shard_transforms._src.state import row_resizing
from shard_transforms._src.state import shardings
from shard_transforms._src.state import specs


def full_state(
    state: optax.OptState,
    tx: optax.GradientTransformation,
    params: leaves_lib.ParamTree,
    mesh: jax.sharding.Mesh,
    *,
    in_specs: partition_specs.SpecTree = P(),
) -> optax.OptState:
  """Returns a state in the shapes of the replicated one, for a checkpoint.

  The parts that a transformation such as `shard_update` has sharded become the
  state of its inner transformation, as `inner.init(params)` has it, whatever
  the number of shards; what a checkpoint holds then does not depend on it. All
  other leaves are copied. Save this state, and place it again with
  `place_state`, on any number of shards.

  The full leaves are sharded over the devices, each along its first dimensions
  that can be divided, so that no device needs memory for all of them; one that
  cannot be divided is replicated. It may be called where the arrays are on
  several processes: all of them must call it.

  Args:
    state: A state of `init_state` and `tx.update`, or `jax.ShapeDtypeStruct`s.
      Arrays of NumPy give arrays of NumPy.
    tx: The transformation.
    params: Tree of arrays, or of `jax.ShapeDtypeStruct`.
    mesh: The mesh of the state.
    in_specs: The `PartitionSpec`s of the parameters, as for `init_state`.

  Returns:
    The state in its full form; `jax.ShapeDtypeStruct`s with shardings (the
    target of a checkpoint restore) if it is abstract.

  Raises:
    NameError: If the transformation names an axis that the mesh lacks.
    TypeError: If a state declares a rule that is not a `Rule`.
    ValueError: If `state` was not made by `tx` for these parameters, or, in
      arrays of JAX, not on this mesh with these `in_specs`; `in_specs` shards
      parameters whose state is sharded further, or a state declares a rule for
      a field that it lacks.

  Examples:
    >>> import jax
    >>> import optax
    >>> import shard_transforms
    >>> mesh = jax.make_mesh((8,), ('data',))
    >>> tx = shard_transforms.shard_update(optax.adam(0.1), 'data')
    >>> params = jax.numpy.ones((3, 5))
    >>> state = shard_transforms.init_state(tx, params, mesh)
    >>> full = shard_transforms.full_state(state, tx, params, mesh)
    >>> print(state.inner_state[0].mu.shape, full.inner_state[0].mu.shape)
    (8, 1, 2) (3, 5)
  """
  one_shard = _OneShard(tx, params, mesh, in_specs)

  def convert(path, rule, field, _):
    if rule.full is None:
      return jax.tree.map(_copied, field)
    full = _joined(one_shard.joining(path, rule), field, mesh)
    if _is_on_devices(field):
      one_shard.check_made_on_mesh(path, field)
    return full

  return _map_fields(convert, _full_rules_of, state, state)


def place_state(
    state: optax.OptState,
    tx: optax.GradientTransformation,
    params: leaves_lib.ParamTree,
    mesh: jax.sharding.Mesh,
    *,
    in_specs: partition_specs.SpecTree = P(),
    reduction: states.Reduction | None = None,
) -> optax.OptState:
  """Places the state of a checkpoint on a mesh of any number of shards.

  The reverse of `full_state`: parts that are full are sharded again. What each
  shard keeps for itself, such as residuals and the towers of an unfinished
  window, is converted as by `resize_state` if the number of shards has changed;
  then it must be on this process, as arrays of NumPy are.

  Args:
    state: What `full_state` returned, in arrays of JAX or, as from a
      checkpoint, of NumPy.
    tx: The transformation.
    params: Tree of arrays, or of `jax.ShapeDtypeStruct`.
    mesh: The mesh of the step.
    in_specs: The `PartitionSpec`s of the parameters, as for `init_state`.
    reduction: As for `resize_state`.

  Returns:
    The state, placed as by `init_state`.

  Raises:
    NameError: If the transformation names an axis that the mesh lacks.
    TypeError: If a leaf has another dtype than the transformation keeps, or a
      state declares a rule that is not a `Rule`.
    ValueError: If `state` was not made by `tx` for these parameters, a leaf
      cannot be carried over or is not on this process, `in_specs` shards
      parameters whose state is sharded further, `reduction` is missing or
      unknown, or a state declares a rule for a field that it lacks.

  Examples:
    >>> import jax
    >>> import optax
    >>> import shard_transforms
    >>> mesh = jax.make_mesh((8,), ('data',))
    >>> tx = shard_transforms.shard_update(optax.adam(0.1), 'data')
    >>> params = jax.numpy.ones((3, 5))
    >>> state = shard_transforms.init_state(tx, params, mesh)
    >>> full = shard_transforms.full_state(state, tx, params, mesh)
    >>> four = jax.make_mesh((4,), ('data',), devices=jax.devices()[:4])
    >>> state = shard_transforms.place_state(full, tx, params, four)
    >>> print(state.inner_state[0].mu.shape)
    (4, 1, 4)
  """
  check_reduction(reduction)
  one_shard = _OneShard(tx, params, mesh, in_specs)
  target = placement.init_state(tx, one_shard.params, mesh, in_specs=in_specs)

  def rules_of(node, like):
    return {
        **_resize_rules_of(node, like, reduction),
        **_full_rules_of(node, like),
    }

  def convert(path, rule, field, like):
    if rule.full is not None:
      one_shard.check(path, field, like)
      return _sharded(rule, field, like, mesh)
    _check_same_trees(path, field, like)
    carry_over = functools.partial(_carried_over, path, rule)
    return jax.tree.map_with_path(carry_over, field, like)

  state = jax.tree.map(on_host, state)
  return _map_fields(convert, rules_of, state, target)


def check_reduction(reduction: Any) -> None:
  """Checks how shards are said to be reduced.

  Raises:
    ValueError: If it is unknown.
  """
  if reduction not in (None, 'mean', 'sum', 'weighted'):
    raise ValueError(
        "`reduction` must be 'mean', 'sum', 'weighted' or None, got"
        f' {reduction!r}.'
    )


@dataclasses.dataclass(frozen=True)
class _OneShard:
  """The state on one shard, whose parts have the shapes of the replicated one.

  Attributes:
    tx: The transformation.
    given: The parameters.
    mesh: A mesh that has its axes.
    in_specs: The `PartitionSpec`s of the parameters.
  """

  tx: optax.GradientTransformation
  given: Any
  mesh: jax.sharding.Mesh
  in_specs: Any

  @functools.cached_property
  def params(self):
    """The shapes of the parameters."""
    return jax.eval_shape(lambda params: params, self.given)

  @functools.cached_property
  def _fields_on_mesh(self):
    """The types of the parts that are sharded, as they are on the mesh."""
    state = placement.init_state(
        self.tx, self.params, self.mesh, in_specs=self.in_specs
    )
    fields = {}

    def note(path, rule, field, _):
      if rule.full is not None:
        fields[path] = field

    _map_fields(note, _full_rules_of, state, state)
    return fields

  def check_made_on_mesh(self, path, field):
    """Checks that a part was made on this mesh for these `in_specs`.

    Slices of other parts of a parameter can have shapes that fit.

    Raises:
      ValueError: If it was not.
    """
    _, full = self._types_of(path)
    made = self._fields_on_mesh.get(path)
    if _types(field) not in (_types(made), _types(full)):
      name = leaves_lib.name_of(path)
      raise ValueError(
          '`mesh` and `in_specs` must be those with which `init_state` made the'
          f' state, got other shapes at {name}. Give both as to `init_state`.'
      )

  @functools.cached_property
  def _fields(self):
    """The types of the parts that are sharded elsewhere, cut and full."""
    names, fields = self.mesh.axis_names, {}
    mesh = jax.sharding.AbstractMesh((1,) * len(names), names)
    state = placement.init_state(
        self.tx, self.params, mesh, in_specs=self.in_specs
    )

    def note(path, rule, field, _):
      if rule.full is not None:
        name = leaves_lib.name_of(path)
        full = jax.eval_shape(
            lambda part: rule.full(part, field, name), _without_shardings(field)
        )
        fields[path] = field, full

    _map_fields(note, _full_rules_of, state, state)
    return fields

  def joining(self, path, rule):
    """Returns the function that gives the part at a path its full form.

    Raises:
      ValueError: If there is none.
    """
    name = leaves_lib.name_of(path)
    one_shard, _ = self._types_of(path)

    def join(field):
      if _types(field) != _types(one_shard):
        self._check_whole_params(path)
      full = rule.full(field, one_shard, name)
      self._check_shapes(path, full)
      return full

    return join

  def check(self, path, full, target):
    """Checks a part in its full form, which is to be placed like `target`.

    Raises:
      TypeError: If a leaf has another dtype.
      ValueError: If it is of other parameters.
    """
    one_shard, expected = self._types_of(path)
    self._check_shapes(path, full, ' It must be what `full_state` returns.')
    for (sub, leaf), like in _pairs(full, expected):
      _check_dtype(leaves_lib.name_of((*path, *sub)), leaf, like)
    if _types(target) != _types(one_shard):
      self._check_whole_params(path)

  def _types_of(self, path):
    if path not in self._fields:
      name = leaves_lib.name_of(path)
      raise ValueError(f'{full_rules.made_for_others("a part", name)}.')
    return self._fields[path]

  def _check_shapes(self, path, full, hint=''):
    _, expected = self._types_of(path)
    _check_same_trees(path, full, expected)
    for (sub, leaf), like in _pairs(full, expected):
      if jnp.shape(leaf) != like.shape:
        name = leaves_lib.name_of((*path, *sub))
        got = f'the shape {jnp.shape(leaf)}'
        raise ValueError(
            f'{full_rules.made_for_others(got, name)} instead of {like.shape}.'
            f'{hint}'
        )

  def _check_whole_params(self, path):
    told = jax.tree.leaves(self.in_specs, is_leaf=partition_specs.is_spec)
    if any(map(partition_specs.axes_of, told)):
      raise ValueError(
          '`in_specs` must not shard parameters whose state is sharded further,'
          f' such as by `shard_update`, got {self.in_specs} for'
          f' {leaves_lib.name_of(path)}. Go on with the same mesh, or start'
          ' again with `init_state`.'
      )


def _pairs(tree, like):
  return zip(
      jax.tree.leaves_with_path(tree), jax.tree.leaves(like), strict=True
  )


def _types(tree):
  return [(jnp.shape(x), _dtype_of(x)) for x in jax.tree.leaves(tree)]


def _map_fields(fn, rules_of, state, like, path=()):
  """Maps a state by the rules that its nodes declare for their fields.

  Args:
    fn: Takes a path, a rule, what is there, and what `like` has there: a field
      for which a rule is declared, or a leaf.
    rules_of: Takes a node and the one in its place, and returns its rules.
    state: The state.
    like: Another state of the same tree, but for such fields.
    path: The path of the state.
  """

  def of_node(sub, node, like):
    here = (*path, *sub)
    if not states.declares(node):
      return fn(here, states.Rule(), node, like)

    def is_part(part):
      return part is not node and part is not like

    _check_same_trees(here, node, like, is_part)
    rules = rules_of(node, like)

    def of_field(key, field, like):
      # Fields have names only in a state that is a class with named fields.
      rule = rules.get(getattr(key[0], 'name', None))
      if rule is None:
        return _map_fields(fn, rules_of, field, like, (*here, *key))
      return fn((*here, *key), rule, field, like)

    return jax.tree.map_with_path(of_field, node, like, is_leaf=is_part)

  is_leaf = states.declares
  _check_same_trees(path, state, like, is_leaf)
  return jax.tree.map_with_path(of_node, state, like, is_leaf=is_leaf)


def _full_rules_of(node, _):
  """Returns the rules of those fields of a node that have a full form."""
  rules = states.rules_of(node)
  return {name: rule for name, rule in rules.items() if rule.full is not None}


def _resize_rules_of(node, like, reduction):
  """Returns the rules of those fields of a node that are resized.

  Raises:
    TypeError: If a function that a state declares returns no rule.
    ValueError: If the state is not on this process.
  """
  rules = {
      name: rule
      for name, rule in states.rules_of(node).items()
      if rule.resize != 'keep'
  }
  changed = {
      name
      for name in rules
      if _types(getattr(node, name)) != _types(getattr(like, name))
  }
  if not changed:
    return {}
  # Rules may depend on values.
  if not all(map(is_here, jax.tree.leaves(node))):
    _raise_not_here(type(node).__name__)
  for name, rule in rules.items():
    if callable(rule.resize):
      rules[name] = rule.resize(node, reduction)
      states.check_rule(node, name, rules[name])
  begun = {name for name, rule in rules.items() if rule.resize == 'begin_anew'}
  # What changes by itself is of other parameters, and does not begin anew.
  return rules if changed - begun else {}


def _check_same_trees(path, state, like, is_leaf=None):
  """Checks that a state has the expected tree.

  Raises:
    ValueError: If it has not.
  """
  found = jax.tree.structure(state, is_leaf=is_leaf)
  expected = jax.tree.structure(like, is_leaf=is_leaf)
  if found != expected:
    got = f'the tree {jax.tree.structure(state)}'
    raise ValueError(
        f'{full_rules.made_for_others(got, leaves_lib.name_of(path))} instead'
        f' of {jax.tree.structure(like)}.'
    )


def _check_dtype(name, leaf, like):
  """Checks the dtype of a leaf.

  Raises:
    TypeError: If it is another one.
  """
  dtype = _dtype_of(leaf)
  if dtype != like.dtype:
    got = f'{dtype.name} instead of {like.dtype.name}'
    raise TypeError(f'{full_rules.made_for_others(got, name)}.')


def _is_on_devices(field):
  leaves = jax.tree.leaves(field)
  return any(isinstance(x, jax.Array) and not _is_key(x) for x in leaves)


def _joined(join, field, mesh):
  """Returns a part in its full form, sharded over the mesh, if it is on one."""
  is_abstract = specs.is_abstract(field)
  if not is_abstract and not _is_on_devices(field):
    return jax.tree.map(_copied, join(field))
  types = jax.eval_shape(join, _without_shardings(field))
  spread = jax.tree.map(lambda x: shardings.spread(x.shape, mesh), types)
  if is_abstract:
    return specs.abstract(types, spread, mesh)
  compiled = _automatic(mesh)
  placed = jax.device_put(
      field, _shardings(jax.tree.map(_spec_of, field), compiled)
  )
  made = jax.jit(join, out_shardings=_shardings(spread, compiled))(placed)
  return jax.device_put(made, _shardings(spread, mesh))


def _sharded(rule, full, target, mesh):
  """Returns a part as the shards of `target` keep it."""
  compiled = _automatic(mesh)
  # No device needs memory for all of it.
  spread = jax.tree.map(
      lambda x: NamedSharding(compiled, shardings.spread(jnp.shape(x), mesh)),
      full,
  )
  placed = jax.tree.map(_put, full, spread)
  kept = jax.tree.map(lambda x: x.sharding.spec, target)
  place = jax.jit(
      lambda full: rule.place(full, target),
      out_shardings=_shardings(kept, compiled),
  )
  return jax.device_put(place(placed), _shardings(kept, mesh))


def _without_shardings(tree):
  return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)


def _automatic(mesh):
  """Returns a mesh on which the compiler reshapes what is sharded."""
  return mesh.update(axis_types=(AxisType.Auto,) * len(mesh.axis_names))


def _shardings(specs, mesh):
  return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)


def _spec_of(leaf):
  sharding = getattr(leaf, 'sharding', None)
  return sharding.spec if isinstance(sharding, NamedSharding) else P()


def _carried_over(path, rule, sub, leaf, like):
  """Returns a leaf, resized by its rule and placed."""
  name = leaves_lib.name_of((*path, *sub))
  _check_dtype(name, leaf, like)
  if rule.resize == 'begin_anew' or jnp.shape(leaf) != like.shape:
    if not is_here(leaf):
      _raise_not_here(name)
    leaf = row_resizing.apply_rule(rule, name, leaf, like)
  return _put(leaf, like.sharding)


def _raise_not_here(name):
  raise ValueError(
      '`state` must be on this process where the number of shards changes, got'
      f' a part of {name}. Restore it as arrays of NumPy.'
  )


def is_here(leaf: Any) -> bool:
  """Whether this process has all of a leaf."""
  if not isinstance(leaf, jax.Array):
    return True
  return leaf.is_fully_addressable or leaf.is_fully_replicated


def _dtype_of(leaf):
  return getattr(leaf, 'dtype', None) or jnp.result_type(leaf)


def _is_key(leaf):
  return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def on_host(leaf: Any) -> Any:
  """Returns a leaf as an array of NumPy, if this process has all of it."""
  is_array = isinstance(leaf, jax.Array)
  if is_array and (_is_key(leaf) or not is_here(leaf)):
    return leaf
  return np.asarray(leaf, _dtype_of(leaf))


def _copied(leaf):
  if isinstance(leaf, jax.ShapeDtypeStruct):
    return leaf
  if isinstance(leaf, jax.Array):
    return _copy(leaf)
  return np.array(leaf, _dtype_of(leaf))


def _copy(leaf):
  if not _is_key(leaf):
    return jnp.copy(leaf)
  bits = jnp.copy(jax.random.key_data(leaf))
  return jax.random.wrap_key_data(bits, impl=jax.random.key_impl(leaf))


def _put(leaf, sharding):
  """Returns a copy of a leaf, placed."""
  if not is_here(leaf):
    return jax.jit(_copy, out_shardings=sharding)(leaf)
  if isinstance(leaf, jax.Array) and _is_key(leaf):
    # Placed as it is, a random key would share its memory.
    bits = _put(np.asarray(jax.random.key_data(leaf)), sharding)
    return jax.random.wrap_key_data(bits, impl=jax.random.key_impl(leaf))
  # JAX may alias the memory of a NumPy array that it is given.
  values = np.array(leaf)
  return jax.make_array_from_callback(
      values.shape, sharding, values.__getitem__, dtype=values.dtype
  )
