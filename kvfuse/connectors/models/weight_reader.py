"""Reads large files of a mount through a ring, in pieces side by side: see `WeightReader`."""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from errno import ENOENT
from pathlib import Path
from typing import NamedTuple, Self

import numpy as np
import numpy.typing as npt

from kvfuse.sizes import MIB
from kvfuse.usrbio.client import Client, Disconnected, File, GpuIov, Iov, Ring, connect
from kvfuse.usrbio.client.iov import bytes_of

Bytes = npt.NDArray[np.uint8]

PIECE = 4 * MIB
"""Bytes of one read: a chunk of a file, where nothing else was chosen for its folder."""
ONCE_PIECE = 8 * MIB
"""Bytes of one that is read past the page cache: the daemon reads as many at a time."""
PIECES_MAX = 8
"""Pieces under way. The daemon reads ahead, so more bring nothing."""
PATIENCE_S = 60.0
"""for a daemon that comes back"""
RETRY_S = 0.05


class WeightReader:
    """Reads files of one mount. Safe to use from any thread; one call is under way at a time.

    Memory that `memory` made, or that lies in shared memory and was registered with the client, is filled by the daemon
    itself. Other memory of this process is filled from `buffer_size` bytes of such memory, and a GPU's as docs/gpu.md
    says. A daemon that ends meanwhile is waited for.
    """

    def __init__(
        self, path: str | os.PathLike[str], *, buffer_size: int = PIECE * PIECES_MAX, once: bool = False
    ) -> None:
        """``path``: in the mount. FileNotFoundError where there is no mount, Disconnected where nobody answers.

        ``once``: this host does not load the same files again soon. They are read past the page cache of the disk, with
        less of the processor, and leave it to others; what it has already is used.
        """
        if buffer_size < PIECE:
            raise ValueError(f"buffer_size {buffer_size}: at least {PIECE} bytes are needed")
        self._stack = ExitStack()
        self._lock = threading.Lock()
        self._files: dict[str, File] = {}
        self.client: Client = self._stack.enter_context(connect(path))
        self._ring: Ring | None = None
        self._buffer_size = buffer_size
        self._buffer: Iov | None = None
        self._once = once
        self._is_closed = False

    def memory(self, size: int) -> Bytes:
        """New memory of ``size`` bytes that the daemon fills in place, zeroed. It lives until `close`, its views on."""
        return self._stack.enter_context(self.client.iov(size)).array

    def read_chunked(self, path: str, dev_ptr: int, file_offset: int, total_length: int, chunk_size: int = 0) -> int:
        """Bytes at ``file_offset`` of the file to the address ``dev_ptr``, of the host or a GPU; how many.

        Fewer than ``total_length`` at the end of the file. ``chunk_size``: bytes of one read, at most; 0: as many as
        suit. What fastsafetensors asks of its readers. OSError of the file; ValueError of the address; DeviceError.
        """
        if not total_length:
            return 0
        if is_writable(dev_ptr, total_length):
            memory = memoryview((ctypes.c_uint8 * total_length).from_address(dev_ptr)).cast("B")
            return self.read_into(path, file_offset, memory, piece_size=chunk_size)
        with self._lock, self.client.iov_from_gpu(_GpuBytes(dev_ptr, total_length)) as gpu, self._ending():
            return self._read(path, file_offset, total_length, chunk_size, gpu, 0)

    def read_into(self, path: str, file_offset: int, target: object, *, piece_size: int = 0) -> int:
        """As `read_chunked`, into a writable buffer, an array or a tensor in memory of the host."""
        array = bytes_of(target)
        if not array.flags.writeable:
            raise ValueError("the target is read-only")
        with self._lock, self._ending():
            place = self.client.locate(array) if len(array) else None
            if place is not None:
                return self._read(path, file_offset, len(array), piece_size, *place)
            return self._read_by_buffer(path, file_offset, array, piece_size)

    def close(self) -> None:
        """The daemon touches no memory of this reader any more."""
        with self._lock:
            self._is_closed = True
            self._files.clear()
            self._stack.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- one call ------------------------------------------------------------------------------------

    def _read_by_buffer(self, path: str, file_offset: int, target: Bytes, piece_size: int) -> int:
        """Through shared memory, from which this process copies."""
        while self._buffer is None:
            try:
                self._buffer = self._stack.enter_context(self.client.iov(self._buffer_size))
            except Disconnected:
                self._come_back()
        size = self._size_of(piece_size)
        count = min(PIECES_MAX, self._buffer_size // size)
        done = 0
        for piece in self._in_order(path, file_offset, len(target), size, self._buffer, count):
            target[done : done + piece.length] = self._buffer.array[piece.place : piece.place + piece.length]
            done += piece.length
        return done

    def _read(self, path: str, file_offset: int, length: int, piece_size: int, memory: Iov | GpuIov, place: int) -> int:
        """Straight into registered memory."""
        pieces = self._in_order(path, file_offset, length, self._size_of(piece_size), memory, PIECES_MAX, place)
        return sum(piece.length for piece in pieces)

    def _in_order(
        self, path: str, file_offset: int, length: int, piece_size: int, memory: Iov | GpuIov, count: int,
        place: int | None = None,
    ) -> Iterator[_FilledPiece]:  # fmt: skip
        """Pieces as they were read, ``count`` under way. ``place``: of all in ``memory``; None: they take turns there.

        Ends with the file. A piece's place may be used again once the next one is asked for.
        """
        self._forget_replaced(path)
        asked = given = 0
        results: dict[int, int] = {}
        pieces = _Pieces(file_offset, length, piece_size)
        while given < pieces.piece_count:
            try:
                while asked < given + count and asked < pieces.piece_count:
                    self._ask(path, pieces, memory, asked, count, place)
                    asked += 1
                while given not in results:
                    results |= {int(row["user_data"]): int(row["result"]) for row in self._own_ring().wait(1)}
            except Disconnected:
                self._end_ring()  # the connection may stand yet, and with it what is under way
                self._come_back()
                asked = given
                results.clear()
                continue
            result = results.pop(given)
            start, wanted = pieces.span(given)
            if result < 0:
                raise OSError(-result, os.strerror(-result), path)
            yield _FilledPiece(given % count * piece_size if place is None else place + start, result)
            given += 1
            if result < wanted:
                return

    def _ask(
        self, path: str, pieces: _Pieces, memory: Iov | GpuIov, number: int, count: int, place: int | None
    ) -> None:
        start, size = pieces.span(number)
        at = number % count * pieces.size if place is None else place + start
        ring = self._own_ring()
        ring.prep_read(memory, at, self._file(path), pieces.offset + start, size, user_data=number)
        ring.submit()

    def _size_of(self, piece_size: int) -> int:
        """Bytes of one read, for what a caller asks; a larger one would come in one go, and so later."""
        size_max = min(ONCE_PIECE, self._buffer_size) if self._once else PIECE
        return min(piece_size, size_max) if piece_size > 0 else size_max

    def _own_ring(self) -> Ring:
        if self._ring is None:
            self._ring = self._stack.enter_context(self.client.ring(2 * PIECES_MAX))
        return self._ring

    def _file(self, path: str) -> File:
        file = self._files.get(path)
        if file is None or not file.handle:  # what took its place since is another file
            file = self._files[path] = self._stack.enter_context(self.client.file(path, once=self._once))
        return file

    def _forget_replaced(self, path: str) -> None:
        """What has the file's path now is what is wanted. While there is no daemon, it is the same file."""
        if (file := self._files.get(path)) is None:
            return
        try:
            is_same = os.stat(path).st_ino == file.inode
        except OSError as error:
            is_same = error.errno != ENOENT
        if not is_same:
            self._files.pop(path).close()

    @contextmanager
    def _ending(self) -> Iterator[None]:
        """Nothing of the body is under way behind it, also where it was interrupted: its memory is the caller's."""
        if self._is_closed:
            raise ValueError("the reader is closed")
        try:
            yield
        finally:
            if self._ring is not None and self._ring.in_flight:
                self._end_ring()

    def _end_ring(self) -> None:
        """The next piece makes another one."""
        ring, self._ring = self._ring, None
        if ring is not None:
            ring.close()

    def _come_back(self) -> None:
        """Connect to the daemon after this one. Disconnected: there is none within PATIENCE_S."""
        until = time.monotonic() + PATIENCE_S
        while True:
            try:
                self.client.reconnect()
            except Disconnected:
                if time.monotonic() > until:
                    raise
                time.sleep(RETRY_S)  # its socket is there when it answers, and nothing tells of that
            else:
                return


class _Pieces(NamedTuple):
    """Where reads of a range begin and end: at multiples of ``size`` in the file, so that none is of two chunks."""

    offset: int
    """of the range in the file"""
    length: int
    size: int

    @property
    def piece_count(self) -> int:
        return (self.offset % self.size + self.length + self.size - 1) // self.size

    def span(self, number: int) -> tuple[int, int]:
        """(Start in the range, bytes) of a piece."""
        before = self.offset % self.size
        start = max(0, number * self.size - before)
        return start, min((number + 1) * self.size - before, self.length) - start


class _FilledPiece(NamedTuple):
    """What was read."""

    place: int
    """in the memory that was read into"""
    length: int


class _GpuBytes:
    """Memory of a GPU, as `Client.iov_from_gpu` takes it."""

    def __init__(self, address: int, size: int) -> None:
        """ValueError: that is no memory."""
        if not address or size <= 0:
            raise ValueError(f"{size} bytes at address {address:#x} are no memory")
        data = {"data": (address, False), "shape": (size,), "typestr": "|u1", "strides": None, "version": 3}
        self.__cuda_array_interface__ = data


def is_writable(address: int, size: int) -> bool:
    """All of these bytes are memory of this process that it may write; a GPU's are not."""
    end = address + size
    for row in Path("/proc/self/maps").read_text(errors="surrogateescape").rstrip("\n").split("\n"):
        span, flags = row.split(maxsplit=2)[:2]
        low, high = (int(bound, 16) for bound in span.split("-"))
        if low <= address < high and flags.startswith("rw"):
            address = min(end, high)  # the next row may go on
    return size > 0 and address == end
