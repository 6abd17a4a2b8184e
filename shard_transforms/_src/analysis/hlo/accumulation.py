"""Accumulation in a compiled program: reduced values that are added up.

The sum of reductions is the reduction of the sum. Values are followed forward
through steps that are linear in each of their inputs; any other step ends the
search.
"""

import collections
from collections.abc import Iterator
from collections.abc import Sequence

from shard_transforms._src.analysis.hlo import dataflow
from shard_transforms._src.analysis.hlo import program as hlo_program

_REDUCTIONS = ('all-reduce', 'reduce-scatter')
_ADDITIONS = 'add', 'subtract'
_LINEAR = *_ADDITIONS, *_REDUCTIONS, 'get-tuple-element', 'slice'
# Mark values that are summed on their way, because a sum of sums cannot wait,
# and those that become a part of a larger array.
_SUMMED, _STACKED = 'summed', 'stacked'


def carried(
    graph: dataflow.Graph,
) -> Iterator[tuple[dataflow.Node, dataflow.Loop]]:
  """Yields reductions that are only added up in what a loop carries.

  Each result comes with the outermost loop behind which it could be reduced;
  the program itself is one, which each call repeats. A turn may add up what an
  inner loop adds up or stacks, such as the gradients of layers.

  Args:
    graph: The values of a program.
  """
  totals = dict(_emptied_totals(graph))
  ends = _ends(graph, totals)
  kept = _kept(graph, totals, ends)
  for node in _reduced(graph):
    if loop := _last_loop(node, ends, kept):
      yield node, loop


def _kept(graph, totals, ends):
  """Returns the places of loops that are only added to, with marks."""
  program, *loops = graph.loops
  # Any argument of the program may be the state of the call before.
  arguments = [ends[node] for node in program.carry.values()]
  kept = {place: set() for place in totals.values() if {place} in arguments}
  for loop in loops:
    for i, node in loop.carry.items():
      marks = ends[node] - {(loop, i)}
      if marks <= {_STACKED}:
        kept[loop, i] = marks
  return kept


def _last_loop(node, ends, kept):
  """Returns the outermost loop that only adds up a value, if there is one."""
  found, loop, values = None, node.loop, [node]
  while loop is not None and not any(value.is_chosen for value in values):
    marked = set().union(*map(ends.get, values)) - {_SUMMED}
    places = marked - {_STACKED}
    if not places or any(x not in kept or x[0] is not loop for x in places):
      break
    if _STACKED not in marked.union(*map(kept.get, places)):
      found = loop
    numbers = {i for _, i in places}
    values = loop.node and dataflow.results(loop.node)
    values = [x for x in values or () if (x.index or 0) in numbers]
    loop = loop.outer
  return found


def joined(
    module: hlo_program.Module, graph: dataflow.Graph
) -> Iterator[Sequence[dataflow.Node]]:
  """Yields results of several reductions that are only added to each other.

  Those of one group come from the same lines of the program, as where a loop in
  Python computes them.

  Args:
    module: The program.
    graph: Its values.
  """
  groups = collections.defaultdict(list)
  for node in _reduced(graph):
    reduction = sender(node)
    given = reduction.inputs[node.index or 0]
    if lines := module.sources(given.instruction):
      devices = reduction.instruction.attributes.get('replica_groups')
      groups[_total(graph, node), lines, devices].append(node)
  yield from (group for group in groups.values() if len(group) > 1)


def sender(result: dataflow.Node) -> dataflow.Node:
  """Returns the collective that a value is a result of."""
  return result if result.index is None else result.inputs[0]


def _reduced(graph):
  """Yields the results of reductions, one for each array."""
  for node in graph.nodes:
    if node.collective in _REDUCTIONS:
      yield from dataflow.results(node)


def _ends(graph, totals):
  """Returns, by value, the places to which it is only added.

  They include `None` for any other use, and marks of what is on the way.

  Args:
    graph: The values of a program.
    totals: The places to which some values are known to belong.
  """
  ends = collections.defaultdict(set)
  ends.update((node, set(places)) for node, places in graph.places.items())
  for node in reversed(graph.nodes):
    if node in totals:
      ends[node] = {totals[node]}
    found = ends[node]
    if node.collective in _REDUCTIONS:
      found = found | {_SUMMED}
    elif node.opcode == 'dynamic-update-slice':
      found = found | {_STACKED}
    for given in node.inputs:
      ends[given] |= found if _is_linear(node, given) else {None}
  return ends


