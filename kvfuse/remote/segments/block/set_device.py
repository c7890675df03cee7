"""One device of a set as this host has it: threads with a deadline, and a device that goes away and comes back.

* A call runs in a thread for at most ``deadline`` seconds; then its caller leaves it, and the thread stays in the
  kernel until that lets go of it, with memory of its own (`pieces`).
* A device of which a call was late is *silent*: calls fail at once, until it answers a probe or a late call. So a
  stalled device costs one deadline, and not one for each call; and no more than ``THREADS_MAX`` threads are ever stuck.
* An error may mean that the device is gone, and its descriptor for ever of no use: a namespace that was switched off
  says ENOSPC, and 0 bytes. So after any error the device is opened again before it is used, by its identity, at the
  path of mount.conf or under any other name. While it is not there calls fail at once, and look again by and by.
* Bytes that a late write may still bring are not written anew meanwhile: the older write would win.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import trio

from kvfuse.errors import EngineError, EngineTimeout, MediumError
from kvfuse.remote.segments.block import finding, reservations
from kvfuse.remote.segments.block.finding import Expected
from kvfuse.remote.segments.block.pieces import Abandoned, BouncePiece, DeviceCall, PartialBlocks

_T = TypeVar("_T")
log = logging.getLogger(__name__)

THREADS_MAX = 16
PARALLEL_MAX = 8
"""threads of one call"""
RETRY_SECONDS, RETRY_SECONDS_MAX = 0.25, 4.0
"""after which a device that is not there is looked for again"""
_MEDIUM_ERRNOS = {errno.ENODATA, errno.EILSEQ}
"""a bad sector, as the block layer says it"""


class _Descriptor:
    """An open device, closed when it was given up and no thread uses it."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.use_count = 0
        self.is_retired = False

    def close_if_unused(self) -> None:
        if self.is_retired and not self.use_count:
            os.close(self.fd)
            self.fd = -1


