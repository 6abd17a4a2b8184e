"""The types of arrays in compiled programs, such as `f32[8,16]{1,0}`."""

import dataclasses
import math
import re

_ARRAY = re.compile(r'([a-z]\w*)\[([\d,<=?]*)\]')
_DTYPES = {'pred': 'bool', 'bf16': 'bfloat16'}
_KINDS = {'f': 'float', 's': 'int', 'u': 'uint', 'c': 'complex'}


@dataclasses.dataclass(frozen=True)
class Array:
  """An array type, such as `f32[8,16]`.

  Attributes:
    xla_dtype: Its dtype as XLA calls it.
    shape: Its shape, on one device.
  """

  xla_dtype: str
  shape: tuple[int, ...]

  @property
  def dtype(self) -> str:
    """The name of its dtype in JAX."""
    name = self.xla_dtype
    if name in _DTYPES:
      return _DTYPES[name]
    kind = _KINDS.get(name[0], name[0])
    # Such as `f8e4m3fn`: JAX puts an underscore after the bits.
    return kind + re.sub(r'^(\d+)(?=e)', r'\1_', name[1:])

  @property
  def bits(self) -> int:
    """The bits of an element; 0 for a token."""
    if self.xla_dtype == 'pred':
      return 8
    digits = re.match(r'[a-z]+(\d+)', self.xla_dtype)
    return int(digits[1]) if digits else 0

  @property
  def size(self) -> int:
    """The number of elements."""
    return math.prod(self.shape)

  @property
  def num_bytes(self) -> int:
    """Its bytes on one device."""
    return -(-self.size * self.bits // 8)

  def __str__(self) -> str:
    return f'{self.dtype}[{",".join(map(str, self.shape))}]'


def read(text: str) -> tuple[Array, ...]:
  """Returns the arrays of a type; the leaves, if that is of a tuple."""
  return tuple(
      Array(dtype, tuple(int(n.lstrip('<=?') or 0) for n in _sizes(dims)))
      for dtype, dims in _ARRAY.findall(text)
  )


def _sizes(dims):
  return dims.split(',') if dims else ()