def _is_linear(node, given):
  if node.opcode == 'select':
    return given is not node.inputs[0]
  if node.opcode == 'dynamic-slice':
    return given is node.inputs[0]
  if node.opcode == 'dynamic-update-slice':
    return given in node.inputs[:2]
  is_sum = node.opcode in _LINEAR and dataflow.is_inexact(node)
  return is_sum or dataflow.is_multiple(node, given)


def _total(graph, node):
  """Returns the last sum in which a value ends that has no other use."""
  while node not in graph.places and len(node.users) == 1:
    (user,) = node.users
    is_choice = user.opcode == 'select' or user.collective
    if is_choice or not _is_linear(user, node):
      break
    node = user
  return node


def _emptied_totals(graph):
  """Yields totals that some turns read and empty, each with its place."""
  fixed = _fixed(graph)
  for loop in graph.loops:
    arguments = {*loop.carry.values()}
    for i, output in loop.outputs.items():
      last = _origin(output)
      total = _unless_emptied(last, fixed)
      if total is None and last.opcode in _ADDITIONS:
        # It may be emptied by the first turn of a window.
        given = [_unless_emptied(_origin(n), fixed) for n in last.inputs]
        total = last if arguments.intersection(given) else None
      if total is not None and _is_read_at_times(graph, total, (loop, i)):
        yield total, (loop, i)


def _fixed(graph):
  """Returns the values that do not change after the first turn.

  The counter of a window of one step is always 0: it empties a total each time.
  """
  fixed = set()
  for loop in graph.loops:
    ends = {i for i, x in loop.outputs.items() if x.opcode == 'constant'}
    fixed |= {node for i, node in loop.carry.items() if i in ends}
  for node in graph.nodes:
    known = node.inputs and fixed.issuperset(node.inputs)
    if known or node.opcode == 'constant':
      fixed.add(node)
  return fixed


def _unless_emptied(node, fixed):
  """Returns the total if a value is in some turns a copy of it, else zero."""
  totals = set()
  if node.opcode == 'multiply':
    for switch, other in (node.inputs, node.inputs[::-1]):
      is_switch = switch not in fixed and _is_switch(switch)
      totals |= {other} if is_switch else set()
  elif node.opcode == 'select' and (
      node.inputs[0] not in fixed and dataflow.is_repeated(node.inputs[0])
  ):
    arms = {*map(_origin, node.inputs[1:])}
    totals = {arm for arm in arms if not _is_number(arm, '0')}
    totals = totals if totals < arms else set()
  return _origin(*totals) if len(totals) == 1 else None


def _is_read_at_times(graph, total, place):
  """Whether nothing but one place sees a total in each turn."""
  seen = {total}
  for node in graph.nodes:
    if node.opcode == 'select' and dataflow.is_repeated(node.inputs[0]):
      decision, *arms = node.inputs
      is_seen = decision in seen or all(arm in seen for arm in arms)
    elif node.opcode == 'multiply' and any(map(_is_switch, node.inputs)):
      is_seen = False
    else:
      is_seen = any(given in seen for given in node.inputs)
    if is_seen:
      seen.add(node)
  return all(graph.places.get(node, {place}) == {place} for node in seen)


def _is_switch(node):
  """Whether it is a number, repeated, that a condition makes zero."""
  if node.array.xla_dtype == 'pred':
    return node.array.size == 1
  if node.opcode == 'select':
    zeros = [n for n in node.inputs[1:] if _is_number(n, '0')]
    return bool(zeros) and dataflow.is_repeated(node.inputs[0])
  if node.opcode == 'broadcast' or node.opcode in dataflow.MOVES:
    return _is_switch(node.inputs[0])
  if node.array.size > 1:
    return False
  if node.opcode == 'subtract':
    return _is_number(node.inputs[0], '1') and _is_switch(node.inputs[1])
  return node.opcode == 'multiply' and any(map(_is_switch, {*node.inputs}))


def _is_number(node, text):
  origins = dataflow.sources(node, ('broadcast', *dataflow.MOVES))
  return all(
      origin.opcode == 'constant' and origin.instruction.operand_text == text
      for origin in origins
  )


def _origin(node):
  """Returns the value that was moved."""
  while node.opcode in dataflow.MOVES:
    (node,) = node.inputs[:1]
  return node
