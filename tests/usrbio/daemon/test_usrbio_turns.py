"""When a ring's thread takes entries, and in which order it serves them."""

from __future__ import annotations

import errno
import random
from collections.abc import Iterator

import pytest
from worker_lab import FILE, Lab, entries, worker_lab

from kvfuse.usrbio.protocol.wire import Op, Priority


@pytest.fixture
def lab(rng: random.Random) -> Iterator[Lab]:
    with worker_lab(rng, sealed=True) as lab:
        yield lab


def test_high_comes_before_normal_before_low_and_low_does_not_starve(lab: Lab) -> None:
    kinds = {Priority.HIGH: 0, Priority.NORMAL: 1, Priority.LOW: 2}
    order = [Priority.LOW, Priority.NORMAL, Priority.HIGH] * 5
    done = lab.run(entries(15, priority=[int(kind) for kind in order]))
    assert [kinds[order[number]] for number, _ in done] == [0] * 5 + [1] * 5 + [2] * 5
    lab.submit(entries(1, priority=Priority.LOW, user_data=1000))
    finished = False
    for turn in range(20):
        lab.submit(entries(1, priority=Priority.HIGH, user_data=turn))
        lab.worker.step()
        finished = finished or any(number == 1000 for number, _ in lab.results())
    assert finished, "twenty turns of higher ones, and the low one still waits"


def test_nobody_starves_beside_two_others(lab: Lab) -> None:
    """Nor the one in the middle, where the lowest never ends either."""
    lab.submit(entries(1, priority=Priority.NORMAL, user_data=1000))
    finished = False
    for turn in range(20):
        for priority in (Priority.HIGH, Priority.LOW):
            lab.submit(entries(1, priority=priority, user_data=turn))
        lab.worker.step()
        finished = finished or any(number == 1000 for number, _ in lab.results())
    assert finished, "twenty turns of higher and lower ones, and the normal one still waits"


def test_no_more_is_taken_while_others_complete(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the event loop completes while the thread counts is counted once: as unread, or as under way."""
    lab.submit(entries(60, op=Op.FSYNC))
    while lab.worker.step():
        pass
    calls = lab.registered.calls
    lab.registered.files[FILE].writable = True
    whole = lab.worker._memory.header_is_whole

    def completes() -> bool:
        for call in calls[:30]:
            lab.worker.completions.complete(call, 0)
        return whole()

    monkeypatch.setattr(lab.worker._memory, "header_is_whole", completes)
    lab.submit(entries(64))
    while lab.worker.step():
        pass
    assert lab.client.sq.taken == 64, "of 64 places 30 are unread, 30 under way"
    assert len(lab.results()) == 30 + 4


def test_no_more_is_taken_than_completions_have_room_for(lab: Lab) -> None:
    lab.submit(entries(64))
    while lab.worker.step():
        pass
    lab.submit(entries(64))
    while lab.worker.step():
        pass
    assert lab.client.sq.taken == 64, "64 completions are unread: there is room for none"
    assert len(lab.results()) == 64
    while lab.worker.step():
        pass
    assert len(lab.results()) == 64
    assert not lab.registered.failures


def test_a_cancel_concerns_what_was_submitted_before_it(lab: Lab) -> None:
    """Not an entry behind it that has the same number, whatever their priorities."""
    for priority in Priority:
        rows = entries(4, priority=Priority.LOW, user_data=[7, 8, 7, 8])
        rows["op"][1], rows["offset"][1], rows["priority"][1] = Op.CANCEL, 7, priority
        assert lab.run(rows) == [(7, -errno.ECANCELED), (8, 0), (7, 4096), (8, 4096)]
        assert lab.run(rows[1:]) == [(8, -errno.ENOENT), (7, 4096), (8, 4096)]


def test_a_cancelled_entry_that_waits_is_never_served(lab: Lab) -> None:
    lab.submit(entries(3, priority=Priority.LOW))
    lab.submit(entries(1, op=Op.CANCEL, offset=1, priority=Priority.HIGH, user_data=9))
    while lab.worker.step():
        pass
    done = dict(lab.results())
    assert done == {0: 4096, 1: -errno.ECANCELED, 2: 4096, 9: 0}
    assert dict(lab.run(entries(1, op=Op.CANCEL, offset=1, user_data=9))) == {9: -errno.ENOENT}


def test_an_entry_whose_time_is_over_is_not_served(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    moments = iter([0.0] + [1.0] * 1000)
    monkeypatch.setattr("time.monotonic", lambda: next(moments))
    timeouts = [0, 500_000, 2_000_000] * 5
    done = lab.run(entries(15, timeout_us=timeouts))
    for number, result in done:
        assert result == (-errno.ETIMEDOUT if timeouts[number] == 500_000 else 4096)
