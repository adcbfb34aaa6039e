"""Which group is made and trained next: whole groups, none too old, each once, and never a wait without end."""

from __future__ import annotations

import json
import queue
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from scripts.bench_schedule import PlainChannel
from services.trainer.groups import Rollout, Row, ScoredGroup
from services.trainer.resume import Cursor
from services.trainer.scheduler import Dropped, GroupScheduler, Limits, RolloutEnded, StepAccount, Ticket

SIZE = 2
"""Rollouts of a group here."""


def limits(groups_per_step: int = 1, max_staleness: int = 4, max_open_groups: int | None = None, **more: int) -> Limits:
    open_groups = max_open_groups or (max_staleness + 1) * groups_per_step
    return Limits(groups_per_step, max_staleness, open_groups, **{"min_group_size": 2, "max_group_tries": 3, **more})


def rollout(version: float, advantage: float = 1.0, rows: int = 1) -> Rollout:
    row = Row([5, 6, 7], [0, 1, 1], [0.0, -1.0, -1.0], [0, int(version), int(version)])
    return Rollout([row] * rows, reward=advantage, advantage=advantage, version=version)


def scored(ticket: Ticket, versions: Sequence[float], *, silent: bool = False, rows: int = 1) -> ScoredGroup:
    rollouts = [rollout(version, 0.0 if silent else float(index) - 0.5, rows) for index, version in enumerate(versions)]
    return ScoredGroup(ticket.number, ticket.position, rollouts)


class Desk:
    """A scheduler and what surrounds it: the worker's hands, and the trainer's."""

    def __init__(self, limits: Limits, cursor: Cursor | None = None, pending: Iterable[ScoredGroup] = ()) -> None:
        self.channel = PlainChannel()
        self.scheduler = GroupScheduler(self.channel, limits, cursor or Cursor(), pending)

    def tickets(self, version: int = 1) -> list[Ticket]:
        """Those that are written now."""
        self.scheduler.admit(version)
        return [self.channel.tickets.get_nowait() for _ in range(self.channel.tickets.qsize())]

    def send(self, *messages: ScoredGroup | RolloutEnded) -> None:
        for message in messages:
            self.channel.messages.put(message)
            assert self.scheduler.receive(0)

    def take(self, version: int) -> list[int]:
        return [group.position for group in self.scheduler.take(version)]

    def step(self, version: int) -> StepAccount:
        """One that must be possible."""
        assert self.scheduler.take(version)
        return self.scheduler.step_ended()

    def resumed(self, limits: Limits, versions: int = 0) -> Desk:
        cursor, pending = self.scheduler.position()
        return Desk(
            limits, through_json(cursor), [group.counted_on(versions) for group in groups_through_json(pending)]
        )


def through_json(cursor: Cursor) -> Cursor:
    """As ``resume`` writes and reads it."""
    fields = json.loads(json.dumps(asdict(cursor)))
    return Cursor(fields["next"], tuple(fields["again"]), tuple(fields["dropped"]))


def groups_through_json(groups: Iterable[ScoredGroup]) -> list[ScoredGroup]:
    return [ScoredGroup.from_json(value) for value in json.loads(json.dumps([asdict(group) for group in groups]))]


def positions(tickets: Iterable[Ticket]) -> list[int]:
    return [ticket.position for ticket in tickets]


# --- Admission ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_open_groups", [1, 3, 7])
def test_tickets_are_written_for_as_many_groups_as_may_be_open_and_in_order(max_open_groups: int) -> None:
    desk = Desk(limits(max_open_groups=max_open_groups))
    tickets = desk.tickets()
    assert [(ticket.number, ticket.position) for ticket in tickets] == [(i, i) for i in range(max_open_groups)]
    assert desk.tickets() == []


