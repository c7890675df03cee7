"""Blocks by key: put, get and exists over rings, for any number of threads. See `BlockStore`."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from errno import ECANCELED, EDQUOT, EIO, EMSGSIZE, ENOENT, ENOSPC, ETIMEDOUT
from functools import partial
from time import monotonic

import numpy as np

from kvfuse.keys import encode_keys
from kvfuse.usrbio.client.client import DEADLINE_S, Client, connect
from kvfuse.usrbio.client.files import Namespace
from kvfuse.usrbio.client.gpu.device_blocks import DeviceBlocks, raise_failure, range_of
from kvfuse.usrbio.client.gpu.gpu_memory import GpuIov, GpuRange
from kvfuse.usrbio.client.iov import Iov, address_of, bytes_of, spans_of
from kvfuse.usrbio.client.key_area import Found
from kvfuse.usrbio.client.lanes import GRACE_S, EntryTerms, Lane, Lanes, Sizes
from kvfuse.usrbio.client.resident import NOT_HERE, Addresses, ResidentBlocks
from kvfuse.usrbio.client.ring import Ring
from kvfuse.usrbio.client.session import Bytes
from kvfuse.usrbio.client.tokens import Token, find_tokens
from kvfuse.usrbio.protocol.costs import Costs, decode_costs
from kvfuse.usrbio.protocol.wire import NO_HINTS, Op, Priority, PutHints

Key = bytes | str
"""1 to 255 bytes; text is its UTF-8"""

MISSES = frozenset({ENOENT, ETIMEDOUT, ECANCELED, EIO})
"""a get that ends so is a miss"""
ABSENT = frozenset({ENOENT})
"""a delete that ends so found nothing; of one that ends otherwise nobody knows what is gone, and that is raised"""
NOT_STORED = frozenset({ENOSPC, EDQUOT, ETIMEDOUT, ECANCELED, EIO})
"""a put of a batch that ends so is answered with False"""
KEYS_MAX = 4000
"""keys in one entry: as many of the longest fit the aux area of a ring"""


class BlockStore(AbstractContextManager["BlockStore"]):
    """Blocks of one namespace: a folder of the mount, in which the block of a key is the file of that name.

    A block is put whole and got whole. A get that the daemon cannot answer within ``deadline`` seconds, or at all, is a
    miss; TimeoutError where it may still use a buffer of the call, which lies in an iov (`is_silent`). Disconnected is
    raised only when the connection is lost. What is wrong with a call itself - no permission, a buffer that is too
    small, a bad key - is raised, once every block of the batch has been served.

    Buffers that lie in an iov of the client are used in place; others are copied once more. Safe to use from any number
    of threads: each call takes a ring that is idle, or makes one.
    """

    def __init__(
        self, mount: str | os.PathLike[str] | Client, namespace: str | os.PathLike[str],
        *, create: bool = True, deadline: float = DEADLINE_S, grace: float = GRACE_S, entries: int = 256,
        priority: Priority = Priority.NORMAL, token: Token = None, descriptor: Mapping[str, str | int] | None = None,
    ) -> None:  # fmt: skip
        """``mount``: a client, or a path inside the mount. ``create``: a folder that is absent is made, see
        `Client.namespace`. ``grace``: seconds that the daemon may take beyond a deadline to say that it passed.
        ``token``: see `connect`; a client that is given shows it, too. FileNotFoundError for no such mount or, without
        ``create``, folder, or where it needs another token; FileExistsError where its blocks have another
        ``descriptor`` (see `Client.namespace`); Disconnected."""
        patience = min(DEADLINE_S, deadline + grace)
        self.client = mount if isinstance(mount, Client) else connect(mount, deadline=patience, token=token)
        self._owns_client = self.client is not mount
        if token is not None and not self._owns_client:
            for shown in find_tokens(token):
                self.client.show_token(shown)
        self._deadline = deadline
        self._entries = entries
        self._terms = EntryTerms(priority=priority, timeout=deadline)
        self.lanes = Lanes(self.client, entries, grace)
        """its rings, and what the daemon left unanswered on them"""
        try:
            self.namespace = self.client.namespace(namespace, create, descriptor=descriptor)
        except BaseException:
            if self._owns_client:
                self.client.close()
            raise
        self._resident = ResidentBlocks(self.client, self.namespace)
        self._on_devices = DeviceBlocks(self.lanes, self._resident, self.namespace, self._bring)

    @property
    def is_silent(self) -> bool:
        """Nobody writes into buffers any more, or stores from them, on account of calls that are over.

        False after the daemon left a call unanswered beyond its deadline, until it, or the next one, has answered, or
        no process is left that could: one that hung in the middle of copying goes on where it was. Buffers that
        lie in no iov are never touched after the call.
        """
        return self.lanes.settle()

    # -- one block -----------------------------------------------------------------------------------

    def put(self, key: Key, buffer: object, *, hints: PutHints = NO_HINTS) -> None:
        """The block of ``key`` is these bytes from here on. OSError (ENOSPC, EDQUOT, ETIMEDOUT, ...); ValueError.

        A full cache may find the block not worth storing: then nothing happens (`put_many` says which are stored).
        """
        (encoded,), result = encode_keys([key]), -ETIMEDOUT
        if (place := range_of(buffer, self.client.gpus)) is not None:
            results = self._on_devices.put([encoded], [place], self._terms, hints)
            raise_failure(results, [place])
            result = int(results[0])
        else:
            array = bytes_of(buffer)
            with suppress(TimeoutError), self.lanes.take() as lane:
                result = lane.put_one(self.namespace, encoded, array, self._terms, hints)
        if result < 0 and result != -ECANCELED:
            raise OSError(-result, os.strerror(-result))

    def get_into(self, key: Key, buffer: object) -> int | None:
        """The size of the block, which stands at the start of ``buffer`` now; None for a miss."""
        if (place := range_of(buffer, self.client.gpus)) is not None:
            (size,) = self.get_many_into([key], [place]).tolist()
            return None if size < 0 else int(size)
        array = bytes_of(buffer)
        if array.flags.writeable:
            found = self._resident.get_one(key.encode() if isinstance(key, str) else key, array)
            if found is not None:
                return found
        (size,) = self.get_many_into([key], [array]).tolist()
        return None if size < 0 else int(size)

    def get(self, key: Key) -> memoryview | None:
        """The bytes of the block, read-only; None for a miss.

        Where the block is in shared memory they are not copied: what is there stays as long as the memoryview is
        held, and its room with it, so let go of it (``view.release()``), or use `view`.
        """
        return self.get_many([key])[0]

    @contextmanager
    def view(self, key: Key) -> Iterator[memoryview | None]:
        """As `get`, until the end of the ``with``; None for a miss. Arrays over the bytes hold them for longer."""
        found = self.get(key)
        try:
            yield found
        finally:
            if found is not None:
                with suppress(BufferError):
                    found.release()

    def delete(self, key: Key) -> bool:
        """Whether the block was there, and is gone. OSError (ETIMEDOUT, EIO, ...): not known, see `delete_many`."""
        return bool(self.delete_many([key])[0])

    # -- many blocks, each call one submission -------------------------------------------------------

    def put_many(self, keys: Sequence[Key], buffers: Sequence[object], *, hints: PutHints = NO_HINTS) -> Found:
        """Which are stored; the others found no room, the cache did not admit them, or the deadline passed."""
        if (results := self._put_in_place(keys, buffers, hints)) is not None:
            _raise_unless(results, NOT_STORED)
            _raise_if_used(self, results, lambda: list(map(bytes_of, buffers)))
            return results >= 0
        places = [range_of(buffer, self.client.gpus) for buffer in buffers]
        if any(place is not None for place in places):

            def put_others(keys: Sequence[Key], buffers: Sequence[object]) -> Sizes:
                return np.where(self.put_many(keys, buffers, hints=hints), 0, -1)

            put = partial(self._on_devices.put, hints=hints)
            return self._move_some(put, keys, buffers, places, put_others, NOT_STORED) >= 0
        arrays = list(map(bytes_of, buffers))
        results = self._move(Op.PUT, encode_keys(keys), arrays, self._terms, hints)
        _raise_unless(results, NOT_STORED)
        _raise_if_used(self, results, lambda: arrays)
        return results >= 0

    def _put_in_place(self, keys: Sequence[Key], buffers: Sequence[object], hints: PutHints) -> Sizes | None:
        """Put blocks that all lie in one iov. Results as of the completions; None: they do not."""
        spans = spans_of(buffers, writes=False) if len(buffers) else None
        place = self.client.locate_all(*spans) if spans is not None else None
        if spans is None or place is None or len(keys) != len(buffers):
            return None
        encoded, (iov, offsets), (_, sizes) = encode_keys(keys), place, spans
        results: Sizes = np.full(len(encoded), -ETIMEDOUT, np.int64)
        with suppress(TimeoutError), self.lanes.take() as lane:
            for start in range(0, len(encoded), self._entries):
                part = slice(start, start + self._entries)
                results[part] = lane.move_at(
                    Op.PUT, self.namespace, encoded[part], iov, offsets[part], sizes[part], self._terms, hints
                )
                if lane.is_late:
                    break
        return results

    def get_many_into(self, keys: Sequence[Key], buffers: Sequence[object]) -> Sizes:
        """The size of each block, -1 for a miss. OSError EMSGSIZE if one is larger than its buffer."""
        spans = spans_of(buffers, writes=True)
        if spans is None:
            places = [range_of(buffer, self.client.gpus) for buffer in buffers]
            if any(place is not None for place in places):
                get, get_others = self._on_devices.get, self.get_many_into
                return np.maximum(self._move_some(get, keys, buffers, places, get_others, MISSES), -1)
            spans = _spans_of_arrays(list(map(bytes_of, buffers)))
        encoded, (targets, rooms) = encode_keys(keys), spans

        def ask(rows: list[int], seconds: float) -> Sizes:
            asked, rest = [encoded[row] for row in rows], [bytes_of(buffers[row]) for row in rows]
            return self._move(Op.GET, asked, rest, _within(self._terms, seconds))

        results = self._get(encoded, targets, rooms, ask, self._deadline)
        _raise_unless(results, MISSES)
        _raise_if_used(self, results, lambda: list(map(bytes_of, buffers)))
        return np.maximum(results, -1)

    def get_many(self, keys: Sequence[Key]) -> list[memoryview | None]:
        """As `get` for each."""
        encoded = encode_keys(keys)
        if self._resident.brings() and (missing := self._resident.missing(encoded)):
            self._bring(missing, self._deadline)
        found: list[memoryview | None] = [None] * len(encoded)
        left = list(range(len(encoded)))
        give_up = monotonic() + self._deadline
        with suppress(TimeoutError), self.lanes.take() as lane:
            while left and monotonic() < give_up:
                elsewhere: dict[int, int] = {}
                for start in range(0, len(left), self._entries):
                    part = left[start : start + self._entries]
                    _get_views(lane, self.namespace, self._terms, encoded, part, found, elsewhere)
                    if lane.is_late:
                        return found
                left = _get_copies(lane, self.namespace, self._terms, encoded, elsewhere, found)
        return found

    def exists(self, keys: Sequence[Key]) -> Found:
        """Which blocks are there."""
        found = self._resident.exists(keys) if len(keys) else np.zeros(0, np.bool_)
        return found if found is not None else self._ask(keys, Ring.prep_exists)

    def costs(self, keys: Sequence[Key]) -> Costs:
        """Which tier has each block, and when it and all before it are expected, if they are got now in this order.

        A forecast: the tiers' speeds are those of their last reads, and others read, too.
        """
        encoded = encode_keys(keys)
        answers = self._ask(encoded, partial(Ring.prep_exists, costs=True)) if encoded else np.zeros(0, np.bool_)
        return decode_costs(answers.view(np.uint8))

    def delete_many(self, keys: Sequence[Key]) -> Found:
        """Which blocks were there, and are gone.

        OSError (ETIMEDOUT, EIO, ...): any of them may be gone, or may still be going. No failure is told as an absent
        block: it may be there for long, or have been there before.
        """
        return self._ask(keys, Ring.prep_delete, ABSENT) if len(keys) else np.zeros(0, np.bool_)

    def prefetch(self, keys: Sequence[Key]) -> Found:
        """Which blocks are in shared memory now, brought there if need be."""
        return self._ask(keys, Ring.prep_prefetch) if len(keys) else np.zeros(0, np.bool_)

    def longest_prefix(self, keys: Sequence[Key]) -> int:
        """How many blocks from the first on are there without a gap."""
        if len(keys) and (known := self._resident.longest_prefix(keys)) is not None:
            return known
        encoded, total = encode_keys(keys), 0
        with suppress(TimeoutError), self.lanes.take() as lane:
            for start in range(0, len(encoded), KEYS_MAX):
                window = encoded[start : start + KEYS_MAX]
                lane.ring.prep_exists(self.namespace, window, prefix=True, **self._terms)
                result = int(lane.finish(1, self._deadline)["result"][0])
                total += max(result, 0)
                _raise_unless(np.array([result]), MISSES)
                if result < len(window):
                    break
        return total

    # -- many blocks of one memory -------------------------------------------------------------------

    def get_at(
        self, keys: Sequence[bytes], memory: Iov | GpuIov | Bytes, offsets: Sequence[int], sizes: Sequence[int],
        *, deadline: float | None = None,
    ) -> Sizes:  # fmt: skip
        """Get each block to ``memory[offset:]``, where it has room for ``size`` bytes; at most ``entries`` of them.

        The size of each, or -errno: ENOENT for a block that is absent, EMSGSIZE for a larger one. ``deadline``:
        seconds, None: that of the store. Disconnected.
        """
        if isinstance(memory, GpuIov):
            places = list(map(memory.range, offsets, sizes))
            return self._on_devices.get(keys, places, _within(self._terms, deadline))
        array = memory.array if isinstance(memory, Iov) else memory
        starts, rooms = np.asarray(offsets, np.int64), np.asarray(sizes, np.int64)
        if len(starts) and (starts.min() < 0 or rooms.min() < 0 or (starts + rooms).max() > len(array)):
            raise ValueError("a block reaches beyond the memory that it is to be got into")
        targets = starts.astype(np.uint64) + np.uint64(address_of(array))

        def ask(rows: list[int], seconds: float) -> Sizes:
            asked = [keys[row] for row in rows]
            return self._move_at(Op.GET, asked, memory, starts[rows].tolist(), rooms[rows].tolist(), seconds)

        return self._get(keys, targets, rooms, ask, self._deadline if deadline is None else deadline)

    def put_at(
        self, keys: Sequence[bytes], memory: Iov | GpuIov | Bytes, offsets: Sequence[int], sizes: Sequence[int],
        *, deadline: float | None = None, hints: PutHints = NO_HINTS,
    ) -> Sizes:  # fmt: skip
        """Put each block from ``memory[offset:][:size]``. Results as of `get_at`; -ECANCELED: it was not admitted."""
        if isinstance(memory, GpuIov):
            places = list(map(memory.range, offsets, sizes))
            return self._on_devices.put(keys, places, _within(self._terms, deadline), hints)
        return self._move_at(Op.PUT, keys, memory, offsets, sizes, deadline, hints)

    def _move_at(
        self, op: Op, keys: Sequence[bytes], memory: Iov | Bytes, offsets: Sequence[int], sizes: Sequence[int],
        deadline: float | None, hints: PutHints = NO_HINTS,
    ) -> Sizes:  # fmt: skip
        terms = _within(self._terms, deadline)
        if not isinstance(memory, Iov):
            arrays = [memory[offset : offset + size] for offset, size in zip(offsets, sizes, strict=True)]
            return self._move(op, list(keys), arrays, terms, hints)
        results: Sizes = np.full(len(keys), -ETIMEDOUT, np.int64)
        with suppress(TimeoutError), self.lanes.take() as lane:
            results = lane.move_at(op, self.namespace, keys, memory, offsets, sizes, terms, hints)
        return results

    def _get(
        self, keys: Sequence[bytes], targets: Addresses, rooms: Sizes, ask: Callable[[list[int], float], Sizes],
        deadline: float,
    ) -> Sizes:  # fmt: skip
        """Get what is in shared memory; ``ask`` the daemon for the rest, by rows, in the seconds that are left.

        Results as of the completions.
        """
        if len(keys) != len(targets):
            raise ValueError(f"{len(keys)} keys and {len(targets)} buffers")
        results = self._resident.get(keys, targets, rooms) if len(keys) else np.zeros(0, np.int64)
        if results is None:
            return ask(list(range(len(keys))), deadline)
        rows = np.flatnonzero(results == NOT_HERE)
        if len(rows) and self._resident.brings():
            began, asked = monotonic(), [keys[row] for row in rows.tolist()]
            if (
                self._bring(asked, deadline)
                and (again := self._resident.get(asked, targets[rows], rooms[rows])) is not None
            ):
                results[rows] = again
                rows = rows[again == NOT_HERE]
            deadline -= monotonic() - began
        if len(rows):
            results[rows] = ask(rows.tolist(), deadline)
        return results

    def _bring(self, keys: Sequence[bytes], deadline: float) -> bool:
        """Have other hosts' blocks brought into shared memory, in half of these seconds; whether any came."""
        came, terms = False, _within(self._terms, deadline / 2)
        with suppress(TimeoutError), self.lanes.take() as lane:
            for start in range(0, len(keys), KEYS_MAX):
                found = lane.ring.prep_prefetch(self.namespace, keys[start : start + KEYS_MAX], near=True, **terms)
                lane.finish(1, terms["timeout"])
                came |= bool(found.any())
                if lane.is_late:
                    break
        return came

    # -- how -----------------------------------------------------------------------------------------

    def _ask(self, keys: Sequence[Key], prepare: Callable[..., Found], expected: frozenset[int] = MISSES) -> Found:
        encoded, found = encode_keys(keys), np.zeros(len(keys), np.bool_)
        with suppress(TimeoutError) if ETIMEDOUT in expected else nullcontext(), self.lanes.take() as lane:
            for start in range(0, len(encoded), KEYS_MAX):
                part = encoded[start : start + KEYS_MAX]
                answers = prepare(lane.ring, self.namespace, part, **self._terms)
                _raise_unless(lane.finish(1, self._deadline)["result"], expected)
                if lane.is_late:
                    break
                found[start : start + len(part)] = answers
        return found

    def _move_some(
        self, move: Callable[[list[bytes], list[GpuRange], EntryTerms], Sizes], keys: Sequence[Key],
        buffers: Sequence[object], places: Sequence[GpuRange | None],
        move_others: Callable[[Sequence[Key], Sequence[object]], Sizes], expected: frozenset[int],
    ) -> Sizes:  # fmt: skip
        """``move`` what has a place on a device, and then the others. What is wrong is raised when all is served."""
        encoded, results = encode_keys(keys), np.zeros(len(keys), np.int64)
        here = {row: place for row, place in enumerate(places) if place is not None}
        moved = move([encoded[row] for row in here], list(here.values()), self._terms)
        results[list(here)] = moved
        others = [row for row in range(len(keys)) if row not in here]
        if others:
            results[others] = move_others([encoded[row] for row in others], [buffers[row] for row in others])
        raise_failure(moved, list(here.values()))
        _raise_unless(moved, expected)
        return results

    def _move(
        self, op: Op, keys: list[bytes], arrays: list[Bytes], terms: EntryTerms, hints: PutHints = NO_HINTS
    ) -> Sizes:
        """Results as of the completions; -ETIMEDOUT, too, where the daemon gives no ring or memory in time."""
        results: Sizes = np.full(len(keys), -ETIMEDOUT, np.int64)
        with suppress(TimeoutError), self.lanes.take() as lane:
            results = lane.move(op, self.namespace, keys, arrays, terms, hints)
        return results

    # -- the end -------------------------------------------------------------------------------------

    def close(self) -> None:
        """Give back rings and memory; the client, too, if the store made it. TimeoutError: no daemon answers."""
        try:
            self.lanes.close()
            self.namespace.close()
        finally:
            if self._owns_client:
                self.client.close()

    def __exit__(self, *_: object) -> None:
        self.close()


