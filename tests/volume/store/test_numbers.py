"""Numbers that are given once, also by daemons that can announce none."""

from __future__ import annotations

import pytest

from kvfuse.errors import EngineFull
from kvfuse.volume.store import schema
from kvfuse.volume.store.numbers import NumberRange


def test_a_daemon_that_can_announce_none_goes_on_with_those_of_the_former_one() -> None:
    word = memoryview(bytearray(8)).cast("q")
    first = NumberRange(schema.COUNTER_INODE, 100, word)
    (announced,) = map(schema.decode_u64, first.take().values())
    first.announced()
    given = [first.next() for _ in range(10)]
    for _ in range(3):
        following = NumberRange(schema.COUNTER_INODE, announced, word)
        assert following.take()
        following.withhold(EngineFull("full"))
        assert following.is_withheld
        given += [following.next() for _ in range(10)]
    assert given == list(range(100, 140))
    following.withhold(EngineFull("still full"))
    given += [following.next() for _ in range(announced - 140)]
    with pytest.raises(EngineFull, match="no number is left"):
        following.next()
    assert following.take()
    following.announced()
    assert following.next() == announced == len(given) + 100


def test_numbers_that_were_given_and_not_announced_are_not_given_again() -> None:
    word = memoryview(bytearray(8)).cast("q")
    word[0] = 150
    following = NumberRange(schema.COUNTER_INODE, 120, word)
    following.pass_over(149)
    following.withhold(EngineFull("full"))
    with pytest.raises(EngineFull):
        following.next()
    following.announced()
    assert following.next() == 150


def test_nobody_knows_what_a_daemon_of_another_version_gave() -> None:
    following = NumberRange(schema.COUNTER_INODE, 120, memoryview(bytearray(8)).cast("q"))
    following.withhold(EngineFull("full"))
    with pytest.raises(EngineFull):
        following.next()