def test_a_scored_group_makes_room_when_it_is_trained_and_not_before() -> None:
    desk = Desk(limits(max_open_groups=2))
    first, _ = desk.tickets()
    desk.send(scored(first, [1, 1]))
    assert desk.tickets() == []
    assert desk.take(1) == [0]
    assert desk.tickets() == []  # the step is under way
    desk.scheduler.step_ended()
    assert positions(desk.tickets()) == [2]


def test_a_walk_goes_on_with_what_was_not_finished_and_then_behind_the_cursor() -> None:
    desk = Desk(limits(max_open_groups=4), Cursor(next=7, again=(3, 5)))
    assert positions(desk.tickets()) == [3, 5, 7, 8]


# --- Whole groups -------------------------------------------------------------------------------------------------


def test_a_step_waits_for_its_number_of_groups_and_has_all_their_rollouts() -> None:
    desk = Desk(limits(groups_per_step=2, max_staleness=0))
    one, two = desk.tickets()
    desk.send(scored(two, [1, 1, 1], rows=3))
    assert desk.take(1) == []
    desk.send(scored(one, [1, 1]))
    groups = desk.scheduler.take(1)
    assert sorted((group.position, len(group.rollouts)) for group in groups) == [(0, 2), (1, 3)]
    account = desk.scheduler.step_ended()
    assert (sorted(account.groups), account.rollouts, account.rows, account.tokens) == ([0, 1], 5, 11, 33)


def test_the_last_step_needs_no_group_beyond_its_own() -> None:
    desk = Desk(limits(max_open_groups=1))
    desk.send(scored(desk.tickets()[0], [1, 1]))
    assert desk.take(1) == [0]


def test_the_oldest_group_is_trained_first_whenever_it_came() -> None:
    desk = Desk(limits())
    tickets = desk.tickets()[:3]
    for ticket, version in zip(tickets, (3, 1, 2), strict=True):
        desk.send(scored(ticket, [version, version]))
    for number in range(3, 5):
        desk.send(scored(Ticket(number, number), [4, 4]))
    assert [desk.step(4 + step).groups for step in range(3)] == [[1], [2], [0]]


# --- A group with too few scored rollouts ---------------------------------------------------------------------------


def test_a_group_with_too_few_scored_rollouts_is_made_again_before_fresh_ones_and_then_given_up() -> None:
    desk = Desk(limits(max_open_groups=2, min_group_size=2, max_group_tries=3))
    bad, good = desk.tickets()
    for _ in range(2):
        desk.send(scored(bad, [1]))
        (bad,) = desk.tickets()
        assert bad.position == 0
    desk.send(scored(bad, []))
    assert positions(desk.tickets()) == [2]
    desk.send(scored(good, [1, 1]))
    account = desk.step(1)
    assert (account.groups, account.dropped) == ([1], [0])
    assert desk.scheduler.position()[0] == Cursor(3, (2,))


def test_a_group_just_large_enough_is_trained() -> None:
    desk = Desk(limits(max_open_groups=1, min_group_size=2))
    desk.send(scored(desk.tickets()[0], [1, 1]))
    assert desk.take(1) == [0]


# --- Too old --------------------------------------------------------------------------------------------------------


def test_a_group_is_as_old_as_its_oldest_rollout_and_one_at_the_limit_is_trained() -> None:
    desk = Desk(limits(max_staleness=2, max_open_groups=1))
    desk.send(scored(desk.tickets()[0], [9, 3, 9]))
    assert desk.take(5) == [0]


def test_a_group_beyond_the_limit_is_dropped_whole_reported_and_made_again_before_fresh_ones() -> None:
    desk = Desk(limits(max_staleness=2, max_open_groups=2))
    old, young = desk.tickets()
    desk.send(scored(old, [2.75, 9], rows=2), scored(young, [4, 4]))
    assert desk.take(5) == [1]
    account = desk.scheduler.step_ended()
    assert account.stale == [Dropped(position=0, age=2.25, tokens=12, rollouts=2)]
    assert account.groups == [1]
    again, fresh = desk.tickets(6)
    assert (again.position, fresh.position) == (0, 2)
    desk.send(scored(again, [6, 6]), scored(fresh, [6, 6]))
    assert desk.step(6).groups == [0]
    assert desk.scheduler.take(7)[0].position == 2


