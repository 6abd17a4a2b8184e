"""TensorFlow 1: its optimizers for shards, towers and stale gradients.

`from shard_transforms.facade import tf` replaces `import tensorflow as tf` in a
script: it has the optimizers, variables, scopes, decays and functions under
their names in TensorFlow 1.15. This namespace has the three wrappers of
optimizers, and the names that TensorFlow does not have.
"""

from shard_transforms.facade import tf as tf
from shard_transforms.facade.checkpoints import get_values
from shard_transforms.facade.checkpoints import set_values
from shard_transforms.facade.contexts import shard_context
from shard_transforms.facade.cross_shard import CrossShardOptimizer
from shard_transforms.facade.drop_stale import DropStaleGradientOptimizer
from shard_transforms.facade.functional import OptaxOptimizer
from shard_transforms.facade.functions import function
from shard_transforms.facade.shards import shard
from shard_transforms.facade.towers import TowerOptimizer
from shard_transforms.facade.transforms import adam
from shard_transforms.facade.transforms import ftrl
from shard_transforms.facade.transforms import lars

__all__ = (
    'CrossShardOptimizer',
    'DropStaleGradientOptimizer',
    'OptaxOptimizer',
    'TowerOptimizer',
    'adam',
    'ftrl',
    'function',
    'get_values',
    'lars',
    'set_values',
    'shard',
    'shard_context',
)
