"""`function` compiles a step that assigns variables; `cond` is its `if`."""

from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Iterator
import contextlib
import functools
import threading
from typing import Any

import jax
from jax import core
import jax.numpy as jnp

from shard_transforms.facade import contexts
from shard_transforms.facade import frames
from shard_transforms.facade import graph as graph_lib
from shard_transforms.facade import leaves
from shard_transforms.facade import passes
from shard_transforms.facade import shards
from shard_transforms.facade import variables as variables_lib


class Function:
  """The result of `function`: call it, or `build` what a call would make."""

  def __init__(self, fn: Callable[..., Any]):
    functools.update_wrapper(self, fn)
    self._fn = fn
    self._attribute = ''
    self._graph = graph_lib.get_default_graph()
    self._scopes = contexts.around.scopes
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
    """Runs the step, and returns what it returns, variables as arrays.

    Args:
      *args: Arrays, or trees of them.
      **kwargs: The same.

    Returns:
      What the function returns.

    Raises:
      RuntimeError: If each trace makes new variables.
      ValueError: If the function raises one.
    """
    around = contexts.around
    if around.frames or around.shards or around.towers:
      # Inside another compiled call, a shard or a tower.
      return self._inline(args, kwargs)
    if not self._is_built:
      self.build(*args, **kwargs)
    for _ in range(shards.MAX_TRACES):
      variables = self._variables
      with self._held():
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
        f'{self._fn!r} met new variables in each of {shards.MAX_TRACES}'
        ' traces. It must use the same at every call.'
    )

  def build(self, *args: Any, **kwargs: Any) -> None:
    """Makes the variables and slots that a call would make; runs nothing.

    Args:
      *args: As for a call; `jax.ShapeDtypeStruct` will do for arrays.
      **kwargs: The same.
    """
    everything = self._graph.get_collection(
        variables_lib.GraphKeys.GLOBAL_VARIABLES
    )
    known = frames.known([*self._variables, *everything])

    def trace(arrays, args, kwargs):
      with frames.frame('discovered', zip(known, arrays, strict=True)) as frame:
        out = self._inline(args, kwargs)
      self._learn(frame)
      return out

    jax.eval_shape(trace, list(known.values()), args, kwargs)
    self._is_built = True
    self._place()

  def _wait(self):
    """Waits for the call before, where this one sums over CPU devices.

    JAX 0.10 aborts where a process has queued more than about 32 such calls,
    and a loop that reads no result, as with `session.run(train_op)`, would.
    """
    if self._unfinished is not None and jax.default_backend() == 'cpu':
      # The results of a call are ready together.
      self._unfinished.block_until_ready()

  def _held(self):
    """Holds the locks of the step, in a fixed order, so that none deadlocks."""
    stack = contextlib.ExitStack()
    for lock in sorted(self._locks, key=id):
      stack.enter_context(frames.held(lock))
    return stack

  def _inline(self, args, kwargs):
    """Runs the function inline."""
    with (
        self._graph.as_default(),
        contexts.replaced(scopes=self._scopes),
        frames.renamed(),
        contexts.call_of(self._template),
        passes.begun(self._template),
    ):
      out = self._fn(*args, **kwargs)
      with contexts.replaced(run=None):
        return jax.tree.map(lambda x: x, out)

  def _learn(self, frame):
    """Records the variables of a trace; returns whether any is new."""
    with self._growing:
      # New variables come last: a program that is compiled already knows the
      # others by their position.
      new_variables = [v for v in frame.used if v not in self._variables]
      new_locks = [lock for lock in frame.locks if lock not in self._locks]
      self._variables += new_variables
      self._locks += new_locks
      self._mesh = frame.mesh or self._mesh
    return bool(new_variables or new_locks)

  def _traced(self, arrays, args, kwargs):
    """The pure function; returns written arrays by the variable's position."""
    variables = self._variables[: len(arrays)]
    with frames.frame('traced', zip(variables, arrays, strict=True)) as frame:
      out = self._inline(args, kwargs)
    if self._learn(frame):
      raise frames.Retraced
    places = {variable: i for i, variable in enumerate(variables)}
    return out, {places[v]: frame.values[v] for v in frame.written}

  def _place(self):
    """Places variables where the step leaves them, to avoid a recompilation."""
    return self._mesh is not None and shards.place(self._variables, self._mesh)