def test_a_group_that_was_dropped_is_reported_once() -> None:
    desk = Desk(limits(max_staleness=0, max_open_groups=1))
    desk.send(scored(desk.tickets()[0], [1, 1]))
    assert desk.take(9) == []
    desk.send(scored(desk.tickets(9)[0], [9, 9]))
    assert len(desk.step(9).stale) == 1
    desk.send(scored(desk.tickets(10)[0], [10, 10]))
    assert desk.step(10).stale == []


# --- Silent groups ----------------------------------------------------------------------------------------------------


def test_silent_groups_take_their_place_in_a_step_by_default_and_are_counted() -> None:
    desk = Desk(limits(groups_per_step=2, max_staleness=0))
    one, two = desk.tickets()
    desk.send(scored(one, [1, 1], silent=True), scored(two, [1, 1]))
    account = desk.step(1)
    assert (sorted(account.groups), account.silent, account.refilled) == ([0, 1], 1, [])


def test_silent_groups_are_replaced_up_to_the_bound_of_a_step_and_the_next_one_is_trained() -> None:
    desk = Desk(limits(max_open_groups=1, refill_silent_groups=2))
    for position in (0, 1):
        desk.send(scored(desk.tickets()[0], [1, 1], silent=True))
        assert desk.take(1) == []
        _, pending = desk.scheduler.position()
        assert [group.position for group in pending] == list(range(position + 1)), "not settled before the step"
    desk.send(scored(desk.tickets()[0], [1, 1], silent=True))
    account = desk.step(1)
    assert (account.groups, account.refilled, account.silent) == ([2], [0, 1], 1)
    assert desk.scheduler.position() == (Cursor(3), [])


def test_the_bound_of_replaced_groups_counts_anew_in_each_step() -> None:
    desk = Desk(limits(max_open_groups=1, refill_silent_groups=1))
    for step in range(3):
        desk.send(scored(desk.tickets()[0], [step, step], silent=True))
        assert desk.take(step) == []
        desk.send(scored(desk.tickets()[0], [step, step]))
        assert desk.step(step).refilled == [2 * step]


# --- When a step waits ------------------------------------------------------------------------------------------------


def test_a_step_waits_for_a_running_group_that_it_would_make_too_old() -> None:
    desk = Desk(limits(max_staleness=1, max_open_groups=2))
    slow, quick = desk.tickets(version=1)
    desk.send(RolloutEnded(slow.number, 1.0), scored(quick, [2, 2]))
    assert desk.take(2) == []  # slow may be trained at version 2 at the latest
    desk.send(scored(slow, [1, 2]))
    assert desk.take(2) == [slow.position]


def test_a_step_does_not_wait_for_a_group_that_has_time_left() -> None:
    desk = Desk(limits(max_staleness=4))
    slow, quick, *_ = desk.tickets(version=1)
    desk.send(RolloutEnded(slow.number, 1.0), scored(quick, [1, 1]))
    assert desk.take(1) == [quick.position]


def test_a_step_waits_where_two_running_groups_would_need_the_same_turn() -> None:
    desk = Desk(limits(max_staleness=2))
    one, two, quick = desk.tickets(version=1)
    desk.send(RolloutEnded(one.number, 1.0), RolloutEnded(two.number, 1.0), scored(quick, [1, 1]))
    assert desk.step(1).groups == [quick.position]
    (fresh,) = desk.tickets(version=2)
    desk.send(scored(fresh, [2, 2]))
    assert desk.take(2) == []  # both may be trained at version 3 at the latest, so one of them has to be now
    desk.send(scored(two, [1, 2]))
    assert desk.take(2) == [two.position]


