"""Warnings of redundant communication in compiled programs.

Values are followed through linear instructions and instructions that move
elements. An unknown instruction ends the search without a warning.
"""

import collections
from collections.abc import Sequence

from shard_transforms._src.analysis.hlo import accumulation
from shard_transforms._src.analysis.hlo import dataflow
from shard_transforms._src.analysis.hlo import program as hlo_program
from shard_transforms._src.monitoring import report_table

_SUMS = 'psum', 'reduce_scatter'
# Ways to reduce only once over some axes, for a loop, for a loop in Python, and
# for repeated calls.
_REMEDY_FOR_LOOPS = (
    'by `accumulated_value_and_grad(loss_fn, {0})`, or by `tower_reduce('
    'num_towers, inner, axis_name={0})` under `jax.shard_map`'
)
_REMEDY_FOR_PYTHON_LOOPS = (
    'as `accumulated_value_and_grad(loss_fn, {0})` does for gradients'
)
_REMEDY_FOR_CALLS = (
    'by `tower_reduce(num_towers, inner, axis_name={0})` under `jax.shard_map`'
)


def find(
    module: hlo_program.Module,
    collectives: Sequence[report_table.Collective],
) -> tuple[str, ...]:
  """Returns the warnings about redundant or imprecise collectives.

  Args:
    module: The program.
    collectives: The collectives of the program.
  """
  graph = dataflow.graph(module)
  by_op = collections.defaultdict(list)
  for collective in collectives:
    by_op[collective.op].append(collective)
  collectives_of = {
      node: by_op[node.instruction.name]
      for node in graph.nodes
      if node.collective and node.instruction.name in by_op
  }
  warnings = (
      *_repeated_reductions(module, graph, collectives_of),
      *_low_precision_sums(collectives_of),
      *_sliced_sums(graph, collectives_of),
  )
  return tuple(dict.fromkeys(warnings))


def _repeated_reductions(module, graph, collectives_of):
  """Yields warnings about reductions that one reduction could replace."""
  carried = dict(accumulation.carried(graph))
  groups = collections.defaultdict(list)
  for node, loop in carried.items():
    groups[accumulation.collective_of(node), loop].append(node)
  for (_, loop), nodes in groups.items():
    if loop.node is None:
      how = 'in each call, and only adds up the results of a window'
      yield from _accumulation(nodes, how, _REMEDY_FOR_CALLS, collectives_of)
    else:
      how = f'in {_iterations(loop)} of a loop that only adds up the results'
      yield from _accumulation(nodes, how, _REMEDY_FOR_LOOPS, collectives_of)
  parts = collections.defaultdict(list)
  for nodes in accumulation.joined(module, graph):
    if not carried.keys() & {*nodes}:
      for c in _sums(nodes[:1], collectives_of):
        parts[c.axes] += nodes
  how = 'one by one, and only adds up the results'
  for nodes in parts.values():
    yield from _accumulation(
        nodes, how, _REMEDY_FOR_PYTHON_LOOPS, collectives_of
    )


def _accumulation(nodes, how, remedy, collectives_of):
  """Yields a warning about results that are only added up, if they are sums."""
  # The cost of scalars, such as a loss, is negligible.
  is_worth_it = remedy is _REMEDY_FOR_LOOPS or any(
      n.array.size > 1 for n in nodes
  )
  if is_worth_it and (sums := _sums(nodes, collectives_of)):
    axes = sums[0].axes
    remedy = remedy.format(repr(axes if len(axes) > 1 else axes[0]))
    yield (
        f'{_location(sums)} reduces {_arrays(nodes)} {how},'
        f' {_sent_bytes(sums)}: accumulate on each shard and reduce once,'
        f' {remedy}.'
    )


def _sums(nodes, collectives_of):
  """Returns the sums over shards with these results, if all are such sums."""
  sums = []
  for node in nodes:
    parts = collectives_of.get(accumulation.collective_of(node), [])
    sums += parts[node.index or 0 :][:1]
  are_sums = all(c.primitive in _SUMS and c.axes for c in sums)
  return sums if are_sums and len(sums) == len(nodes) else []


