"""Worker threads: dropped stale gradients and synchronous replicas."""

import types

import jax.numpy as jnp
import numpy as np

import cases
import graphs
from shard_transforms import facade
from shard_transforms.facade import tf

sgd, drop_stale = graphs.sgd, graphs.drop_stale


class WorkersTest(graphs.GraphTest):

  def setUp(self):
    super().setUp()
    self.w = tf.Variable(0.0, name='w')
    self.step = tf.train.get_or_create_global_step()

  def run_threads(self, *workers):
    """Runs workers in the graph of the test."""

    def in_graph(worker):
      with self.graph.as_default():
        worker()

    actual = [lambda worker=worker: in_graph(worker) for worker in workers]
    return graphs.run_threads(*actual)

  def minimize(self, opt, gradient=1.0):
    return opt.minimize(lambda: self.w * gradient, self.step)

  def pairs(self, opt, gradient=1.0):
    return opt.compute_gradients(lambda: self.w * gradient)


class DropStaleTest(WorkersTest):

  @cases.parameters((0, 0, 1), (0, 1, 0), (2, 2, 1), (2, 3, 0), (-1, 0, 0))
  def test_applies_gradients_up_to_the_staleness(self, staleness, age, applies):
    inner = tf.train.AdamOptimizer(0.5)
    opt = drop_stale(inner, staleness)
    inner.apply_gradients([(1.0, self.w)], self.step)
    self.assertEqual(int(opt.stale_counter), 0)
    before = self.values()

    pairs = self.pairs(opt, 1.0 if applies else np.nan)
    self.step.assign_add(age)
    count = opt.apply_gradients(pairs, self.step)

    after = self.values()
    if applies:
      self.assertLess(after['w'], before['w'])
    else:
      counts = {k: after[k] for k in ('global_step', 'stale_counter')}
      self.assert_equal(after, before | counts)
    counts = int(count), int(self.step)
    self.assertEqual(counts, (not applies, 1 + age + applies))

  def test_the_oldest_step_since_the_last_update_counts(self):
    opt = drop_stale(sgd())

    def loss():
      # Another worker updates while this one computes.
      self.step.assign_add(1)
      return self.w * 1.0

    self.assertEqual(int(opt.minimize(loss, self.step)), 1)
    # Steps recorded before the last update do not count.
    pairs = self.pairs(opt)
    self.assertEqual(int(opt.apply_gradients(pairs, self.step)), 1)
    # It counts for every update that follows.
    self.assertEqual(int(opt.apply_gradients(pairs, self.step)), 2)
    self.pairs(opt)
    self.step.assign_add(1)
    counts = [int(opt.apply_gradients(self.pairs(opt), self.step))]
    # That of another thread, and of a loss that fails, do not count.
    with self.assertRaises(KeyError):
      opt.minimize(lambda: {}['no'], self.step)
    self.step.assign_add(1)
    threads = self.run_threads(lambda: counts.append(int(self.minimize(opt))))
    self.assertEmpty(threads)
    counts.append(int(self.minimize(opt)))

    self.assertEqual(counts, [3, 3, 3])

  def test_in_a_function_a_gradient_without_a_step_is_dropped(self):
    opt = drop_stale(sgd(), 5)
    step = facade.function(
        lambda grad: opt.apply_gradients([(grad, self.w)], self.step)
    )

    self.assertEqual(int(step(1.0)), 1)
    self.assert_holds(self.w, 0.0)

  def test_wrappers_of_one_optimizer_share_the_counter(self):
    inner = tf.train.AdamOptimizer()
    wrappers = [drop_stale(x, -1) for x in (inner, inner, sgd())]

    for opt in wrappers:
      opt.apply_gradients(self.pairs(opt), self.step)

    counters = [opt.stale_counter for opt in wrappers]
    self.assertEqual([int(x) for x in counters], [2, 2, 1])
    names = [x.name for x in counters[1:]]
    self.assertEqual(names, ['stale_counter:0', 'stale_counter_1:0'])
    self.step.assign(2)
    self.assertEqual(float(wrappers[0].stale_fraction(self.step)), 0.5)
    self.assertIn(counters[0], wrappers[0].variables())

  @cases.parameters((False, 0), (True, 3), fast='True_3')
  def test_no_update_is_lost_and_none_applied_twice(self, compiled, staleness):
    num_workers, num_steps = 4, 40 if compiled else 8
    w = tf.Variable(np.zeros(num_workers, np.float32), name='each')
    inner = tf.train.MomentumOptimizer(1.0, 0.0)
    accepted = np.zeros(num_workers, np.float32)

    def worker(i):
      opt = drop_stale(inner, staleness, use_locking=True)

      def apply(grad):
        before = opt.stale_counter.value()
        return opt.apply_gradients([(grad, w)], self.step), before

      compute = graphs.mapped(
          lambda: opt.compute_gradients(lambda: -w[i], w)[0][0], None, compiled
      )
      apply = graphs.mapped(apply, None, compiled)
      for _ in range(num_steps):
        after, before = apply(compute())
        if compiled:
          # Read in the same atomic step as the update, so exact.
          accepted[i] += int(after) == int(before)

    errors = self.run_threads(
        *(lambda i=i: worker(i) for i in range(num_workers))
    )

    self.assertEmpty(errors)
    drops = int(drop_stale(inner).stale_counter)
    self.assertEqual(int(self.step) + drops, num_workers * num_steps)
    self.assertEqual(float(w.value().sum()), int(self.step))
    if compiled:
      self.assert_holds(w, accepted)

  @cases.parameters(
      lambda opt: opt, facade.CrossShardOptimizer, facade.TowerOptimizer
  )
  def test_locking_of_the_inner_optimizer_is_used(self, wrap):
    # Several optimizers of one variable: TensorFlow 1 locked the variable.
    def worker():
      opt = wrap(sgd(use_locking=True))
      for _ in range(25):
        with facade.shard_context(1):
          opt.apply_gradients([(-1.0, self.w)])

    self.assertEmpty(self.run_threads(*[worker] * 4))

    self.assert_holds(self.w, 100.0)

  def test_locking_is_used_in_towers(self):
    inner = sgd()

    def worker():
      opt = facade.TowerOptimizer(drop_stale(inner, 100, use_locking=True))
      step = graphs.mapped(
          lambda x: opt.minimize(lambda: -jnp.mean(x) * self.w, self.step),
          ['/cpu:0'] * 2,
          compiled=False,
      )
      for _ in range(5):
        step(jnp.ones(2))

    self.assertEmpty(self.run_threads(*[worker] * 4))

    self.assertEqual([int(self.step), float(self.w)], [20, 20])


