"""What a ring can be asked to do: reads, writes and block calls, one at a time or as columns."""

from __future__ import annotations

from collections.abc import Sequence
from errno import EAGAIN
from functools import partial
from typing import Self

import numpy as np
import numpy.typing as npt

from kvfuse.usrbio.client import event_loops
from kvfuse.usrbio.client.files import File, Namespace
from kvfuse.usrbio.client.iov import Iov
from kvfuse.usrbio.client.submission import KEY_CELL, Submission
from kvfuse.usrbio.client.tickets import Numbers
from kvfuse.usrbio.protocol.wire import KEY_SIZE_MAX, Flag, Op, Priority, pack_keys

NO_ENTRY = (1 << 64) - 1
"""the number of no ticket: what a cancel of something that is not under way names"""

Column = npt.ArrayLike
"""an array with a value for each entry, or one value for all"""
Found = npt.NDArray[np.bool_]


class Ring(Submission):
    """Asynchronous file and block operations. One thread at a time; made by `Client.ring`.

    ``prep_*`` place an entry, `submit` gives all placed ones to the daemon, `wait` or `peek` bring the completions, in
    whatever order they ended. Buffers belong to the daemon from `submit` until the completion. A negative ``result`` is
    an errno. Every ``prep_*`` takes ``user_data`` (a number below 2**64 that comes back in the completion; it
    need not be unique), ``priority`` and ``timeout`` (seconds from the moment the daemon takes the entry; past it
    the result is -ETIMEDOUT, and the buffer is left alone from then on). BlockingIOError when the ring is full: reap
    first.
    """

    # -- files ---------------------------------------------------------------------------------------

    def prep_read(
        self, iov: Iov, iov_offset: int, file: File, offset: int, length: int,
        *, user_data: int = 0, priority: Priority = Priority.NORMAL, timeout: float | None = None,
    ) -> None:  # fmt: skip
        """File bytes into the iov. Result: how many, fewer than ``length`` at the end of the file."""
        self._need_room(1)
        ticket = self._place(
            Op.READ, file.handle, iov.handle, offset, iov.at(iov_offset), length,
            user_data=user_data, priority=priority, timeout=timeout,
        )  # fmt: skip
        if iov.mirror is not None:
            self._copy_out(ticket, iov, iov_offset, length)

    def prep_write(
        self, iov: Iov, iov_offset: int, file: File, offset: int, length: int,
        *, user_data: int = 0, priority: Priority = Priority.NORMAL, timeout: float | None = None,
    ) -> None:  # fmt: skip
        """Bytes of the iov into the file. Result: how many."""
        self._need_room(1)
        self._place(
            Op.WRITE, file.handle, iov.handle, offset, iov.at(iov_offset), length,
            user_data=user_data, priority=priority, timeout=timeout,
        )  # fmt: skip
        if iov.mirror is not None:
            self._copy_in(iov, iov_offset, length)

    def prep_fsync(
        self, file: File, *, user_data: int = 0, priority: Priority = Priority.NORMAL, timeout: float | None = None
    ) -> None:
        """What completed before survives the loss of power when this completed. Result: 0."""
        self._need_room(1)
        self._place(Op.FSYNC, file.handle, 0, 0, 0, 0, user_data=user_data, priority=priority, timeout=timeout)

    def prep_reads(
        self, iov: Iov, iov_offsets: Column, file: File, offsets: Column, lengths: Column, user_data: Column = 0,
        *, priority: Priority = Priority.NORMAL, timeout: float | None = None,
    ) -> int:  # fmt: skip
        """Many `prep_read` at once: arrays, or one value for all. How many entries; all were placed or none."""
        return self._prep_columns(Op.READ, iov, iov_offsets, file, offsets, lengths, user_data, priority, timeout)

    def prep_writes(
        self, iov: Iov, iov_offsets: Column, file: File, offsets: Column, lengths: Column, user_data: Column = 0,
        *, priority: Priority = Priority.NORMAL, timeout: float | None = None,
    ) -> int:  # fmt: skip
        """Many `prep_write` at once, as `prep_reads`."""
        return self._prep_columns(Op.WRITE, iov, iov_offsets, file, offsets, lengths, user_data, priority, timeout)

    def _prep_columns(
        self, op: Op, iov: Iov, iov_offsets: Column, file: File, offsets: Column, lengths: Column, user_data: Column,
        priority: Priority, timeout: float | None,
    ) -> int:  # fmt: skip
        count = max(map(np.size, (iov_offsets, offsets, lengths, user_data)))
        places = _places(iov_offsets)
        self._need_room(count)
        tickets = self._place_columns(
            count, user_data, timeout, op=op, priority=priority, handle=file.handle, iov=iov.handle,
            offset=offsets, iov_offset=places + np.uint64(iov.base), length=lengths,
        )  # fmt: skip
        if iov.mirror is not None:
            self._copy_columns(op, tickets, [iov] * count, places, lengths)
        return count

    # -- blocks --------------------------------------------------------------------------------------

    def prep_get(
        self, iov: Iov | None, iov_offset: int, namespace: Namespace, key: bytes, length: int, *, view: bool = False,
        user_data: int = 0, priority: Priority = Priority.NORMAL, timeout: float | None = None,
    ) -> None:  # fmt: skip
        """The block into the iov. Result: its size; -ENOENT; -EMSGSIZE if it has more than ``length`` bytes.

        ``view``: the completion may be answered with a view of shared memory instead (``arena`` is not 0, see
        `view`); with no iov and the length 0 that is all it can be answered with.
        """
        self._prep_key(Op.GET, iov, iov_offset, namespace, key, length, view, user_data, priority, timeout)

    def prep_put(
        self, iov: Iov, iov_offset: int, namespace: Namespace, key: bytes, length: int,
        *, user_data: int = 0, priority: Priority = Priority.NORMAL, timeout: float | None = None,
    ) -> None:  # fmt: skip
        """``length`` bytes of the iov become the block of ``key``. Result: ``length``."""
        self._prep_key(Op.PUT, iov, iov_offset, namespace, key, length, False, user_data, priority, timeout)

    def prep_gets(
        self, iovs: Sequence[Iov | None], iov_offsets: Column, namespace: Namespace, keys: Sequence[bytes],
        lengths: Column, user_data: Column = 0,
        *, view: bool = False, priority: Priority = Priority.NORMAL, timeout: float | None = None,
    ) -> None:  # fmt: skip
        """Many `prep_get` at once: an iov and a key each; the others arrays, or one value for all."""
        flags = Flag.VIEW if view else 0
        self._prep_keys(Op.GET, iovs, iov_offsets, namespace, keys, lengths, user_data, flags, priority, timeout)

    def prep_puts(
        self, iovs: Sequence[Iov], iov_offsets: Column, namespace: Namespace, keys: Sequence[bytes], lengths: Column,
        user_data: Column = 0, *, priority: Priority = Priority.NORMAL, timeout: float | None = None,
    ) -> None:  # fmt: skip
        """Many `prep_put` at once, as `prep_gets`."""
        self._prep_keys(Op.PUT, iovs, iov_offsets, namespace, keys, lengths, user_data, 0, priority, timeout)

    def prep_exists(
        self, namespace: Namespace, keys: Sequence[bytes], *, prefix: bool = False,
        user_data: int = 0, priority: Priority = Priority.NORMAL, timeout: float | None = None,
    ) -> Found:  # fmt: skip
        """Which blocks are there: filled in when the completion is reaped, whose result is how many.

        ``prefix``: look no further than the first that is absent; the result is how many stand before it.
        """
        flags = Flag.PREFIX if prefix else 0
        return self._prep_many(Op.EXISTS, namespace, keys, flags, user_data, priority, timeout)

    def prep_delete(
        self, namespace: Namespace, keys: Sequence[bytes],
        *, user_data: int = 0, priority: Priority = Priority.NORMAL, timeout: float | None = None,
    ) -> Found:  # fmt: skip
        """Which were there, and are gone: as `prep_exists`."""
        return self._prep_many(Op.DELETE, namespace, keys, 0, user_data, priority, timeout)

    def prep_prefetch(
        self, namespace: Namespace, keys: Sequence[bytes],
        *, user_data: int = 0, priority: Priority = Priority.NORMAL, timeout: float | None = None,
    ) -> Found:  # fmt: skip
        """Which are in the shared-memory tier now: as `prep_exists`."""
        return self._prep_many(Op.PREFETCH, namespace, keys, 0, user_data, priority, timeout)

    def _prep_key(
        self, op: Op, iov: Iov | None, iov_offset: int, namespace: Namespace, key: bytes, length: int, view: bool,
        user_data: int, priority: Priority, timeout: float | None,
    ) -> None:  # fmt: skip
        self._need_cells([key])
        self._need_room(1)
        iov_handle, place = (0, iov_offset) if iov is None else (iov.handle, iov.at(iov_offset))
        key_offset = self._tickets.next() * KEY_CELL
        self._aux_bytes[key_offset : key_offset + len(key)] = key
        ticket = self._place(
            op, namespace.handle, iov_handle, 0, place, length,
            user_data=user_data, priority=priority, timeout=timeout, flags=Flag.VIEW if view else 0,
            key_offset=key_offset, key_length=len(key),
        )  # fmt: skip
        if iov is not None and iov.mirror is not None:
            if op is Op.PUT:
                self._copy_in(iov, iov_offset, length)
            else:
                self._copy_out(ticket, iov, iov_offset, length)

    def _prep_keys(
        self, op: Op, iovs: Sequence[Iov | None], iov_offsets: Column, namespace: Namespace, keys: Sequence[bytes],
        lengths: Column, user_data: Column, flags: int, priority: Priority, timeout: float | None,
    ) -> None:  # fmt: skip
        count = len(keys)
        key_sizes = self._need_cells(keys)
        handles = np.fromiter((iov.handle if iov is not None else 0 for iov in iovs), np.uint32, count)
        bases = np.fromiter((iov.base if iov is not None else 0 for iov in iovs), np.uint64, count)
        places = _places(iov_offsets)
        self._need_room(count)
        tickets = self._tickets.next_many(count)
        self._key_cells[tickets] = np.array(keys, f"S{KEY_CELL}").view(np.uint8).reshape(count, KEY_CELL)
        self._place_columns(
            count, user_data, timeout, op=op, priority=priority, flags=flags, handle=namespace.handle, iov=handles,
            iov_offset=places + bases, length=lengths, key_length=key_sizes, key_offset=tickets * KEY_CELL,
        )  # fmt: skip
        if any(iov is not None and iov.mirror is not None for iov in iovs):
            self._copy_columns(op, tickets, iovs, places, lengths)

    def _need_cells(self, keys: Sequence[bytes]) -> npt.NDArray[np.uint32]:
        """The sizes of keys that are given one to an entry. ValueError for a wrong one, and on a ring without keys."""
        if not self._cells_size:
            raise ValueError("the ring was made for file operations only")
        sizes = np.fromiter(map(len, keys), np.uint32, len(keys))
        size_min, size_max = (np.min(sizes), np.max(sizes)) if len(sizes) else (1, 1)
        if not (size_min >= 1 and size_max <= KEY_SIZE_MAX):
            raise ValueError(f"a key has 1 to {KEY_SIZE_MAX} bytes, not {size_min} or {size_max}")
        return sizes

    def _prep_many(
        self, op: Op, namespace: Namespace, keys: Sequence[bytes], flags: int, user_data: int, priority: Priority,
        timeout: float | None,
    ) -> Found:  # fmt: skip
        packed = pack_keys(list(keys))
        count = len(keys)
        self._need_room(1)
        span = self._spans.take(len(packed) + count)
        if span is None:
            raise BlockingIOError(EAGAIN, f"{count} keys of {len(packed)} bytes find no room in the ring's aux area")
        answers_offset = span + len(packed)
        self._aux_bytes[span:answers_offset] = packed
        self._aux[answers_offset : answers_offset + count] = 0
        try:
            ticket = self._place(
                op, namespace.handle, 0, answers_offset, 0, count, user_data=user_data, priority=priority,
                timeout=timeout, flags=flags, key_offset=span, key_length=len(packed),
            )  # fmt: skip
        except ValueError:
            self._spans.give_back(span)
            raise
        found = np.zeros(count, np.bool_)

        def end(result: int, viewed: bool) -> None:
            if result >= 0:
                np.not_equal(self._aux[answers_offset : answers_offset + count], 0, out=found)
            self._spans.give_back(span)

        self._endings[ticket] = end
        return found

    # -- what is under way, and views ----------------------------------------------------------------

    def prep_cancel(
        self, target_user_data: int,
        *, user_data: int = 0, priority: Priority = Priority.HIGH, timeout: float | None = None,
    ) -> None:  # fmt: skip
        """End the oldest entry with that ``user_data``, which then completes with -ECANCELED if it had not begun.

        Result of this entry: 0, or -ENOENT if that one is not under way any more.
        """
        self._need_room(1)
        ticket = self._tickets.find(target_user_data)
        target = NO_ENTRY if ticket is None else ticket
        self._place(Op.CANCEL, 0, 0, target, 0, 0, user_data=user_data, priority=priority, timeout=timeout)

    def view(self, completion: np.void) -> memoryview:
        """The bytes of a get that was answered with a view, read-only, where the daemon has them.

        They stay what they are while the memoryview, a slice of it or an array over it, is held. When the last is
        gone, the next `submit` of any ring of this client gives the pin back. ValueError for other completions.
        """
        _, size, offset, arena, pin = completion.item()
        if not arena:
            raise ValueError("the completion is not one with a view")
        return self._session.view(arena, offset, size, pin)

    def release(self, pin: int) -> None:
        """Give back, with the next `submit`, the pin of a completion for which `view` is not called."""
        self._session.unpins.append(pin)

    # -- copies for memory that the daemon cannot map ------------------------------------------------

    def _copy_out(self, ticket: int, iov: Iov, offset: int, length: int) -> None:
        def end(result: int, viewed: bool) -> None:
            if result > 0 and not viewed:
                iov.from_mirror(offset, min(result, length))

        self._endings[ticket] = end

    def _copy_in(self, iov: Iov, offset: int, length: int) -> None:
        self._before_submit.append(partial(iov.to_mirror, offset, length))

    def _copy_columns(
        self, op: Op, tickets: Numbers, iovs: Sequence[Iov | None], offsets: Column, lengths: Column
    ) -> None:
        columns = (np.broadcast_to(np.asarray(column), len(tickets)).tolist() for column in (offsets, lengths))
        for ticket, iov, offset, length in zip(tickets.tolist(), iovs, *columns, strict=True):
            if iov is None or iov.mirror is None:
                continue
            if op in (Op.WRITE, Op.PUT):
                self._copy_in(iov, offset, length)
            else:
                self._copy_out(ticket, iov, offset, length)

    # -- as a context --------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await event_loops.in_thread(self.close)


def _places(offsets: Column) -> npt.NDArray[np.uint64]:
    """Offsets in iovs, as `Iov.at` takes them one by one."""
    numbers = np.asarray(offsets)
    if numbers.dtype.kind != "u" and numbers.size and numbers.min() < 0:
        raise ValueError(f"the offset {numbers.min()} in an iov")
    return numbers.astype(np.uint64)
