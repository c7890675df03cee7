"""A cache of chains as plainly as it can be said, to compare policies with: a dict, and a heap."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from itertools import takewhile
from typing import NamedTuple

from kvfuse_bench.traffic import Request


class Order(NamedTuple):
    """The smallest goes first."""

    due: float
    followed: bool
    request: int
    depth_from_leaf: int


class Reference:
    """Stores what ``admits`` says of (follows, seen, depth, mean age of victims), evicts by ``Order``."""

    def __init__(self, capacity: int, bonus: float, admits: Callable[[bool, bool, int, float], bool]) -> None:
        self.capacity = capacity
        self.bonus = bonus
        self.admits = admits
        self.order: dict[int, Order] = {}
        self.heap: list[tuple[Order, int]] = []
        """of all orders that blocks ever had"""
        self.touched: dict[int, float] = {}
        self.seen: set[int] = set()
        self.age = float("inf")
        self.count = 0
        self.written = 0

    def ask(self, now: float, blocks: tuple[int, ...]) -> int:
        """Hits of one request."""
        hits = sum(1 for _ in takewhile(self.order.__contains__, blocks))
        known = sum(1 for _ in takewhile(self.seen.__contains__, blocks))
        follows = known > 1
        absent = [block for block in blocks if block not in self.order]
        has_room = len(self.order) < self.capacity
        new = {
            block
            for depth, block in enumerate(blocks)
            if block in absent and (has_room or self.admits(follows, block in self.seen, depth, self.age))
        }
        stays = [block for block in blocks if block not in absent]
        self._touch(stays, blocks, now, follows)
        self._evict(len(self.order) + len(new) - self.capacity, now)
        self._touch(new, blocks, now, follows)
        self.written += len(new)
        self.seen.update(blocks)
        self.count += 1
        return hits

    def _touch(self, chosen: Iterable[int], blocks: tuple[int, ...], now: float, follows: bool) -> None:
        due = now + self.bonus if follows else now
        followed = follows and self.bonus > 0
        for block in chosen:
            order = Order(due, followed, self.count, -blocks.index(block))
            before = self.order.get(block, order)
            if before.due <= now or follows:
                self.order[block] = order
                heapq.heappush(self.heap, (order, block))
            self.touched[block] = now

    def _evict(self, excess: int, now: float) -> None:
        while excess > 0:
            order, block = heapq.heappop(self.heap)
            if self.order.get(block) != order:
                continue
            excess -= 1
            del self.order[block]
            age = now - self.touched.pop(block)
            self.age = age if self.age == float("inf") else 0.998 * self.age + 0.002 * age


def replay(reference: Reference, requests: list[Request]) -> int:
    return sum(reference.ask(request.arrival_ms / 1000, request.block_ids) for request in requests)
