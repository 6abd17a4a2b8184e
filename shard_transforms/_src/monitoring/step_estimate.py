"""`estimate_step`: the memory of a step on a chip, and bounds on its time."""

from collections.abc import Callable
import dataclasses
import math
from typing import Any, NamedTuple

import jax

from shard_transforms._src.analysis import inlining
from shard_transforms._src.analysis import matrix_products
from shard_transforms._src.monitoring import compiled_report
from shard_transforms._src.monitoring import report_table


class Chip(NamedTuple):
  """The peak rates and the memory of a chip, from its data sheet.

  Attributes:
    flops: Floating-point operations per second in bfloat16, without sparsity.
    memory_bytes: The size of the memory, in bytes.
    memory_bandwidth: The bytes per second between the chip and its memory.
    link_bandwidth: The bytes per second that the chip can send over all of its
      links together, in one direction.
    axis_bandwidth: The bytes per second that the chip can send over the links
      along one axis of a torus. If a switch connects the chips, it equals
      `link_bandwidth`.
    network_bandwidth: The bytes per second that the chip can send to other TPU
      slices, or to other GPU hosts.

  Examples:
    >>> from shard_transforms import monitoring
    >>> chip = monitoring.Chip(
    ...     flops=1e12, memory_bytes=8e9, memory_bandwidth=1e11,
    ...     link_bandwidth=1e10, axis_bandwidth=1e10, network_bandwidth=1e9)
    >>> print(chip.flops / chip.memory_bandwidth)
    10.0
  """

  flops: float
  memory_bytes: float
  memory_bandwidth: float
  link_bandwidth: float
  axis_bandwidth: float
  network_bandwidth: float


# By `device_kind`. TPUs: the pages of their versions under
# https://cloud.google.com/tpu/docs, which give bandwidths of links in both
# directions, and call a GiB a GB: XLA compiles programs of up to 15.75 GiB for
# v5e. H100 SXM: NVIDIA's data sheet, with the memory that CUDA reports and one
# network adapter of 400 Gbit/s per GPU, as in a DGX H100.
CHIPS = {
    'TPU v5 lite': Chip(197e12, 16 * 2**30, 819e9, 200e9, 100e9, 3.125e9),
    'TPU v5': Chip(459e12, 95 * 2**30, 2765e9, 600e9, 200e9, 6.25e9),
    'TPU v6 lite': Chip(918e12, 32 * 2**30, 1638e9, 400e9, 200e9, 12.5e9),
    'NVIDIA H100 80GB HBM3': Chip(
        989e12, 84942979072, 3350e9, 450e9, 450e9, 50e9
    ),
}


