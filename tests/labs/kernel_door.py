"""Asks what C answers about blocks (`KernelAnswers`) as the kernel does, and Python for comparison."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

from block_tree import engine_of

from kvfuse.errors import NotFound
from kvfuse.volume.api import Attributes, Caller, Handle
from kvfuse.volume.blocks.block_engine import BlockEngine
from kvfuse.volume.blocks.kernel_answers import NOT_KEPT, KeptRows
from kvfuse.volume.volume import Volume

LOOKUP, FORGET, GETATTR, OPEN, READ, WRITE, RELEASE, FSYNC, FLUSH = 1, 2, 3, 14, 15, 16, 18, 20, 25
BATCH_FORGET = 42
HEAD, OUT = struct.Struct("<IIQQIIIHH"), struct.Struct("<IiQ")
ATTR = struct.Struct("<QQQQQQIIIIIIIIII")
ENTRY = struct.Struct("<QQQQII")
SENT_AGAIN = 1 << 63
ENOENT = 2


NOBODY = Caller(0, 0)


class Answer(NamedTuple):
    error: int
    body: bytes


@dataclass
class Kernel:
    """Asks as the kernel does, over a socket. ``answers``: of an engine."""

    engine: BlockEngine
    ours: socket.socket
    theirs: socket.socket
    unique: int = 0
    taken: dict[int, Handle] = field(default_factory=dict)
    """fh -> handle that Python made of one of C's"""

    def take(self, fh: int, handle: Handle, unique: int = 0) -> bool:
        return self.taken.setdefault(fh, handle) is handle

    def request(self, opcode: int, node: int, body: bytes = b"", mark: int = 0, caller: Caller = NOBODY) -> bytes:
        self.unique += 2
        uid, gid = caller.uid, caller.gid
        return HEAD.pack(HEAD.size + len(body), opcode, self.unique | mark, node, uid, gid, 1, 0, 0) + body

    def ask(
        self, opcode: int, node: int, body: bytes = b"", *, mark: int = 0, caller: Caller = NOBODY
    ) -> Answer | None:
        """None: Python has to answer."""
        request = self.request(opcode, node, body, mark, caller)
        if not self.engine.answers.door.answer(self.theirs.fileno(), request):
            return None
        if opcode in (FORGET, BATCH_FORGET):
            return Answer(0, b"")
        found = self.ours.recv(1 << 21)
        length, error, unique = OUT.unpack_from(found)
        assert (length, unique) == (len(found), self.unique)
        return Answer(-error, found[OUT.size :])

    def look_up(self, folder: int, name: bytes) -> tuple[int, bytes] | None:
        """(inode, its attributes); (0, b""): there is none. None: Python has to."""
        answer = self.ask(LOOKUP, folder, name + b"\0")
        if answer is None:
            return None
        if answer.error:
            assert answer == (ENOENT, b"")
            return 0, b""
        ino, _, name_seconds, attr_seconds, name_rest, attr_rest = ENTRY.unpack_from(answer.body)
        assert (name_seconds, name_rest, attr_seconds, attr_rest) == (0, 0, 1, 500_000_000)
        return ino, answer.body[ENTRY.size :]

    def open(self, ino: int, flags: int = os.O_RDONLY) -> int | None:
        answer = self.ask(OPEN, ino, struct.pack("<II", flags, 0))
        if answer is None:
            return None
        assert answer.error == 0
        return int.from_bytes(answer.body[:8], "little")

    def read(self, ino: int, fh: int, offset: int, size: int) -> bytes | None:
        answer = self.ask(READ, ino, struct.pack("<QQIIQII", fh, offset, size, 0, 0, 0, 0))
        return answer.body if answer is not None else None

    def release(self, ino: int, fh: int) -> bool:
        return self.ask(RELEASE, ino, struct.pack("<QIIQ", fh, 0, 0, 0)) is not None


@contextmanager
def door_ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in (ours, theirs):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 << 20)
    ours.settimeout(5)
    with ours, theirs:
        yield ours, theirs


async def connect(volume: Volume, ends: tuple[socket.socket, socket.socket], kept: KeptRows = NOT_KEPT) -> Kernel:
    kernel = Kernel(engine_of(volume), *ends)
    assert volume.begin_kernel_answers(1.5, kept, kernel.take) is not None
    return kernel


def attributes_as_sent(found: Attributes) -> bytes:
    """As the kernel gets them."""
    seconds, rests = zip(*[divmod(at, 10**9) for at in (found.atime, found.mtime, found.ctime)], strict=True)
    return ATTR.pack(
        found.ino, found.size, found.blocks, *seconds, *rests, found.mode, found.nlink, found.uid, found.gid, 0, 4096, 0
    )  # fmt: skip


async def python_says(volume: Volume, folder: int, name: bytes) -> tuple[int, bytes]:
    try:
        found = await volume.tree.lookup(folder, name)
    except NotFound:
        return 0, b""
    volume.tree.forget(found.ino, 1)
    return found.ino, attributes_as_sent(found)
