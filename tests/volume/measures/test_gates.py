"""Which token a namespace asks for, and whether one is it."""

from __future__ import annotations

from kvfuse.volume.measures.gates import ENDED, Gate, Gates, fits, is_lock, is_token, make_lock

TOKEN = "correct-horse-battery-staple"


def test_a_lock_knows_its_token_alone() -> None:
    lock = make_lock(TOKEN)
    assert is_lock(lock)
    assert fits(lock, TOKEN)
    assert not any(fits(lock, other) for other in (TOKEN[:-1], TOKEN + "e", TOKEN.upper(), lock))
    assert make_lock(TOKEN) != lock, "each has a salt of its own"
    assert TOKEN not in lock
    assert not any(
        map(is_lock, ("", TOKEN, lock[:-1], lock + "0", "b2" + lock[2:], lock.replace(".", "-"), lock.upper()))
    )


def test_what_may_be_a_token() -> None:
    assert is_token("x" * 16)
    assert is_token("x" * 256)
    assert not any(map(is_token, ("", "x" * 15, "x" * 257, "with a space in it", "tab\tin-the-middle-of", "ü" * 20)))


def test_the_nearest_token_above_holds() -> None:
    gates = Gates()
    one, two = make_lock(TOKEN), make_lock(TOKEN)
    for number, above, lock in ((0, 0, ""), (5, 0, one), (6, 5, ""), (7, 6, two), (8, 7, ""), (9, 0, "")):
        gates.put(number, above, lock)
    assert gates.all == {5: Gate(5, one), 6: Gate(5, one), 7: Gate(7, two), 8: Gate(7, two)}
    gates.put(7, None, "")
    assert gates.all[8] == Gate(5, one)
    gates.remove(5)
    assert gates.all == {}


def test_damaged_records_that_lead_in_a_circle_end_somewhere() -> None:
    gates = Gates()
    gates.put(5, 6, "")
    gates.put(6, 5, "")
    gates.put(7, 0, make_lock(TOKEN))
    assert gates.all.keys() == {7}


def test_the_epoch_grows_when_others_are_let_in() -> None:
    gates = Gates()
    gates.put(5, 0, "")
    assert gates.epoch == 0, "no namespace has a token"
    gates.put(5, None, make_lock(TOKEN))
    gates.put(6, 0, "")
    assert gates.epoch == 1
    gates.put(5, None, "")
    assert gates.epoch == 2
    gates.end()
    assert gates.epoch == ENDED
