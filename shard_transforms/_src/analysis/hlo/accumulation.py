"""Accumulation in a compiled program: reduced values that are added up.

The sum of reductions is the reduction of the sum. Values are followed forward
through instructions that are linear in each of their inputs; any other
instruction ends the search.
"""

import collections
from collections.abc import Iterator
from collections.abc import Sequence

from shard_transforms._src.analysis.hlo import dataflow
from shard_transforms._src.analysis.hlo import program as hlo_program

_REDUCTIONS = ('all-reduce', 'reduce-scatter')
_ADDITIONS = 'add', 'subtract'
_LINEAR = *_ADDITIONS, *_REDUCTIONS, 'get-tuple-element', 'slice'
# Marks of values that are summed on the way, because a sum of sums cannot wait,
# and of values that become a part of a larger array.
_SUMMED, _STACKED = 'summed', 'stacked'


def carried(
    graph: dataflow.Graph,
) -> Iterator[tuple[dataflow.Node, dataflow.Loop]]:
  """Yields reductions that are only added up in the carry of a loop.

  Each result comes with the outermost loop after which it could be reduced; the
  program itself counts as a loop, which each call repeats. An iteration may add
  up values that an inner loop adds up or stacks, such as the gradients of
  layers.

  Args:
    graph: The values of a program.
  """
  totals = dict(_reset_totals(graph))
  ends = _ends(graph, totals)
  accumulated = _accumulated_carries(graph, totals, ends)
  for node in _reduced(graph):
    if loop := _last_loop(node, ends, accumulated):
      yield node, loop


def _accumulated_carries(graph, totals, ends):
  """Returns the carries of loops that are only added to, with marks."""
  program, *loops = graph.loops
  # Any argument of the program may be the state of the previous call.
  arguments = [ends[node] for node in program.carry.values()]
  accumulated = {
      place: set() for place in totals.values() if {place} in arguments
  }
  for loop in loops:
    for i, node in loop.carry.items():
      marks = ends[node] - {(loop, i)}
      if marks <= {_STACKED}:
        accumulated[loop, i] = marks
  return accumulated


def _last_loop(node, ends, accumulated):
  """Returns the outermost loop that only adds up a value, if any."""
  outermost, loop, values = None, node.loop, [node]
  while loop is not None and not any(value.is_conditional for value in values):
    marked = set().union(*map(ends.get, values)) - {_SUMMED}
    carries = marked - {_STACKED}
    if not carries or any(
        x not in accumulated or x[0] is not loop for x in carries
    ):
      break
    if _STACKED not in marked.union(*map(accumulated.get, carries)):
      outermost = loop
    indices = {i for _, i in carries}
    values = loop.node and dataflow.results(loop.node)
    values = [x for x in values or () if (x.index or 0) in indices]
    loop = loop.outer
  return outermost


def joined(
    module: hlo_program.Module, graph: dataflow.Graph
) -> Iterator[Sequence[dataflow.Node]]:
  """Yields groups of reductions that are only added to each other.

  The reductions of a group come from the same lines of the program, for example
  from a loop in Python.

  Args:
    module: The program.
    graph: The values of the program.
  """
  groups = collections.defaultdict(list)
  for node in _reduced(graph):
    reduction = collective_of(node)
    operand = reduction.inputs[node.index or 0]
    if lines := module.sources(operand.instruction):
      devices = reduction.instruction.attributes.get('replica_groups')
      groups[_total(graph, node), lines, devices].append(node)
  yield from (group for group in groups.values() if len(group) > 1)


def collective_of(result: dataflow.Node) -> dataflow.Node:
  """Returns the collective that a value is a result of."""
  return result if result.index is None else result.inputs[0]


def _reduced(graph):
  """Yields the results of reductions, one per array."""
  for node in graph.nodes:
    if node.collective in _REDUCTIONS:
      yield from dataflow.results(node)


def _ends(graph, totals):
  """Returns the carries to which each value is only added.

  They include `None` for any other use, and marks of instructions on the way.

  Args:
    graph: The values of a program.
    totals: The carries to which some values are known to belong.
  """
  ends = collections.defaultdict(set)
  ends.update((node, set(places)) for node, places in graph.places.items())
  for node in reversed(graph.nodes):
    if node in totals:
      ends[node] = {totals[node]}
    marks = ends[node]
    if node.collective in _REDUCTIONS:
      marks = marks | {_SUMMED}
    elif node.opcode == 'dynamic-update-slice':
      marks = marks | {_STACKED}
    for operand in node.inputs:
      ends[operand] |= marks if _is_linear(node, operand) else {None}
  return ends


def _is_linear(node, operand):
  if node.opcode == 'select':
    return operand is not node.inputs[0]
  if node.opcode == 'dynamic-slice':
    return operand is node.inputs[0]
  if node.opcode == 'dynamic-update-slice':
    return operand in node.inputs[:2]
  is_sum = node.opcode in _LINEAR and dataflow.is_inexact(node)
  return is_sum or dataflow.is_multiple(node, operand)


def _total(graph, node):
  """Returns the last sum to which a value without other uses contributes."""
  while node not in graph.places and len(node.users) == 1:
    (user,) = node.users
    is_choice = user.opcode == 'select' or user.collective
    if is_choice or not _is_linear(user, node):
      break
    node = user
  return node


def _reset_totals(graph):
  """Yields totals that some iterations read and reset, with their carries."""
  fixed = _fixed(graph)
  for loop in graph.loops:
    arguments = {*loop.carry.values()}
    for i, output in loop.outputs.items():
      last = _origin(output)
      total = _total_unless_reset(last, fixed)
      if total is None and last.opcode in _ADDITIONS:
        # The first iteration of a window may reset it.
        candidates = [
            _total_unless_reset(_origin(n), fixed) for n in last.inputs
        ]
        total = last if arguments.intersection(candidates) else None
      if total is not None and _is_read_at_times(graph, total, (loop, i)):
        yield total, (loop, i)


def _fixed(graph):
  """Returns the values that do not change after the first iteration.

  The counter of a window of one step is always 0, and resets a total each time.
  """
  fixed = set()
  for loop in graph.loops:
    ends = {i for i, x in loop.outputs.items() if x.opcode == 'constant'}
    fixed |= {node for i, node in loop.carry.items() if i in ends}
  for node in graph.nodes:
    is_fixed = node.inputs and fixed.issuperset(node.inputs)
    if is_fixed or node.opcode == 'constant':
      fixed.add(node)
  return fixed


def _total_unless_reset(node, fixed):
  """Returns the total that a value copies, unless it is reset to zero."""
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
  """Whether a total is used only by its carry in every iteration."""
  seen = {total}
  for node in graph.nodes:
    if node.opcode == 'select' and dataflow.is_repeated(node.inputs[0]):
      decision, *arms = node.inputs
      is_seen = decision in seen or all(arm in seen for arm in arms)
    elif node.opcode == 'multiply' and any(map(_is_switch, node.inputs)):
      is_seen = False
    else:
      is_seen = any(operand in seen for operand in node.inputs)
    if is_seen:
      seen.add(node)
  return all(graph.places.get(node, {place}) == {place} for node in seen)


def _is_switch(node):
  """Whether it is a repeated scalar that a condition sets to zero."""
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
