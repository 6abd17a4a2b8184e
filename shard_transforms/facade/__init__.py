"""The optimizers of TensorFlow 1, for code that was written against them."""

from shard_transforms.facade.bases import OptaxOptimizer
from shard_transforms.facade.clipping import clip_by_global_norm
from shard_transforms.facade.clipping import clip_by_norm
from shard_transforms.facade.clipping import clip_by_value
from shard_transforms.facade.clipping import clip_gradient_norms
from shard_transforms.facade.clipping import clip_gradients_by_norm
from shard_transforms.facade.clipping import global_norm
from shard_transforms.facade.contexts import Reduction
from shard_transforms.facade.contexts import shard_context
from shard_transforms.facade.cross_shard import CrossShardOptimizer
from shard_transforms.facade.cross_shard import cross_replica_sum
from shard_transforms.facade.differentiation import gradients
from shard_transforms.facade.functions import cond
from shard_transforms.facade.functions import control_dependencies
from shard_transforms.facade.functions import function
from shard_transforms.facade.functions import group
from shard_transforms.facade.functions import no_op
from shard_transforms.facade.graph import Graph
from shard_transforms.facade.graph import add_to_collection
from shard_transforms.facade.graph import get_collection
from shard_transforms.facade.graph import get_default_graph
from shard_transforms.facade.graph import get_variable_scope
from shard_transforms.facade.graph import name_scope
from shard_transforms.facade.graph import reset_default_graph
from shard_transforms.facade.graph import set_random_seed
from shard_transforms.facade.graph import variable_scope
from shard_transforms.facade.inner import AdadeltaOptimizer
from shard_transforms.facade.inner import AdagradOptimizer
from shard_transforms.facade.inner import AdamOptimizer
from shard_transforms.facade.inner import AdamWOptimizer
from shard_transforms.facade.inner import DecoupledWeightDecayExtension
from shard_transforms.facade.inner import FtrlOptimizer
from shard_transforms.facade.inner import GradientDescentOptimizer
from shard_transforms.facade.inner import LARSOptimizer
from shard_transforms.facade.inner import LazyAdamOptimizer
from shard_transforms.facade.inner import MomentumOptimizer
from shard_transforms.facade.inner import RMSPropOptimizer
from shard_transforms.facade.lookup import get_global_step
from shard_transforms.facade.lookup import get_or_create_global_step
from shard_transforms.facade.lookup import get_values
from shard_transforms.facade.lookup import get_variable
from shard_transforms.facade.lookup import global_variables
from shard_transforms.facade.lookup import local_variables
from shard_transforms.facade.lookup import set_values
from shard_transforms.facade.lookup import trainable_variables
from shard_transforms.facade.optimizer import AggregationMethod
from shard_transforms.facade.optimizer import Optimizer
from shard_transforms.facade.replicate import EstimatorSpec
from shard_transforms.facade.replicate import ModeKeys
from shard_transforms.facade.replicate import TowerOptimizer
from shard_transforms.facade.replicate import TPUEstimatorSpec
from shard_transforms.facade.replicate import replicate_model_fn
from shard_transforms.facade.schedules import ExponentialMovingAverage
from shard_transforms.facade.schedules import cosine_decay
from shard_transforms.facade.schedules import cosine_decay_restarts
from shard_transforms.facade.schedules import exponential_decay
from shard_transforms.facade.schedules import inverse_time_decay
from shard_transforms.facade.schedules import natural_exp_decay
from shard_transforms.facade.schedules import piecewise_constant
from shard_transforms.facade.schedules import polynomial_decay
from shard_transforms.facade.shards import shard
from shard_transforms.facade.variables import GraphKeys
from shard_transforms.facade.variables import Variable
from shard_transforms.facade.workers import DropStaleGradientOptimizer
from shard_transforms.facade.workers import SyncReplicasOptimizer

__all__ = (
    'AdadeltaOptimizer',
    'AdagradOptimizer',
    'AdamOptimizer',
    'AdamWOptimizer',
    'AggregationMethod',
    'CrossShardOptimizer',
    'DecoupledWeightDecayExtension',
    'DropStaleGradientOptimizer',
    'EstimatorSpec',
    'ExponentialMovingAverage',
    'FtrlOptimizer',
    'GradientDescentOptimizer',
    'Graph',
    'GraphKeys',
    'LARSOptimizer',
    'LazyAdamOptimizer',
    'ModeKeys',
    'MomentumOptimizer',
    'OptaxOptimizer',
    'Optimizer',
    'RMSPropOptimizer',
    'Reduction',
    'SyncReplicasOptimizer',
    'TPUEstimatorSpec',
    'TowerOptimizer',
    'Variable',
    'add_to_collection',
    'clip_by_global_norm',
    'clip_by_norm',
    'clip_by_value',
    'clip_gradient_norms',
    'clip_gradients_by_norm',
    'cond',
    'control_dependencies',
    'cosine_decay',
    'cosine_decay_restarts',
    'cross_replica_sum',
    'exponential_decay',
    'function',
    'get_collection',
    'get_default_graph',
    'get_global_step',
    'get_or_create_global_step',
    'get_values',
    'get_variable',
    'get_variable_scope',
    'global_norm',
    'global_variables',
    'gradients',
    'group',
    'inverse_time_decay',
    'local_variables',
    'name_scope',
    'natural_exp_decay',
    'no_op',
    'piecewise_constant',
    'polynomial_decay',
    'replicate_model_fn',
    'reset_default_graph',
    'set_random_seed',
    'set_values',
    'shard',
    'shard_context',
    'trainable_variables',
    'variable_scope',
)
