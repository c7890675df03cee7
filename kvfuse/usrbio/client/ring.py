"""What a ring can be asked to do: reads, writes and block calls, one at a time or as columns."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from typing import Protocol

import numpy as np

from kvfuse.usrbio.client import event_loops
from kvfuse.usrbio.client.attached_ring import AttachedRing, Column, Memory, Shape
from kvfuse.usrbio.client.files import File, Namespace
from kvfuse.usrbio.client.iov import Iov
from kvfuse.usrbio.client.key_area import Found
from kvfuse.usrbio.client.session import Session
from kvfuse.usrbio.protocol.queues import Entries
from kvfuse.usrbio.protocol.wire import NO_HINTS, Flag, Op, Priority, PutHints


class Connected(Protocol):
    """A client: it has the present connection, and another one after a reconnect."""

    session: Session


class Ring(AbstractContextManager["Ring"], AbstractAsyncContextManager["Ring"]):
    """Asynchronous file and block operations. One thread at a time; made by `Client.ring`.

    ``prep_*`` place an entry, `submit` gives all placed ones to the daemon, `wait` or `peek` bring the completions, in
    whatever order they ended. Buffers belong to the daemon from `submit` until the completion. A negative ``result`` is
    an errno. Every ``prep_*`` takes ``user_data`` (a number below 2**64 that comes back in the completion; it
    need not be unique), ``priority`` and ``timeout`` (seconds from the moment the daemon takes the entry; past it
    the result is -ETIMEDOUT, and the buffer is left alone from then on). BlockingIOError when the ring is full: reap
    first. When the client has reconnected, the ring starts anew by itself.
    """

    def __init__(self, client: Connected, entries: int, aux_size: int | None, ops: Iterable[Op] | None) -> None:
        self.entries = entries
        self._shape = Shape.of(entries, aux_size, ops)
        self._client = client
        self.attached = AttachedRing(client.session, self._shape)
        """the daemon's, of the connection on which this one was used last"""
        self._closed = False

    def _present(self) -> AttachedRing:
        """The daemon's ring on the client's present connection. ValueError where this one is closed."""
        session = self._client.session
        if self.attached.session is not session or self._closed:
            if self._closed:
                raise ValueError("the ring is closed")
            self.attached.let_go()
            self.attached = AttachedRing(session, self._shape)
        return self.attached

    # -- files ---------------------------------------------------------------------------------------

    def prep_read(
        self, iov: Memory, iov_offset: int, file: File, offset: int, length: int,
        *, user_data: int = 0, priority: Priority = Priority.NORMAL, timeout: float | None = None,
    ) -> None:  # fmt: skip
        """File bytes into the iov. Result: how many, fewer than ``length`` at the end of the file."""
        ring = self._present()
        ring.place_one(Op.READ, file.handle, iov, iov_offset, offset, length, user_data, priority, timeout)

    def prep_write(
        self, iov: Memory, iov_offset: int, file: File, offset: int, length: int,
        *, user_data: int = 0, priority: Priority = Priority.NORMAL, timeout: float | None = None,
    ) -> None:  # fmt: skip
        """Bytes of the iov into the file. Result: how many."""
        ring = self._present()
        ring.place_one(Op.WRITE, file.handle, iov, iov_offset, offset, length, user_data, priority, timeout)

    def prep_fsync(
        self, file: File, *, user_data: int = 0, priority: Priority = Priority.NORMAL, timeout: float | None = None
    ) -> None:
        """What completed before survives the loss of power when this completed. Result: 0."""
        self._present().place_one(Op.FSYNC, file.handle, None, 0, 0, 0, user_data, priority, timeout)

    def prep_reads(
        self, iov: Memory, iov_offsets: Column, file: File, offsets: Column, lengths: Column, user_data: Column = 0,
        *, priority: Priority = Priority.NORMAL, timeout: float | None = None,
    ) -> int:  # fmt: skip
        """Many `prep_read` at once: arrays, or one value for all. How many entries; all were placed or none."""
        ring = self._present()
        return ring.place_files(Op.READ, iov, iov_offsets, file, offsets, lengths, user_data, priority, timeout)

    def prep_writes(
        self, iov: Memory, iov_offsets: Column, file: File, offsets: Column, lengths: Column, user_data: Column = 0,
        *, priority: Priority = Priority.NORMAL, timeout: float | None = None,
    ) -> int:  # fmt: skip
        """Many `prep_write` at once, as `prep_reads`."""
        ring = self._present()
        return ring.place_files(Op.WRITE, iov, iov_offsets, file, offsets, lengths, user_data, priority, timeout)

    # -- blocks --------------------------------------------------------------------------------------

    def prep_get(
        self, iov: Memory | None, iov_offset: int, namespace: Namespace, key: bytes, length: int, *, view: bool = False,
        user_data: int = 0, priority: Priority = Priority.NORMAL, timeout: float | None = None,
    ) -> None:  # fmt: skip
        """The block into the iov. Result: its size; -ENOENT; -EMSGSIZE if it has more than ``length`` bytes.

        ``view``: the completion may be answered with a view of shared memory instead (``arena`` is not 0, see
        `view`); with no iov and the length 0 that is all it can be answered with.
        """
        ring, handle, flags = self._present(), namespace.handle, Flag.VIEW if view else 0
        ring.place_one(Op.GET, handle, iov, iov_offset, 0, length, user_data, priority, timeout, flags, key)

    def prep_put(
        self, iov: Memory, iov_offset: int, namespace: Namespace, key: bytes, length: int,
        *, user_data: int = 0, priority: Priority = Priority.NORMAL, timeout: float | None = None,
        hints: PutHints = NO_HINTS,
    ) -> None:  # fmt: skip
        """``length`` bytes of the iov become the block of ``key``. Result: ``length``. ValueError."""
        ring, handle = self._present(), namespace.handle
        ring.place_one(Op.PUT, handle, iov, iov_offset, hints.pack(), length, user_data, priority, timeout, 0, key)

    def prep_gets(
        self, iovs: Sequence[Memory | None] | Iov, iov_offsets: Column, namespace: Namespace, keys: Sequence[bytes],
        lengths: Column, user_data: Column = 0,
        *, view: bool = False, priority: Priority = Priority.NORMAL, timeout: float | None = None,
    ) -> None:  # fmt: skip
        """Many `prep_get` at once: a key each, and an iov each, or one; the others arrays, or one value for all."""
        ring, flags = self._present(), Flag.VIEW if view else 0
        ring.place_keys(Op.GET, iovs, iov_offsets, namespace, keys, lengths, user_data, flags, priority, timeout)

    def prep_puts(
        self, iovs: Sequence[Memory] | Iov, iov_offsets: Column, namespace: Namespace, keys: Sequence[bytes],
        lengths: Column, user_data: Column = 0, *, priority: Priority = Priority.NORMAL, timeout: float | None = None,
        hints: PutHints = NO_HINTS,
    ) -> None:  # fmt: skip
        """Many `prep_put` at once, as `prep_gets`."""
        terms = user_data, 0, priority, timeout, hints.pack()
        self._present().place_keys(Op.PUT, iovs, iov_offsets, namespace, keys, lengths, *terms)

    def prep_exists(
        self, namespace: Namespace, keys: Sequence[bytes], *, prefix: bool = False, costs: bool = False,
        user_data: int = 0, priority: Priority = Priority.NORMAL, timeout: float | None = None,
    ) -> Found:  # fmt: skip
        """Which blocks are there: filled in when the completion is reaped, whose result is how many.

        ``prefix``: look no further than the first that is absent; the result is how many stand before it.
        ``costs``: answer where they are and when they are expected, for ``decode_costs(answer.view(np.uint8))``.
        """
        ring, flags = self._present(), (Flag.PREFIX if prefix else 0) | (Flag.COSTS if costs else 0)
        return ring.place_key_list(Op.EXISTS, namespace, keys, user_data, flags, priority, timeout)

    def prep_delete(
        self, namespace: Namespace, keys: Sequence[bytes],
        *, user_data: int = 0, priority: Priority = Priority.NORMAL, timeout: float | None = None,
    ) -> Found:  # fmt: skip
        """Which were there, and are gone: as `prep_exists`."""
        return self._present().place_key_list(Op.DELETE, namespace, keys, user_data, 0, priority, timeout)

    def prep_prefetch(
        self, namespace: Namespace, keys: Sequence[bytes],
        *, user_data: int = 0, priority: Priority = Priority.NORMAL, timeout: float | None = None, near: bool = False,
    ) -> Found:  # fmt: skip
        """Which are in the shared-memory tier now: as `prep_exists`. ``near``: brought from other hosts alone."""
        flags = Flag.NEAR if near else 0
        return self._present().place_key_list(Op.PREFETCH, namespace, keys, user_data, flags, priority, timeout)

    # -- what is under way, and views ----------------------------------------------------------------

    @property
    def in_flight(self) -> int:
        """Entries prepared or submitted, and not reaped yet."""
        return self.entries - self.attached.tickets.free

    def prep_cancel(
        self, target_user_data: int,
        *, user_data: int = 0, priority: Priority = Priority.HIGH, timeout: float | None = None,
    ) -> None:  # fmt: skip
        """End the oldest entry with that ``user_data``, which then completes with -ECANCELED if it had not begun.

        Result of this entry: 0, or -ENOENT if that one is not under way any more.
        """
        self._present().place_cancel(target_user_data, user_data, priority, timeout)

    def view(self, completion: np.void) -> memoryview:
        """The bytes of a get that was answered with a view, read-only, where the daemon has them.

        They stay what they are while the memoryview, a slice of it or an array over it, is held. When the last is
        gone, the next `submit` of any ring of this client gives the pin back. ValueError for other completions.
        """
        _, size, offset, arena, pin = completion.item()
        if not arena:
            raise ValueError("the completion is not one with a view")
        return self.attached.session.view(arena, offset, size, pin)

    def release(self, pin: int) -> None:
        """Give back, with the next `submit`, the pin of a completion for which `view` is not called."""
        self.attached.session.unpins.append(pin)

    # -- submitting and reaping ----------------------------------------------------------------------

    def submit(self) -> int:
        """Give the prepared entries to the daemon. How many. Also gives back the pins of views that died."""
        return self._present().submit()

    def wait(self, min_results: int = 1, timeout: float | None = None, max_results: int | None = None) -> Entries:
        """Completions (CQE) of submitted entries: at least ``min_results``, fewer only after ``timeout`` seconds.

        ``min_results`` is lowered to what is under way. Entries without a completion stay under way after a
        timeout. Disconnected as soon as the daemon is gone.
        """
        return self._present().wait(min_results, timeout, max_results)

    async def wait_async(
        self, min_results: int = 1, timeout: float | None = None, max_results: int | None = None
    ) -> Entries:
        """As `wait`, under trio or asyncio. Cancelled, it has taken no completion."""
        return await self._present().wait_async(min_results, timeout, max_results)

    def peek(self, max_results: int | None = None) -> Entries:
        """Completions that are there already. Disconnected if there are none and the daemon is gone."""
        return self._present().peek(max_results)

    # -- the end -------------------------------------------------------------------------------------

    def close(self) -> None:
        """Returns when the daemon touches no iov for this ring any more. What was under way is forgotten."""
        if not self._closed:
            self._closed = True
            self.attached.close()

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aexit__(self, *_: object) -> None:
        await event_loops.in_thread(self.close)
