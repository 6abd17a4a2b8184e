"""Accumulation in a compiled computation: reduced values that are added up.

The sum of reductions is the reduction of the sum. Values are followed forward
through steps that are linear in each of their inputs; any other step ends the
search.
"""

import collections
from collections.abc import Iterator
from collections.abc import Sequence

from shard_transforms._src.analysis.hlo import flow
from shard_transforms._src.analysis.hlo import program as hlo_program

_REDUCTIONS = ('all-reduce', 'reduce-scatter')
_ADDITIONS = 'add', 'subtract'
_LINEAR = *_ADDITIONS, *_REDUCTIONS, 'slice'
# Marks values that are summed on their way: a sum of sums cannot wait.
_SUMMED = 'summed'


def carried(
    module: hlo_program.Module,
    graph: flow.Graph,
    loop: hlo_program.Instruction | None,
) -> Iterator[flow.Node]:
  """Yields results of reductions that are only added up in what is carried.

  Args:
    module: The program.
    graph: The body of a loop, or what each call of the program runs.
    loop: The loop, or `None`.
  """
  totals = dict(_emptied_totals(module, graph))
  ends = _ends(graph, totals)
  carry = graph.carry()
  if loop is None:
    # Any argument may be the state of the call before.
    found = {frozenset(ends[node]) for node in carry.values()}
    added_up = {i for i in totals.values() if {i} in found}
  else:
    condition, _ = module.called(loop)
    test = flow.graph(module, condition)
    ends_loop = {i for i, node in test.carry().items() if node.users}
    added_up = {i for i, node in carry.items() if ends[node] == {i}}
    added_up -= ends_loop
  for node in _reduced(graph):
    if set() < ends[node] - {_SUMMED} <= added_up:
      yield node


def joined(
    module: hlo_program.Module, graph: flow.Graph
) -> Iterator[Sequence[flow.Node]]:
  """Yields results of several reductions that are only added to each other.

  Those of one group come from the same lines of the program, as where a loop in
  Python computes them.

  Args:
    module: The program.
    graph: The values of a computation.
  """
  groups = collections.defaultdict(list)
  for node in _reduced(graph):
    reduction = sender(node)
    given = reduction.inputs[node.index or 0]
    if lines := module.sources(given.instruction):
      devices = reduction.instruction.attributes.get('replica_groups')
      groups[_total(graph, node), lines, devices].append(node)
  yield from (group for group in groups.values() if len(group) > 1)


def sender(result: flow.Node) -> flow.Node:
  """Returns the collective that a value is a result of."""
  return result if result.index is None else result.inputs[0]


def _reduced(graph):
  """Yields the results of reductions, one for each array."""
  for node in graph.nodes:
    if node.instruction.collective in _REDUCTIONS:
      yield from flow.results(node)


def _ends(graph, totals):
  """Returns, by value, the outputs to which it is only added.

  The outputs include `None` for any other use, and `_SUMMED` if a reduction is
  on the way.

  Args:
    graph: The values of a computation.
    totals: The outputs to which some values are known to belong.
  """
  ends = collections.defaultdict(set)
  ends.update((node, set(places)) for node, places in graph.places.items())
  root = [node for node in graph.nodes if node.opcode == 'tuple']
  for node in reversed(graph.nodes):
    # The tuple of all outputs is not a use.
    if node in root and node.inputs == graph.outputs:
      continue
    if node in totals:
      ends[node] = {totals[node]}
    found = ends[node]
    if node.instruction.collective in _REDUCTIONS:
      found = found | {_SUMMED}
    for given in node.inputs:
      ends[given] |= found if _is_linear(node, given) else {None}
  return ends


def _is_linear(node, given):
  if node.opcode == 'select':
    return given is not node.inputs[0]
  if node.opcode == 'dynamic-slice':
    return given is node.inputs[0]
  is_sum = node.opcode in _LINEAR and flow.is_inexact(node)
  return is_sum or flow.is_multiple(node, given)


def _total(graph, node):
  """Returns the last sum in which a value ends that has no other use."""
  while node not in graph.places and len(node.users) == 1:
    (user,) = node.users
    is_choice = user.opcode == 'select' or user.instruction.collective
    if is_choice or not _is_linear(user, node):
      break
    node = user
  return node


def _emptied_totals(module, graph):
  """Yields totals that some calls read and empty, each with its output."""
  arguments = set(graph.carry().values())
  for i, output in enumerate(graph.outputs):
    last = _origin(output)
    total = _unless_emptied(module, last)
    if total is None and last.opcode in _ADDITIONS:
      # It may be emptied by the first call of a window.
      given = [_unless_emptied(module, _origin(n)) for n in last.inputs]
      total = last if arguments.intersection(given) else None
    if total is not None and _is_read_at_times(module, graph, total, i):
      yield total, i


