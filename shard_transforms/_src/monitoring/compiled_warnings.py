"""Warnings of redundant communication in compiled programs.

They follow values through instructions that move elements and through linear
ones. An instruction that the rules do not know ends the search without a
warning.
"""

import collections
from collections.abc import Sequence

from shard_transforms._src.analysis.hlo import accumulation
from shard_transforms._src.analysis.hlo import flow as hlo_flow
from shard_transforms._src.analysis.hlo import program as hlo_program
from shard_transforms._src.monitoring import report_table

_SUMS = 'psum', 'reduce_scatter'
# How to reduce once over some axes: in place of a loop, a loop in Python, and
# calls that add up.
_BY_LOOP = (
    'by `accumulated_value_and_grad(loss_fn, {0})`, or by `tower_reduce('
    'num_towers, inner, axis_name={0})` under `jax.shard_map`'
)
_BY_PARTS = 'as `accumulated_value_and_grad(loss_fn, {0})` does for gradients'
_BY_CALLS = (
    'by `tower_reduce(num_towers, inner, axis_name={0})` under `jax.shard_map`'
)


def find(
    module: hlo_program.Module,
    collectives: Sequence[report_table.Collective],
) -> tuple[str, ...]:
  """Returns warnings of redundant or imprecise collectives, each once.

  Args:
    module: The program.
    collectives: Its collectives.
  """
  graph = hlo_flow.graph(module)
  by_op = collections.defaultdict(list)
  for collective in collectives:
    by_op[collective.op].append(collective)
  names = {
      node: node.instruction.name for node in graph.nodes if node.collective
  }
  sent = {node: by_op[name] for node, name in names.items() if name in by_op}
  found = (
      *_added_up(module, graph, sent),
      *_too_few_bits(sent),
      *_cut_after_sum(graph, sent),
  )
  return tuple(dict.fromkeys(found))


def _added_up(module, graph, sent):
  """Yields warnings of reductions that one of their sum could replace."""
  late = dict(accumulation.carried(graph))
  found = collections.defaultdict(list)
  for node, loop in late.items():
    found[accumulation.sender(node), loop].append(node)
  for (_, loop), nodes in found.items():
    if loop.node is None:
      how = 'in each call, and only adds up the results of a window'
      yield from _accumulation(nodes, how, _BY_CALLS, sent)
    else:
      how = f'in {_turns(loop)} of a loop that only adds up the results'
      yield from _accumulation(nodes, how, _BY_LOOP, sent)
  parts = collections.defaultdict(list)
  for nodes in accumulation.joined(module, graph):
    if not late.keys() & {*nodes}:
      for c in _sums(nodes[:1], sent):
        parts[c.axes] += nodes
  how = 'one by one, and only adds up the results'
  for nodes in parts.values():
    yield from _accumulation(nodes, how, _BY_PARTS, sent)


def _accumulation(nodes, how, cure, sent):
  """Yields a warning of results that are only added up, if they are sums."""
  # Beside the arrays of a step, numbers such as a loss cost nothing.
  is_worth_it = cure is _BY_LOOP or any(n.array.size > 1 for n in nodes)
  if is_worth_it and (sums := _sums(nodes, sent)):
    axes = sums[0].axes
    cure = cure.format(repr(axes if len(axes) > 1 else axes[0]))
    yield (
        f'{_where(sums)} reduces {_names(nodes)} {how}, {_which_sends(sums)}:'
        f' accumulate on each shard and reduce once, {cure}.'
    )


def _sums(nodes, sent):
  """Returns the sums over shards that have some results, if all are such."""
  found = []
  for node in nodes:
    parts = sent.get(accumulation.sender(node), [])
    found += parts[node.index or 0 :][:1]
  are_sums = all(c.primitive in _SUMS and c.axes for c in found)
  return found if are_sums and len(found) == len(nodes) else []


def _too_few_bits(sent):
  """Yields warnings of sums in low precision, which round each partial sum."""
  for node, parts in sent.items():
    for c, given in zip(parts, node.inputs, strict=False):
      is_float = c.dtype.startswith(('bfloat', 'float'))
      if is_float and c.primitive in _SUMS and given.array.bits < 32:
        yield (
            f'{_where([c])} sums {given.array} over {c.num_shards:,} shards'
            f' with the rounding of {c.dtype}, {_which_sends([c])}: cast to'
            ' float32 before, as `cross_shard_mean` does.'
        )


def _cut_after_sum(graph, sent):
  """Yields warnings of sums of which each shard then takes only a part."""
  by_place = collections.defaultdict(list)
  for node, parts in sent.items():
    # The second step of a reduce-scatter may be too small for another.
    if any(map(_is_scattered, node.inputs)):
      continue
    for c, result in zip(parts, hlo_flow.results(node), strict=False):
      if c.primitive == 'psum' and _is_cut(graph, result, c.num_shards):
        by_place[_where([c]), c.axes].append((c, result))
  for (where, axes), found in by_place.items():
    sums, nodes = zip(*found, strict=True)
    over = repr(axes[0] if len(axes) == 1 else axes)
    yield (
        f'{where} has {_names(nodes)} summed whole, then cut: each of the'
        f' {sums[0].num_shards:,} shards over {over} takes only its part of'
        f' the sum, {_which_sends(sums)}, twice as many as a reduce-scatter.'
        ' On TPUs, XLA has no reduce-scatter over all shards of some slices:'
        ' take `shard_update`, which scatters in two steps, or call'
        ' `lax.psum_scatter` with `axis_index_groups` of every second shard,'
        ' and then of pairs. For CPUs, XLA makes no reduce-scatter of a program'
        ' under `jax.jit`.'
    )


def _is_scattered(node):
  sources = hlo_flow.sources(node, (*hlo_flow.MOVES, 'get-tuple-element'))
  return any(source.collective == 'reduce-scatter' for source in sources)


def _is_cut(graph, result, num_shards):
  """Whether each shard takes only its own part of a result."""
  moved, cuts = [result], []
  for node in moved:
    # A value that the program returns has no user.
    if node in graph.places:
      return False
    moved += [n for n in node.users if n.opcode in hlo_flow.MOVES]
    cuts += [n for n in node.users if n.opcode not in hlo_flow.MOVES]
  return bool(cuts) and all(
      cut.opcode == 'dynamic-slice'
      and cut.array.size * num_shards == result.array.size
      and any(map(_depends_on_shard, cut.inputs[1:]))
      for cut in cuts
  )


def _depends_on_shard(node):
  """Whether a value is computed from the number of the shard."""
  pending, seen = [node], {node}
  while pending:
    node = pending.pop()
    if node.opcode in ('partition-id', 'replica-id'):
      return True
    pending += [n for n in node.inputs if n not in seen]
    seen.update(node.inputs)
  return False


def _where(parts):
  first = parts[0]
  places = [repr(first.scope)] if first.scope else []
  places += filter(None, [first.source.rpartition('/')[2]])
  where = f' ({", ".join(places)})' if places else ''
  return f'`{first.primitive}`{where}'


def _names(nodes):
  counts = collections.Counter(str(node.array) for node in nodes)
  return ', '.join(f'{n} {a}' if n > 1 else a for a, n in counts.items())


def _turns(loop):
  turns = loop.node.instruction.num_turns
  return 'each turn' if turns is None else f'each of {turns:,} turns'


def _which_sends(parts):
  return f'which sends {sum(c.sent_bytes for c in parts):,.0f} bytes'
