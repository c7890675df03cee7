"""Which ring works: users take turns, the event loop precedes them, and what means nothing costs its ring."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial

import numpy as np
import pytest
from mounting import wait_until
from worker_lab import entries, worker_lab

from kvfuse.usrbio.daemon import interpreter as module
from kvfuse.usrbio.daemon.interpreter import MUCH_SECONDS, Interpreter, Seat
from kvfuse.usrbio.daemon.penalty import BOUND, FREE, LAST_SECONDS, SHORT_TURN, Penalty
from kvfuse.usrbio.daemon.ring_thread import Broken


def in_thread(work: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def has_waiting(interpreter: Interpreter, count: int) -> bool:
    return sum(len(user.waiting) for user in interpreter._waiting) == count


def line_up(interpreter: Interpreter, names: str, order: list[str]) -> list[threading.Thread]:
    """A thread for each name, of the user with that name: it takes a turn, notes the name, and gives it back."""
    threads = []
    for number, name in enumerate(names):
        seat = Seat(interpreter.get_user(name))

        def work(name: str = name, seat: Seat = seat) -> None:
            interpreter.take_turn(seat)
            order.append(name)
            interpreter.give_turn(seat)

        threads.append(in_thread(work))
        wait_until(partial(has_waiting, interpreter, number + 1), "a thread to wait")
    return threads


def test_the_user_that_had_least_precedes_all_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "HALF_LIFE_SECONDS", 1e9)
    interpreter = Interpreter()
    users = {name: interpreter.get_user(name) for name in "abc"}
    users["a"].lately, users["b"].lately, users["c"].lately = 100.0, 50.0, 0.0
    first, order = Seat(users["a"]), list[str]()
    interpreter.take_turn(first)
    threads = line_up(interpreter, "aabbac", order)
    assert interpreter.is_wanted(first)
    interpreter.give_turn(first)
    for thread in threads:
        thread.join(10)
    assert "".join(order) == "cbbaaa"
    assert interpreter.token == [True]


def test_a_ring_works_on_while_nobody_precedes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TURN_SECONDS", 1e9)
    interpreter = Interpreter()
    seat = Seat(interpreter.get_user("a"))
    interpreter.take_turn(seat)
    assert not interpreter.is_wanted(seat)
    threads = line_up(interpreter, "a", [])
    assert not interpreter.is_wanted(seat), "another ring of the same user, and its turn is not over"
    interpreter.give_turn(seat)
    threads[0].join(10)


def test_a_busy_event_loop_precedes_those_that_had_much_and_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "STAND_BACK_SECONDS", 1.0)
    monkeypatch.setattr(module, "TURN_SECONDS", 100.0)
    monkeypatch.setattr(module, "HALF_LIFE_SECONDS", 1e9)
    interpreter = Interpreter()
    seat, light = Seat(interpreter.get_user("a")), Seat(interpreter.get_user("b"))
    seat.user.lately = 1e9
    interpreter.take_turn(seat)
    interpreter.note_loop_busy()
    assert interpreter.is_wanted(seat)
    lent = in_thread(lambda: interpreter.lend_turn(seat))
    wait_until(lambda: bool(interpreter.token), "the turn to be there")
    interpreter.take_turn(light)
    assert not interpreter.is_wanted(light)
    interpreter.give_turn(light)
    lent.join(10)  # however long the event loop is busy
    assert not lent.is_alive()
    assert not interpreter.is_wanted(seat), "it works for a while"
    assert seat.user.lately > MUCH_SECONDS


def test_others_work_during_a_copy_but_few_of_a_user_copy() -> None:
    """A user may make its copies as slow as it likes: others go on, however many of it copy."""
    interpreter = Interpreter()
    slow = interpreter.get_user("slow")
    copying = {Seat(slow): ExitStack() for _ in range(module.COPIES_MAX + 1)}
    for seat, copies in copying.items():
        interpreter.take_turn(seat)
        copies.enter_context(interpreter.copying(seat))
    other, last = Seat(interpreter.get_user("other")), Seat(slow)
    for _ in range(2):
        interpreter.take_turn(other)
        interpreter.give_turn(other)

    def work() -> None:
        interpreter.take_turn(last)
        interpreter.give_turn(last)

    def end(seat: Seat) -> Callable[[], None]:
        def run() -> None:
            copying[seat].close()
            interpreter.give_turn(seat)

        return run

    waits = in_thread(work)
    waits.join(0.05)
    assert waits.is_alive(), "as many of the user copy as may"
    interpreter.take_turn(other)
    interpreter.give_turn(other)
    for thread in [in_thread(end(seat)) for seat in copying] + [waits]:
        thread.join(10)
        assert not thread.is_alive()
    assert slow.copies == 0


def test_turns_are_never_two_and_never_lost(rng: random.Random) -> None:
    interpreter = Interpreter()
    inside, most = [0], [0]
    end = time.monotonic() + 0.5

    def work(seat: Seat, rng: random.Random) -> None:
        while time.monotonic() < end:
            interpreter.take_turn(seat)
            for _ in range(rng.randrange(5)):
                inside[0] += 1
                most[0] = max(most[0], inside[0])
                inside[0] -= 1
                if interpreter.is_wanted(seat):
                    interpreter.lend_turn(seat)
                elif rng.random() < 0.2:
                    with interpreter.copying(seat):
                        time.sleep(0)  # as a copy does, it lets go of the interpreter
            interpreter.give_turn(seat)

    threads = [
        threading.Thread(target=work, args=(Seat(interpreter.get_user(number % 3)), random.Random(rng.random())))
        for number in range(12)
    ]
    for thread in threads:
        thread.start()
    while time.monotonic() < end:
        interpreter.note_loop_busy()
        time.sleep(0.0005)  # the event loop works for a while
        interpreter.note_loop_idle()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    assert most == [1]
    assert interpreter.token == [True]
    assert not interpreter._waiting
    assert all(interpreter.get_user(number).copies == 0 for number in range(3))


# -- entries that mean nothing ----------------------------------------------------------------------


def test_a_client_that_is_wrong_now_and_then_pays_nothing(rng: random.Random) -> None:
    penalty = Penalty()
    for _ in range(10_000):
        penalty.judge(10, rng.randrange(6))
        assert not penalty.seconds
    assert not penalty.is_broken


def test_a_ring_of_bad_entries_rests_longer_and_longer_and_then_breaks() -> None:
    penalty = Penalty()
    penalty.judge(FREE, FREE)
    assert not penalty.seconds
    rests = []
    while not penalty.is_broken:
        count = penalty.entries_max(256)
        penalty.judge(count, count)
        rests.append(penalty.seconds)
    assert rests == sorted(rests)
    assert rests[-1] == LAST_SECONDS
    assert len(rests) > (BOUND - 2 * FREE) / SHORT_TURN
    assert sum(rests) > 30


def test_bells_that_ring_for_nothing_cost_rests_but_break_nothing() -> None:
    penalty = Penalty()
    for _ in range(2 * BOUND):
        penalty.count_idle_ring()
    assert penalty.seconds == LAST_SECONDS
    assert not penalty.is_broken


def test_a_ring_is_broken_by_malformed_entries(rng: random.Random, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvfuse.usrbio.daemon.penalty.BOUND", 300)
    with worker_lab(rng, sealed=True) as lab:
        good, bad = entries(64), entries(64, op=99)
        lab.submit(good)
        while lab.worker.step():
            pass
        assert [result for _, result in lab.results()].count(4096) == 64
        with pytest.raises(Broken, match="malformed"):
            for _ in range(10):
                lab.submit(bad)
                while lab.worker.step():
                    pass
                assert np.all(np.array(lab.results())[:, 1] == -22)
