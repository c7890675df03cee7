"""A daemon whose adapter fills memory of devices that are none: ``python adapter_daemon.py VOLUME POINT [-o WORD]...``.

That memory is a memfd, which is mapped and registered in the place of a dma-buf. READs copy memory (`soft_rdma`), or,
where the variable KVFUSE_LAB_ADAPTER is "rdma", the RDMA device of the virtual machine carries them out.

Beside the volume, the file "adapter.word" says what it is to do: "refuse" memory, "fail", or "hold" each list for as
long as it says so. The file "adapter.lists" gets the number of pieces of each list, a line each.
"""

from __future__ import annotations

import mmap
import os
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import trio
from door_daemon import main
from mounting import KvfuseMount
from soft_rdma import SoftDevice, SoftNetwork, SoftPair, _Piece

from kvfuse.errors import Unsupported
from kvfuse.peer import rdma_memories
from kvfuse.peer.rdma_memories import RdmaMemories, RdmaMemory, check_writable
from kvfuse.peer.verbs import RdmaDevice, Registration, VerbsError, open_device
from kvfuse.usrbio.daemon import device_calls
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


class SoftMemfdDevice(SoftDevice):
    def lacks_dmabuf(self) -> str:
        return ""

    def register_dmabuf(self, descriptor: int, offset: int, size: int, *, remote: bool) -> Registration:
        if self.is_failing:
            raise VerbsError("the driver does not like it")
        memory = np.frombuffer(mmap.mmap(descriptor, offset + size), np.uint8)
        address = memory.ctypes.data + offset
        return Registration(address, size, remote, memory, [_Piece(self, address, size, remote)], size)


class MemfdDevice(RdmaDevice):
    def lacks_dmabuf(self) -> str:
        return ""

    def register_dmabuf(self, descriptor: int, offset: int, size: int, *, remote: bool) -> Registration:
        memory = np.frombuffer(mmap.mmap(descriptor, offset + size), np.uint8)
        memory[::4096] |= 0  # pages that are not there are made slowly
        address = memory.ctypes.data + offset
        return Registration(address, size, remote, memory, [self._register_piece(address, size, remote)], size)


def open_memfd_device() -> RdmaDevice:
    with open_device() as found:
        return MemfdDevice(found.info)


class LabMemory(RdmaMemory):
    async def fill(self, pieces: Sequence[tuple[np.ndarray, int, int, int]], seconds: float) -> bool:
        with (folder() / "adapter.lists").open("a") as lists:
            print(len(pieces), file=lists, flush=True)
        with trio.move_on_after(seconds):
            while word() == "hold" and self.registration.is_open:  # noqa: ASYNC110  # a file
                await trio.sleep(0.005)
            if word() != "fail":
                return await super().fill(pieces, seconds)
            if self.pair is not None:
                self.pair.close()  # as a READ that failed does
        return False


class LabMemories(RdmaMemories):
    def check(self, descriptor: int) -> None:
        check_writable(descriptor)

    async def add(self, descriptor: int, offset: int, size: int) -> RdmaMemory:
        if word() == "refuse":
            raise Unsupported("the lab has no adapter today")
        made = await super().add(descriptor, offset, size)
        return LabMemory(made._loop, made.registration)


def soft_memories() -> LabMemories:
    network = SoftNetwork()
    return LabMemories(lambda: cast(Any, SoftMemfdDevice(network)), cast(Any, SoftPair))


def serve() -> None:
    """As `sys.argv` says."""
    if BY_RDMA:
        device_calls.FILL_SECONDS = device_calls.LEAST_SECONDS = 200.0  # what is only slow there is no fault
        memories = LabMemories(open_memfd_device)
    else:
        memories = soft_memories()
        rdma_memories.missing = lambda **_: ""
    main([partial(serve_rings, device_memories=memories)])


if __name__ == "__main__":
    serve()