def test_with_the_default_number_of_open_groups_nothing_gets_too_old_however_long_one_takes() -> None:
    """The slowest group of all ends last; steps go on until it would be lost, and then wait."""
    desk = Desk(limits(max_staleness=4))
    slow, *others = desk.tickets(1)
    desk.send(RolloutEnded(slow.number, 1.0))
    version, steps = 1, 0
    while others:
        ticket = others.pop(0)
        desk.send(scored(ticket, [version, version]))
        if not desk.take(version):
            break
        assert desk.scheduler.step_ended().stale == []
        version, steps = version + 1, steps + 1
        others += desk.tickets(version)
    assert steps == 4
    desk.send(scored(slow, [1, version]))
    account = desk.step(version)
    assert (account.groups, account.stale) == ([slow.position], [])


# --- A checkpoint, and the end of the worker --------------------------------------------------------------------------


def test_a_checkpoint_holds_what_is_scored_and_names_what_is_made_again() -> None:
    desk = Desk(limits(max_open_groups=4))
    zero, one, two, three = desk.tickets()
    desk.send(scored(two, [1, 1]), scored(zero, [1, 1]), scored(three, [1, 1]))
    assert desk.step(1).groups == [2]
    cursor, pending = desk.scheduler.position()
    assert cursor == Cursor(4, (one.position,))
    assert sorted(group.position for group in pending) == [0, 3]


def test_a_step_that_was_not_finished_is_trained_again() -> None:
    desk = Desk(limits(max_open_groups=1))
    desk.send(scored(desk.tickets()[0], [1, 1]))
    assert desk.take(1) == [0]
    after = desk.resumed(limits(max_open_groups=1))
    assert after.take(1) == [0]


def test_a_checkpoint_takes_what_lies_in_the_queue() -> None:
    desk = Desk(limits(max_open_groups=2))
    ticket, _ = desk.tickets()
    desk.channel.messages.put(scored(ticket, [1, 1]))
    cursor, pending = desk.scheduler.position()
    assert (cursor, [group.position for group in pending]) == (Cursor(2, (1,)), [0])


def test_what_comes_out_of_a_checkpoint_is_what_went_in() -> None:
    group = scored(Ticket(3, 17), [1.5, 2.25], rows=2)
    assert groups_through_json([group]) == [group]


def test_pending_groups_are_as_old_after_a_resume_as_before() -> None:
    desk = Desk(limits(max_staleness=2, max_open_groups=2))
    old, young = desk.tickets()
    desk.send(scored(old, [1, 1]), scored(young, [3, 3]))
    after = desk.resumed(limits(max_staleness=2, max_open_groups=2), versions=10)
    assert after.take(14) == [young.position]
    assert [dropped.age for dropped in after.scheduler.step_ended().stale] == [3.0]


def test_a_group_that_was_given_up_just_before_a_checkpoint_is_named_after_the_resume() -> None:
    desk = Desk(limits(max_open_groups=2, max_group_tries=1))
    bad, good = desk.tickets()
    desk.send(scored(bad, []), scored(good, [1, 1]))
    after = desk.resumed(limits(max_open_groups=2))
    account = after.step(1)
    assert (account.groups, account.dropped) == ([1], [0])


def test_groups_of_a_worker_that_is_gone_are_made_again() -> None:
    desk = Desk(limits(max_open_groups=3))
    ticket, *_ = desk.tickets()
    desk.channel.messages.put(scored(ticket, [1, 1]))
    desk.scheduler.worker_ended(whole=True)
    cursor, pending = desk.scheduler.position()
    assert (cursor, [group.position for group in pending]) == (Cursor(3, (1, 2)), [0])
    desk.scheduler.admit(1)
    assert desk.channel.tickets.empty()


