"""Redundant communication in a compiled program, without false positives.

Values are followed through instructions that pass elements on, and through
linear steps; whatever the rules do not understand gives no warning.
"""

import collections
from collections.abc import Sequence
import itertools
import math
import re

from shard_transforms._src.monitoring import report_table
from shard_transforms._src.tracing import hlo_flow
from shard_transforms._src.tracing import hlo_modules

_REDUCTIONS = ('all-reduce', 'reduce-scatter')
_RESHARDINGS = ('all-to-all', 'collective-permute')
# Collectives that the user has written are no mistake of a sharding.
_ASKED_FOR = ('all_to_all', 'ppermute', 'pshuffle', 'ragged_all_to_all')
_LINEAR = (
    'add',
    'bitcast',
    'convert',
    'copy',
    'get-tuple-element',
    'negate',
    'reshape',
    'slice',
    'subtract',
    'transpose',
    *_REDUCTIONS,
)


def find(
    module: hlo_modules.Module,
    collectives: Sequence[report_table.Collective],
) -> tuple[str, ...]:
  """Returns warnings of what is redundant or in low precision, each once.

  Args:
    module: The program.
    collectives: What it sends.
  """
  sent = collections.defaultdict(list)
  for collective in collectives:
    sent[collective.op].append(collective)
  found = []
  for loop, computation in _bodies(module, module.entry, None):
    graph = hlo_flow.graph(module, computation)
    if loop is not None:
      found += _added_up(graph, loop, sent)
      found += _gathered_again(graph, loop, sent)
    found += _only_sliced(graph, sent)
    if computation is module.entry:
      found += _resharded(graph, sent)
  found += _too_few_bits(module, sent)
  return tuple(dict.fromkeys(found))


def _bodies(module, computation, loop):
  """Yields the computations that run, each with the loop around it, if any."""
  yield loop, computation
  pending = list(computation.instructions.values())
  while pending:
    instruction = pending.pop(0)
    called = module.called(instruction)
    if instruction.opcode == 'while':
      yield from _bodies(module, called[1], instruction)
    elif instruction.opcode == 'conditional':
      for branch in called:
        yield from _bodies(module, branch, None)
    elif instruction.opcode in ('call', 'async-start'):
      # The graph of the caller contains these.
      pending += [i for c in called for i in c.instructions.values()]


def _added_up(graph, loop, sent):
  """Yields warnings of reductions that one after the loop could replace."""
  if loop.num_turns == 1:
    return
  ends = _ends(graph)
  added_up = {i for i, node in graph.carry().items() if ends[node] == {i}}
  for node in graph.nodes:
    parts = sent.get(node.instruction.name, ())
    if node.instruction.collective not in _REDUCTIONS or not _is_sum(parts):
      continue
    late = [n for n in hlo_flow.results(node) if set() < ends[n] <= added_up]
    if late:
      total = sum(parts[n.index or 0].sent_bytes for n in late)
      yield (
          f'{_where(parts[0])} reduces {_names(n.array for n in late)} in'
          f' {_turns(loop)} of a loop that only adds up the results, which'
          f' sends {total:,.0f} bytes: accumulate on each shard, and reduce'
          ' once after the loop, as `tower_reduce` does under `jax.shard_map`.'
      )


def _ends(graph):
  """Returns the outputs that each value is only added to; `None` for other use.

  Values are taken through steps that are linear in each of their inputs.
  """
  ends = collections.defaultdict(set)
  for i, output in enumerate(graph.outputs):
    ends[output].add(i)
  root = [node for node in graph.nodes if node.opcode == 'tuple']
  for node in reversed(graph.nodes):
    # The tuple of all outputs is not a use.
    if node in root and node.inputs == graph.outputs:
      continue
    for given in node.inputs:
      ends[given] |= ends[node] if _is_linear(node, given) else {None}
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


def _is_sum(collectives):
  return bool(collectives) and all(
      c.primitive in ('psum', 'reduce_scatter') for c in collectives
  )


def _gathered_again(graph, loop, sent):
  """Yields warnings of loop invariants that each iteration gathers."""
  if loop.num_turns == 1:
    return
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
    if (
        is_same
        and node.opcode.startswith('all-gather')
        and (node.instruction.name in sent)
    ):
      yield (
          f'{_label(node, sent)} gathers the same {node.array} in'
          f' {_turns(loop)} of a loop, {_sent(sent, node)}: gather it once'
          ' before the loop, as by `jax.lax.with_sharding_constraint` there.'
      )


def _only_sliced(graph, sent):
  """Yields warnings of what is gathered whole and then sliced."""
  for node in graph.nodes:
    if node.opcode.startswith('all-gather') and node.instruction.name in sent:
      for result in hlo_flow.results(node):
        taken = _num_taken(result, graph)
        if 0 < taken < result.array.size:
          yield (
              f'{_label(node, sent)} gathers the whole {result.array},'
              f' {_sent(sent, node)}, of which only {taken:,} elements are'
              ' taken: slice it before it is gathered, or shard it over another'
              ' dimension than the one that is sliced.'
          )


def _num_taken(node, graph):
  """Returns how many elements of a value are used; all, if unknown."""
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
  """Yields warnings of arguments that are resharded in each step."""
  given_back = {output.array for output in graph.outputs}
  moves = *hlo_flow.MOVES, *hlo_flow.SLICES
  for node in graph.nodes:
    if node.instruction.collective not in _RESHARDINGS or (
        node.instruction.op_name.split('/')[-1] in _ASKED_FOR
        or node.instruction.name not in sent
    ):
      continue
    for source in {s for n in node.inputs for s in hlo_flow.sources(n, moves)}:
      if source.opcode == 'parameter' and source.array in given_back:
        yield (
            f'{_label(node, sent)} changes the sharding of the argument'
            f' `{_argument(source)}` ({source.array} on a device) in each step,'
            f' {_sent(sent, node)}: hand it in, and give it back, in the'
            ' sharding that the step computes with.'
        )


def _argument(node):
  name = node.instruction.op_name or node.instruction.name
  return name.replace("\\'", "'")


def _too_few_bits(module, sent):
  """Yields warnings of sums in low precision, which round each partial sum."""
  for c, array in _with_arrays(module, sent):
    if c.primitive in ('psum', 'reduce_scatter') and (
        c.dtype.startswith(('bfloat', 'float'))
        and c.dtype not in ('float32', 'float64')
    ):
      yield (
          f'{_where(c)} sums {array} over {c.num_shards:,} shards with the'
          f' rounding of {c.dtype}, which sends {c.sent_bytes:,.0f} bytes: cast'
          ' to float32 before, as `cross_shard_mean` does.'
      )


def _with_arrays(module, sent):
  """Yields what is sent, each with the array that it takes."""
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
