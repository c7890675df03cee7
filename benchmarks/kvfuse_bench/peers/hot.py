"""Blocks that all hosts want at the same time: who serves whom."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kvfuse.sizes import MIB
from kvfuse_bench.peers.clients import Blocks
from kvfuse_bench.peers.mounts import PORT, Host, Hosts

SIZE, COUNT, DEPTH = MIB, 64, 4
_labels = itertools.count()


@dataclass
class Spread:
    """``readers`` hosts read all blocks, each in an order of its own, at the same time."""

    readers: int
    size: int
    """bytes of all blocks"""
    seconds: float
    """until the last one had them"""
    served: list[list[int]]
    """[host][reader]: bytes that the host sent to it; the first host is the writer"""
    segment_bytes: int

    @property
    def read(self) -> int:
        """Bytes, by all."""
        return self.readers * self.size

    @property
    def gigabytes_per_second(self) -> float:
        return self.read / self.seconds / 1e9

    def copies(self, host: int) -> float:
        """That it sent of each block, on the average."""
        return sum(self.served[host]) / self.size

    def share(self, host: int) -> float:
        """Of all that was sent between hosts."""
        return sum(self.served[host]) / max(1, sum(map(sum, self.served)))

    def to_json(self) -> dict[str, Any]:
        return {
            "readers": self.readers,
            "bytes": self.size,
            "seconds": self.seconds,
            "gigabytes_per_second": self.gigabytes_per_second,
            "writer_share": self.share(0),
            "copies": [self.copies(host) for host in range(len(self.served))],
            "served_bytes": self.served,
            "segment_bytes": self.segment_bytes,
        }


def measure_hot(hosts: Hosts, readers: int, scale: float, round_count: int, progress: Callable[[str], None]) -> Spread:
    """Of so many of the hosts: the median of the rounds, by their time. A first round warms memory."""
    spreads = []
    for number in range(round_count + 1):
        progress(f"{readers} hosts read the same blocks, {f'round {number} of {round_count}' if number else 'warm-up'}")
        spreads.append(_spread(hosts, readers, scale))
    return sorted(spreads[1:], key=lambda one: one.seconds)[round_count // 2]


def _spread(hosts: Hosts, readers: int, scale: float) -> Spread:
    chosen = hosts.readers[:readers]
    blocks = Blocks(f"hot-{next(_labels)}", SIZE, DEPTH, max(DEPTH, int(COUNT * scale)))
    everyone = [hosts.writer, *chosen]
    with hosts.stored(blocks, chosen):
        before = [host.stats() for host in everyone]
        for number, reader in enumerate(chosen):
            reader.client.begin("get", blocks=blocks, seed=number)
        seconds = max(sum(reader.client.end().seconds) for reader in chosen)
        after = [host.stats() for host in everyone]
    numbers = _clients(everyone)
    served = [
        [_sent(now, number) - _sent(then, number) for number in numbers[1:]]
        for then, now in zip(before, after, strict=True)
    ]
    segment_bytes = sum(
        now["segments"]["read_bytes"] - then["segments"]["read_bytes"] for then, now in zip(before, after, strict=True)
    )
    return Spread(readers, blocks.size * blocks.total, seconds, served, segment_bytes)


def _sent(stats: dict[str, Any], client: str) -> int:
    return int(stats["peers"]["served"]["served"].get(client, 0))


def _clients(hosts: Sequence[Host]) -> list[str]:
    """The numbers of these hosts in their volume, as the others know them."""
    known = {
        address: one["client"]
        for host in hosts
        for one in host.stats()["peers"]["hosts"]
        for address in one["addresses"]
    }
    return [known[f"{host.network.address}:{PORT}"] for host in hosts]