@dataclasses.dataclass(frozen=True)
class StepEstimate:
  """The memory that a step needs on one device, and bounds on its time.

  The bounds follow from data sheets and are not calibrated: they hold for a
  program that reaches the peak rates, which few do. Use them to compare steps
  and numbers of devices with each other.

  Args:
    chip: The chip.
    num_devices: The number of devices.
    flops: The operations of matrix products and convolutions on one device.
    report: The report on the compiled step: its communication and its memory.

  Examples:
    >>> from shard_transforms import monitoring
    >>> chip = monitoring.Chip(1e12, 8e9, 1e11, 1e10, 1e10, 1e9)
    >>> report = monitoring.CommunicationReport((monitoring.Collective(
    ...     'psum', 'float32', payload_bytes=4_000_000, axes=('data',),
    ...     num_shards=8),))
    >>> estimate = monitoring.StepEstimate(
    ...     chip, num_devices=8, flops=2e9, report=report)
    >>> print(estimate.seconds)
    (0.002, 0.0027)
  """

  chip: Chip
  num_devices: int
  flops: float
  report: report_table.CommunicationReport

  @property
  def memory_bytes(self) -> int:
    """The bytes that the step needs on one device.

    This is the peak memory that XLA reports, plus the size of the program. If
    XLA does not report a peak that includes the arguments, the sum of the
    arguments, results and temporary arrays is used instead, although not all of
    them are needed at the same time.
    """
    memory = self.report.memory
    if memory is None:
      return 0
    args = memory.argument_size_in_bytes
    # Results in the memory of donated arguments do not need more memory.
    results = memory.output_size_in_bytes - memory.alias_size_in_bytes
    needed = args + results + memory.temp_size_in_bytes
    peak = getattr(memory, 'peak_memory_in_bytes', 0)
    if peak >= args:
      needed = min(needed, peak)
    return needed + memory.generated_code_size_in_bytes

  @property
  def fits(self) -> bool:
    """Whether the step fits into the memory of the chip."""
    return self.memory_bytes <= self.chip.memory_bytes

  @property
  def compute_seconds(self) -> float:
    """The time of the matrix products at the peak rate."""
    return self.flops / self.chip.flops

  @property
  def memory_seconds(self) -> float:
    """The time to read all arguments once and to write all results once."""
    memory = self.report.memory
    if memory is None:
      return 0.0
    moved = memory.argument_size_in_bytes + memory.output_size_in_bytes
    return moved / self.chip.memory_bandwidth

  @property
  def send_seconds(self) -> tuple[float, float]:
    """The time of collectives over all links and over the links of one axis."""
    bounds = zip(*map(self._bounds, self.report.collectives), strict=True)
    least, most = map(math.fsum, bounds) if self.report.collectives else (0, 0)
    return least, most

  @property
  def seconds(self) -> tuple[float, float]:
    """Bounds on the time of a step.

    The lower bound is the longest of `compute_seconds`, `memory_seconds` and
    `send_seconds`, as if all three ran at the same time; the upper bound is
    their sum.
    """
    least, most = self.send_seconds
    local = self.compute_seconds, self.memory_seconds
    return max(*local, least), sum(local) + most

  def _bounds(self, collective):
    """Returns the time of a collective, at least and at most."""
    chip, sent = self.chip, collective.sent_bytes
    if collective.num_slices == 1:
      return sent / chip.link_bandwidth, sent / chip.axis_bandwidth
    # In a ring through all devices, one device of each slice sends to the next
    # slice; the devices of a slice share this load.
    per_slice = collective.num_shards / collective.num_slices
    bandwidth = min(chip.network_bandwidth * per_slice, chip.link_bandwidth)
    return sent / bandwidth, sent / bandwidth

  def __str__(self) -> str:
    least, most = (1e3 * x for x in self.seconds)
    first, last = (1e3 * x for x in self.send_seconds)
    verb = 'fits' if self.fits else 'does not fit'
    return '\n'.join(
        [
            (
                f'{verb}: {self.memory_bytes / 2**30:,.2f} of'
                f' {self.chip.memory_bytes / 2**30:,.0f} GiB on each of'
                f' {self.num_devices:,} devices'
            ),
            f'step: {least:,.2f} to {most:,.2f} ms, not calibrated',
            f'  matrix products: {1e3 * self.compute_seconds:,.2f} ms',
            f'  arguments and results: {1e3 * self.memory_seconds:,.2f} ms',
            f'  collectives: {first:,.2f} to {last:,.2f} ms',
        ]
    )


