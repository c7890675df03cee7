"""``attack_revocation.py UID MOUNT``: a user who keeps all that it ever got, and looks for blocks with it.

Each line of its input is a question in JSON, and its line of output the answer. It puts blocks, too: each consists of
lines with the number of the block, and the number is its key, so whoever sees 17 bytes knows whose they are.
"""

from __future__ import annotations

import json
import mmap
import os
import re
import struct
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
from attacker_kit import (
    CLOSE_NAMESPACE,
    EXISTS,
    GET,
    MAP_ARENA,
    OPEN_NAMESPACE,
    PREFETCH,
    PUT,
    VIEW,
    Attacker,
    Ring,
    become,
    memfd,
    say,
    sqe,
)

from kvfuse.usrbio.client.mapped_table import MappedTable

MAP_INDEX = 14
ROOM = 1 << 20
LINE = re.compile(rb"<block (\d{8})>\n")
ROWS_LOOKED_AT = 4096
NEWEST = 6
"""arenas that it asks for again and again; more refusals would have the daemon slow it down"""


def content(number: int, size: int) -> bytes:
    return (b"<block %08d>\n" % number * (size // 17 + 1))[:size]


def key(number: int) -> bytes:
    return b"key-%08d" % number


class User:
    """One connection at a time. Descriptors of arenas and mappings of indexes stay when it ends."""

    def __init__(self, mount: str) -> None:
        self.mount = mount
        self.arenas: dict[int, int] = {}
        """number -> descriptor: nothing is mapped, as to look at a hole in a mapping would fill it"""
        self.row_tables: list[MappedTable] = []
        self.handles: dict[str, int] = {}
        self.held: dict[str, int] = {}
        """descriptors of folders"""
        self.memory = memfd(ROOM)
        self.map = mmap.mmap(self.memory, ROOM)
        self.connect("")

    def connect(self, token: str) -> None:
        """Begin anew."""
        self.handles.clear()
        if hasattr(self, "client"):
            self.client.close()
        self.client = Attacker(self.mount)
        if token:
            self.client.show(token)
        self.ring: Ring = self.client.ring(64, ROOM)
        self.iov = self.client.iov(self.memory, ROOM)

    def open(self, folders: list[str], mode: int = 0o644) -> list[str]:
        """Register folders, as far as the kernel and the daemon let it. Which are registered now."""
        for folder in folders:
            if folder in self.handles:
                continue
            try:
                descriptor = os.dup(self.held[folder]) if folder in self.held else os.open(folder, os.O_PATH)
            except OSError:
                continue
            self.client.request(OPEN_NAMESPACE, mode, descriptors=[descriptor])
            os.close(descriptor)
            error, values, _ = self.client.answer()
            if not error:
                self.handles[folder] = values[0]
        return sorted(self.handles)

    def hold(self, folder: str) -> None:
        """Have a descriptor of a folder, which `open` uses later."""
        self.held[folder] = os.open(folder, os.O_PATH)

    def close(self) -> None:
        for handle in self.handles.values():
            self.client.ask(CLOSE_NAMESPACE, handle)
        self.handles.clear()

    def put(self, folder: str, blocks: list[list[int]]) -> list[int]:
        """The result of each (number, size)."""
        return [self._put(folder, number, size) for number, size in blocks]

    def _put(self, folder: str, number: int, size: int) -> int:
        self.map[:size] = content(number, size)
        return self._ask(PUT, folder, key(number), iov=self.iov, length=size)[1]

    def get(self, folder: str, number: int) -> list[int]:
        """As `look`, of one block by one call."""
        return sorted(self._get(folder, number))

    def arena(self, folder: str, number: int) -> int:
        """Where a block is."""
        return self._ask(GET, folder, key(number), iov=self.iov, length=ROOM, flags=VIEW)[3]

    def prefetch(self, folder: str, number: int) -> None:
        """Have a stored block brought into the memory of who may read it."""
        name = key(number)
        self._ask(PREFETCH, folder, struct.pack("<H", len(name)) + name, length=1, offset=ROOM // 2)

    def _ask(self, op: int, folder: str, packed: bytes, **fields: int) -> tuple[int, ...]:
        aux = self.ring.aux
        self.ring.map[aux : aux + len(packed)] = packed
        self.ring.push(sqe(op, handle=self.handles[folder], key_length=len(packed), user_data=1, **fields))
        return self.ring.wait()[0]

    # -- looking -------------------------------------------------------------------------------------

    def look(self, numbers: list[int]) -> dict[str, Any]:
        """All blocks of which it finds out anything by any way: where bytes of it are, or that it is there."""
        answered, found = set[int](), set[int]()
        for folder in self.handles:
            self._map_indexes(folder)
            found |= self._exist(folder, numbers)
            for number in numbers:
                answered |= self._get(folder, number)
        known = dict.fromkeys(self.arenas)
        for rows in self.row_tables:
            there = rows.find(list(map(key, numbers)))
            found |= {number for number, row in zip(numbers, there, strict=True) if row >= 0}
            known |= dict.fromkeys(rows.rows["arena"][:ROWS_LOOKED_AT].tolist())
        self._map_arena(max(known, default=0) + 1)
        for number in [number for number in known if number not in self.arenas][-NEWEST:]:
            self._map_arena(number)
        mapped = {number for descriptor in self.arenas.values() for number in _blocks_in(descriptor)}
        return {"answered": sorted(answered), "found": sorted(found), "mapped": sorted(mapped)}

    def _map_indexes(self, folder: str) -> None:
        for number in range(8):
            self.client.request(MAP_INDEX, self.handles[folder], number)
            error, values, descriptors = self.client.answer()
            if error:
                return
            memory = mmap.mmap(descriptors[0], values[0], prot=mmap.PROT_READ)
            self._note_table(np.frombuffer(memory, np.uint8))
            for descriptor in descriptors:
                os.close(descriptor)

    def _note_table(self, memory: np.ndarray[Any, np.dtype[np.uint8]]) -> None:
        rows = MappedTable(memory)
        if rows.serial not in [other.serial for other in self.row_tables]:
            self.row_tables.append(rows)

    def _exist(self, folder: str, numbers: list[int]) -> set[int]:
        keys = [key(number) for number in numbers]
        packed = struct.pack(f"<{len(keys)}H", *map(len, keys)) + b"".join(keys)
        answers = self.ring.aux + ROOM // 2
        self.ring.map[answers : answers + len(keys)] = bytes(len(keys))
        if not keys or self._ask(EXISTS, folder, packed, length=len(keys), offset=ROOM // 2)[1] < 0:
            return set()
        return {number for number, byte in zip(numbers, self.ring.map[answers:][: len(keys)], strict=False) if byte}

    def _get(self, folder: str, number: int) -> set[int]:
        self.map[:17] = bytes(17)
        _, result, _, arena, _ = self._ask(GET, folder, key(number), iov=self.iov, length=ROOM, flags=VIEW)
        if arena:
            self._map_arena(arena)
        return {number} if result >= 0 or LINE.match(self.map[:17]) else set()

    def _map_arena(self, number: int) -> None:
        if number in self.arenas or not number:
            return
        self.client.request(MAP_ARENA, number)
        error, _, descriptors = self.client.answer()
        if not error:
            (self.arenas[number],) = descriptors


def _blocks_in(descriptor: int) -> Iterator[int]:
    """The numbers of blocks of which an arena has bytes."""
    end, size = 0, os.fstat(descriptor).st_size
    while end < size:
        try:
            start = os.lseek(descriptor, end, os.SEEK_DATA)
        except OSError:  # there is no more
            return
        end = os.lseek(descriptor, start, os.SEEK_HOLE)
        yield from {int(number) for number in LINE.findall(os.pread(descriptor, end - start, start))}


def main() -> None:
    become(int(sys.argv[1]))
    user = User(sys.argv[2])
    for line in sys.stdin:
        question = json.loads(line)
        say(answer=getattr(user, question.pop("do"))(**question))


if __name__ == "__main__":
    main()
