"""Compressed means over shards, with error feedback."""

from shard_transforms.contrib._src.compression.compressed_mean import (
    compressed_mean,
)
from shard_transforms.contrib._src.compression.compressor import Compressor
from shard_transforms.contrib._src.compression.encodings import cast
from shard_transforms.contrib._src.compression.encodings import quantize
from shard_transforms.contrib._src.compression.encodings import scaled_sign
from shard_transforms.contrib._src.compression.encodings import top_k
from shard_transforms.contrib._src.compression.power_sgd import power_sgd
from shard_transforms.contrib._src.compression.residuals import (
    CompressedMeanState,
)
from shard_transforms.contrib._src.compression.residuals import PowerSGDState
from shard_transforms.contrib._src.compression.residuals import (
    compression_error,
)

__all__ = (
    'CompressedMeanState',
    'Compressor',
    'PowerSGDState',
    'cast',
    'compressed_mean',
    'compression_error',
    'power_sgd',
    'quantize',
    'scaled_sign',
    'top_k',
)
