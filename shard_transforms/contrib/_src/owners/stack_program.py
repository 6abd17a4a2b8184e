"""The program of `inner` for one stack, which each owner runs on its rows.

If the programs of all members are equal, the owner runs one program on all of
its rows. Otherwise, a `lax.switch` on the owner runs the program of each of its
members.
"""

from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import functools
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp

from shard_transforms._src.base import axes as axes_lib
from shard_transforms._src.reduction import collectives
from shard_transforms.contrib._src.owners import leaf_program
from shard_transforms.contrib._src.owners import stack as stack_lib

Inputs = Mapping[int, jax.Array]


@dataclasses.dataclass(frozen=True)
class StackProgram:
  """The part of a program that computes some outputs of the members of a stack.

  Attributes:
    program: The program, traced with the types that owners have.
    stack: The stack.
    outputs: For each parameter, its outputs by key. Outputs with the same key
      have the same type.
    owners: The parameters with owners that inputs belong to, by index.
    digests: For each output of the program, the digest of its equations.
  """

  program: leaf_program.LeafProgram
  stack: stack_lib.Stack
  outputs: Mapping[int, Mapping[str, int]]
  owners: Mapping[int, int]
  digests: Sequence[int]

  @functools.cached_property
  def own_inputs(self) -> set[int]:
    """The inputs of members, unless a member reads those of another."""
    read = [
        (param, i)
        for param, outputs in self.outputs.items()
        for i in self.program.inputs_of(*outputs.values())
        if i in self.owners
    ]
    is_separate = all(self.owners[i] == param for param, i in read)
    return {i for _, i in read} if is_separate else set()

  @functools.cached_property
  def other_inputs(self) -> set[int]:
    """All other inputs that are read."""
    outputs = (i for x in self.outputs.values() for i in x.values())
    return set(self.program.inputs_of(*outputs)) - self.own_inputs

  def run(self, shared: Inputs, rows: Inputs) -> dict[str, jax.Array]:
    """Returns the owner's rows of outputs, [rows, ...], by key.

    Args:
      shared: The inputs that all shards have, by index.
      rows: The owner's rows of the inputs of members, by index.
    """
    programs = {
        tuple((key, self.digests[i]) for key, i in outputs.items())
        for outputs in self.outputs.values()
    }
    is_separate = self.other_inputs.isdisjoint(self.owners)
    if is_separate and len(programs) == 1:
      return self._run_equal(shared, rows)
    run = functools.partial(self._run_owner, shared, rows)
    return self.stack.switch(run)

  def total(self, shared: Inputs, rows: Inputs, kind: Any) -> jax.Array:
    """Returns the sum of all outputs over the members, in the type `kind`."""
    stack, total = self.stack, jnp.zeros(kind.shape, kind.dtype)
    row = stack.owner() * stack.length + jnp.arange(stack.length)
    for x in self.run(shared, rows).values():
      is_member = jnp.expand_dims(row < len(stack.members), range(1, x.ndim))
      total += jnp.where(is_member, x.astype(kind.dtype), 0).sum(0)
    return collectives.psum(total, stack.layout.axes)

  def _run_equal(self, shared, rows):
    """Runs the program of one member on all rows."""
    stack, param = self.stack, self.stack.params[0]

    def run(own):
      return self._run_member(param, {**shared, **own})

    inputs = self.program.inputs_of(*self.outputs[param].values())
    own = {i: rows[i] for i in inputs if i in self.owners}
    if stack.length > 1:
      outputs = jax.vmap(run, axis_size=stack.length)(own)
    else:
      outputs = run({i: lax.squeeze(x, (0,)) for i, x in own.items()})
      outputs = {key: lax.expand_dims(x, (0,)) for key, x in outputs.items()}
    return axes_lib.to_varying(outputs, stack.layout.axes)

  def _run_owner(self, shared, rows, owner):
    """Runs the programs of the members of an owner; other rows are zero."""
    stack, outputs = self.stack, []
    for row, (param, _) in enumerate(stack.members_of(owner)):
      own = {i: x[row] for i, x in rows.items() if self.owners[i] == param}
      outputs.append(self._run_member(param, {**shared, **own}))
    outputs += [{}] * (stack.length - len(outputs))
    types = {
        key: self.program.jaxpr.out_avals[i]
        for of_param in self.outputs.values()
        for key, i in of_param.items()
    }
    zeros = {key: jnp.zeros(x.shape, x.dtype) for key, x in types.items()}
    return {
        key: jnp.stack([x.get(key, zeros[key]) for x in outputs])
        for key in types
    }

  def _run_member(self, param, inputs):
    outputs = self.outputs[param]
    values = self.program.run(outputs.values(), inputs)
    return {key: values[i] for key, i in outputs.items()}