def _get_views(
    lane: Lane, namespace: Namespace, terms: EntryTerms, keys: list[bytes], numbers: list[int],
    found: list[memoryview | None], elsewhere: dict[int, int],
) -> None:  # fmt: skip
    """Fill in what is in shared memory, and what is empty; note the sizes of other blocks. By their ``numbers``."""
    nowhere, order = [None] * len(numbers), np.arange(len(numbers))
    asked = [keys[number] for number in numbers]
    lane.ring.prep_gets(nowhere, 0, namespace, asked, 0, order, view=True, **terms)
    completions = lane.finish(len(numbers), terms["timeout"])
    for place, (number, result) in enumerate(zip(numbers, completions["result"].tolist(), strict=True)):
        if result == 0:
            found[number] = memoryview(b"")
        elif result > 0:
            found[number] = lane.ring.view(completions[place])
        elif result == -EMSGSIZE:
            elsewhere[number] = int(completions[place]["offset"])
    _raise_unless(completions["result"], MISSES | {EMSGSIZE})


def _get_copies(
    lane: Lane, namespace: Namespace, terms: EntryTerms, keys: list[bytes], sizes: dict[int, int],
    found: list[memoryview | None],
) -> list[int]:  # fmt: skip
    """Fill in blocks of these sizes. The numbers of those that a larger one has taken the place of by now."""
    buffers = [np.empty(size, np.uint8) for size in sizes.values()]
    results = lane.move(Op.GET, namespace, [keys[number] for number in sizes], buffers, terms)
    _raise_unless(results, MISSES | {EMSGSIZE})
    for number, buffer, result in zip(sizes, buffers, results.tolist(), strict=True):
        if result >= 0:
            found[number] = buffer[:result].data.toreadonly()
    return [number for number, result in zip(sizes, results.tolist(), strict=True) if result == -EMSGSIZE]


