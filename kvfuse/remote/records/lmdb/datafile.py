"""LMDB's ``data.mdb`` as bytes: whether all of it is there, before LMDB maps it; filler for pages that are not.

LMDB never looks at the file's size: what was cut off is SIGBUS when it is read. A healthy file may be shorter than its
meta page says, by pages at its end that are free and were never written. So the free list decides.

The layout is that of LMDB 0.9 on 64-bit systems, data version 1: pages with a header of 16 bytes, the first two are
meta pages, of which the one with the higher transaction id counts; the free list is a B+tree of lists of page numbers.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from kvfuse.errors import Corrupt, EngineError

_HEADER = struct.Struct("<QHHHH")
"""page number, pad, flags, lower (free space begins), upper (it ends)"""
_META = struct.Struct("<II16xI36xQ40xQQQ")
"""magic, version, page size, root of the free list, root of the records, last page, transaction id"""
_NODE = struct.Struct("<HHHH")
"""low and high half of the data size, or of a page number, whose top are the flags; key size"""
_MAGIC, _DATA_VERSION = 0xBEEFC0DE, 1
_BRANCH, _LEAF, _DIRTY = 0x01, 0x02, 0x10
_BIG_DATA = 0x01
"""flag of a node whose data is on pages of its own"""
_NO_PAGE = (1 << 64) - 1
PAGE_SIZE_MAX = 1 << 16


class _Meta(NamedTuple):
    magic: int
    version: int
    page_size: int
    free_root: int
    records_root: int
    last_page: int
    transaction: int


def check_whole(path: Path) -> None:
    """EngineError, where bytes of the file are missing that LMDB would read; Corrupt, where it is none of its files.

    A file that is not there, or empty, is about to be made.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        size = os.fstat(descriptor).st_size
        if size:
            _check(path, descriptor, size)
    except struct.error as error:
        raise Corrupt(f"{path}: its free list is damaged: {error}") from None
    except OSError as error:
        raise EngineError(f"{path}: {error.strerror}: its medium does not give all bytes") from error
    finally:
        os.close(descriptor)


def check_readable(path: Path) -> None:
    """EngineError where a small file is there of which a byte cannot be read."""
    try:
        path.read_bytes()
    except FileNotFoundError:
        pass
    except OSError as error:
        raise EngineError(f"{path}: {error.strerror}: its medium does not give all bytes") from error


def _check(path: Path, descriptor: int, size: int) -> None:
    pages = _FilePages(path, descriptor, size)
    meta = pages.meta()
    count = size // meta.page_size
    if count <= meta.last_page:
        pages.page_size = meta.page_size
        free = set(pages.free_pages(meta.free_root))
        if not free.issuperset(range(count, meta.last_page + 1)):
            raise pages.truncated((meta.last_page + 1) * meta.page_size)


class _FilePages:
    """The pages of a file, read one by one."""

    def __init__(self, path: Path, descriptor: int, size: int) -> None:
        self._path = path
        self._descriptor = descriptor
        self._size = size
        self.page_size = 0

    def truncated(self, wanted: int) -> EngineError:
        return EngineError(
            f"{self._path} has {self._size} bytes of the {wanted} that its header names: it was truncated"
        )

    def meta(self) -> _Meta:
        """The newer of the two meta pages."""
        first = self._meta_at(0)
        if not 512 <= first.page_size <= PAGE_SIZE_MAX:
            raise Corrupt(f"{self._path}: its header names pages of {first.page_size} bytes")
        return max(first, self._meta_at(first.page_size), key=lambda meta: meta.transaction)

    def _meta_at(self, offset: int) -> _Meta:
        meta = _Meta._make(_META.unpack(self._read(offset + _HEADER.size, _META.size)))
        if meta.magic != _MAGIC or meta.version != _DATA_VERSION:
            raise Corrupt(f"{self._path}: no file of LMDB")
        return meta

    def _read(self, offset: int, length: int) -> bytes:
        data = os.pread(self._descriptor, length, offset)
        if len(data) < length:
            raise self.truncated(offset + length)
        return data

    def free_pages(self, root: int) -> Iterator[int]:
        """The numbers in all lists of the free list's tree."""
        waiting = [root] if root != _NO_PAGE else []
        seen = set(waiting)
        while waiting:
            page = self._read(waiting.pop() * self.page_size, self.page_size)
            _, _, flags, lower, _ = _HEADER.unpack_from(page)
            for place in struct.unpack_from(f"<{max(0, lower - _HEADER.size) // 2}H", page, _HEADER.size):
                low, high, node_flags, key_size = _NODE.unpack_from(page, place)
                if flags & _LEAF:
                    data = place + _NODE.size + key_size
                    yield from self._list(page, data, low | high << 16, is_big=bool(node_flags & _BIG_DATA))
                elif flags & _BRANCH and (child := low | high << 16 | node_flags << 32) not in seen:
                    seen.add(child)
                    waiting.append(child)

    def _list(self, page: bytes, place: int, size: int, *, is_big: bool) -> tuple[int, ...]:
        """A list: its length, and so many page numbers."""
        if is_big:
            (first,) = struct.unpack_from("<Q", page, place)
            page, place = self._read(first * self.page_size + _HEADER.size, size), 0
        (count,) = struct.unpack_from("<Q", page, place)
        return struct.unpack_from(f"<{min(count, size // 8 - 1)}Q", page, place + 8)


def filler_page(size: int) -> bytes:
    """A page that LMDB refuses with an error (MDB_CORRUPTED) when it looks it up, and the transaction with it.

    py-lmdb 2.1 and newer refuse a page of the file that is marked as changed and not yet written. Where LMDB does not
    look - an older one, or the page was lost after it was looked up - this is a leaf and a branch at once: on a page of
    the other kind LMDB ends the process, as on zeros. One node is lower than all keys, one is higher. As a leaf's they
    hold lists of no free pages; as a branch's they name a page behind every map, which is an error again.

    LMDB may write to a page that is so marked: it has to be mapped writable.
    """
    page = bytearray(size)
    nodes = _NODE.pack(8, 0, 8, 0) + bytes(8), _NODE.pack(8, 0, 8, 8) + b"\xff" * 8 + bytes(8)
    body = b"".join(nodes)
    page[size - len(body) :] = body
    places = struct.pack("<HH", size - len(body), size - len(nodes[1]))
    header = _HEADER.pack(0, 0, _BRANCH | _LEAF | _DIRTY, _HEADER.size + len(places), size - len(body))
    page[: len(header) + len(places)] = header + places
    return bytes(page)
