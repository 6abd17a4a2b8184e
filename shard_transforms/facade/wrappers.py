"""Base classes of optimizers that wrap another one, which keeps the slots."""

from shard_transforms.facade import functional
from shard_transforms.facade import optimizer
from shard_transforms.facade import variables as variables_lib

Variable = variables_lib.Variable


class Wrapper(optimizer.Optimizer):
  """An optimizer whose slots are those of an inner one."""

  def __init__(self, opt: optimizer.Optimizer, use_locking: bool, name: str):
    super().__init__(use_locking, name)
    self._wrapped = opt

  @property
  def _opt(self) -> optimizer.Optimizer:
    """The inner optimizer."""
    return self._wrapped

  def get_slot(self, var: Variable, name: str) -> Variable | None:
    """Returns the wrapped optimizer's slot of a name, `None` without one."""
    return self._opt.get_slot(var, name)

  def get_slot_names(self) -> list[str]:
    """Returns the names of the wrapped optimizer's slots, sorted."""
    return self._opt.get_slot_names()

  def variables(self) -> list[Variable]:
    """Returns all variables that hold state, by name."""
    return self._opt.variables()


class FunctionalWrapper(Wrapper, functional.FunctionalOptimizer):
  """An optimizer whose transformation wraps that of an inner one."""

  def __init__(self, opt: optimizer.Optimizer, use_locking: bool, name: str):
    self._inner: functional.FunctionalOptimizer = optimizer.check_optimizer(
        'opt', opt, functional.FunctionalOptimizer
    )
    super().__init__(opt, use_locking, name)

  @property
  def root(self) -> functional.SlotOptimizer:
    """The innermost optimizer."""
    return self._inner.root

  @property
  def uses_locking(self) -> bool:
    """Whether this optimizer or an inner one has locking."""
    return self._use_locking or self._inner.uses_locking

  def _extra_args(self):
    return self._inner._extra_args()