def _within(terms: EntryTerms, deadline: float | None) -> EntryTerms:
    """``deadline``: None: as the terms say."""
    return terms if deadline is None else EntryTerms(priority=terms["priority"], timeout=deadline)


def _spans_of_arrays(arrays: Sequence[Bytes]) -> tuple[Addresses, Sizes]:
    """(addresses, sizes); a size below 0: it is read-only."""
    targets = np.fromiter(map(address_of, arrays), np.uint64, len(arrays))
    rooms = np.fromiter((len(array) if array.flags.writeable else -1 for array in arrays), np.int64, len(arrays))
    return targets, rooms


def _raise_if_used(store: BlockStore, results: Sizes, get_arrays: Callable[[], Sequence[Bytes]]) -> None:
    """TimeoutError where the daemon may still use a buffer: its caller must not take that for its own again."""
    late = np.flatnonzero(results == -ETIMEDOUT).tolist()
    if not late or store.is_silent:
        return
    arrays = get_arrays()
    if any(store.client.locate(arrays[row]) is not None for row in late):
        raise TimeoutError(
            ETIMEDOUT, "the daemon is late, and may use the buffers, which lie in an iov, until is_silent"
        )


def _raise_unless(results: Sizes, expected: frozenset[int]) -> None:
    """Raise the first failure that is none of the expected ones."""
    for result in results[results < 0].tolist():
        if -result not in expected:
            raise OSError(-result, os.strerror(-result))
