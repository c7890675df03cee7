"""Gets that share questions: everybody's answer is newer than his call, and nobody suffers from another."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import trio
import trio.testing

from kvfuse.errors import EngineTimeout
from kvfuse.remote.records.api import Versioned
from kvfuse.remote.records.etcd.gets import GATHER_SECONDS, UNDER_WAY, SharedGets

KEYS_MAX = 20


class Store:
    """Every key's version is when the question about it was sent, in milliseconds; an answer takes ``seconds``."""

    def __init__(self, seconds: float = 0.01) -> None:
        self.seconds = seconds
        self.questions: list[list[bytes]] = []
        self.gets = SharedGets(self.ask, KEYS_MAX)
        self.error: EngineTimeout | None = None

    async def ask(self, keys: Sequence[bytes]) -> list[Versioned | None]:
        assert 0 < len(keys) <= KEYS_MAX
        assert len(set(keys)) == len(keys)
        self.questions.append(list(keys))
        rows = [Versioned(key, now()) if key != b"absent" else None for key in keys]
        error = self.error
        await trio.sleep(self.seconds)
        if error is not None:
            raise error
        return rows


def now() -> int:
    return round(trio.current_time() * 1000)


async def test_what_is_asked_together_goes_together(rng: random.Random, autojump_clock: trio.testing.MockClock) -> None:
    store = Store()
    most_waited = 0.0

    async def client(number: int) -> None:
        nonlocal most_waited
        own = random.Random(number)
        for _ in range(50):
            keys = [b"%d" % own.randrange(30) for _ in range(own.randrange(1, 4))] + [b"absent"]
            called, called_at = now(), trio.current_time()
            rows = await store.gets.get(keys)
            most_waited = max(most_waited, trio.current_time() - called_at)
            assert [row.value if row else b"absent" for row in rows] == keys
            assert all(row.version >= called for row in rows if row is not None)
            await trio.sleep(own.random() * 0.01)

    async with trio.open_nursery() as nursery:
        for _ in range(16):
            nursery.start_soon(client, rng.randrange(1 << 30))
    assert len(store.questions) < 16 * 50 / 4
    assert most_waited < store.seconds + 2 * GATHER_SECONDS


async def test_one_who_is_alone_does_not_wait(autojump_clock: trio.testing.MockClock) -> None:
    store = Store()
    for _ in range(3):
        began = trio.current_time()
        await store.gets.get([b"a"])
        assert trio.current_time() - began == pytest.approx(store.seconds)
    assert store.questions == [[b"a"]] * 3


async def test_whoever_asks_for_others_may_be_cancelled(autojump_clock: trio.testing.MockClock) -> None:
    """Before his question is sent, and while it is answered."""
    for delay in (GATHER_SECONDS / 2, GATHER_SECONDS * 1.5):
        store = Store(seconds=1.0)
        answered: list[bytes] = []

        async def client(key: bytes, store: Store = store, answered: list[bytes] = answered) -> None:
            (row,) = await store.gets.get([key])
            assert row is not None
            answered.append(row.value)

        async with trio.open_nursery() as nursery:
            for number in range(UNDER_WAY):
                nursery.start_soon(client, b"first-%d" % number)
            await trio.testing.wait_all_tasks_blocked()
            leading = trio.CancelScope()

            async def lead(leading: trio.CancelScope = leading, store: Store = store) -> None:
                with leading:
                    await store.gets.get([b"leader"])

            nursery.start_soon(lead)
            await trio.testing.wait_all_tasks_blocked()
            for number in range(3):
                nursery.start_soon(client, b"follower-%d" % number)
            await trio.sleep(delay)
            leading.cancel()
        assert leading.cancelled_caught
        assert len(answered) == UNDER_WAY + 3


async def test_an_error_is_told_to_those_who_asked_together(autojump_clock: trio.testing.MockClock) -> None:
    store = Store()
    store.error = EngineTimeout("no member answers")
    errors: list[EngineTimeout] = []

    async def client() -> None:
        with pytest.raises(EngineTimeout, match="no member answers") as caught:
            await store.gets.get([b"a"])
        errors.append(caught.value)

    async with trio.open_nursery() as nursery:
        for _ in range(10):
            nursery.start_soon(client)
    assert len({id(error) for error in errors}) == 10, "each has a traceback of his own"
    store.error = None
    assert await store.gets.get([b"absent"]) == [None]


async def test_a_stalled_question_holds_up_no_other(autojump_clock: trio.testing.MockClock) -> None:
    store = Store(seconds=1000.0)
    async with trio.open_nursery() as nursery:
        for number in range(UNDER_WAY):
            nursery.start_soon(store.gets.get, [b"%d" % number])
        await trio.testing.wait_all_tasks_blocked()
        store.seconds = 0.01
        for _ in range(5):
            with trio.fail_after(0.011 + GATHER_SECONDS):
                await store.gets.get([b"quick"])
        nursery.cancel_scope.cancel()


async def test_no_question_is_too_large(autojump_clock: trio.testing.MockClock) -> None:
    store = Store()
    async with trio.open_nursery() as nursery:
        for number in range(30):
            nursery.start_soon(store.gets.get, [b"%d-%d" % (number, index) for index in range(KEYS_MAX - number % 5)])
    assert sum(map(len, store.questions)) == sum(KEYS_MAX - number % 5 for number in range(30))
