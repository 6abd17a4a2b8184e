"""Warnings of redundant communication in compiled programs.

They follow values through instructions that move elements and through linear
ones. An instruction that the rules do not know ends the search without a
warning, so that no warning is false.
"""

import collections
from collections.abc import Sequence
import itertools
import math
import re

from shard_transforms._src.analysis.hlo import flow as hlo_flow
from shard_transforms._src.analysis.hlo import program as hlo_program
from shard_transforms._src.monitoring import report_table

_GATHERS = ('all-gather',)
_REDUCTIONS = ('all-reduce', 'reduce-scatter')
_RESHARDINGS = ('all-to-all', 'collective-permute')
# Collectives that the user wrote do not come from a wrong sharding.
_ASKED_FOR = ('all_to_all', 'ppermute', 'pshuffle', 'ragged_all_to_all')
_LINEAR = *hlo_flow.MOVES, 'add', 'negate', 'slice', 'subtract', *_REDUCTIONS
_SUMS = 'psum', 'reduce_scatter'
# Marks values that are summed on their way: a sum of sums cannot wait.
_SUMMED = 'summed'


def find(
    module: hlo_program.Module,
    collectives: Sequence[report_table.Collective],
) -> tuple[str, ...]:
  """Returns warnings of redundant or imprecise collectives, each once.

  Args:
    module: The program.
    collectives: Its collectives.
  """
  sent = collections.defaultdict(list)
  for collective in collectives:
    sent[collective.op].append(collective)
  found = []
  for loop, computation in _bodies(module, module.entry, None):
    graph = hlo_flow.graph(module, computation)
    if loop is not None:
      found += _added_up(module, graph, loop, sent)
      found += _gathered_again(graph, loop, sent)
    found += _only_sliced(graph, sent)
    if computation is module.entry:
      found += _resharded(graph, sent)
  found += _too_few_bits(module, sent)
  return tuple(dict.fromkeys(found))


def _bodies(module, computation, loop):
  """Yields the computations that run, each with the loop that repeats it.

  The loop is `None` if there is none, or if it has at most one turn.
  """
  yield loop, computation
  pending = list(computation.instructions.values())
  while pending:
    instruction = pending.pop(0)
    called = module.called(instruction)
    if instruction.opcode == 'while':
      repeats = instruction.num_turns != 1 and (
          not hlo_flow.turns_at_most_once(module, instruction)
      )
      yield from _bodies(module, called[1], instruction if repeats else None)
    elif instruction.opcode == 'conditional':
      for branch in called:
        yield from _bodies(module, branch, None)
    elif instruction.opcode in ('call', 'async-start'):
      # The graph of the caller contains these.
      pending += [i for c in called for i in c.instructions.values()]


def _senders(graph, sent, opcodes):
  """Returns the values that collectives with such opcodes compute."""
  return [
      node
      for node in graph.nodes
      if node.instruction.collective in opcodes
      and node.instruction.name in sent
  ]


def _added_up(module, graph, loop, sent):
  """Yields warnings of reductions that one after the loop could replace."""
  ends = _ends(graph)
  condition, _ = module.called(loop)
  test = hlo_flow.graph(module, condition)
  ends_loop = {i for i, node in test.carry().items() if node.users}
  added_up = {i for i, node in graph.carry().items() if ends[node] == {i}}
  added_up -= ends_loop
  for node in _senders(graph, sent, _REDUCTIONS):
    parts = sent[node.instruction.name]
    late = [
        n
        for n in hlo_flow.results(node)
        if set() < ends[n] - {_SUMMED} <= added_up
    ]
    if late and all(c.primitive in _SUMS for c in parts):
      total = sum(parts[n.index or 0].sent_bytes for n in late)
      yield (
          f'{_where(parts[0])} reduces {_names(n.array for n in late)} in'
          f' {_turns(loop)} of a loop that only adds up the results, which'
          f' sends {total:,.0f} bytes: accumulate on each shard, and reduce'
          ' once after the loop, as `accumulated_value_and_grad` does, or'
          ' `tower_reduce` under `jax.shard_map`.'
      )


def _ends(graph):
  """Returns, by value, the outputs to which it is only added.

  Values are followed through steps that are linear in each of their inputs. The
  outputs include `None` for any other use, and `_SUMMED` if a reduction is on
  the way.
  """
  ends = collections.defaultdict(set)
  for i, output in enumerate(graph.outputs):
    ends[output].add(i)
  root = [node for node in graph.nodes if node.opcode == 'tuple']
  for node in reversed(graph.nodes):
    # The tuple of all outputs is not a use.
    if node in root and node.inputs == graph.outputs:
      continue
    found = ends[node]
    if node.instruction.collective in _REDUCTIONS:
      found = found | {_SUMMED}
    for given in node.inputs:
      ends[given] |= found if _is_linear(node, given) else {None}
  return ends


