"""Fields of messages: the compiled way and its twin find the same, whatever the bytes are."""

from __future__ import annotations

import random

import pytest

from kvfuse.native import messagefields
from kvfuse.native.messagefields import Fields, NoMessage, fields, python_fields

WAYS = [python_fields] + [fields] * (messagefields.native is not None)


def found_by(way: object, data: bytes) -> Fields | None:
    try:
        return way(data)
    except NoMessage:
        return None


@pytest.mark.parametrize("way", WAYS)
def test_fields_are_found_in_their_order(way: object) -> None:
    nested = b"\x0a\x02hi"
    data = (
        b"\x08\x00\x18" + b"\xff" * 9 + b"\x01" + b"\x12\x04" + nested + b"\x12\x00" + b"\x5a\x01x" + b"\x82\x04\x01y"
    )
    data += b"\x21" + bytes(8) + b"\x2d" + bytes(4)
    assert found_by(way, data) == [(1, 0), (3, (1 << 64) - 1), (2, nested), (2, b""), (11, b"x"), (64, b"y")]
    assert found_by(way, b"") == []


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "data", [b"\x08", b"\x80", b"\x12\x02a", b"\x0b", b"\x21" + bytes(7), b"\x08" + b"\xff" * 10 + b"\1"]
)
def test_what_is_no_message_is_refused(way: object, data: bytes) -> None:
    assert found_by(way, data) is None


def test_both_find_the_same_in_any_bytes(rng: random.Random) -> None:
    kinds = set()
    for _ in range(20_000):
        data = bytes(rng.choice((0, 1, 2, 8, 10, 18, 26, 33, 45, 127, 128, 255)) for _ in range(rng.randrange(14)))
        expected = found_by(python_fields, data)
        assert all(found_by(way, data) == expected for way in WAYS)
        kinds.add(expected is None)
    assert kinds == {True, False}