class SetDevice:
    """A device of a set. Made with its descriptor; closed by ``close``. Any thread may use it."""

    def __init__(self, path: Path, fd: int, expected: Expected, deadline: float, *, read_only: bool = False) -> None:
        self.path = path
        self.expected = expected
        self.deadline = deadline
        self._read_only = read_only
        self._descriptor: _Descriptor | None = _Descriptor(fd)
        self._partial = PartialBlocks()
        self._lock = threading.Lock()
        self._opening = threading.Lock()
        self._threads = trio.CapacityLimiter(THREADS_MAX)
        self._is_closed = False
        self._key = b""
        """registered with the device, again each time that it comes back"""
        self._silent_since: float | None = None
        self._late_writes: set[BouncePiece] = set()
        """that nobody waits for, and which may still happen"""
        self._retry_at = 0.0
        self._retry_pause = RETRY_SECONDS

    # -- calls, in the event loop ----------------------------------------------------------------------

    async def read(self, pieces: Sequence[BouncePiece]) -> None:
        """Fill them all. EngineError, EngineTimeout."""
        await self._move(pieces, lambda fd, call, piece: piece.read(fd, call))

    async def write(self, pieces: Sequence[BouncePiece]) -> None:
        """Write them all. EngineError, EngineTimeout."""
        late = [piece for piece in tuple(self._late_writes) if any(_overlap(piece, other) for other in pieces)]
        if late:
            raise EngineTimeout(f"{self.path} at {late[0].offset}: an earlier write there is still under way")
        await self._move(pieces, self._write, are_writes=True)

    async def run(self, work: Callable[[int], _T]) -> _T:
        """``work`` with the device's descriptor, in a thread. It must not touch memory of others."""
        return await self._in_thread(DeviceCall(), lambda fd, call: work(fd))

    @property
    def has_late_writes(self) -> bool:
        """Some that nobody waits for may still happen."""
        return bool(self._late_writes)

    async def register(self, key: bytes) -> bool:
        """Be one of the clients that may write, from now on. False: the device has no reservations. EngineError."""
        is_registered = await self.run(lambda fd: reservations.register(fd, key))
        self._key = key if is_registered else b""
        if not is_registered:
            log.warning("segments.reservations: %s has none, so it takes late writes of hosts that are gone", self.path)
        return is_registered

    def close(self) -> None:
        """No call may be waited for any more."""
        with self._lock:
            self._is_closed = True
        self._give_up(self._descriptor)

    def _write(self, fd: int, call: DeviceCall, piece: BouncePiece) -> None:
        piece.write(fd, call, self._partial)

    async def _move(
        self,
        pieces: Sequence[BouncePiece],
        move: Callable[[int, DeviceCall, BouncePiece], None],
        *,
        are_writes: bool = False,
    ) -> None:
        call = DeviceCall(pieces)
        errors: list[EngineError] = []

        def work(fd: int, call: DeviceCall) -> None:
            while (piece := call.take()) is not None:
                try:
                    move(fd, call, piece)
                finally:
                    call.ended(piece)

        async def run() -> None:
            try:
                await self._in_thread(call, work, are_writes=are_writes)
            except EngineError as error:
                call.stop()
                errors.append(error)

        if len(pieces) == 1:
            await run()
        else:
            async with trio.open_nursery() as nursery:
                for _ in range(min(len(pieces), PARALLEL_MAX)):
                    nursery.start_soon(run)
        if errors:
            raise errors[0]

    async def _in_thread(
        self, call: DeviceCall, work: Callable[[int, DeviceCall], _T], *, are_writes: bool = False
    ) -> _T:
        """A call that is cancelled still waits; one that is late does not."""
        await trio.lowlevel.checkpoint_if_cancelled()
        if self._silent_since is not None:
            raise EngineTimeout(f"{self.path} has not answered for {time.monotonic() - self._silent_since:.1f} s")
        with trio.CancelScope(shield=True, deadline=trio.current_time() + self.deadline):
            return await trio.to_thread.run_sync(
                self._run_work, call, work, abandon_on_cancel=True, limiter=self._threads
            )
        call.leave(self._late_writes if are_writes else set())
        self._be_silent()
        raise EngineTimeout(f"{self.path} did not answer within {self.deadline:g} s")

    def _be_silent(self) -> None:
        if self._silent_since is None:
            self._silent_since = time.monotonic() - self.deadline
            log.warning("%s did not answer within %g s: nobody waits for it until it does", self.path, self.deadline)
            trio.lowlevel.start_thread_soon(self._probe, lambda outcome: None)

    # -- in threads --------------------------------------------------------------------------------------

    def _run_work(self, call: DeviceCall, work: Callable[[int, DeviceCall], _T]) -> _T:
        with self._using() as fd:
            try:
                result = work(fd, call)
            except Abandoned:
                raise EngineTimeout(f"{self.path} was late") from None
        if call.is_left:
            self._answered()
        return result

    def _probe(self) -> None:
        """Any answer will do, errors as well."""
        try:
            with self._using() as fd:
                finding.read_label(fd)
        except Exception as error:
            log.info("%s answers: %s", self.path, error)
        self._answered()

    def _answered(self) -> None:
        if self._silent_since is not None:
            self._silent_since = None
            log.warning("%s answers again", self.path)

    @contextmanager
    def _using(self) -> Iterator[int]:
        """The descriptor, which stays open meanwhile; the device is opened again first where need be. EngineError."""
        descriptor = self._held()
        try:
            yield descriptor.fd
        except (OSError, EOFError) as error:
            self._give_up(descriptor)
            if isinstance(error, OSError) and error.errno == errno.EBADE:
                self._key = b""  # it was taken away: only another client's key may come in its place
            raise self._as_engine_error(error) from error
        finally:
            with self._lock:
                descriptor.use_count -= 1
                descriptor.close_if_unused()

    def _held(self) -> _Descriptor:
        with self._opening:
            if self._descriptor is None:
                self._open_again()
            with self._lock:
                if self._descriptor is None or self._is_closed:
                    raise EngineError(f"{self.path} is closed")
                self._descriptor.use_count += 1
                return self._descriptor

    def _open_again(self) -> None:
        now = time.monotonic()
        if now < self._retry_at:
            raise EngineError(f"{self.path} is gone: {self.expected.title} is looked for again and again")
        try:
            fd, path = finding.find(self.path, self.expected, read_only=self._read_only)
            self._register_again(fd, path)
        except EngineError:
            self._retry_at = time.monotonic() + self._retry_pause
            self._retry_pause = min(2 * self._retry_pause, RETRY_SECONDS_MAX)
            raise
        self._retry_pause = RETRY_SECONDS
        log.warning("%s was opened again: %s", path, self.expected.title)
        with self._lock:
            if self._is_closed:
                os.close(fd)
                raise EngineError(f"{self.path} is closed")
            self._descriptor = _Descriptor(fd)

    def _register_again(self, fd: int, path: Path) -> None:
        """It may have lost its registrations meanwhile."""
        try:
            if self._key:
                reservations.register(fd, self._key)
        except OSError as error:
            os.close(fd)
            raise EngineError(f"{path} cannot be registered with: {error.strerror}") from error

    def _give_up(self, descriptor: _Descriptor | None) -> None:
        with self._lock:
            if descriptor is not None and not descriptor.is_retired:
                descriptor.is_retired = True
                descriptor.close_if_unused()
                self._descriptor = None

    def _as_engine_error(self, error: OSError | EOFError) -> EngineError:
        if isinstance(error, EOFError):
            return EngineError(f"{self.path} is gone: it gave fewer bytes than were asked for")
        code = error.errno or 0
        if code == errno.ENOSPC:
            return EngineError(f"{self.path} is gone: it has no room for bytes that it had room for")
        if code == errno.EBADE:
            return EngineError(f"{self.path}: another host cut this one off (its reservation is gone)")
        kind = MediumError if code in _MEDIUM_ERRNOS else EngineError
        return kind(f"{self.path}: {os.strerror(code)}")


def _overlap(one: BouncePiece, other: BouncePiece) -> bool:
    """They touch one block."""
    return one.blocks.start < other.blocks.stop and other.blocks.start < one.blocks.stop