def _is_linear(node, given):
  if node.opcode in ('multiply', 'divide'):
    others = [n for n in node.inputs if n is not given]
    is_numerator = node.opcode == 'multiply' or node.inputs[0] is given
    return is_numerator and len(others) == 1 and others[0].is_number
  if node.instruction.collective in _REDUCTIONS or node.opcode in _LINEAR:
    # Rounding to integers is not linear.
    return all(
        a.xla_dtype.startswith(('bf', 'f', 'c'))
        for a in node.instruction.results
    )
  return False


def _gathered_again(graph, loop, sent):
  """Yields warnings of arrays that do not change and that each turn gathers."""
  carry = {node: i for i, node in graph.carry().items()}
  same = set()
  for node in graph.nodes:
    if node in carry:
      source, *_ = hlo_flow.sources(graph.outputs[carry[node]], ('copy',))
      is_same = source is node
    else:
      is_same = node.opcode == 'constant' or bool(
          node.inputs and all(given in same for given in node.inputs)
      )
    if is_same:
      same.add(node)
  for node in _senders(graph, sent, _GATHERS):
    if node in same:
      yield (
          f'{_label(node, sent)} gathers the same {node.array} in'
          f' {_turns(loop)} of a loop, {_sent(sent, node)}: gather it once'
          ' before the loop, as by `jax.lax.with_sharding_constraint` there.'
      )


def _only_sliced(graph, sent):
  """Yields warnings of arrays that are gathered whole and then sliced."""
  for node in _senders(graph, sent, _GATHERS):
    for result in hlo_flow.results(node):
      taken = _num_taken(result, graph)
      if 0 < taken < result.array.size:
        yield (
            f'{_label(node, sent)} gathers the whole {result.array},'
            f' {_sent(sent, node)}, but only {taken:,} of its elements are'
            ' used: slice it before it is gathered, or shard it over another'
            ' dimension than the one that is sliced.'
        )


def _num_taken(node, graph):
  """Returns how many elements of a value are used; infinity if unknown."""
  if node in graph.outputs:
    return math.inf
  taken = 0
  for user in node.users:
    if (
        user.opcode in hlo_flow.SLICES
        and user.inputs[0] is node
        and not _is_head(user)
    ):
      taken += user.array.size
    elif user.opcode in hlo_flow.MOVES and user.array.size == node.array.size:
      taken += _num_taken(user, graph)
    else:
      return math.inf
  return taken


def _is_head(node):
  """Whether it is a slice from the start, as where padding is removed."""
  ranges = node.instruction.attributes.get('slice', '')
  return node.opcode == 'slice' and not re.search(r'\[[1-9]', ranges)


def _resharded(graph, sent):
  """Yields warnings of arguments that each step reshards."""
  given_back = {a for node in graph.outputs for a in node.instruction.results}
  moves = 'broadcast', *hlo_flow.MOVES, *hlo_flow.SLICES
  for node in _senders(graph, sent, _RESHARDINGS):
    if node.instruction.op_name.split('/')[-1] in _ASKED_FOR:
      continue
    for source in {s for n in node.inputs for s in hlo_flow.sources(n, moves)}:
      if source.opcode == 'parameter' and source.array in given_back:
        yield (
            f'{_label(node, sent)} changes the sharding of the argument'
            f' `{_argument(source)}` ({source.array} on a device) in each step,'
            f' {_sent(sent, node)}: pass it in and return it in the sharding'
            ' that the step computes with.'
        )


def _argument(node):
  name = node.instruction.op_name or node.instruction.name
  return name.replace("\\'", "'")


def _too_few_bits(module, sent):
  """Yields warnings of sums in low precision, which round each partial sum."""
  for c, array in _with_arrays(module, sent):
    is_float = c.dtype.startswith(('bfloat', 'float'))
    if is_float and c.primitive in _SUMS and array.bits < 32:
      yield (
          f'{_where(c)} sums {array} over {c.num_shards:,} shards with the'
          f' rounding of {c.dtype}, which sends {c.sent_bytes:,.0f} bytes: cast'
          ' to float32 before, as `cross_shard_mean` does.'
      )


def _with_arrays(module, sent):
  """Yields each collective with the array that it takes."""
  for computation in module.computations.values():
    for name, instruction in computation.instructions.items():
      if name in sent:
        given = computation.operands(instruction)
        arrays = [array for source in given for array in source.results]
        # In turn, once for each call of the computation.
        yield from zip(sent[name], itertools.cycle(arrays), strict=False)


def _label(node, sent):
  return _where(sent[node.instruction.name][0])


def _where(collective):
  source = collective.source.rpartition('/')[2]
  places = [repr(collective.scope)] if collective.scope else []
  places += [source] if source else []
  where = f' ({", ".join(places)})' if places else ''
  return f'`{collective.primitive}`{where}'


def _names(arrays):
  counts = collections.Counter(map(str, arrays))
  return ', '.join(f'{n} {a}' if n > 1 else a for a, n in counts.items())


def _turns(loop):
  turns = loop.num_turns
  return 'each turn' if turns is None else f'each of {turns:,} turns'


def _sent(sent, node):
  total = sum(c.sent_bytes for c in sent[node.instruction.name])
  return f'which sends {total:,.0f} bytes'