def estimate_step(
    fn: Callable[..., Any], *args: Any, chip: Chip | None = None, **kwargs: Any
) -> StepEstimate:
  """Estimates whether a step fits on a chip, and how long it takes.

  The step is traced and compiled, but not run, so you can estimate a step for
  devices that you do not have, such as a TPU slice; see
  `docs/compile_for_hardware.md`. Estimate it for several sizes of a slice to
  see how it scales.

  Only the operations of matrix products and convolutions count, without the
  products with zeros of padding and dilation. They are read from the traced
  function, and those outside of a mapped function count as evenly divided over
  the devices. Communication and memory are read from the compiled program.

  Args:
    fn: The step, mapped by `jax.shard_map` or compiled by `jax.jit`.
    args: The arguments of the step: trees of arrays, or of
      `jax.ShapeDtypeStruct`s with shardings.
    chip: The chip; by default that of the devices, which must then be TPU v5e,
      v5p or v6e, or NVIDIA H100.
    kwargs: The keyword arguments of the step, like `args`.

  Returns:
    A `StepEstimate`, which prints as a summary.

  Raises:
    TypeError: If `fn` is not a function, or `chip` is not a `Chip`.
    ValueError: If `chip` is not given and the devices are of another type, if a
      number of `chip` is not positive, if the arguments do not have devices, or
      if XLA refuses to compile the step because it does not fit into the
      memory, as XLA for TPUs does.

  Examples:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> from shard_transforms import monitoring
    >>> mesh = jax.make_mesh((1,), ('data',))
    >>> sharding = jax.NamedSharding(mesh, jax.P())
    >>> x = jax.ShapeDtypeStruct((500, 500), jnp.float32, sharding=sharding)
    >>> chip = monitoring.Chip(
    ...     flops=1e12, memory_bytes=8e9, memory_bandwidth=1e11,
    ...     link_bandwidth=1e10, axis_bandwidth=1e10, network_bandwidth=1e9)
    >>> step = jax.jit(lambda x: x @ x)
    >>> estimate = monitoring.estimate_step(step, x, chip=chip)
    >>> print(estimate.fits, estimate.compute_seconds, estimate.memory_seconds)
    True 0.00025 2e-05
  """
  if not callable(fn) or isinstance(
      fn, jax.stages.Traced | jax.stages.Lowered | jax.stages.Compiled
  ):
    raise TypeError(
        f'`fn` must be the function of a step, got {fn!r}. Pass the function:'
        ' the operations in its loops cannot be counted in a compiled program.'
    )
  if chip is not None and not isinstance(chip, Chip):
    raise TypeError(f'`chip` must be a `Chip`, got {chip!r}.')
  if chip is not None and not min(chip) > 0:
    raise ValueError(f'`chip` must have positive numbers, got {chip!r}.')
  compiled = compiled_report.compile_program(fn, args, kwargs)
  devices = _devices(compiled, (args, kwargs))
  kind = next(iter(devices)).device_kind
  if chip is None and kind not in CHIPS:
    raise ValueError(
        f'`estimate_step` does not have the data sheet of {kind!r}, only of'
        f' {", ".join(map(repr, CHIPS))}. Pass `chip=monitoring.Chip(...)`.'
    )
  # `jax.make_jaxpr` traces static arguments, too.
  trace = getattr(fn, 'trace', None)
  jaxpr = trace(*args, **kwargs).jaxpr if trace else None
  jaxpr = jaxpr or jax.make_jaxpr(fn)(*args, **kwargs)
  program = inlining.flatten(jaxpr.jaxpr)
  return StepEstimate(
      chip=CHIPS[kind] if chip is None else chip,
      num_devices=len(devices),
      flops=matrix_products.flops(program, len(devices)),
      report=compiled_report.report_program(compiled, None),
  )


def _devices(compiled, arguments):
  """Returns the devices of a program.

  Raises:
    ValueError: If neither the arguments nor the program name any.
  """
  # Not those of the arguments: a program for a mesh also takes arrays that are
  # on one device, or on the host.
  shardings = compiled.input_shardings, compiled.output_shardings
  devices = frozenset().union(
      *(sharding.device_set for sharding in jax.tree.leaves(shardings))
  )
  is_named = any(
      getattr(x, 'sharding', None) for x in jax.tree.leaves(arguments)
  )
  if len(devices) < 2 and not is_named:
    raise ValueError(
        'The arguments of the step do not have devices. Pass arrays, or'
        ' `jax.ShapeDtypeStruct`s with a `sharding`.'
    )
  return devices
