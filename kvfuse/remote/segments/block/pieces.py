"""Transfers to and from devices, cut into pieces that a thread moves through aligned memory of its own.

A thread in the kernel cannot be called back. So the kernel never gets the caller's memory: a caller whose time is over
leaves its call, and the thread finds that out before it touches that memory again.
"""

from __future__ import annotations

import errno
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from kvfuse.remote import libc
from kvfuse.remote.segments.file.direct import (
    BLOCK_SIZE,
    BOUNCE_SIZE,
    bounce_buffer,
    first_of,
    read_fully,
    write_fully,
)


class Abandoned(Exception):
    """Nobody waits for this call any more."""


class DeviceCall:
    """What one caller waits for. Threads touch its memory within ``memory()`` alone."""

    def __init__(self, pieces: Iterable[BouncePiece] = ()) -> None:
        self.is_left = False
        self._left_pieces = deque(pieces)
        self._begun: set[BouncePiece] = set()
        self._late: set[BouncePiece] = set()
        self._lock = threading.Lock()

    @contextmanager
    def memory(self) -> Iterator[None]:
        with self._lock:
            if self.is_left:
                raise Abandoned
            yield

    def take(self) -> BouncePiece | None:
        """The next piece; None: there is none, or nobody waits for it."""
        with self._lock:
            if self.is_left or not self._left_pieces:
                return None
            piece = self._left_pieces.popleft()
            self._begun.add(piece)
            return piece

    def stop(self) -> None:
        """Begin no piece more: one of them failed."""
        with self._lock:
            self._left_pieces.clear()

    def leave(self, late: set[BouncePiece]) -> None:
        """From now on no thread touches the caller's memory, or knows it. ``late`` has what may still happen."""
        with self._lock:
            self.is_left = True
            self._late = late
            late |= self._begun
            self._left_pieces.clear()
            for piece in self._begun:
                piece.views.clear()

    def ended(self, piece: BouncePiece) -> None:
        """A thread is done with it, whether it happened or not."""
        with self._lock:
            self._begun.discard(piece)
            self._late.discard(piece)


class BouncePiece:
    """Neighbouring bytes of a device, of at most one bounce buffer with the blocks that they lie in."""

    def __init__(self, offset: int) -> None:
        self.offset = offset
        self.end = offset
        self.views: deque[memoryview] = deque()

    @property
    def blocks(self) -> range:
        """In bytes, from the beginning of the first block to the end of the last one."""
        return range(self.offset - self.offset % BLOCK_SIZE, -(-self.end // BLOCK_SIZE) * BLOCK_SIZE)

    def add(self, view: memoryview) -> memoryview:
        """Take the first bytes of a view that follows; what there is no room for."""
        room = self.offset - self.offset % BLOCK_SIZE + BOUNCE_SIZE - self.end
        if room <= 0:
            return view
        self.views.append(view[:room])
        self.end += min(room, view.nbytes)
        return view[room:]

    def read(self, fd: int, call: DeviceCall) -> None:
        """EOFError, OSError."""
        blocks, start = self.blocks, self.offset - self.blocks.start
        with bounce_buffer() as bounce, bounce[: len(blocks)] as memory:
            read_fully(fd, memory, blocks.start)
            with call.memory():
                for part in first_of(self.views, self.end - self.offset):
                    part[:] = memory[start : start + len(part)]
                    start += len(part)

    def write(self, fd: int, call: DeviceCall, partial: PartialBlocks) -> None:
        """The rest of the first and the last block stays as it is. EOFError, OSError."""
        blocks, start = self.blocks, self.offset - self.blocks.start
        cut = {blocks.start} if self.offset != blocks.start else set()
        cut |= {blocks.stop - BLOCK_SIZE} if self.end != blocks.stop else set()
        with bounce_buffer() as bounce, bounce[: len(blocks)] as memory, partial.held(cut):
            for block in cut:
                with memory[block - blocks.start :][:BLOCK_SIZE] as kept:
                    read_fully(fd, kept, block)
            with call.memory():
                for part in first_of(self.views, self.end - self.offset):
                    memory[start : start + len(part)] = part
                    start += len(part)
                del part  # the kernel may keep this thread for long, and the memory is the caller's
            write_fully(fd, memory, blocks.start)


class PartialBlocks:
    """Blocks of a device of which a part is being changed: one thread at a time does so."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._busy: set[int] = set()

    @contextmanager
    def held(self, blocks: set[int]) -> Iterator[None]:
        if not blocks:
            yield
            return
        with self._changed:
            self._changed.wait_for(lambda: not blocks & self._busy)
            self._busy |= blocks
        try:
            yield
        finally:
            with self._changed:
                self._busy -= blocks
                self._changed.notify_all()


class Located(NamedTuple):
    """A transfer whose place on a device is known."""

    offset: int
    view: memoryview


def cut(transfers: Sequence[Located]) -> list[BouncePiece]:
    """As few pieces as there may be; empty transfers have none."""
    pieces: list[BouncePiece] = []
    for offset, view in sorted(transfers, key=lambda transfer: transfer.offset):
        rest = view
        while rest.nbytes:
            if not pieces or pieces[-1].end != offset + view.nbytes - rest.nbytes:
                pieces.append(BouncePiece(offset + view.nbytes - rest.nbytes))
            before = rest.nbytes
            rest = pieces[-1].add(rest)
            if rest.nbytes == before:
                pieces.append(BouncePiece(pieces[-1].end))
    return [piece for piece in pieces if piece.views]


def read_page(fd: int, offset: int) -> bytes:
    """One block. EOFError, OSError."""
    return read_bytes(fd, offset, BLOCK_SIZE)


def write_page(fd: int, offset: int, image: bytes) -> None:
    """One block, of which the rest is zeros. OSError."""
    write_bytes(fd, offset, image.ljust(BLOCK_SIZE, b"\0"))


def read_bytes(fd: int, offset: int, length: int) -> bytes:
    """Whole blocks, up to a bounce buffer. EOFError, OSError."""
    with bounce_buffer() as bounce, bounce[:length] as memory:
        read_fully(fd, memory, offset)
        return bytes(memory)


def write_bytes(fd: int, offset: int, image: bytes) -> None:
    """From a block's beginning, up to a bounce buffer; the rest of the last block is zeros. OSError."""
    with bounce_buffer() as bounce, bounce[: -(-len(image) // BLOCK_SIZE) * BLOCK_SIZE] as memory:
        memory[:] = image.ljust(memory.nbytes, b"\0")
        write_fully(fd, memory, offset)


def write_zeros(fd: int, offset: int, length: int) -> None:
    """By the device itself, where it can. OSError."""
    try:
        libc.fallocate(fd, libc.FALLOC_FL_ZERO_RANGE | libc.FALLOC_FL_KEEP_SIZE, offset, length)
    except OSError as error:
        if error.errno != errno.EOPNOTSUPP:
            raise
        with bounce_buffer() as bounce:
            bounce[:] = bytes(BOUNCE_SIZE)
            for start in range(offset, offset + length, BOUNCE_SIZE):
                write_fully(fd, bounce[: min(BOUNCE_SIZE, offset + length - start)], start)
