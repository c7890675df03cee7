"""RDMA without devices, within this process: READs copy memory, and keys open what was registered, and nothing else.

For what hosts do with it; what devices do is tested in the machine of scripts/rdma-vm.
"""

from __future__ import annotations

import ctypes
import itertools
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, cast

import trio

from kvfuse.peer.devices import DeviceInfo, Gid
from kvfuse.peer.queue_pair import LARGE_BLOCKS, QueuePair, QueuePairCounters, ReadOutcome, Reads
from kvfuse.peer.rdma import Adapter, Rdma
from kvfuse.peer.verbs import CallTimes, RdmaDevice, Registration, VerbsError

GID = bytes(10) + b"\xff\xff" + bytes((10, 9, 0, 1))
_KEYS = itertools.count(0x1234, 7)


class _Piece:
    def __init__(self, device: SoftDevice, address: int, size: int, remote: bool) -> None:
        self.device, self.address, self.size, self.remote = device, address, size, remote
        self.lkey = self.rkey = next(_KEYS)
        device.pieces[self.rkey] = self

    def close(self) -> None:
        del self.device.pieces[self.rkey]


class SoftDevice:
    def __init__(self, network: SoftNetwork) -> None:
        self.network = network
        self.info, self.gid, self.calls = DeviceInfo("soft0", 1, -1, "ACTIVE", "Ethernet"), Gid(0, GID), CallTimes()
        self.pieces: dict[int, _Piece] = {}
        self.is_failing = False

    async def register(self, address: int, size: int, owner: object, *, remote: bool) -> Registration:
        await trio.lowlevel.checkpoint()
        if self.is_failing:
            raise VerbsError("no memory may be registered")
        return Registration(address, size, remote, owner, [_Piece(self, address, size, remote)], size)

    def close(self) -> None:
        assert not self.pieces


class SoftNetwork:
    """``flowing``: READs wait while it is not set."""

    def __init__(self) -> None:
        self.pairs: dict[int, SoftPair] = {}
        self.flowing = trio.Event()
        self.flowing.set()
        self.fails = ""
        """status of all READs that are asked for"""


class SoftPair:
    """As much of a `QueuePair` as `Link` uses."""

    def __init__(self, device: SoftDevice) -> None:
        self.device, self.network = device, device.network
        self.counters, self.errors = QueuePairCounters(), Counter[str]()
        self.ended = ""
        self.number = next(_KEYS)
        self.network.pairs[self.number] = self
        self._other: SoftPair | None = None
        self._changed = trio.Event()

    @property
    def place(self) -> bytes:
        return self.number.to_bytes(16, "little") + GID

    async def connect(self, place: bytes) -> None:
        await trio.lowlevel.checkpoint()
        other = self.network.pairs.get(int.from_bytes(place[:16], "little"))
        if other is None:
            raise VerbsError("nobody is there")
        self._other = other

    async def read(self, rows: Reads) -> ReadOutcome:
        self.counters.batches += 1
        self.counters.reads += len(rows)
        self.counters.bytes += int(rows["length"].sum())
        try:
            await trio.lowlevel.checkpoint()
            while not self.network.flowing.is_set() and not self.ended:
                with trio.move_on_after(0.005):
                    await self._changed.wait()
        except BaseException:
            self.end("CANCELLED")
            raise
        for whole, row in enumerate(rows.tolist()):
            status = self.ended or self.network.fails or self._copy(*row)
            if status:
                self.end(status)
                return ReadOutcome(whole, status)
        self.counters.completions += 1
        return ReadOutcome(len(rows), "")

    def _copy(self, remote: int, local: int, length: int, rkey: int, lkey: int) -> str:
        assert self._other is not None
        if self._other.ended:
            return "RETRY_EXC_ERR"
        source, target = self._other.device.pieces.get(rkey), self.device.pieces.get(lkey)
        if source is None or not source.remote or not _is_in(source, remote, length):
            return "REM_ACCESS_ERR"
        if target is None or not _is_in(target, local, length):
            return "LOC_PROT_ERR"
        ctypes.memmove(local, remote, length)
        return ""

    def end(self, why: str) -> None:
        if not self.ended:
            self.ended = why
            self.errors[why] += 1
            self._changed.set()

    def close(self) -> None:
        self.end("CLOSED")
        self.network.pairs.pop(self.number, None)


def _is_in(piece: _Piece, address: int, size: int) -> bool:
    return piece.address <= address and address + size <= piece.address + piece.size


class SoftRdma(Rdma):
    def make_pair(self, adapter: Adapter, *, reads: bool = True) -> QueuePair:
        pair = SoftPair(cast(Any, adapter.device))
        pair.counters, pair.errors = self.counters, self.errors
        self.pairs += 1
        return cast(QueuePair, pair)


@asynccontextmanager
async def soft_rdma(network: SoftNetwork) -> AsyncIterator[SoftRdma]:
    adapter = Adapter(cast(RdmaDevice, SoftDevice(network)), 1 << 30, remote=True)
    rdma = SoftRdma([adapter], LARGE_BLOCKS)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(rdma.run)
        yield rdma
        nursery.cancel_scope.cancel()
    adapter.close()
