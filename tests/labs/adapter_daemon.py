"""A daemon whose adapter fills memory of devices that are none: ``python adapter_daemon.py VOLUME POINT [-o WORD]...``.

That memory is a memfd. The adapter copies by itself, or, where the variable KVFUSE_LAB_ADAPTER is "rdma", by the RDMA
device of the virtual machine, whose kernel registers no dma-bufs: there the memfd is mapped and registered instead.

Beside the volume, the file "adapter.word" says what it is to do: "refuse" memory, "fail", or "hold" each list for as
long as it says so. The file "adapter.lists" gets the number of pieces of each list, a line each.
"""

from __future__ import annotations

import mmap
import os
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import numpy as np
import trio
from door_daemon import main
from mounting import KvfuseMount

from kvfuse.errors import InvalidArgument, Unsupported
from kvfuse.peer.device_memory import RdmaMemories, RdmaMemory, check_writable, size_of
from kvfuse.peer.verbs import Device, Registration, open_device
from kvfuse.usrbio.daemon.device_memory import Piece
from kvfuse.usrbio.daemon.listener import serve_rings

ADAPTER_DAEMON = (sys.executable, __file__)
"""command of a `KvfuseMount` of this daemon"""
BY_RDMA = os.environ.get("KVFUSE_LAB_ADAPTER") == "rdma"


def tell_adapter(mount: KvfuseMount, word: str) -> None:
    """ "" for what adapters do."""
    path = mount.volume.parent / "adapter.word"
    path.with_suffix(".new").write_text(word)
    path.with_suffix(".new").rename(path)


def lists_of(mount: KvfuseMount) -> list[int]:
    """How many pieces each list had until now."""
    path = mount.volume.parent / "adapter.lists"
    return [int(line) for line in path.read_text().splitlines()] if path.exists() else []


def folder() -> Path:
    return Path(sys.argv[1]).parent


def word() -> str:
    path = folder() / "adapter.word"
    return path.read_text() if path.exists() else ""


async def obey(pieces: Sequence[Piece]) -> bool:
    """Whether the list may be filled, when it may."""
    with (folder() / "adapter.lists").open("a") as lists:
        print(len(pieces), file=lists, flush=True)
    while word() == "hold":  # noqa: ASYNC110  # a file tells nobody
        await trio.sleep(0.005)
    return word() != "fail"


class CopyMemory:
    def __init__(self, descriptor: int, offset: int, size: int) -> None:
        self.bytes = np.frombuffer(mmap.mmap(descriptor, offset + size), np.uint8)[offset:]
        self.scopes: set[trio.CancelScope] = set()

    async def fill(self, pieces: Sequence[Piece], seconds: float) -> bool:
        with trio.move_on_after(seconds) as scope:
            self.scopes.add(scope)
            if not await obey(pieces):
                return False
            for memory, start, size, offset in pieces:
                assert offset + size <= len(self.bytes)
                self.bytes[offset : offset + size] = memory[start : start + size]
            return True
        return False

    async def aclose(self) -> None:
        for scope in self.scopes:
            scope.cancel()
        self.bytes = self.bytes[:0].copy()


class CopyMemories:
    lacks = ""

    def check(self, descriptor: int) -> None:
        check_writable(descriptor)

    async def add(self, descriptor: int, offset: int, size: int) -> CopyMemory:
        if word() == "refuse":
            raise Unsupported("the lab has no adapter today")
        if offset + size > size_of(descriptor):
            raise InvalidArgument("the memory is not as large")
        return CopyMemory(descriptor, offset, size)

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        yield


class MemfdDevice(Device):
    def lacks_dmabuf(self) -> str:
        return ""

    def register_dmabuf(self, descriptor: int, offset: int, size: int, *, remote: bool) -> Registration:
        memory = np.frombuffer(mmap.mmap(descriptor, offset + size), np.uint8)
        memory[::4096] |= 0  # pages that are not there are made slowly
        address = memory.ctypes.data + offset
        return Registration(address, size, remote, memory, [self._register_piece(address, size, remote)], size)


def open_memfd_device() -> Device:
    with open_device() as found:
        return MemfdDevice(found.info)


class LabMemory(RdmaMemory):
    async def fill(self, pieces: Sequence[tuple[np.ndarray, int, int, int]], seconds: float) -> bool:
        with trio.move_on_after(seconds):
            if await obey([Piece(*piece) for piece in pieces]):
                return await super().fill(pieces, seconds)
            if self.pair is not None:
                self.pair.close()  # as a READ that failed does
        return False


class LabMemories(RdmaMemories):
    def __init__(self) -> None:
        super().__init__(open_memfd_device)

    def check(self, descriptor: int) -> None:
        check_writable(descriptor)

    async def add(self, descriptor: int, offset: int, size: int) -> RdmaMemory:
        made = await super().add(descriptor, offset, size)
        return LabMemory(made._loop, made.registration)


def serve() -> None:
    """As `sys.argv` says."""
    memories = LabMemories() if BY_RDMA else CopyMemories()
    main([partial(serve_rings, device_memories=memories)])


if __name__ == "__main__":
    serve()
