"""Which rows come next: those with a reply, those that wait for a slot, and which leaves one."""

import pytest

from qerl_jax.environments.roles import DONE, OPEN
from qerl_jax.rollout.row import NO_SLOT, Row, State, next_rows


def row_in(state, number, **changes):
    row = Row(number, identity=number, group=0, prompt=[1], state=state)
    for name, value in changes.items():
        setattr(row, name, value)
    return row


def decoding(number, slot):
    return row_in(State.DECODING, number, cache_row=slot, limit=9)


def at_environment(number, slot, *, since=0.0):
    return row_in(State.AT_ENVIRONMENT, number, cache_row=slot, since=since)


def ready(number, slot=NO_SLOT):
    return row_in(State.READY, number, cache_row=slot, kept=[] if slot == NO_SLOT else None)


def numbers(coming):
    return [row.number for row in coming.evicted], [row.number for row in coming.resumed]


def test_rows_take_free_slots():
    live = [decoding(0, 0), decoding(1, 2)]
    assert next_rows(live, waiting=5, slots=4, now=0.0) == ([], [], 2)
    assert next_rows(live, waiting=1, slots=4, now=0.0) == ([], [], 1)
    assert next_rows(live, waiting=0, slots=4, now=0.0) == ([], [], 0)
    assert next_rows(live, waiting=5, slots=2, now=0.0) == ([], [], 0)


def test_rows_with_a_reply_come_before_rows_that_have_not_begun():
    live = [ready(7), decoding(0, 0), ready(4, slot=1), ready(2)]
    for slots, resumed, begun in ((2, [4], 0), (3, [4, 2], 0), (6, [4, 2, 7], 2)):
        coming = next_rows(live, waiting=3, slots=slots, now=0.0)
        assert (numbers(coming), coming.begun) == (([], resumed), begun)


@pytest.mark.parametrize(
    ("now", "waiting", "decodes", "evicted"),
    [
        (1.2, 3, True, []),
        (1.32, 3, True, [5]),
        (1.52, 3, True, [5, 1, 3]),
        (1.52, 1, True, [5]),
        (1.52, 0, True, []),
        (1.06, 3, False, [5]),
    ],
)
def test_rows_that_are_at_their_environment_for_long_leave(now, waiting, decodes, evicted):
    """The longest first, no more than others need; sooner where no row decodes."""
    live = [at_environment(3, 0, since=1.2), at_environment(1, 1, since=1.2)]
    live += [at_environment(5, 2, since=1.0), row_in(State.AT_ENVIRONMENT, 6, kept=[])]
    live += [decoding(0, 3)] if decodes else []
    coming = next_rows(live, waiting=waiting, slots=3 + decodes, now=now)
    assert (numbers(coming), coming.begun) == ((evicted, []), len(evicted))


def test_a_row_that_does_not_fit_on_the_host_keeps_its_slot():
    live = [at_environment(number, number) for number in range(4)]
    coming = next_rows(live, waiting=2, slots=4, now=1.0, fits=lambda row: row.number % 2)
    assert (numbers(coming), coming.begun) == (([1, 3], []), 2)
    coming = next_rows(live, waiting=2, slots=4, now=1.0, fits=lambda row: False)
    assert (numbers(coming), coming.begun) == (([], []), 0)


def test_a_row_that_ends_gives_up_its_slot_with_its_reason():
    row = decoding(0, 3)
    assert row.decodes
    row.end(DONE)
    assert (row.state, row.ending, row.cache_row, row.kept) == (State.ENDED, DONE, NO_SLOT, None)
    assert not row.decodes
    assert Row(1, identity=1, group=0, prompt=[1]).ending == OPEN
