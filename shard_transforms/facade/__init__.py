"""The optimizers of TensorFlow 1, for code that was written against them."""

from shard_transforms.facade.clipping import clip_by_global_norm
from shard_transforms.facade.constants import AggregationMethod
from shard_transforms.facade.constants import ModeKeys
from shard_transforms.facade.constants import Reduction
from shard_transforms.facade.contexts import shard_context
from shard_transforms.facade.cross_shard import CrossShardOptimizer
from shard_transforms.facade.differentiation import gradients
from shard_transforms.facade.functions import function
from shard_transforms.facade.graph import Graph
from shard_transforms.facade.graph import GraphKeys
from shard_transforms.facade.graph import get_default_graph
from shard_transforms.facade.graph import reset_default_graph
from shard_transforms.facade.inner import AdagradOptimizer
from shard_transforms.facade.inner import AdamOptimizer
from shard_transforms.facade.inner import FtrlOptimizer
from shard_transforms.facade.inner import GradientDescentOptimizer
from shard_transforms.facade.inner import MomentumOptimizer
from shard_transforms.facade.inner import OptaxOptimizer
from shard_transforms.facade.inner import RMSPropOptimizer
from shard_transforms.facade.lookup import get_global_step
from shard_transforms.facade.lookup import get_or_create_global_step
from shard_transforms.facade.lookup import get_values
from shard_transforms.facade.lookup import get_variable
from shard_transforms.facade.lookup import global_variables
from shard_transforms.facade.lookup import set_values
from shard_transforms.facade.lookup import trainable_variables
from shard_transforms.facade.optimizer import Optimizer
from shard_transforms.facade.replicate import EstimatorSpec
from shard_transforms.facade.replicate import replicate_model_fn
from shard_transforms.facade.shards import shard
from shard_transforms.facade.staleness import DropStaleGradientOptimizer
from shard_transforms.facade.sync_replicas import SyncReplicasOptimizer
from shard_transforms.facade.towers import TowerOptimizer
from shard_transforms.facade.variables import Variable

__all__ = (
    'AdagradOptimizer',
    'AdamOptimizer',
    'AggregationMethod',
    'CrossShardOptimizer',
    'DropStaleGradientOptimizer',
    'EstimatorSpec',
    'FtrlOptimizer',
    'GradientDescentOptimizer',
    'Graph',
    'GraphKeys',
    'ModeKeys',
    'MomentumOptimizer',
    'OptaxOptimizer',
    'Optimizer',
    'RMSPropOptimizer',
    'Reduction',
    'SyncReplicasOptimizer',
    'TowerOptimizer',
    'Variable',
    'clip_by_global_norm',
    'function',
    'get_default_graph',
    'get_global_step',
    'get_or_create_global_step',
    'get_values',
    'get_variable',
    'global_variables',
    'gradients',
    'replicate_model_fn',
    'reset_default_graph',
    'set_values',
    'shard',
    'shard_context',
    'trainable_variables',
)
