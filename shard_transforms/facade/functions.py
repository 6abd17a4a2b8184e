"""`function` compiles a step that reads and assigns variables."""

from collections.abc import Callable
import contextlib
import functools
import threading
from typing import Any

import jax

from shard_transforms.facade import contexts
from shard_transforms.facade import frames
from shard_transforms.facade import graph as graph_lib
from shard_transforms.facade import passes
from shard_transforms.facade import shards


class Function:
  """A compiled step, the result of `function`."""

  def __init__(self, fn: Callable[..., Any]):
    functools.update_wrapper(self, fn)
    self._fn = fn
    self._attribute = ''
    self._graph = graph_lib.get_default_graph()
    self._scopes = contexts.current.scopes
    self._template = contexts.Template()
    self._variables = []
    self._locks = []
    self._mesh = None
    self._unfinished: jax.Array | None = None
    self._is_built = False
    self._growing = threading.RLock()
    self._run = jax.jit(self._traced)

  def __set_name__(self, owner: type, name: str):
    self._attribute = name

  def __get__(self, instance: Any, owner: type | None = None) -> 'Function':
    if instance is None:
      return self
    # Python finds this attribute of the instance first from here on; otherwise
    # each access would compile the step again.
    bound = Function(self._fn.__get__(instance))
    return vars(instance).setdefault(self._attribute, bound)

  def __call__(self, *args: Any, **kwargs: Any) -> Any:
    """Runs the step; variables in its result become arrays.

    Raises:
      RuntimeError: If each trace creates new variables.
      ValueError: If the function raises one.
    """
    thread = contexts.current
    if thread.frames or thread.shards or thread.towers:
      # The call is part of another compiled call, a shard or a tower.
      return self._inline(args, kwargs)
    if not self._is_built:
      self.build(*args, **kwargs)
    for _ in range(shards.MAX_TRACES):
      variables = self._variables
      with self._locked():
        # Outside of all frames, a variable stands for what it stores.
        arrays = [variable.stored for variable in variables]
        self._wait()
        try:
          out, written = self._run(arrays, args, kwargs)
        except frames.Retraced:
          self.build(*args, **kwargs)
          continue
        except ValueError:
          # JAX raises this if another call has left arrays on other devices.
          if not self._place():
            raise
          continue
        frames.commit([variables[i] for i in written], written.values())
        if self._mesh is not None:
          self._unfinished = next(iter(written.values()), None)
        return out
    raise RuntimeError(
        f'{self._fn!r} used new variables in each of {shards.MAX_TRACES}'
        ' traces. Create variables with `tf.get_variable`, which finds them'
        ' again.'
    )

  def build(self, *args: Any, **kwargs: Any) -> None:
    """Creates the variables and slots that a call would create; runs nothing.

    Args:
      *args: The arguments of a call; `jax.ShapeDtypeStruct` can replace arrays.
      **kwargs: The keyword arguments of a call.
    """
    all_variables = self._graph.get_collection(
        graph_lib.GraphKeys.GLOBAL_VARIABLES
    )
    arrays_by_variable = frames.readable([*self._variables, *all_variables])

    def trace(arrays, args, kwargs):
      with frames.frame(
          'discovered', zip(arrays_by_variable, arrays, strict=True)
      ) as frame:
        out = self._inline(args, kwargs)
      self._learn(frame)
      return out

    jax.eval_shape(trace, list(arrays_by_variable.values()), args, kwargs)
    self._is_built = True
    self._place()

  def _wait(self):
    """Waits for the previous call, if this one sums over CPU devices.

    JAX 0.10 aborts if a process has queued more than about 32 such calls, which
    a loop that reads no result would do.
    """
    if self._unfinished is not None and jax.default_backend() == 'cpu':
      # The results of a call are ready together.
      self._unfinished.block_until_ready()

  def _locked(self):
    """Acquires the locks of the step in a fixed order, to avoid deadlocks."""
    stack = contextlib.ExitStack()
    for lock in sorted(self._locks, key=id):
      stack.enter_context(frames.locked(lock))
    return stack

  def _inline(self, args, kwargs):
    """Runs the function as part of the current trace."""
    with (
        self._graph.as_default(),
        contexts.replaced(scopes=self._scopes),
        frames.names_change(),
        contexts.call_of(self._template),
        passes.new_pass(self._template),
    ):
      out = self._fn(*args, **kwargs)
      with contexts.replaced(run=None):
        return jax.tree.map(lambda x: x, out)

  def _learn(self, frame):
    """Records the variables of a trace; returns whether any of them is new."""
    with self._growing:
      # New variables are appended, because a compiled program identifies the
      # others by their positions.
      new_variables = [v for v in frame.used if v not in self._variables]
      new_locks = [lock for lock in frame.locks if lock not in self._locks]
      self._variables += new_variables
      self._locks += new_locks
      self._mesh = frame.mesh or self._mesh
    return bool(new_variables or new_locks)

  def _traced(self, arrays, args, kwargs):
    """The pure function; returns written arrays by position of the variable."""
    variables = self._variables[: len(arrays)]
    with frames.frame('traced', zip(variables, arrays, strict=True)) as frame:
      out = self._inline(args, kwargs)
    if self._learn(frame):
      raise frames.Retraced
    positions = {variable: i for i, variable in enumerate(variables)}
    return out, {positions[v]: frame.values[v] for v in frame.written}

  def _place(self):
    """Moves variables to the sharding that the step gives them."""
    return self._mesh is not None and shards.place(self._variables, self._mesh)


def function(fn: Callable[..., Any]) -> Function:
  """Compiles a training step that reads and assigns variables.

  At the first call, JAX traces `fn` twice: once to find the variables that it
  uses and to create the slots of its optimizers, and once with these variables
  as inputs and outputs. Later calls with arguments of the same shapes and
  dtypes run the compiled program. As under `jax.jit`, Python code in `fn` runs
  only while JAX traces it. The old arrays of variables are not donated, because
  other threads may be reading them. A step that reduces over CPU devices waits
  for the previous one. `fn` runs in the graph and the scopes in which
  `function` was called, in any thread. Inside another `function` or a loss, it
  becomes part of that.

  `build(*args)` of the result creates the variables and slots of a first call
  without running it: call it before `set_values`.

  Args:
    fn: A function that takes and returns arrays, or trees of arrays.

  Returns:
    A function with the same arguments.

  Raises:
    TypeError: If `fn` is not a function.
    ValueError: When called, if `fn` creates a `tf.Variable` by its constructor.

  Examples:
    >>> import jax.numpy as jnp
    >>> from shard_transforms import facade
    >>> from shard_transforms.facade import tf
    >>> with tf.Graph().as_default():
    ...   w = tf.Variable(jnp.zeros(2), name='w')
    >>> opt = tf.train.GradientDescentOptimizer(0.5)
    >>> @facade.function
    ... def step(x):
    ...   return opt.minimize(lambda: jnp.sum((w - x) ** 2), var_list=[w])
    >>> for _ in range(2):
    ...   _ = step(jnp.array([1.0, 2.0]))
    >>> print(w)
    [1. 2.]
  """
  if not callable(fn):
    raise TypeError(f'`fn` must be a function, got {fn!r}.')
  return Function(fn)
