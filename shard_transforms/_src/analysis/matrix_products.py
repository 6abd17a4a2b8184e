"""The floating-point operations of the matrix products in a jaxpr.

Matrix products and convolutions are counted, without the products with zeros
of padding and dilation. Everything else takes little time on devices that have
units for matrix products.
"""

import math

import numpy as np

from shard_transforms._src.analysis import inlining
from shard_transforms._src.analysis import interpreter


def flops(program: interpreter.Program, num_devices: int) -> float:
  """Returns the operations of one device.

  A multiplication and the addition of its result are two operations. Work that
  no map divides counts as divided evenly over the other devices. Only the
  branch with the most operations counts, and a loop with an unknown number of
  iterations counts as one iteration.

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


def _of_ragged_dot(equation):
  # Each row belongs to one group, so that groups add no operations.
  lhs, rhs = (x.aval for x in equation.inputs[:2])
  numbers = equation.params['ragged_dot_dimension_numbers']
  (_, contracted), (_, batch) = numbers.dot_dimension_numbers
  rest = {*contracted, *batch, *numbers.rhs_group_dimensions}
  columns = [n for i, n in enumerate(rhs.shape) if i not in rest]
  return 2 * lhs.size * math.prod(columns)


def _of_convolution(equation):
  image, kernel, out = (x.aval for x in (*equation.inputs, *equation.outputs))
  of_image, of_kernel, of_out = equation.params['dimension_numbers']
  products = [
      _num_products(image.shape[i], kernel.shape[k], out.shape[o], *window)
      for i, k, o, *window in zip(
          of_image[2:],
          of_kernel[2:],
          of_out[2:],
          equation.params['window_strides'],
          equation.params['padding'],
          equation.params['lhs_dilation'],
          equation.params['rhs_dilation'],
          strict=True,
      )
  ]
  batch, features = (out.shape[i] for i in of_out[:2])
  # The input features of one group.
  in_features = kernel.shape[of_kernel[1]]
  return 2 * batch * features * in_features * math.prod(products)


def _num_products(
    image, kernel, out, stride, padding, image_dilation, kernel_dilation
):
  """Returns the products along a dimension that do not fall on padding."""
  at = stride * np.arange(out)[:, None] - padding[0]
  at = at + kernel_dilation * np.arange(kernel)
  is_inside = (at >= 0) & (at <= (image - 1) * image_dilation)
  # Between the elements of a dilated image, there are zeros.
  return int(np.sum(is_inside & (at % image_dilation == 0)))


_OPERATIONS = {
    'dot_general': _of_dot,
    'ragged_dot_general': _of_ragged_dot,
    'conv_general_dilated': _of_convolution,
}
