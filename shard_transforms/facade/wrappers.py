"""`Wrapper`: an optimizer around another, which keeps the slots."""

from shard_transforms.facade import optimizer
from shard_transforms.facade import variables as variables_lib

Variable = variables_lib.Variable


class Wrapper(optimizer.FunctionalOptimizer):
  """An optimizer whose transformation goes around that of another."""

  def __init__(
      self,
      argument: str,
      opt: optimizer.Optimizer,
      use_locking: bool,
      name: str,
  ):
    super().__init__(use_locking, name)
    self._opt: optimizer.FunctionalOptimizer = optimizer.check_optimizer(
        argument, opt, optimizer.FunctionalOptimizer
    )

  @property
  def root(self) -> optimizer.SlotOptimizer:
    """The innermost optimizer."""
    return self._opt.root

  def get_slot(self, var: Variable, name: str) -> Variable | None:
    """Returns the wrapped optimizer's slot of a name, `None` without one."""
    return self._opt.get_slot(var, name)

  def get_slot_names(self) -> list[str]:
    """Returns the names of the wrapped optimizer's slots, sorted."""
    return self._opt.get_slot_names()

  def variables(self) -> list[Variable]:
    """Returns all variables that hold state, by name."""
    return self._opt.variables()