def test_what_a_killed_worker_left_is_not_read() -> None:
    desk = Desk(limits(max_open_groups=2))
    ticket, _ = desk.tickets()
    desk.channel.messages.put(scored(ticket, [1, 1]))
    desk.scheduler.worker_ended(whole=False)
    assert desk.scheduler.position() == (Cursor(2, (0, 1)), [])


def test_a_worker_that_ends_by_itself_is_drained_and_one_that_does_not_is_given_up_in_time() -> None:
    desk = Desk(limits(max_open_groups=2))
    ticket, _ = desk.tickets()
    desk.channel.messages.put(scored(ticket, [1, 1]))
    assert desk.scheduler.drain(lambda: desk.channel.qsize() > 0, timeout_s=60)
    assert not desk.scheduler.drain(lambda: True, timeout_s=1)
    assert [group.position for group in desk.scheduler.position()[1]] == [0]


def test_a_worker_that_goes_on_filling_the_queue_does_not_keep_a_checkpoint_waiting() -> None:
    class Endless(PlainChannel):
        """FAKE channel: for each group that is read, another one is there."""

        def get(self, timeout: float | None = None) -> ScoredGroup | RolloutEnded:
            message = super().get(timeout)
            self.messages.put(RolloutEnded(0, 1.0))
            return message

    channel = Endless()
    scheduler = GroupScheduler(channel, limits(max_open_groups=1), Cursor())
    scheduler.admit(1)
    channel.messages.put(scored(Ticket(0, 0), [1, 1]))
    assert scheduler.position()[0] == Cursor(1)


def test_news_of_a_rollout_whose_group_is_settled_changes_nothing() -> None:
    desk = Desk(limits(max_open_groups=1))
    (ticket,) = desk.tickets()
    desk.send(scored(ticket, [1, 1]), RolloutEnded(ticket.number, 1.0))
    assert desk.take(1) == [0]


def test_a_group_for_which_there_was_no_ticket_is_an_error() -> None:
    desk = Desk(limits())
    with pytest.raises(KeyError):
        desk.send(scored(Ticket(99, 99), [1, 1]))


def test_an_empty_queue_says_so() -> None:
    assert not Desk(limits()).scheduler.receive(0)
    with pytest.raises(queue.Empty):
        PlainChannel().get()


# --- Any order of events ----------------------------------------------------------------------------------------------


@dataclass
class Running:
    """A group in the worker's hands."""

    ticket: Ticket
    version: int
    ended: list[float]


