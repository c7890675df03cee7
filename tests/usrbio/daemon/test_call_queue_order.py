"""In which order the event loop does calls of rings that wait for it: the call queue alone, whose calls note their
turn."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, cast

import pytest
import trio
import trio.testing

from kvfuse.access.namespace_handle import Group, NamespaceHandle
from kvfuse.usrbio.daemon import call_queue as desks
from kvfuse.usrbio.daemon.call import Call, Entry, ServedRing
from kvfuse.usrbio.daemon.call_queue import CallQueue
from kvfuse.usrbio.protocol.wire import Op
from kvfuse.volume.measures.fair_line import PASSED_MAX, WaitKind
from kvfuse.volume.measures.measures import Measures

BLOCK = 64 << 10


class Lab:
    """A call queue, and what it did. ``done``: (ring, user_data), in order."""

    def __init__(self) -> None:
        self.call_queue = CallQueue()
        self.done: list[tuple[str, int]] = []

    def put(self, ring: str, ops: Sequence[int], namespace: NamespaceHandle, user: str = "user") -> None:
        rows = [Entry(op, 0, 0, 0, 0, 0, 0, 0, BLOCK, 0, number, 0, 0) for number, op in enumerate(ops)]
        calls = [Call(cast(ServedRing, ring), row, float("inf"), namespace=namespace, names=[b"name"]) for row in rows]
        self.call_queue.put(user, calls, self.do)

    def do(self, calls: list[Call]) -> None:
        self.done += [(cast(str, call.ring), call.entry.user_data) for call in calls]

    async def run(self) -> list[str]:
        """The rings, in the order of their calls."""
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self.call_queue.run)
                await trio.testing.wait_all_tasks_blocked()
                scope.cancel()
        return [ring for ring, _ in self.done]


def namespace(weight: float = 1.0) -> NamespaceHandle:
    measures = Measures()
    measures.weight = weight
    return NamespaceHandle(1, 0o644, Group(0), measures=measures)


@pytest.fixture
async def lab(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(desks, "PIECE", 1)
    return Lab()


async def test_a_read_does_not_wait_for_a_flood_of_writes_of_its_user(lab: Lab) -> None:
    flooded, other = namespace(), namespace()
    for ring in ("flood 1", "flood 2"):
        lab.put(ring, [Op.PUT] * 200, flooded)
    lab.put("reader", [Op.GET] * 4, other)
    order = await lab.run()
    assert [*filter("reader".__eq__, order)] == ["reader"] * 4
    assert order[:5].count("reader") == 4, "reads precede writes"
    assert len(order) == 404


async def test_writes_are_done_beside_endless_reads(lab: Lab) -> None:
    lab.put("writer", [Op.PUT] * 10, namespace())
    lab.put("reader", [Op.GET] * 200, namespace())
    order = await lab.run()
    places = [number for number, ring in enumerate(order) if ring == "writer"]
    passed = PASSED_MAX[WaitKind.WRITE]
    assert all(after - before == passed + 1 for before, after in pairwise(places))
    assert places[0] <= passed


async def test_prefetch_is_last_and_does_not_starve(lab: Lab) -> None:
    lab.put("prefetcher", [Op.PREFETCH] * 2, namespace())
    lab.put("writer", [Op.PUT] * 100, namespace())
    lab.put("reader", [Op.GET] * 100, namespace())
    order = await lab.run()
    first, second = (number for number, ring in enumerate(order) if ring == "prefetcher")
    assert PASSED_MAX[WaitKind.PREFETCH] <= first <= PASSED_MAX[WaitKind.PREFETCH] + 1
    assert second > 2 * PASSED_MAX[WaitKind.PREFETCH]


async def test_namespaces_share_by_weight(lab: Lab, rng: random.Random) -> None:
    heavy, light = rng.choice([2, 3, 5]), 1
    namespaces = {"heavy": namespace(heavy), "light": namespace(light)}
    for name, of in namespaces.items():
        for number in range(rng.randint(1, 4)):  # how many rings there are makes no difference
            lab.put(f"{name} {number}", [Op.PUT] * 400, of)
    shares = Counter(ring.split()[0] for ring in (await lab.run())[:300])
    assert shares["heavy"] / shares["light"] == pytest.approx(heavy, rel=0.1)


async def test_calls_of_a_ring_keep_their_order(lab: Lab, rng: random.Random) -> None:
    """Whatever they are, and of whichever namespaces: a CANCEL finds what was submitted before it."""
    ops = [Op.GET, Op.PUT, Op.PREFETCH, Op.EXISTS, Op.CANCEL, Op.DELETE]
    namespaces = [namespace(), namespace(5)]
    for ring in "abc":
        for _ in range(20):
            lab.put(ring, rng.choices(ops, k=rng.randint(1, 8)), rng.choice(namespaces))
    await lab.run()
    for ring in "abc":
        numbers = [number for other, number in lab.done if other == ring]
        assert sum(number == 0 for number in numbers) == 20
        assert all(after in (0, before + 1) for before, after in pairwise(numbers))


async def test_users_take_turns_whatever_their_namespaces_weigh(lab: Lab) -> None:
    lab.put("first", [Op.PUT] * 50, namespace(100), user="first")
    lab.put("second", [Op.PUT] * 50, namespace(0.01), user="second")
    order = await lab.run()
    assert order[:40].count("first") == 20


async def test_a_ring_that_ended_leaves_the_others(lab: Lab) -> None:
    of = namespace()
    for ring in "abc":
        lab.put(ring, [Op.PUT] * 5, of)
    assert len(list(lab.call_queue.list_calls(cast(ServedRing, "b")))) == 5
    lab.call_queue.drop({cast(ServedRing, "b"), cast(ServedRing, "unknown")})
    assert Counter(await lab.run()) == {"a": 5, "c": 5}
