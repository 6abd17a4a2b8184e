"""Fewer bytes between shards, with feedback of what is not sent."""

from shard_transforms._src.compression.compressed_mean import compressed_mean
from shard_transforms._src.compression.compressor import Compressor
from shard_transforms._src.compression.ef21 import EF21State
from shard_transforms._src.compression.error_feedback import CompressedMeanState
from shard_transforms._src.compression.one_bit_adam import (
    ScaleByOneBitAdamState,
)
from shard_transforms._src.compression.one_bit_adam import scale_by_one_bit_adam
from shard_transforms._src.compression.power_sgd import PowerSGDState
from shard_transforms._src.compression.power_sgd import power_sgd
from shard_transforms._src.compression.quantization import cast
from shard_transforms._src.compression.quantization import quantize
from shard_transforms._src.compression.quantization import scaled_sign
from shard_transforms._src.compression.sparsification import group_max
from shard_transforms._src.compression.sparsification import random_k
from shard_transforms._src.compression.sparsification import top_k
from shard_transforms._src.transforms.compressed_shard_update import (
    CompressedShardUpdateState,
)
from shard_transforms._src.transforms.compressed_shard_update import (
    compressed_shard_update,
)

__all__ = (
    'CompressedMeanState',
    'CompressedShardUpdateState',
    'Compressor',
    'EF21State',
    'PowerSGDState',
    'ScaleByOneBitAdamState',
    'cast',
    'compressed_mean',
    'compressed_shard_update',
    'group_max',
    'power_sgd',
    'quantize',
    'random_k',
    'scale_by_one_bit_adam',
    'scaled_sign',
    'top_k',
)
