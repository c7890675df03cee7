"""Blocks that one host put, read by another from its memory: by kvfuse, by Mooncake's store over TCP, and by memcpy."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from kvfuse.sizes import KIB, MIB, format_size
from kvfuse_bench.daemons import cpu_seconds_of
from kvfuse_bench.mooncake import Mooncake, Place, mooncake_hosts
from kvfuse_bench.peers.clients import Blocks
from kvfuse_bench.peers.mounts import Host, Hosts
from kvfuse_bench.peers.networks import BRIDGE_ADDRESS

KVFUSE, MEMCPY, MOONCAKE = "kvfuse", "memcpy", "Mooncake TCP"
MOONCAKE_SECONDS = 0.4
"""that it gets blocks in a round"""
ROOM = 128 * MIB
"""bytes of a round, at most"""


class Cell(NamedTuple):
    """A row of the table: ``total`` blocks of ``size`` bytes, ``depth`` at once."""

    size: int
    depth: int
    total: int

    @property
    def name(self) -> str:
        return f"{format_size(self.size)}, {self.depth} at once"

    def scaled(self, scale: float) -> Cell:
        return self._replace(total=self.depth * max(1, int(self.total * scale / self.depth)))


CELLS = (
    Cell(4 * KIB, 1, 512),
    Cell(4 * KIB, 64, 4096),
    Cell(64 * KIB, 8, 1024),
    Cell(MIB, 8, 128),
    Cell(2 * MIB, 1, 64),
    Cell(4 * MIB, 8, 32),
)


class Round(NamedTuple):
    """What a side did in one round. Processor times in seconds, None where there is no such process."""

    seconds: Sequence[float]
    """of each batch"""
    owner: float | None
    """processor: the daemon, or the process, that had the blocks"""
    reader: float | None
    """the daemon of the host that read"""
    client: float
    segment_bytes: int = 0
    """read from the segments"""
    hedged: int = 0
    """reads that were late: the segments were asked beside the other host, or instead of it"""


@dataclass
class Side:
    name: str
    cell: Cell
    rounds: list[Round] = field(default_factory=list)

    def _each(self, value: Callable[[Round], float]) -> float:
        return statistics.median(map(value, self.rounds))

    @property
    def blocks_per_second(self) -> float:
        return self._each(lambda one: self.cell.depth * len(one.seconds) / sum(one.seconds))

    @property
    def gigabytes_per_second(self) -> float:
        return self.blocks_per_second * self.cell.size / 1e9

    def milliseconds(self, percent: float) -> float:
        """Of a batch, over all rounds."""
        return 1e3 * float(np.percentile([second for one in self.rounds for second in one.seconds], percent))

    def processor(self, name: str) -> float | None:
        """Seconds for each GB. ``name``: of the field."""
        if any(getattr(one, name) is None for one in self.rounds):
            return None
        size = self.cell.size * self.cell.depth
        return self._each(lambda one: getattr(one, name) / (size * len(one.seconds) / 1e9))

    @property
    def segment_bytes(self) -> int:
        return sum(one.segment_bytes for one in self.rounds)

    @property
    def hedged(self) -> int:
        return sum(one.hedged for one in self.rounds)

    def to_json(self) -> dict[str, Any]:
        return {
            "side": self.name,
            "size": self.cell.size,
            "depth": self.cell.depth,
            "gigabytes_per_second": self.gigabytes_per_second,
            "blocks_per_second": self.blocks_per_second,
            "median_ms": self.milliseconds(50),
            "p99_ms": self.milliseconds(99),
            "processor_seconds_per_GB": {name: self.processor(name) for name in ("owner", "reader", "client")},
            "segment_bytes": self.segment_bytes,
            "hedged": self.hedged,
            "rounds": [
                self.cell.size * self.cell.depth * len(one.seconds) / sum(one.seconds) / 1e9 for one in self.rounds
            ],
        }


def measure_blocks(
    hosts: Hosts, cells: Sequence[Cell], round_count: int, mooncake: Path | None, progress: Callable[[str], None]
) -> Iterator[list[Side]]:
    """The sides of each cell, of one host that reads."""
    with _mooncake(hosts, mooncake) as stores:
        for cell in cells:
            timings: dict[str, Callable[[int], Round]] = {
                KVFUSE: partial(_read, hosts, cell),
                MEMCPY: partial(_copy, hosts.readers[0], cell),
            }
            if stores is not None:
                stores[1].ask("load", size=cell.size, count=cell.total)
                timings[MOONCAKE] = partial(_get, *stores, cell)
            yield _alternated(timings, cell, round_count, progress)
            if stores is not None:
                stores[1].ask("drop")


def _alternated(
    timings: Mapping[str, Callable[[int], Round]], cell: Cell, round_count: int, progress: Callable[[str], None]
) -> list[Side]:
    """All sides in each round, in turning order. The first round warms memory and does not count."""
    sides = {name: Side(name, cell) for name in timings}
    for number in range(round_count + 1):
        for name in timings if number % 2 else reversed(list(timings)):
            progress(f"{cell.name}: {f'round {number} of {round_count}' if number else 'warm-up'}, {name}")
            measured = timings[name](number)
            if number:
                sides[name].rounds.append(measured)
    return list(sides.values())


_labels = itertools.count()


def _read(hosts: Hosts, cell: Cell, _number: int) -> Round:
    """Each block once: then the reader has it, too."""
    blocks, reader = Blocks(f"blocks-{next(_labels)}", *cell), hosts.readers[0]
    with hosts.stored(blocks, [reader]):
        before, owner, own = reader.stats(), hosts.writer.processor(), reader.processor()
        answer = reader.client.ask("get", blocks=blocks)
        owner, own, after = hosts.writer.processor() - owner, reader.processor() - own, reader.stats()
        return Round(
            answer.seconds, owner, own, answer.processor,
            after["segments"]["read_bytes"] - before["segments"]["read_bytes"], _late(after) - _late(before),
        )  # fmt: skip


def _late(stats: dict[str, Any]) -> int:
    return int(stats["peers"]["asked"]["hedged"] + stats["peers"]["asked"]["late"])


def _copy(host: Host, cell: Cell, _number: int) -> Round:
    answer = host.client.ask("copy", blocks=Blocks("", *cell))
    return Round(answer.seconds, None, None, answer.processor)


def _get(owner: Mooncake, reader: Mooncake, cell: Cell, _number: int) -> Round:
    before = cpu_seconds_of(owner.pid), cpu_seconds_of(reader.pid)
    seconds = reader.ask("get", size=cell.size, depth=cell.depth, count=cell.total, seconds=MOONCAKE_SECONDS)
    return Round(seconds, cpu_seconds_of(owner.pid) - before[0], None, cpu_seconds_of(reader.pid) - before[1])


@contextmanager
def _mooncake(hosts: Hosts, python: Path | None) -> Iterator[tuple[Mooncake, Mooncake] | None]:
    """Who keeps blocks on the writer's network, and who gets them on the first reader's."""
    with ExitStack() as stack:
        if python is None:
            yield None
            return
        owner, reader = (Place(*host.network) for host in (hosts.writer, hosts.readers[0]))
        yield stack.enter_context(mooncake_hosts(python, 3 * ROOM, 2 * ROOM, BRIDGE_ADDRESS, (owner, reader)))
