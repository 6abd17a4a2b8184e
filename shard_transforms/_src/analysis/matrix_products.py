"""The floating-point operations of a traced program that matter.

Matrix products and convolutions are counted; everything else takes little time
on devices that have units for these.
"""

import math

from shard_transforms._src.analysis import inlining
from shard_transforms._src.analysis import interpreter


def flops(program: interpreter.Program, num_devices: int) -> float:
  """Returns the operations of one device.

  A multiplication and the addition of its result are two operations. Work that
  no map divides counts as divided evenly over the other devices. Of branches,
  the one with most operations counts; of a loop with an unknown number of
  iterations, one iteration.

  Args:
    program: The program, as `inlining.flatten` returns it.
    num_devices: The number of devices that run it.
  """
  total = 0.0
  for equation in program.equations:
    inner = [flops(body, num_devices) for body in equation.bodies]
    if equation.name == 'cond':
      total += max(inner)
    elif equation.name == 'scan':
      total += equation.params['length'] * sum(inner)
    elif equation.name in _OPERATIONS:
      num_mapped = math.prod(inlining.axis_sizes(equation).values())
      total += _OPERATIONS[equation.name](equation) * num_mapped / num_devices
    else:
      total += sum(inner)
  return total


def _of_dot(equation):
  (contracted, _), _ = equation.params['dimension_numbers']
  shape = equation.inputs[0].aval.shape
  return (
      2
      * equation.outputs[0].aval.size
      * math.prod(shape[i] for i in contracted)
  )


def _of_convolution(equation):
  kernel = equation.inputs[1].aval
  features = kernel.shape[equation.params['dimension_numbers'].rhs_spec[0]]
  return 2 * equation.outputs[0].aval.size * kernel.size / features


_OPERATIONS = {'dot_general': _of_dot, 'conv_general_dilated': _of_convolution}