class AnyOrder(RuleBasedStateMachine):
    """Rollouts end in any order and at any age, groups fail, the trainer dies and goes on; what must hold, holds."""

    @initialize(
        groups_per_step=st.integers(1, 3),
        max_staleness=st.integers(0, 4),
        more_open=st.integers(0, 12),
        max_group_tries=st.integers(1, 3),
        refill_silent_groups=st.integers(0, 2),
    )
    def start(
        self, groups_per_step: int, max_staleness: int, more_open: int, max_group_tries: int, refill_silent_groups: int
    ) -> None:
        self.limits = Limits(
            groups_per_step, max_staleness, groups_per_step + more_open, min_group_size=SIZE,
            max_group_tries=max_group_tries, refill_silent_groups=refill_silent_groups,
        )  # fmt: skip
        self.desk = Desk(self.limits)
        self.version = 1
        self.running: list[Running] = []
        self.settled: list[int] = []
        """Positions that were trained, given up, or replaced for being silent."""
        self.training = False
        self.admit()

    # --- The worker

    def admit(self) -> None:
        self.running += [Running(ticket, self.version, []) for ticket in self.desk.tickets(self.version)]

    def pick(self, data: st.DataObject) -> Running:
        return data.draw(st.sampled_from(self.running))

    def age(self, data: st.DataObject, running: Running) -> float:
        """Of a rollout that ends now: its calls were made at any time since its ticket."""
        share = data.draw(st.sampled_from([0.0, 0.3, 0.5, 1.0]))
        return running.version + share * (self.version - running.version)

    @precondition(lambda self: any(len(running.ended) < SIZE for running in self.running))
    @rule(data=st.data())
    def a_rollout_ends(self, data: st.DataObject) -> None:
        running = data.draw(st.sampled_from([running for running in self.running if len(running.ended) < SIZE]))
        running.ended.append(self.age(data, running))
        self.desk.send(RolloutEnded(running.ticket.number, running.ended[-1]))

    @precondition(lambda self: self.running)
    @rule(data=st.data(), silent=st.booleans())
    def a_group_is_scored(self, data: st.DataObject, silent: bool) -> None:
        running = self.pick(data)
        self.running.remove(running)
        missing = [self.age(data, running) for _ in range(SIZE - len(running.ended))]
        self.desk.send(scored(running.ticket, [*running.ended, *missing], silent=silent))

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def a_group_fails(self, data: st.DataObject) -> None:
        running = self.pick(data)
        self.running.remove(running)
        self.desk.send(scored(running.ticket, running.ended[: SIZE - 1]))

    # --- The trainer

    @precondition(lambda self: not self.training)
    @rule()
    def asks_for_a_step(self) -> None:
        groups = self.desk.scheduler.take(self.version)
        assert len(groups) in (0, self.limits.groups_per_step)
        for group in groups:
            assert len(group.rollouts) == SIZE
            assert all(self.version - each.version <= self.limits.max_staleness for each in group.rollouts)
        self.training = bool(groups)
        self.admit()

    @precondition(lambda self: self.training)
    @rule()
    def ends_the_step(self) -> None:
        account = self.desk.scheduler.step_ended()
        assert len(account.groups) == self.limits.groups_per_step
        assert len(account.refilled) <= self.limits.refill_silent_groups
        self.settled += [*account.groups, *account.refilled, *account.dropped]
        assert len(set(self.settled)) == len(self.settled), "trained twice"
        self.training = False
        self.version += 1
        self.admit()

    @rule(later=st.integers(0, 3))
    def dies_and_goes_on(self, later: int) -> None:
        """From what a checkpoint of this very moment says."""
        self.desk = self.desk.resumed(self.limits, versions=later)
        self.version += later
        self.running, self.training = [], False
        self.admit()

    # --- What must hold

    @invariant()
    def no_more_groups_are_open_than_may_be(self) -> None:
        _, pending = self.desk.scheduler.position()
        replaced = len(pending) - self.limits.max_open_groups + len(self.running)
        # A replaced group waits for the step that settles it. A resume gives all of them back at once.
        assert replaced <= self.limits.refill_silent_groups

    @invariant()
    def each_position_is_somewhere_and_nowhere_twice(self) -> None:
        cursor, pending = self.desk.scheduler.position()
        found = [*self.settled, *cursor.dropped, *cursor.again, *(group.position for group in pending)]
        assert sorted(found) == list(range(cursor.next))

    @invariant()
    def a_step_is_possible_once_nothing_runs(self) -> None:
        """On a copy: whatever the state, a worker that ends all its groups now makes a step possible, without luck."""
        desk = self.desk.resumed(self.limits)
        running = desk.tickets(self.version)
        for _ in range(3 + self.limits.refill_silent_groups):
            desk.send(*(scored(ticket, [self.version] * SIZE) for ticket in running))
            if desk.take(self.version):
                return
            running = desk.tickets(self.version)
        raise AssertionError("the step is held for ever")

    def teardown(self) -> None:
        if not hasattr(self, "desk"):
            return
        for running in self.running:
            self.desk.send(scored(running.ticket, [self.version] * SIZE))
        self.running = []
        if not self.training:
            ready = len(self.desk.scheduler.position()[1])
            groups = self.desk.scheduler.take(self.version)
            stale = [group for group in self.desk.scheduler._stale]
            enough = ready - len(stale) - self.limits.refill_silent_groups >= self.limits.groups_per_step
            assert groups or not enough, "held although nothing runs"


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
