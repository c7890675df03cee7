"""Segments as files of a directory: a local disk, tmpfs, or any shared mount.

Where they are, and how one is made, is up to `SegmentPlaces`: here files, elsewhere parts of a device (``block``).

* Reads are tried on the event loop's thread with RWF_NOWAIT; what is not in the page cache, and batches so
  large that copying them would hold up the loop, go to a thread: one hop for all of a batch.
* Writes, syncs and everything that touches the directory go to a thread: one hop for a batch.
* Neighbouring transfers are merged into one system call.
* With ``direct`` the files bypass the page cache: aligned transfers go straight from and to the caller's
  buffer, others through an aligned one (``direct.py``); there are no views.

A view shows the page cache through a mapping, to the kernel alone. mincore says that its pages are there; one that is
evicted before the kernel copies it is read again from the disk, and a disk error is the kernel's EFAULT. A source has a
mapping of its own: threads that may wait read from it whether its pages are there or not, and they stay mapped. There
a medium that fails is a signal, which the map's guard takes (``mapguard.py``): the bytes are then read anew, by
preadv, which has an error for each of them.

After a failed fdatasync the kernel may have dropped the written pages, and calls the next one a success: which is so
for what is written from then on, as the contract says.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Self, TypeVar

import numpy as np
import numpy.typing as npt
import trio

from kvfuse.errors import EngineError, ReadOnly
from kvfuse.remote.mapguard import GuardedMap
from kvfuse.remote.segments.api import Fetch, NoSegment, SegmentInfo, SegmentLimits, SegmentStore, Target, Transfer
from kvfuse.remote.segments.file import fileio
from kvfuse.remote.segments.file.direct import BLOCK_SIZE
from kvfuse.remote.segments.file.fileio import Run, SegmentFile
from kvfuse.remote.segments.file.places import SEGMENT_MAX, FolderPlaces, SegmentPlaces

_T = TypeVar("_T")
log = logging.getLogger(__name__)
_place = itemgetter(0, 1)
"""(segment, offset) of a transfer"""

NOWAIT_BYTES_MAX = 4 << 20
"""Bytes of one batch that are copied on the event loop's thread: about 0.3 ms."""
VIEW_BYTES_MAX = 128 << 20
"""Bytes of views after which the mappings' pages stop counting as this process's memory."""
THREADS_MAX = 32