def _unless_emptied(module, node):
  """Returns the total if a value is either a copy of it or zero."""
  total = None
  if node.opcode == 'multiply':
    for switch, other in (node.inputs, node.inputs[::-1]):
      total = other if _is_switch(switch) else total
  elif node.opcode == 'select' and flow.is_repeated(node.inputs[0]):
    _, *branches = node.inputs
    for one, other in (branches, branches[::-1]):
      total = other if _is_number(one, '0') else total
  elif node.index is not None:
    total = _unless_emptied_inside(module, node.inputs[0], node.index)
  return None if total is None else _origin(total)


def _unless_emptied_inside(module, node, index):
  """The same for a part of what a loop or conditional returns."""
  totals, is_emptied = set(), False
  for branch, given in _branches(module, node):
    inside = flow.graph(module, branch)
    last = _origin(inside.outputs[index])
    if _is_number(last, '0'):
      is_emptied = True
    else:
      totals |= {
          value for value, part in _arguments(inside, given) if part is last
      } or {None}
  if node.opcode == 'while' and is_emptied:
    totals.add(node.inputs[0].inputs[index])
  return totals.pop() if is_emptied and len(totals) == 1 else None


def _branches(module, node):
  """Yields the computations of branches, and their arguments."""
  called = module.called(node.instruction)
  given = [n.inputs if n.opcode == 'tuple' else (n,) for n in node.inputs]
  if node.opcode == 'conditional' and len(given) == len(called) + 1:
    yield from zip(called, given[1:], strict=True)
  elif (
      node.opcode == 'while'
      and node.inputs[0].opcode == 'tuple'
      and flow.turns_at_most_once(module, node.instruction)
  ):
    yield called[1], given[0]


def _arguments(graph, given):
  """Yields what a branch is given, and the values that these are inside."""
  for i, part in graph.carry().items():
    # An empty tuple has no parts, but is a value.
    if i < len(given):
      yield given[i], part


def _is_read_at_times(module, graph, total, output):
  """Whether nothing but one output sees a total in each call."""
  pending, seen = [total], {total}
  while pending:
    node = pending.pop()
    if graph.places.get(node, set()) - {output}:
      return False
    for user in node.users:
      found = _seen_through(module, node, user)
      pending += [n for n in found if n not in seen]
      seen.update(found)
  return True


def _seen_through(module, node, user):
  """Returns the values that a user of a value makes of it in each call."""
  if user.opcode == 'multiply' and any(map(_is_switch, user.inputs)):
    return set()
  if user.opcode == 'select' and flow.is_repeated(user.inputs[0]):
    return {user} if node is user.inputs[0] else set()
  wholes = user.users if user.opcode == 'tuple' else [user]
  branches = [(whole, [*_branches(module, whole)]) for whole in wholes]
  if not all(found for _, found in branches):
    return {user}
  return {
      part
      for whole, found in branches
      for part in whole.users
      if part.index in _always_seen(module, node, whole, found)
  }


def _always_seen(module, node, whole, branches):
  """Returns the parts of a loop or conditional that show a value each time."""
  if whole.opcode == 'while':
    return {i for i, n in enumerate(whole.inputs[0].inputs) if n is node}
  parts = {part.index for part in whole.users}
  for branch, given in branches:
    inside = flow.graph(module, branch)
    kept = set()
    for value, part in _arguments(inside, given):
      if value is node:
        kept |= _kept_as(inside, part)
    parts &= kept
  return parts


def _kept_as(graph, node):
  """Returns the outputs that a value is; all, if anything else uses it."""
  pending, found = [node], set()
  while pending:
    node = pending.pop()
    found |= graph.places.get(node, set())
    for user in node.users:
      if user.inputs != graph.outputs:
        if user.opcode not in flow.MOVES:
          return {*range(len(graph.outputs))}
        pending.append(user)
  return found


def _is_switch(node):
  """Whether it is a number, repeated, that a condition makes zero."""
  if node.array.xla_dtype == 'pred':
    return node.array.size == 1
  if node.opcode == 'select':
    zeros = [n for n in node.inputs[1:] if _is_number(n, '0')]
    return bool(zeros) and flow.is_repeated(node.inputs[0])
  if node.opcode == 'broadcast' or node.opcode in flow.MOVES:
    return node.index is None and _is_switch(node.inputs[0])
  if node.array.size > 1:
    return False
  if node.opcode == 'subtract':
    return _is_number(node.inputs[0], '1') and _is_switch(node.inputs[1])
  return node.opcode == 'multiply' and any(map(_is_switch, {*node.inputs}))


def _is_number(node, text):
  origins = flow.sources(node, ('broadcast', *flow.MOVES))
  return all(
      origin.opcode == 'constant' and origin.instruction.operand_text == text
      for origin in origins
  )


def _origin(node):
  """Returns the value that was moved; a part of a tuple is one."""
  while node.opcode in flow.MOVES and node.index is None:
    (node,) = node.inputs[:1]
  return node
