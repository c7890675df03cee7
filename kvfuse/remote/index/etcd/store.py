"""The index in etcd: one key for each entry.

* The keys are beside those of the record store, not below the prefix that it watches: no host is told of an entry.
* A call sends transactions of up to `KEYS_MAX` keys, side by side. Within one, every key has a transaction of its own:
  it compares the stored entry with the new one, and shows the former.
* A request without an answer is sent again, to another member. So a put may be done twice, and then finds its own
  entry; a very late one may bring back an entry that was dropped since.
* etcd keeps each former revision of a key until compaction.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Self, TypeVar

import trio

from kvfuse.errors import EngineError
from kvfuse.remote.index.api import KEY_SIZE
from kvfuse.remote.index.engine import STORED_SIZE_MAX, IndexEngine, Row, above, below, side_by_side
from kvfuse.remote.records.etcd import messages
from kvfuse.remote.records.etcd.gateway import EtcdClient, EtcdPlace

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
        self._prefix = place.prefix
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
        return await self._each(self._show, keys)

    async def _put(self, rows: Sequence[Row]) -> list[bytes | None]:
        return await self._each(self._store, rows)

    async def _drop(self, entries: Sequence[tuple[bytes, int]]) -> list[bytes | None]:
        return await self._each(self._remove, entries)

    async def _close(self) -> None:
        await self._client.aclose()

    def _show(self, key: bytes) -> messages.TxnOperation:
        return messages.TxnOperation(request_range=messages.Range(self._prefix + key))

    def _store(self, row: Row) -> messages.TxnOperation:
        """An absent key is not greater than anything."""
        key = self._prefix + row.key
        is_higher = messages.CompareValue(key, above(row.sequence), "GREATER")
        put = messages.TxnOperation(request_put=messages.Put(key, row.stored, prev_kv=True))
        return messages.TxnOperation(request_txn=messages.TxnMessage([is_higher], [self._show(row.key)], [put]))

    def _remove(self, entry: tuple[bytes, int]) -> messages.TxnOperation:
        key, sequence = self._prefix + entry[0], entry[1]
        has_sequence: list[messages.Compare | messages.CompareValue] = [
            messages.CompareValue(key, below(sequence), "GREATER"),
            messages.CompareValue(key, above(sequence), "LESS"),
        ]
        delete = messages.TxnOperation(request_delete_range=messages.DeleteRange(key))
        return messages.TxnOperation(request_txn=messages.TxnMessage(has_sequence, [delete]))

    async def _each(self, operation: Callable[[_I], messages.TxnOperation], items: Sequence[_I]) -> list[bytes | None]:
        """Returns what each operation shows. All of them together have one deadline."""
        deadline = trio.current_time() + self._client.options.deadline

        async def some(items: Sequence[_I]) -> list[bytes | None]:
            return await self._transact([*map(operation, items)], deadline)

        return await side_by_side(some, items, self._batch_size)

    async def _transact(self, operations: list[messages.TxnOperation], deadline: float) -> list[bytes | None]:
        message = messages.TxnMessage(success=operations)
        answer = await self._client.call("kv/txn", message, messages.TRANSACTION, deadline)
        if len(answer.responses) != len(operations):
            raise EngineError(f"etcd answered {len(answer.responses)} of {len(operations)} keys")
        return [*map(_shown, answer.responses)]


def _shown(answer: messages.OperationAnswer) -> bytes | None:
    """What there was of a key."""
    if answer.response_txn is not None and answer.response_txn.responses:
        (answer,) = answer.response_txn.responses
    if answer.response_range is not None and answer.response_range.kvs:
        return answer.response_range.kvs[0].value
    if answer.response_put is not None and answer.response_put.prev_kv is not None:
        return answer.response_put.prev_kv.value
    return None
