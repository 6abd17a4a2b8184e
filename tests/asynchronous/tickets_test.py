from absl.testing import parameterized

import cases
from shard_transforms._src.asynchronous import tickets as tickets_lib


def make(**options):
  defaults = {
      'staleness': 2,
      'pace': True,
      'patience': 4.0,
      'on_drop': 'again',
  }
  return tickets_lib.Tickets(**(defaults | options))


def know(tickets, *seconds):
  """Lets each worker take so long, twice, so that all speeds are known."""
  for now in 0.0, 100.0:
    for worker, duration in enumerate(seconds):
      tickets.start(worker, 0, now)
      tickets.finish(worker, now + duration)


class TicketsTest(parameterized.TestCase):

  def test_numbers_batches_in_order(self):
    tickets = make()

    numbers = [tickets.start(worker, 0, 0.0).batch for worker in range(3)]

    self.assertEqual(numbers, [0, 1, 2])
    self.assertEqual(tickets.next_batch, 3)

  @cases.parameters(0, 1, 2, 5)
  def test_pace_keeps_every_age_within_staleness(self, staleness):
    # Of 8 workers, the one that comes back is always the latest.
    tickets = make(staleness=staleness)
    ages = []
    for step in range(50):
      for worker in tickets.idle(range(8)):
        if tickets.may_start(step, 1000):
          tickets.start(worker, step, 0.0)
      worker = max(set(range(8)) - set(tickets.idle(range(8))))
      ages.append(step - tickets.finish(worker, 1.0)[0].local_step)

    self.assertLessEqual(max(ages), staleness)

  def test_pace_lets_as_many_work_as_staleness_allows(self):
    tickets = make(staleness=2)

    for worker in range(3):
      self.assertTrue(tickets.may_start(0, 1000))
      tickets.start(worker, 0, 0.0)

    self.assertFalse(tickets.may_start(0, 1000))
    self.assertTrue(make(pace=False).may_start(0, 1000))

  def test_hands_out_no_more_than_is_needed(self):
    tickets = make(pace=False)
    tickets.start(0, 0, 0.0)

    self.assertFalse(tickets.may_start(9, 10))
    self.assertTrue(tickets.may_start(8, 10))

  def test_fastest_idle_worker_comes_first(self):
    tickets = make()
    know(tickets, 3.0, 1.0, 2.0)

    self.assertEqual(tickets.idle(range(3)), [1, 2, 0])

  @cases.parameters(('again', [5]), ('forget', []))
  def test_dropped_batch_goes_where_it_should(self, on_drop, ready):
    tickets = make(on_drop=on_drop, next_batch=5)
    ticket = tickets.start(0, 0, 0.0)
    tickets.finish(0, 1.0)

    tickets.drop(ticket)

    self.assertEqual(tickets.ready, ready)
    if ready:
      again = tickets.start(0, 0, 0.0)
      self.assertEqual((again.batch, again.attempt), (5, 2))

  def test_late_ticket_goes_to_another_and_does_not_count(self):
    tickets = make(patience=2.0, next_batch=6)
    know(tickets, 1.0, 1.0)
    first = tickets.start(0, 0, 200.0).batch

    self.assertEmpty(tickets.make_late(201.9))
    self.assertEqual([t.batch for t in tickets.make_late(202.1)], [first])
    again = tickets.start(1, 3, 202.1)
    self.assertEqual((again.batch, again.attempt), (first, 2))
    self.assertEqual(tickets.idle(range(2)), [])
    self.assertEqual(tickets.finish(0, 203.0)[1], False)
    self.assertEqual(tickets.finish(1, 203.0)[1], True)

  def test_batch_that_takes_long_has_twice_the_time_in_each_attempt(self):
    tickets = make(patience=2.0)
    know(tickets, 1.0, 1.0, 1.0)

    for worker, limit in enumerate([2.0, 4.0, 8.0]):
      tickets.start(worker, 0, 200.0)
      self.assertEmpty(tickets.make_late(200.0 + limit - 0.1))
      self.assertLen(tickets.make_late(200.0 + limit + 0.1), 1)

  def test_late_tickets_hold_nobody_back(self):
    tickets = make(patience=2.0, staleness=0)
    know(tickets, 1.0, 1.0)
    tickets.start(0, 0, 200.0)
    self.assertFalse(tickets.may_start(0, 10))

    tickets.make_late(203.0)

    self.assertTrue(tickets.may_start(0, 10))

  def test_first_ticket_of_a_worker_has_time_to_be_compiled(self):
    tickets = make(patience=2.0)
    know(tickets, 1.0)
    tickets.start(1, 0, 200.0)

    self.assertEmpty(tickets.make_late(321.9))
    self.assertLen(tickets.make_late(322.1), 1)

  def test_nothing_is_late_before_there_is_a_median(self):
    tickets = make()
    tickets.start(0, 0, 0.0)

    self.assertEmpty(tickets.make_late(1e9))

  def test_worker_that_stays_late_hangs(self):
    tickets = make(patience=2.0)
    know(tickets, 1.0)
    tickets.start(0, 0, 200.0)
    tickets.make_late(203.0)

    self.assertEmpty(tickets.hung(209.0))
    self.assertEqual(tickets.hung(211.0), [0])

  def test_seconds_left_end_when_the_first_is_late(self):
    tickets = make(patience=2.0)
    self.assertEqual(tickets.seconds_left(0.0), float('inf'))
    know(tickets, 1.0, 1.0)
    tickets.start(0, 0, 200.0)
    tickets.start(1, 0, 200.5)

    self.assertEqual(tickets.seconds_left(201.0), 1.0)

  def test_lost_worker_is_unknown_again(self):
    tickets = make()
    know(tickets, 1.0, 2.0)
    ticket = tickets.start(1, 0, 0.0)

    self.assertEqual(tickets.lose(1), (ticket, True))
    self.assertEqual(tickets.idle(range(2)), [1, 0])
