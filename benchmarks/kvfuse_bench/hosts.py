"""One hour of requests on two hosts that share a volume: what each finds of the other's, and what that does to the time
to first token.

Requests go to the hosts in turn. Of each prompt a host asks its adapter's store (`SteadyStore`) for the longest prefix
that is there, gets it, and puts the rest, as an engine does that has just computed it. Nothing is computed here: the
time to first token is the measured time of asking and getting, and that of the tokens left at a stated speed.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np

from kvfuse.connectors.steady_store import SteadyStore
from kvfuse.errors import KvfuseError
from kvfuse.sizes import MIB, format_size
from kvfuse.usrbio.client.iov import new_memory
from kvfuse_bench.content import BlockContent
from kvfuse_bench.daemons import kvfuse_mount
from kvfuse_bench.replay import ReplayPlan, engine_key, engine_keys
from kvfuse_bench.traffic import Request
from kvfuse_cluster.etcd import EtcdServers
from kvfuse_cluster.process import wait_until
from kvfuse_cluster.volumes import SETTINGS, records_conf

WINDOW_SIZE_MAX = 32 * MIB
"""bytes that are got or put in one call"""
WINDOW_BLOCKS_MAX = 64
DEADLINE_S = 10.0
SEEN_SECONDS_MAX = 2.0
"""until the other host has to have what one has stored. In the traffic more time passes before it is asked"""
WRONG_NAMED_MAX = 20
HOST_COUNT = 2


@contextmanager
def two_mounts(folder: Path, capacity: int) -> Iterator[list[Path]]:
    """A new volume of ``capacity`` bytes in ``folder``, records in an etcd of this machine, mounted twice."""
    etcd = EtcdServers.start(folder / "etcd", 1, SETTINGS)
    with ExitStack() as stack:
        stack.callback(etcd.stop)
        conf = folder / "two-hosts.conf"
        segments = json.dumps(str(folder / "segments"))
        records = records_conf(conf.stem, format_size(capacity), etcd)
        conf.write_text(f"{records}\n[segments]\npath = {segments}\n")
        yield [stack.enter_context(kvfuse_mount(conf, folder / f"host-{name}")).mountpoint for name in "ab"]


class Served(NamedTuple):
    """A request as its host served it. Counts are of blocks, times in seconds."""

    host: int
    arrival_ms: int
    prompt_tokens: int
    blocks: int
    own: int
    """loaded of what this host had stored"""
    others: int
    """loaded of what the other one had stored"""
    alone: int
    """that a cache of this host, which never forgets, would have had"""
    load_seconds: float
    """asking and getting"""
    stored: int

    @property
    def hits(self) -> int:
        return self.own + self.others


@dataclass
class Moved:
    """Blocks that were got, and how long that took."""

    blocks: int = 0
    seconds: float = 0.0

    def add(self, blocks: int, seconds: float) -> None:
        self.blocks += blocks
        self.seconds += seconds


@dataclass
class HostsReplay:
    """One run on all hosts."""

    plan: ReplayPlan
    prefill: float
    """tokens a second that the engine computes"""
    served: list[Served] = field(default_factory=list)
    from_own: Moved = field(default_factory=Moved)
    from_others: Moved = field(default_factory=Moved)
    stored: Moved = field(default_factory=Moved)
    wrong: list[str] = field(default_factory=list)
    """the first wrong blocks"""
    wrong_count: int = 0
    unseen: int = 0
    """requests whose blocks the other host did not have `SEEN_SECONDS_MAX` later"""
    failures: dict[str, int] = field(default_factory=dict)
    """blocks that the stores could not get or put, by reason"""
    seconds: float = 0.0

    def of(self, host: int | None) -> list[Served]:
        """The requests of one host; None: all."""
        return [one for one in self.served if host in (None, one.host)]

    # -- times to first token, in seconds

    def computed(self, one: Served) -> float:
        """Without any cache."""
        return one.prompt_tokens / self.prefill

    def shared(self, one: Served) -> float:
        """With what the volume had, as it was measured."""
        return one.load_seconds + self._rest(one, one.hits)

    def alone(self, one: Served) -> float:
        """With a cache of this host alone, blocks loaded as fast as here."""
        loaded = self.from_own.blocks + self.from_others.blocks
        each = (self.from_own.seconds + self.from_others.seconds) / loaded if loaded else 0.0
        return one.alone * each + self._rest(one, one.alone)

    def _rest(self, one: Served, hits: int) -> float:
        """Tokens left to compute; the last one always is, to have something to go on from."""
        return max(1, one.prompt_tokens - hits * self.plan.block_tokens) / self.prefill

    def rate(self, moved: Moved) -> float | None:
        """GB/s."""
        return moved.blocks * self.plan.block_size / moved.seconds / 1e9 if moved.seconds else None


class Host(AbstractContextManager["Host"]):
    """An engine's store on one mount."""

    def __init__(self, number: int, mount: Path, namespace: str, plan: ReplayPlan) -> None:
        """KvfuseError where no daemon answers."""
        self.number = number
        size = plan.block_size
        descriptor: dict[str, str | int] = {"model": plan.model, "block_tokens": plan.block_tokens, "block_size": size}
        self.store = SteadyStore(mount, namespace, descriptor=descriptor, deadline=DEADLINE_S)
        if not self.store.is_up:
            self.store.close()
            raise KvfuseError(f"{mount}: {self.store.reason}")
        self.window = max(1, min(WINDOW_BLOCKS_MAX, WINDOW_SIZE_MAX // size))
        memory, self._part = new_memory(self.window * size)
        self._region = self.store.register(memory)
        self._content = BlockContent(size)
        self._size = size
        self.seen: set[bytes] = set()
        """keys that this host was asked for"""

    def __exit__(self, *_: object) -> None:
        self.store.close()

    def get(self, keys: Sequence[bytes], moved: Moved, wrong: Callable[[str], None]) -> tuple[int, float]:
        """Up to a window of blocks: how many came, from the first on without a gap, and the seconds."""
        offsets = [index * self._size for index in range(len(keys))]
        start = time.perf_counter()
        sizes = self.store.get(keys, self._region, offsets, [self._size] * len(keys))
        seconds = time.perf_counter() - start
        missing = np.flatnonzero(sizes < 0)
        count = int(missing[0]) if len(missing) else len(keys)
        moved.add(count, seconds)
        for key, offset in zip(keys[:count], offsets, strict=False):
            difference = self._content.difference(key, self._region.array[offset : offset + self._size].data)
            if difference is not None:
                wrong(f"host {self.number}: {key.hex()} {difference}")
        return count, seconds

    def put(self, keys: Sequence[bytes], moved: Moved) -> list[bytes]:
        """Those of up to a window of blocks that are stored."""
        offsets = [index * self._size for index in range(len(keys))]
        for key, offset in zip(keys, offsets, strict=True):
            self._region.array[offset : offset + self._size] = np.frombuffer(self._content.fill(key), np.uint8)
        start = time.perf_counter()
        stored = self.store.put(keys, self._region, offsets, [self._size] * len(keys))
        moved.add(int(stored.sum()), time.perf_counter() - start)
        return [key for key, is_stored in zip(keys, stored.tolist(), strict=True) if is_stored]


class _Run:
    """Requests on hosts, one after the other."""

    def __init__(self, hosts: Sequence[Host], result: HostsReplay) -> None:
        self._hosts = hosts
        self._result = result
        self._writers: dict[bytes, int] = {}
        """key -> the host that stored it last"""

    def serve(self, host: Host, request: Request) -> Served:
        keys = list(engine_keys(request, self._result.plan))
        alone = sum(1 for _ in itertools.takewhile(host.seen.__contains__, keys))
        own, others, seconds = self._load(host, keys)
        stored: list[bytes] = []
        for window in _windows(keys[own + others :], host.window):
            stored += host.put(window, self._result.stored)
        self._writers.update(dict.fromkeys(stored, host.number))
        if not wait_until(lambda: are_seen(self._hosts, [*stored[:1], *stored[-1:]]), SEEN_SECONDS_MAX):
            self._result.unseen += 1
        host.seen.update(keys)
        arrival, tokens = request.arrival_ms, request.prompt_tokens
        return Served(host.number, arrival, tokens, len(keys), own, others, alone, seconds, len(stored))

    def _load(self, host: Host, keys: Sequence[bytes]) -> tuple[int, int, float]:
        """(own, the other's, seconds) of the blocks at the start of ``keys`` that are there."""
        start = time.perf_counter()
        found = host.store.longest_prefix(keys) if keys else 0
        seconds, counts = time.perf_counter() - start, [0, 0]
        for is_other, run in self._by_writer(host, keys[:found]):
            moved = self._result.from_others if is_other else self._result.from_own
            for window in _windows(run, host.window):
                got, more = host.get(window, moved, self._wrong)
                counts[is_other] += got
                seconds += more
                if got < len(window):
                    return counts[0], counts[1], seconds
        return counts[0], counts[1], seconds

    def _by_writer(self, host: Host, keys: Sequence[bytes]) -> Iterator[tuple[bool, list[bytes]]]:
        """Runs of blocks that this host stored, or another one."""
        for is_other, run in itertools.groupby(keys, lambda key: self._writers.get(key, host.number) != host.number):
            yield is_other, list(run)

    def _wrong(self, detail: str) -> None:
        self._result.wrong_count += 1
        if len(self._result.wrong) < WRONG_NAMED_MAX:
            self._result.wrong.append(detail)


def _windows(keys: Sequence[bytes], size: int) -> Iterator[Sequence[bytes]]:
    return (keys[start : start + size] for start in range(0, len(keys), size))


def replay_on_hosts(
    requests: Iterable[Request],
    mounts: Sequence[Path],
    namespace: str,
    plan: ReplayPlan,
    prefill: float,
    progress: Callable[[HostsReplay], None],
) -> HostsReplay:
    """Serve ``requests`` by the hosts in turn, in the ``namespace`` of the volume that all ``mounts`` are of.

    KvfuseError where the mounts are not of one volume, or one does not answer.
    """
    result = HostsReplay(plan, prefill)
    with ExitStack() as stack:
        hosts = [stack.enter_context(Host(number, mount, namespace, plan)) for number, mount in enumerate(mounts)]
        _require_one_volume(hosts, plan)
        run, start = _Run(hosts, result), time.perf_counter()
        turns = itertools.cycle(hosts)
        for request in islice(requests, plan.request_max):
            result.served.append(run.serve(next(turns), request))
            result.seconds = time.perf_counter() - start
            progress(result)
        for host in hosts:
            for reason, count in host.store.counters.failures.items():
                result.failures[reason] = result.failures.get(reason, 0) + count
    return result


def are_seen(hosts: Sequence[Host], keys: Sequence[bytes]) -> bool:
    """All hosts have these blocks."""
    return not keys or all(host.store.exists(keys).all() for host in hosts)


def _require_one_volume(hosts: Sequence[Host], plan: ReplayPlan) -> None:
    """What the first host stores the others have."""
    key = engine_key(-1, plan)
    first = hosts[0]
    if not first.put([key], Moved()):
        raise KvfuseError("the first host cannot store a block")
    if not wait_until(lambda: are_seen(hosts, [key]), SEEN_SECONDS_MAX):
        raise KvfuseError("what one host stores another one does not see: are these mounts of one shared volume?")
    first.store.delete([key])
