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
from shard_transforms.contrib._src.owners import exchange as exchange_lib
from shard_transforms.contrib._src.owners import leaf_program

Inputs = Mapping[int, jax.Array]


@dataclasses.dataclass(frozen=True)
class StackProgram:
  """The part of a program that computes some outputs of the members of a stack.

  Attributes:
    program: The program, traced with the types that owners have.
    exchange: The exchange of the stack.
    outputs: For each parameter, its outputs by key. Outputs with the same key
      have the same type.
    owners: The parameters with owners that inputs belong to, by index.
    digests: For each output of the program, the digest of its equations.
  """

  program: leaf_program.LeafProgram
  exchange: exchange_lib.Exchange
  outputs: Mapping[int, Mapping[str, int]]
  owners: Mapping[int, int]
  digests: Sequence[int]

  @functools.cached_property
  def inputs(self) -> set[int]:
    """All inputs of the program that the outputs read."""
    outputs = (i for x in self.outputs.values() for i in x.values())
    return {*self.program.inputs_of(*outputs)}

  @functools.cached_property
  def own_inputs(self) -> set[int] | None:
    """The inputs of members; `None` if a member reads those of another."""
    own = {
        (param, i)
        for param, outputs in self.outputs.items()
        for i in self.program.inputs_of(*outputs.values())
        if i in self.owners
    }
    if any(self.owners[i] != param for param, i in own):
      return None
    return {i for _, i in own}

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
    if self.own_inputs is not None and len(programs) == 1:
      return self._run_equal(shared, rows)
    run = functools.partial(self._run_owner, shared, rows)
    return self.exchange.switch(run)

  def total(self, shared: Inputs, rows: Inputs, kind: Any) -> jax.Array:
    """Returns the sum of all outputs over the members, in the type `kind`."""
    stack, total = self.exchange.stack, jnp.zeros(kind.shape, kind.dtype)
    row = self.exchange.owner() * stack.length + jnp.arange(stack.length)
    for x in self.run(shared, rows).values():
      is_member = jnp.expand_dims(row < len(stack.members), range(1, x.ndim))
      total += jnp.where(is_member, x.astype(kind.dtype), 0).sum(0)
    return collectives.psum(total, stack.layout.axes)

  def _run_equal(self, shared, rows):
    """Runs the program of one member on all rows."""
    stack = self.exchange.stack
    param = stack.params[0]

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
    stack, outputs = self.exchange.stack, []
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
