"""Volumes of this process, as two hosts have one, that read from each other by RDMA or what is like it."""

from __future__ import annotations

import random
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest.mock import patch

import trio
from block_calls import put_shared
from peer_hosts import until
from shared_lab import hosts, quiet
from soft_rdma import SoftNetwork, soft_rdma
from volume_lab import Chaos

from kvfuse.options.options import PeerOptions
from kvfuse.peer import service
from kvfuse.volume.api import ROOT_INODE
from kvfuse.volume.volume import Volume


@dataclass
class LinkedVolumes:
    writer: Volume
    reader: Volume

    async def put(self, names: Sequence[bytes], size: int, rng: random.Random) -> dict[bytes, bytes]:
        """Blocks in the writer's tier, of which the reader knows."""
        data = {name: rng.randbytes(size) for name in names}
        for name, content in data.items():
            await put_shared(self.writer, name, content)
        await quiet(self.writer, self.reader)
        return data

    async def bring(self, names: Sequence[bytes]) -> list[bool]:
        """As a batch of gets begins: which are in the reader's tier then."""
        return await self.reader.near.all_of(ROOT_INODE, names, lambda binding: True)

    def kept(self, names: Sequence[bytes]) -> dict[bytes, bytes]:
        """What is in the reader's tier."""
        blocks = self.reader.tier.kept.values()
        return {block.name: bytes(block.buffer) for block in blocks if block.name in names}

    @property
    def peers(self) -> dict[str, Any]:
        section: Any = self.reader.sections["peers"]()
        return dict(section)

    @property
    def rdma(self) -> dict[str, Any]:
        return dict(self.peers["rdma"])


@asynccontextmanager
async def linked_volumes(rng: random.Random, network: SoftNetwork | None = None) -> AsyncIterator[LinkedVolumes]:
    """Without a ``network``: by real devices."""
    opened = partial(_soft, network) if network is not None else service.open_rdma
    with patch.object(service, "open_rdma", opened):
        chaos = [Chaos(random.Random(rng.random())) for _ in range(2)]
        async with hosts(rng, 2, chaos, capacity=64 << 20) as (writer, reader), trio.open_nursery() as nursery:
            for volume in (writer, reader):
                options = PeerOptions(
                    listen=f"127.0.0.1:{_free_port()}", transport="rdma", rdma_devices=("rxe0",), connections=1,
                    deadline=20.0,
                )  # fmt: skip
                await nursery.start(partial(service.serve_peers, volume, options=options))
            pair = LinkedVolumes(writer, reader)
            await until(lambda: [one["rdma_connections"] for one in pair.peers["hosts"]] == [1])
            yield pair
            nursery.cancel_scope.cancel()


def _soft(network: SoftNetwork, *_: object) -> Any:
    return soft_rdma(network)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return int(listening.getsockname()[1])
