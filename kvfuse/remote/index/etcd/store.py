"""The index in etcd: one key for each entry.

* The keys are beside those of the record store, not below the prefix that it watches: no host is told of an entry.
* A call sends transactions of up to `KEYS_MAX` keys, side by side.
* A put first supposes that all its keys are absent, as they mostly are: one transaction compares and puts. Where it is
  refused, every key gets a transaction of its own within the next one: it compares the stored entry with the new one,
  and shows the former. So do replacements and drops.
* A request without an answer is sent again, to another member. So a put may be done twice, and then finds its own
  entry; a very late one may bring back an entry that was dropped since.
* etcd keeps each former revision of a key until compaction.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from itertools import pairwise
from typing import Self, TypeVar

import trio

from kvfuse.errors import EngineError
from kvfuse.remote.index.api import KEY_SIZE
from kvfuse.remote.index.engine import STORED_SIZE_MAX, IndexEngine, Row, RowChange, side_by_side
from kvfuse.remote.index.etcd.templates import IndexMessages
from kvfuse.remote.records.etcd import messages
from kvfuse.remote.records.etcd.calls import KV_TXN, EtcdClient, EtcdPlace
from kvfuse.remote.records.etcd.messages import prefix_end

_I = TypeVar("_I")

KEYS_MAX = 256
"""keys of one transaction: more are better done side by side"""
KEY_OVERHEAD = 128
"""bytes of a request for one key, beside key and value"""
OPERATIONS_INSIDE = 2
"""of a key's own transaction; etcd counts them once, beside the keys of the whole"""


class EtcdIndex(IndexEngine):
    """Made by ``open``."""

    def __init__(self, place: EtcdPlace) -> None:
        super().__init__(f"the index in etcd, {place.prefix.decode()}")
        self._messages = IndexMessages(place.prefix)
        self._client = EtcdClient(place)
        size = STORED_SIZE_MAX + 3 * (len(place.prefix) + KEY_SIZE) + KEY_OVERHEAD
        limits = KEYS_MAX, place.options.operations_max - OPERATIONS_INSIDE, place.options.request_size_max // size
        self._batch_size = max(min(limits), 1)

    @classmethod
    async def open(cls, place: EtcdPlace) -> Self:
        """Connect. ConfigError where the options cannot work, EngineError where no member answers or lets us in."""
        index = cls(place)
        try:
            await index._find([bytes(KEY_SIZE)])
        except BaseException:
            await index.aclose()
            raise
        return index

    async def _find(self, keys: Sequence[bytes]) -> list[bytes | None]:
        return await self._side_by_side(self._find_some, keys)

    async def _put(self, rows: Sequence[Row]) -> list[bytes | None]:
        return await self._side_by_side(self._put_some, rows)

    async def _replace(self, changes: Sequence[RowChange]) -> list[bytes | None]:
        return await self._side_by_side(self._replace_some, changes)

    async def _drop(self, entries: Sequence[tuple[bytes, int]]) -> list[bytes | None]:
        return await self._side_by_side(self._drop_some, entries)

    async def _clear(self) -> None:
        """A transaction for each first byte of keys: the server does nothing else meanwhile."""
        prefix = self._messages.prefix
        starts = [prefix, *(prefix + bytes([first]) for first in range(1, 256)), prefix_end(prefix)]
        for start, end in pairwise(starts):
            message = messages.transaction([], [messages.delete_operation(start, end)])
            await self._transact(message, trio.current_time() + self._client.options.deadline)

    async def _close(self) -> None:
        await self._client.aclose()

    async def _find_some(self, keys: Sequence[bytes], deadline: float) -> list[bytes | None]:
        return _shown(await self._transact(self._messages.find(keys), deadline), len(keys))

    async def _put_some(self, rows: Sequence[Row], deadline: float) -> list[bytes | None]:
        answer = await self._transact(self._messages.put_if_absent(rows), deadline)
        if answer.succeeded:
            return [None] * len(rows)
        return _shown(await self._transact(b"".join(map(self._messages.put_unless_lower, rows)), deadline), len(rows))

    async def _replace_some(self, changes: Sequence[RowChange], deadline: float) -> list[bytes | None]:
        answer = await self._transact(b"".join(map(self._messages.replace, changes)), deadline)
        return _shown(answer, len(changes))

    async def _drop_some(self, entries: Sequence[tuple[bytes, int]], deadline: float) -> list[bytes | None]:
        await self._transact(self._messages.drop(entries), deadline)
        return [None] * len(entries)

    async def _side_by_side(
        self, call: Callable[[Sequence[_I], float], Awaitable[list[bytes | None]]], items: Sequence[_I]
    ) -> list[bytes | None]:
        """Returns what each item's call shows. All of them together have one deadline."""
        deadline = trio.current_time() + self._client.options.deadline
        return await side_by_side(lambda some: call(some, deadline), items, self._batch_size)

    async def _transact(self, message: bytes, deadline: float) -> messages.TransactionAnswer:
        return await self._client.call(KV_TXN, message, messages.TransactionAnswer.parse, deadline)


def _shown(answer: messages.TransactionAnswer, count: int) -> list[bytes | None]:
    """What there was of each key."""
    if len(answer.operations) != count:
        raise EngineError(f"etcd answered {len(answer.operations)} of {count} keys")
    return [*map(messages.first_value, answer.operations)]