def function(fn: Callable[..., Any]) -> Function:
  """Compiles a training step that reads and assigns variables.

  At the first call, JAX traces `fn` twice: once to find the variables that it
  uses and to make the slots of its optimizers, and once with these variables as
  inputs and outputs. Later calls with arguments of the same shapes and dtypes
  run what was compiled. As under `jax.jit`, Python code in `fn` runs only
  while JAX traces it. The old arrays of variables are not donated, because
  other threads may be reading them. A step that reduces over CPU devices waits
  for the one before. `fn` runs in the graph and the scopes of names in which
  `function` was called, in any thread. Inside another `function` or a loss, it
  becomes part of that.

  `build(*args)` of the result makes what a first call would make, and runs
  nothing: call it before `set_values`.

  Args:
    fn: A function that takes and returns arrays, or trees of them.

  Returns:
    A function of the same arguments.

  Raises:
    TypeError: If `fn` is no function.
    ValueError: When called, if `fn` makes a `Variable` by its constructor.

  Examples:
    >>> import jax.numpy as jnp
    >>> from shard_transforms import facade
    >>> with facade.Graph().as_default():
    ...   w = facade.Variable(jnp.zeros(2), name='w')
    >>> opt = facade.GradientDescentOptimizer(0.5)
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


def cond(
    pred: jax.typing.ArrayLike | variables_lib.Variable,
    true_fn: Callable[[], Any],
    false_fn: Callable[[], Any],
    strict: bool = False,
    name: str | None = None,
) -> Any:
  """Chooses between two branches, which may assign to variables.

  In a compiled step, where `pred` is not known, both branches compute from the
  values before; the assignments and the result of one are then chosen. (In a
  branch of `jax.lax.cond`, variables cannot be assigned.)

  Args:
    pred: A scalar; the same on all shards if a branch assigns.
    true_fn: A function of no arguments.
    false_fn: The same; returns a tree of the same structure and shapes. If one
      returns `None`, such as `no_op`, so does `cond` in a compiled step.
    strict: Ignored.
    name: Ignored.

  Returns:
    What the chosen branch returns; a number or a variable as an array.

  Raises:
    ValueError: If the structures or shapes of their results differ; outside of
      a step, if one returns a decaying rate: it would stay what is chosen now.

  Examples:
    >>> from shard_transforms import facade
    >>> w = facade.Variable(1.0)
    >>> step = facade.function(
    ...     lambda x: facade.cond(x > 0, lambda: w.assign_add(x), lambda: x)
    ... )
    >>> for x in (2.0, -5.0):
    ...   _ = step(x)
    >>> print(w)
    3.0

  References:
    `tf.cond` of TensorFlow 1.15.
  """
  chosen = jnp.asarray(pred)
  if isinstance(chosen, core.Tracer):
    return select(chosen, true_fn, false_fn)
  out = true_fn() if chosen else false_fn()
  if leaves.is_step() or not isinstance(pred, jax.Array | leaves.Leaf):
    return out
  is_number = type(out) in (int, float) and abs(out) < 2**31
  # An array, of which optimizers warn: what is chosen now stays.
  return jnp.asarray(out) if is_number or isinstance(out, leaves.Leaf) else out


def select(
    chosen: jax.Array, true_fn: Callable[[], Any], false_fn: Callable[[], Any]
) -> Any:
  """Computes both branches of `cond`, then chooses between the results.

  Raises:
    ValueError: If they return other structures or shapes.
  """
  outputs, tried, runs = [], [], []
  before = contexts.around.run
  for branch in (true_fn, false_fn):
    with contexts.replaced(run=before), frames.frame('undecided') as opened:
      outputs.append(jax.tree.map(jnp.asarray, branch()))
      runs.append(contexts.around.run)
    tried.append(opened)
  passes.join(runs)
  if any(output is None for output in outputs):
    outputs = [None, None]
  shapes = [jax.tree.map(jnp.shape, output) for output in outputs]
  if shapes[0] != shapes[1]:
    raise ValueError(
        '`true_fn` and `false_fn` must return the same structure and shapes,'
        f' got {shapes[0]} and {shapes[1]}.'
    )
  for variable in {**tried[0].written, **tried[1].written}:
    new = [f.values.get(variable, frames.read(variable)) for f in tried]
    frames.commit([variable], [jnp.where(chosen, *new)])
  return jax.tree.map(lambda x, y: jnp.where(chosen, x, y), *outputs)


def group(*inputs: Any, name: str | None = None) -> None:
  """Takes operations that have run already: lines run in order.

  Args:
    *inputs: What was returned for operations; functions of no arguments are
      called, in this order.
    name: Ignored.

  Examples:
    >>> from shard_transforms import facade
    >>> w, step = facade.Variable(1.0), facade.Variable(0, trainable=False)
    >>> opt = facade.GradientDescentOptimizer(0.5)
    >>> facade.group(opt.minimize(lambda: w, var_list=[w]), step.assign_add(1))
    >>> print(w, step)
    0.5 1

  References:
    `tf.group` of TensorFlow 1.15.
  """
  for operation in inputs:
    if callable(operation):
      operation()


def no_op(name: str | None = None) -> None:
  """Does nothing.

  Args:
    name: Ignored.

  Examples:
    >>> from shard_transforms import facade
    >>> print(facade.no_op())
    None

  References:
    `tf.no_op` of TensorFlow 1.15.
  """


@contextlib.contextmanager
def control_dependencies(
    control_inputs: Iterable[Any] | None,
) -> Iterator[None]:
  """Runs the lines inside after those before, as all lines do.

  Args:
    control_inputs: What was returned for operations; functions of no arguments
      are called first.

  Yields:
    `None`.

  Examples:
    >>> from shard_transforms import facade
    >>> w = facade.Variable(1.0)
    >>> with facade.control_dependencies([w.assign(2.0)]):
    ...   print(w)
    2.0

  References:
    `tf.control_dependencies` of TensorFlow 1.15.
  """
  inputs = tuple(control_inputs or ())
  group(*inputs)
  with passes.settled() if inputs else contextlib.nullcontext():
    yield
