"""Optimizers of TensorFlow 1 for shards, towers and stale gradients.

`from shard_transforms.facade import tf` replaces `import tensorflow as tf` in a
script: it has the optimizers, variables, scopes, decays and functions under
their names in TensorFlow 1.15. This namespace has the three wrappers, the
optimizers that they take, and the names that TensorFlow does not have.
"""

from shard_transforms.facade import tf as tf
from shard_transforms.facade.checkpoints import get_values
from shard_transforms.facade.checkpoints import set_values
from shard_transforms.facade.contexts import shard_context
from shard_transforms.facade.cross_shard import CrossShardOptimizer
from shard_transforms.facade.functional import OptaxOptimizer
from shard_transforms.facade.functions import function
from shard_transforms.facade.lookup import get_global_step
from shard_transforms.facade.lookup import get_or_create_global_step
from shard_transforms.facade.optimizer import Optimizer
from shard_transforms.facade.shards import shard
from shard_transforms.facade.sync_replicas import SyncReplicasOptimizer
from shard_transforms.facade.tf_optimizers import AdadeltaOptimizer
from shard_transforms.facade.tf_optimizers import AdagradOptimizer
from shard_transforms.facade.tf_optimizers import AdamOptimizer
from shard_transforms.facade.tf_optimizers import FtrlOptimizer
from shard_transforms.facade.tf_optimizers import GradientDescentOptimizer
from shard_transforms.facade.tf_optimizers import MomentumOptimizer
from shard_transforms.facade.tf_optimizers import RMSPropOptimizer
from shard_transforms.facade.towers import TowerOptimizer
from shard_transforms.facade.transforms import adam
from shard_transforms.facade.transforms import ftrl
from shard_transforms.facade.transforms import lars
from shard_transforms.facade.variables import Variable
from shard_transforms.facade.workers import DropStaleGradientOptimizer

__all__ = (
    'AdadeltaOptimizer',
    'AdagradOptimizer',
    'AdamOptimizer',
    'CrossShardOptimizer',
    'DropStaleGradientOptimizer',
    'FtrlOptimizer',
    'GradientDescentOptimizer',
    'MomentumOptimizer',
    'OptaxOptimizer',
    'Optimizer',
    'RMSPropOptimizer',
    'SyncReplicasOptimizer',
    'TowerOptimizer',
    'Variable',
    'adam',
    'ftrl',
    'function',
    'get_global_step',
    'get_or_create_global_step',
    'get_values',
    'lars',
    'set_values',
    'shard',
    'shard_context',
)