def _low_precision_sums(collectives_of):
  """Yields warnings about low-precision sums, which round each partial sum."""
  for node, parts in collectives_of.items():
    for c, operand in zip(parts, node.inputs, strict=False):
      is_float = c.dtype.startswith(('bfloat', 'float'))
      if is_float and c.primitive in _SUMS and operand.array.bits < 32:
        yield (
            f'{_location([c])} sums {operand.array} over {c.num_shards:,}'
            f' shards with the rounding of {c.dtype}, {_sent_bytes([c])}: cast'
            ' to float32 before, as `cross_shard_mean` does.'
        )


def _sliced_sums(graph, collectives_of):
  """Yields warnings of sums of which each shard then takes only a part."""
  by_location = collections.defaultdict(list)
  for node, parts in collectives_of.items():
    # The second step of a reduce-scatter may be too small for another.
    if any(map(_is_scattered, node.inputs)):
      continue
    for c, result in zip(parts, dataflow.results(node), strict=False):
      if c.primitive == 'psum' and _is_sliced(graph, result, c.num_shards):
        by_location[_location([c]), c.axes].append((c, result))
  for (location, axes), sums_and_nodes in by_location.items():
    sums, nodes = zip(*sums_and_nodes, strict=True)
    over = repr(axes[0] if len(axes) == 1 else axes)
    yield (
        f'{location} has {_arrays(nodes)} summed whole, then cut: each of the'
        f' {sums[0].num_shards:,} shards over {over} takes only its part of'
        f' the sum, {_sent_bytes(sums)}, twice as many as a reduce-scatter. On'
        ' some TPU slices, XLA cannot reduce-scatter over all shards at once:'
        ' use `shard_update`, which scatters in two steps, or call'
        ' `lax.psum_scatter` twice, with `axis_index_groups` first of every'
        ' second shard, and then of pairs. Under plain `jax.jit`, XLA for CPUs'
        ' does not use reduce-scatters.'
    )


def _is_scattered(node):
  sources = dataflow.sources(node, (*dataflow.MOVES, 'get-tuple-element'))
  return any(source.collective == 'reduce-scatter' for source in sources)


def _is_sliced(graph, result, num_shards):
  """Whether each shard takes only its own part of a result."""
  moved, users = [result], []
  for node in moved:
    # A value that the program returns has no user.
    if node in graph.places:
      return False
    moved += [n for n in node.users if n.opcode in dataflow.MOVES]
    users += [n for n in node.users if n.opcode not in dataflow.MOVES]
  return bool(users) and all(
      user.opcode == 'dynamic-slice'
      and user.array.size * num_shards == result.array.size
      and any(map(_depends_on_shard, user.inputs[1:]))
      for user in users
  )


def _depends_on_shard(node):
  """Whether a value is computed from the number of the shard."""
  opcodes = {source.opcode for source in dataflow.sources(node)}
  return not opcodes.isdisjoint(('partition-id', 'replica-id'))


def _location(collectives):
  """Returns the primitive, the scope and the line of the first collective."""
  first = collectives[0]
  scope = repr(first.scope) if first.scope else ''
  location = ', '.join(filter(None, [scope, first.source.rpartition('/')[2]]))
  return f'`{first.primitive}`' + (f' ({location})' if location else '')


def _arrays(nodes):
  counts = collections.Counter(str(node.array) for node in nodes)
  return ', '.join(f'{n} {a}' if n > 1 else a for a, n in counts.items())


def _iterations(loop):
  iterations = loop.node.instruction.num_iterations
  return (
      'each iteration'
      if iterations is None
      else f'each of {iterations:,} iterations'
  )


def _sent_bytes(collectives):
  return f'which sends {sum(c.sent_bytes for c in collectives):,.0f} bytes'
