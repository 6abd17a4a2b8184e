"""Constants of TensorFlow 1 that name a choice."""


class Reduction:
  """How the losses and gradients of shards or towers are reduced.

  `CrossShardOptimizer` takes `MEAN` and `SUM`. For towers, `SUM` is the sum,
  `NONE` is refused, and all others are the mean over the towers.

  Attributes:
    NONE: No reduction.
    SUM: The sum.
    SUM_OVER_BATCH_SIZE: In TensorFlow, the sum divided by the number of losses.
    MEAN: The mean; in TensorFlow, the sum divided by the sum of the weights.
    SUM_BY_NONZERO_WEIGHTS: In TensorFlow, the sum divided by the number of
      weights that are not zero.
    SUM_OVER_NONZERO_WEIGHTS: The same, by its older name.

  Examples:
    >>> from shard_transforms import facade
    >>> print(facade.Reduction.MEAN)
    weighted_mean

  References:
    `tf.losses.Reduction` of TensorFlow 1.15.
  """

  NONE = 'none'
  SUM = 'weighted_sum'
  SUM_OVER_BATCH_SIZE = 'weighted_sum_over_batch_size'
  MEAN = 'weighted_mean'
  SUM_BY_NONZERO_WEIGHTS = 'weighted_sum_by_nonzero_weights'
  SUM_OVER_NONZERO_WEIGHTS = SUM_BY_NONZERO_WEIGHTS

  @classmethod
  def all(cls) -> tuple[str, ...]:
    """Returns all names."""
    divided = cls.MEAN, cls.SUM_OVER_BATCH_SIZE, cls.SUM_BY_NONZERO_WEIGHTS
    return cls.NONE, cls.SUM, *divided

  @classmethod
  def validate(cls, key: str) -> None:
    """Checks a name.

    Raises:
      ValueError: If it is no such name.
    """
    if key not in cls.all():
      raise ValueError(f'Invalid Reduction: {key!r}. Use one of {cls.all()}.')


class AggregationMethod:
  """How TensorFlow 1 summed the parts of one gradient; without effect here.

  Attributes:
    ADD_N: All parts in one operation.
    DEFAULT: The same.
    EXPERIMENTAL_TREE: Two parts at a time.
    EXPERIMENTAL_ACCUMULATE_N: Each part into one shared buffer.

  Examples:
    >>> from shard_transforms import facade
    >>> print(facade.AggregationMethod.DEFAULT)
    0

  References:
    `tf.AggregationMethod` of TensorFlow 1.15.
  """

  ADD_N = 0
  DEFAULT = ADD_N
  EXPERIMENTAL_TREE = 1
  EXPERIMENTAL_ACCUMULATE_N = 2


class ModeKeys:
  """What a `model_fn` is called for.

  Attributes:
    TRAIN: Training: gradients are applied.
    EVAL: Evaluation: the loss and the metrics.
    PREDICT: Prediction: there are no labels.

  Examples:
    >>> from shard_transforms import facade
    >>> print(facade.ModeKeys.TRAIN)
    train

  References:
    `tf.estimator.ModeKeys` of TensorFlow 1.15.
  """

  TRAIN = 'train'
  EVAL = 'eval'
  PREDICT = 'infer'


class GraphKeys:
  """Names of the collections of a graph.

  Attributes:
    GLOBAL_VARIABLES: All variables.
    TRAINABLE_VARIABLES: Those that optimizers update by default.
    GLOBAL_STEP: The global step alone.
    MOVING_AVERAGE_VARIABLES: Those that have an average.
    REGULARIZATION_LOSSES: The results of the regularizers of variables.
    LOCAL_VARIABLES: Empty until you add to it; so are all that follow.
    LOSSES: The same.
    SUMMARIES: The same.
    TRAIN_OP: The same.
    UPDATE_OPS: The same.

  Examples:
    >>> from shard_transforms import facade
    >>> with facade.Graph().as_default() as graph:
    ...   w = facade.Variable(1.0, name='w')
    ...   print(graph.get_collection(facade.GraphKeys.TRAINABLE_VARIABLES))
    [<Variable 'w:0' shape=() dtype=float32>]

  References:
    `tf.GraphKeys` of TensorFlow 1.15.
  """

  GLOBAL_VARIABLES = 'variables'
  TRAINABLE_VARIABLES = 'trainable_variables'
  GLOBAL_STEP = 'global_step'
  MOVING_AVERAGE_VARIABLES = 'moving_average_variables'
  REGULARIZATION_LOSSES = 'regularization_losses'
  LOCAL_VARIABLES = 'local_variables'
  LOSSES = 'losses'
  SUMMARIES = 'summaries'
  TRAIN_OP = 'train_op'
  UPDATE_OPS = 'update_ops'