class SyncReplicasTest(WorkersTest):

  def optimizer(self, *args, inner=None, timeout=60.0, **kwargs):
    opt = tf.train.SyncReplicasOptimizer(inner or sgd(), *args, **kwargs)
    opt.timeout_secs = timeout
    return opt

  def worker(self, opt, last_step, gradient):
    """Returns a worker that goes on until the last step."""

    def run():
      # A bound on the rounds, most of which backup workers may lose.
      for _ in range(1_000):
        step = int(self.step)
        if step >= last_step:
          return
        self.minimize(opt, float(gradient(step)))

    return run

  def test_synchronous_replicas_train_with_their_mean(self):
    grads = np.random.default_rng(0).normal(size=(3, 5)).astype(np.float32)
    opt = self.optimizer(3, inner=tf.train.AdamOptimizer(0.1))

    errors = self.run_threads(
        *(
            self.worker(
                opt, 5, lambda i, worker_grads=worker_grads: worker_grads[i]
            )
            for worker_grads in grads
        )
    )

    self.assertEmpty(errors)
    self.assertEqual(int(self.step), 5)
    with tf.Graph().as_default():
      reference, inner = tf.Variable(0.0), tf.train.AdamOptimizer(0.1)
      for grad in grads.mean(0):
        inner.apply_gradients([(grad, reference)])
    self.assert_close(self.w.value(), reference.value())

  @cases.parameters((2, 4, 10), (4, 2, 3))
  def test_backups_are_dropped_and_few_workers_contribute_several(
      self, needed, workers, steps
  ):
    opt = self.optimizer(needed, total_num_replicas=workers)

    errors = self.run_threads(*[self.worker(opt, steps, lambda _: 2)] * workers)

    self.assertEmpty(errors)
    self.assertEqual([float(self.w), int(self.step)], [-2 * steps, steps])

  @cases.parameters(False, True)
  def test_gradients_of_an_earlier_step_are_dropped(self, compiled):
    opt = self.optimizer(1, total_num_replicas=2, timeout=30.0)
    compute = graphs.mapped(
        lambda: self.pairs(opt, 100.0)[0][0], None, compiled
    )
    late = compute()

    self.assertEmpty(self.run_threads(lambda: self.minimize(opt)))
    opt.apply_gradients([(late, self.w)], self.step)

    self.assertEqual([float(self.w), int(self.step)], [-1, 1])

  @cases.parameters(False, True)
  def test_another_optimizer_may_use_the_same_global_step(self, both):
    b = tf.Variable(0.0, name='b')
    opts = [self.optimizer(1, total_num_replicas=2, inner=sgd(0.5))]
    opts.append(
        self.optimizer(1, total_num_replicas=2, inner=sgd(0.5))
        if both
        else sgd(0.5)
    )
    for _ in range(3):
      computed = [
          opt.compute_gradients(lambda v=v: (v - 1.0) ** 2 / 2, [v])
          for opt, v in zip(opts, (self.w, b), strict=True)
      ]
      for opt, pairs in reversed([*zip(opts, computed, strict=True)]):
        opt.apply_gradients(pairs, self.step)

    self.assertEqual(
        [float(self.w), float(b), int(self.step)], [7 / 8] * 2 + [6]
    )

  def test_a_worker_times_out(self):
    opt = self.optimizer(2, timeout=0.1)
    other = tf.Variable(0.0, name='other')

    # Gradients of a worker that timed out are withdrawn.
    for variable in (self.w, other):
      with self.assertRaisesRegex(
          TimeoutError, 'did not end within .*fewer than 2 gradients'
      ):
        opt.apply_gradients([(1.0, variable)], self.step)
    self.assertEqual([float(self.w), int(self.step)], [0, 0])

  def test_workers_must_have_the_same_variables(self):
    other = tf.Variable(0.0, name='other')
    opt = self.optimizer(3, total_num_replicas=2)
    with self.assertRaises(TypeError):
      opt.apply_gradients([(1, other)], self.step)
    opt.apply_gradients([(1.0, self.w)], self.step)

    with self.assertRaisesRegex(ValueError, 'update the same variables'):
      opt.apply_gradients([(1.0, other)], self.step)

  def test_one_replica_is_the_inner_optimizer_and_compiles(self):
    calls = []
    averages = types.SimpleNamespace(
        apply=lambda variables: calls.append([v.value() for v in variables])
    )
    opt = self.optimizer(
        1,
        inner=tf.train.MomentumOptimizer(1.0, 0.5),
        variable_averages=averages,
        variables_to_average=[self.w],
    )

    counts = [int(facade.function(lambda: self.minimize(opt))()) for _ in '12']
    self.minimize(opt)

    self.assertEqual(counts, [1, 2])
    self.assert_holds(self.w, -1 - 1.5 - 1.75)
    self.assert_equal(calls[-1], [self.w.value()])
    self.assertEqual(opt.get_name(), 'sync_replicas')

  def test_replicas_in_towers_synchronize(self):
    opt = self.optimizer(2)

    def worker(value):
      step = graphs.mapped(
          lambda x: facade.TowerOptimizer(opt).minimize(
              lambda: -jnp.mean(x) * self.w, self.step
          ),
          ['/cpu:0'] * 2,
          compiled=False,
      )
      step(jnp.full(2, value))

    errors = self.run_threads(lambda: worker(2.0), lambda: worker(3.0))

    self.assertEmpty(errors)
    self.assertEqual([float(self.w), int(self.step)], [2.5, 1])

  def test_an_error_in_one_worker_reaches_all(self):
    averages = types.SimpleNamespace(apply=lambda variables: {}['average'])
    opt = self.optimizer(
        2, variable_averages=averages, variables_to_average=[self.w]
    )

    errors = self.run_threads(*[lambda: self.minimize(opt)] * 2)

    self.assertEqual({type(e) for e in errors}, {KeyError, RuntimeError})