class FileSegments(SegmentStore):
    """A directory of segment files, or other places. Others may have it open, too, and make segments."""

    def __init__(self, places: SegmentPlaces, *, direct: bool = False, read_only: bool = False) -> None:
        """EngineError. `open` is for directories."""
        # the kernel answers mincore truly only to processes that could write the file
        super().__init__(SegmentLimits(mappable=places.are_mappable and not direct and not read_only))
        self._places = places
        self._files = {file.segment: file for file in places.found()}
        self._direct = direct
        self._read_only = read_only
        self._nowait = not direct  # a direct read always waits for the device
        self._closed = False
        self._view_bytes = 0
        self._unsynced: set[SegmentFile] = set() if read_only else set(self._files.values())
        """first all: a daemon that was killed may have written to them"""
        self._names_lock = trio.Lock()
        self._sync_lock = trio.Lock()
        self._threads = trio.CapacityLimiter(THREADS_MAX)

    @classmethod
    def open(cls, directory: str | os.PathLike[str], *, direct: bool = False, read_only: bool = False) -> Self:
        """Open all segments of ``directory``; made if absent, unless ``read_only``. EngineError, EngineFull."""
        places = FolderPlaces(Path(directory), is_direct=direct, is_read_only=read_only)
        return cls(places, direct=direct, read_only=read_only)

    async def create(self, segment: int, size: int) -> None:
        self._check_writable()
        unit = BLOCK_SIZE if self._direct else 1
        if not 0 <= segment <= SEGMENT_MAX or size <= 0 or size % unit:
            raise ValueError(f"segment {segment} of {size} bytes, in units of {unit}")
        async with self._names_lock:
            existing = self._files.get(segment)
            if existing is not None:
                if existing.size != size:
                    raise ValueError(f"segment {segment} exists with {existing.size} bytes, not {size}")
                return
            made = await self._in_thread(lambda: self._places.make(segment, size))
            if made.size != size:
                made.retire()
                raise ValueError(f"segment {segment} exists with {made.size} bytes, not {size}")
            self._files[segment] = made

    async def remove(self, segment: int) -> None:
        self._check_writable()
        async with self._names_lock:
            file = self._files.pop(segment, None)
            if file is None:
                return
            self._unsynced.discard(file)
            file.retire()
            with trio.CancelScope(shield=True):
                await file.closed.wait()  # no call writes where another segment may be
                await self._in_thread(lambda: self._places.drop(file))

    async def list(self) -> list[SegmentInfo]:
        await self._meet(await self._in_thread(self._places.numbers))
        return [SegmentInfo(segment, self._files[segment].size) for segment in sorted(self._files)]

    async def _meet(self, segments: set[int]) -> None:
        """Open those of these segments that another process has made meanwhile."""
        for segment in sorted(segments - self._files.keys()):
            async with self._names_lock:
                if segment not in self._files and 0 <= segment <= SEGMENT_MAX and not self._closed:
                    met = await self._in_thread(partial(self._places.find, segment))
                    if met is not None:
                        self._files[segment] = met

    async def read(self, batch: Sequence[Transfer]) -> None:
        if not self._files.keys() >= (segments := {transfer.segment for transfer in batch}):
            await self._meet(segments)
        with contextlib.ExitStack() as in_use:
            runs = self._runs(batch, in_use, writable=True)
            byte_count = sum(run.length for run in runs)
            self.counters.reads += len(batch)
            self.counters.read_bytes += byte_count
            try:
                if self._nowait and byte_count <= NOWAIT_BYTES_MAX:
                    runs = self._read_resident(runs)
                if runs:
                    self.counters.thread_reads += sum(run.transfer_count for run in runs)
                    await self._in_thread(lambda: fileio.read_runs(runs))
            except EngineError as error:
                self.counters.failed_reads += 1
                log.error("%s", error)
                raise

    async def write(self, batch: Sequence[Transfer]) -> None:
        self._check_writable()
        if not self._files.keys() >= (segments := {transfer.segment for transfer in batch}):
            await self._meet(segments)
        with contextlib.ExitStack() as in_use:
            runs = self._runs(batch, in_use, writable=False)
            self.counters.writes += len(batch)
            self.counters.written_bytes += sum(run.length for run in runs)
            if not runs:
                return
            try:
                await self._in_thread(lambda: fileio.write_runs(runs))
            finally:
                self._unsynced.update(run.file for run in runs if not run.file.retired)

    @contextlib.contextmanager
    def writing(self, segments: set[int]) -> Iterator[Mapping[int, Target]]:
        files = [self._files[segment] for segment in segments if segment in self._files]
        if self._read_only or self._closed or self._direct or len(files) < len(segments):
            yield {}
            return
        with contextlib.ExitStack() as in_use:
            for file in files:
                in_use.enter_context(file)
            if not all(file.is_writable and file.past_cache is None for file in files):
                yield {}
                return
            are_mapped = self._places.are_mappable
            yield {
                file.segment: fileio.ThreadTarget(file, self._unsynced, file.written_address() if are_mapped else 0)
                for file in files
            }

    async def sync(self) -> None:
        self.counters.syncs += 1
        async with self._sync_lock:  # a later call waits for an earlier one: it may vouch for the same writes
            files = []
            while self._unsynced:  # one by one: threads add some
                files.append(self._unsynced.pop())
            files = [file for file in files if not file.retired]
            with contextlib.ExitStack() as in_use:
                for file in files:
                    in_use.enter_context(file)
                try:
                    await self._in_thread(lambda: fileio.sync(files))
                except BaseException:
                    self._unsynced.update(file for file in files if not file.retired)
                    raise

    def distrust_cache(self) -> None:
        for file in self._files.values():
            file.distrust_cache()

    def recheck(self) -> None:
        """What was written to a file that is removed need not be synced."""
        for segment, file in list(self._files.items()):
            if not self._places.has(file):
                del self._files[segment]
                self._unsynced.discard(file)
                file.retire()

    def drop_cache(self) -> None:
        for file in self._files.values():
            if file.past_cache is not None:
                file.drop_cache()

    def view(self, segment: int, offset: int, length: int) -> memoryview | None:
        file = self._checked(segment, offset, length)
        view = file.resident(offset, length) if self.limits.mappable and length else None
        if view is None:
            return None
        self.counters.views += 1
        self.counters.view_bytes += length
        self._view_bytes += length
        if self._view_bytes > VIEW_BYTES_MAX:
            self._view_bytes = 0
            for other in self._files.values():
                other.drop_mapped_pages()
        return view

    async def warm(self, segment: int, offset: int, length: int, threads: trio.CapacityLimiter) -> bytes:
        if not self.limits.mappable or not length:
            return b""
        with self._checked(segment, offset, length) as file:
            return await self._check_range(partial(fileio.warm, file, file.start + offset, length), length, threads)

    async def fetch(self, batch: Sequence[Fetch], threads: trio.CapacityLimiter) -> Sequence[bytes]:
        if not self.limits.mappable or not batch:
            return []
        with contextlib.ExitStack() as in_use:
            calls = []
            for segment, offset, length, target in batch:
                file = in_use.enter_context(self._checked(segment, offset, length))
                pages = target[: -(-length // BLOCK_SIZE) * BLOCK_SIZE]
                calls.append(partial(fileio.fetch, file, file.start + offset, length, pages))
            size = sum(one.length for one in batch)
            return await self._check_range(lambda: [call() for call in calls], size, threads)

    async def _check_range(self, call: Callable[[], _T], length: int, threads: trio.CapacityLimiter) -> _T:
        """Have one of ``threads`` sum bytes, with the counts and the log of a read. EngineError."""
        self.counters.reads += 1
        self.counters.read_bytes += length
        self.counters.thread_reads += 1
        try:
            return await trio.to_thread.run_sync(call, limiter=threads)
        except EngineError as error:
            self.counters.failed_reads += 1
            log.error("%s", error)
            raise

    def source(self, segment: int) -> tuple[int, npt.NDArray[np.uint8], GuardedMap | None] | None:
        file = self._checked(segment, 0, 0)
        return file.source() if self._places.are_mappable and not self._direct else None

    async def aclose(self) -> None:
        with trio.CancelScope(shield=True):
            async with self._names_lock, self._sync_lock:
                self._closed = True
                files = list(self._files.values())
                self._files.clear()
                for file in files:
                    file.retire()
                for file in files:
                    await file.closed.wait()

    def _check_writable(self) -> None:
        if self._read_only:
            raise ReadOnly(f"{self._places.path} is open for reading only")
        if self._closed:
            raise EngineError(f"{self._places.path} is closed")

    def _checked(self, segment: int, offset: int, length: int) -> SegmentFile:
        """The open file of a segment that holds the range, else ValueError."""
        file = self._files.get(segment)
        if file is None:
            raise NoSegment(f"{self._places.path} has no segment {segment}", segment)
        if offset < 0 or length < 0 or offset + length > file.size:
            raise ValueError(f"{length} bytes at {offset} of segment {segment}, which has {file.size}")
        return file

    def _runs(self, batch: Sequence[Transfer], in_use: contextlib.ExitStack, *, writable: bool) -> Sequence[Run]:
        """The batch as few runs of neighbouring bytes, whose files stay open as long as ``in_use``."""
        runs: list[Run] = []
        for segment, offset, buffer in sorted(batch, key=_place):
            view = memoryview(buffer)
            file = self._checked(segment, offset, view.nbytes)
            if writable and view.readonly:
                raise ValueError(f"a buffer to read into is not writable (segment {segment}, offset {offset})")
            if not view.nbytes:
                continue
            view = view.cast("B")
            if not (runs and runs[-1].takes(file, file.start + offset, view)):
                runs.append(Run(file, file.start + offset, view))
        for file in {run.file for run in runs}:
            in_use.enter_context(file)
        return runs

    def _read_resident(self, runs: Sequence[Run]) -> Sequence[Run]:
        """Read what needs no waiting; return what is left, whole runs or their rest."""
        for run in runs:
            self._nowait = self._nowait and fileio.read_resident(run)
        return [run for run in runs if run.length]

    async def _in_thread(self, call: Callable[[], _T]) -> _T:
        """Never abandoned: a call that was cancelled still waits until the thread has let go of its buffers."""
        return await trio.to_thread.run_sync(call, limiter=self._threads)
