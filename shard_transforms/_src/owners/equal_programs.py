"""Whether the programs of several leaves are equal, so that one runs for all.

Programs are equal if they do the same steps in the same order on inputs that
are a leaf's own, at the same place, or the same input for all leaves. What is
not known to be equal counts as different, and so does what `jax.vmap` changes.
"""

from collections.abc import Hashable
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
from typing import Any

import numpy as np

from shard_transforms._src.analysis import interpreter


@dataclasses.dataclass(frozen=True)
class Parts:
  """The parts of a program that its outputs depend on.

  Attributes:
    program: A program with calls inlined.
    maker: The step that makes each value.
  """

  program: interpreter.Program
  maker: Mapping[Any, interpreter.Step]

  @classmethod
  def of(cls, program: interpreter.Program) -> 'Parts':
    """Returns the parts of a program."""
    steps = program.steps
    return cls(program, {x: step for step in steps for x in step.outputs})

  def key(
      self, outputs: Sequence[int], own: Sequence[int] = ()
  ) -> tuple[Hashable, set[int]]:
    """Returns a key that only equal parts share, and what the part reads.

    Args:
      outputs: The numbers of the outputs.
      own: The numbers of those inputs that are a leaf's own, in the order in
        which another leaf has its own.

    Returns:
      The key, and which of `own`, by their places there, it depends on.
    """
    names = {x: ('input', i) for i, x in enumerate(self.program.inputs)}
    places = {self.program.inputs[i]: k for k, i in enumerate(own)}
    names |= {x: ('own', k) for x, k in places.items()}
    results = [self.program.outputs[i] for i in outputs]
    todo, lines, read = list(reversed(results)), [], set()
    while todo:
      value = todo[-1]
      step = None if value in names else self.maker.get(value)
      missing = (
          [x for x in step.inputs if self._is_to_do(x, names)] if step else []
      )
      todo += reversed(missing)
      if missing:
        continue
      todo.pop()
      if step is not None:
        given = tuple(self._name(x, names) for x in step.inputs)
        read.update(places[x] for x in step.inputs if x in places)
        names |= {x: (len(lines), k) for k, x in enumerate(step.outputs)}
        kinds = tuple(x.aval for x in step.outputs)
        lines.append((step.name, _params(step), given, kinds))
    read.update(places[x] for x in results if x in places)
    kinds = tuple(self.program.inputs[i].aval for i in own)
    ends = tuple(self._name(x, names) for x in results)
    return (kinds, tuple(lines), ends), read

  def _is_to_do(self, value, names):
    return value in self.maker and value not in names

  def _name(self, value, names):
    if value.is_literal:
      return value.aval, np.asarray(value.number).tobytes()
    # A constant is equal to itself alone.
    constant = value if value.number is None else value.number
    return names.get(value, ('constant', id(constant)))


def _params(step):
  """Returns the parameters of a step, with its bodies as keys."""
  if not _runs_alike(step):
    return object()
  found = []
  for name, param in sorted(step.params.items()):
    if interpreter.held({name: param}):
      continue
    try:
      hash(param)
    except TypeError:
      param = id(param)
    found.append((name, param))
  bodies = (Parts.of(x).key(range(len(x.outputs)))[0] for x in step.bodies)
  return tuple(found), tuple(bodies)


def _runs_alike(step):
  """Whether `jax.vmap` of a step gives what it gives leaf by leaf."""
  # Of keys of XLA's own generator, all draw what the first one draws.
  kinds = (str(x.aval) for x in (*step.inputs, *step.outputs))
  draws = step.name == 'rng_bit_generator' or any(
      kind.startswith('key<') and not kind.startswith('key<fry>')
      for kind in kinds
  )
  # Calls of other languages may have no rule for it.
  return not draws and step.params.get('vmap_method', '') is not None
