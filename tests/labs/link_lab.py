"""A host that lends an arena, and one that reads what is in it, by RDMA or what is like it (`soft_rdma`)."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import trio
from lent_memory import Bytes, shared_memory
from peer_hosts import PeerHost, peer_hosts
from soft_rdma import SoftNetwork

from kvfuse.peer.read_link import ReadLink

ARENA = 16 << 20
KIB, MIB = 1 << 10, 1 << 20


@dataclass
class LinkedPair:
    """A host with blocks in an arena, and one that reads them into an arena of its own."""

    writer: PeerHost
    reader: PeerHost
    lent: Bytes
    memory: Bytes

    def put(self, sizes: Sequence[int]) -> list[int]:
        """Blocks one behind the other, of any bytes; their inodes."""
        inos, start = list(range(1, len(sizes) + 1)), 0
        for ino, size in zip(inos, sizes, strict=True):
            self.lent[start : start + size] = np.frombuffer(secrets.token_bytes(size), np.uint8)
            self.writer.neighbourhood.blocks[ino] = self.lent[start : start + size].data
            self.reader.neighbourhood.holders[ino] = self.writer.neighbourhood.client
            start += size
        return inos

    def targets(self, inos: Sequence[int]) -> list[memoryview]:
        """One behind the other, in memory that the reader keeps."""
        found, start = [], 0
        for ino in inos:
            size = len(self.writer.neighbourhood.blocks[ino])
            found.append(self.memory[start : start + size].data)
            start += size
        return found

    async def read(self, inos: Sequence[int], targets: list[memoryview] | None = None) -> list[bool]:
        """Which came; they are right."""
        wanted = [self.writer.wanted(ino) for ino in inos]
        found, data = await self.reader.read(*wanted, targets=self.targets(inos) if targets is None else targets)
        for ino, is_right, block in zip(inos, found, data, strict=True):
            assert not is_right or block == self.writer.neighbourhood.blocks[ino]
        return found

    def links(self) -> list[ReadLink]:
        """The reader's ends of its queue pairs."""
        links = [one.link for one in self.reader.peers.neighbours[self.writer.neighbourhood.client].connections]
        return [link for link in links if link is not None and not link.pair.ended]

    def lent_links(self) -> list[ReadLink]:
        """The writer's ends."""
        return list(self.writer.listener.links)

    @property
    def reads(self) -> int:
        return int(self.rdma["reads"])

    @property
    def rdma(self) -> dict[str, Any]:
        return dict(self.reader.peers.statistics()["rdma"])

    async def until_by_rdma(self, inos: Sequence[int]) -> None:
        """All of these come by RDMA: what is asked for first comes by TCP, and has its memory registered meanwhile."""
        size = sum(len(self.writer.neighbourhood.blocks[ino]) for ino in inos)
        with trio.fail_after(60):
            while True:
                before = self.rdma["bytes"]
                if all(await self.read(inos)) and self.rdma["bytes"] - before == size:
                    return
                await trio.sleep(0.01)


@asynccontextmanager
async def linked(network: SoftNetwork | None = None, **options: Any) -> AsyncIterator[LinkedPair]:
    """Without a ``network``: by real devices."""
    given = {"deadline": 20.0, "connections": 1, "transport": "rdma", "rdma_devices": ("rxe0",), **options}
    async with peer_hosts(2, network=network, **given) as (writer, reader):
        await reader.until_ready(1)
        yield LinkedPair(writer, reader, shared_memory(ARENA), shared_memory(ARENA))
