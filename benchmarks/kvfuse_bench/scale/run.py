"""What a host of a shared volume pays, and its servers, as there are more hosts and the traffic stays the same.

The hosts are volumes without mounts, many to a process (`program`). A few write, a few look and get, and all others
are idle: they have the volume open and hear of changes. Etcd and the index are servers of this machine, segments are
files of a folder. The processor's time is that of whole processes, each of which has hosts of one role; bytes are what
the kernel counted of a process's connections.
"""

from __future__ import annotations

import json
import secrets
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from kvfuse.cli.volumes import ensure_volume
from kvfuse.errors import KvfuseError
from kvfuse.options import config
from kvfuse.sizes import MIB
from kvfuse_bench.daemons import cpu_seconds_of
from kvfuse_bench.scale.program import BATCH, names_of
from kvfuse_bench.workers import WorkerProcess
from kvfuse_cluster.etcd import EtcdServers
from kvfuse_cluster.process import Server
from kvfuse_cluster.redis import RedisServer
from kvfuse_cluster.volumes import SETTINGS, records_conf

CAPACITY = "16GiB"
SLAB_SIZE = MIB
"""16,384 slabs: some for each of thousands of hosts"""
SEGMENT_SIZE = 64 * MIB
PATIENCE = "deadline = 20\n[client]\nlease = 30\n"
"""of the hosts of one process each waits for all others, and many open at once"""
PROCESS_HOSTS = 50
"""at most, so that each process keeps up with its hosts"""
LOOKED_UP = 1000
"""names of one look-up that is timed"""
LOOK_UPS = 5
SETTLE_SECONDS = 12.0
"""between the last host's opening and the first measurement: slabs that are too many go back, in some seconds"""
WARM_SECONDS = 5.0
LEAD_SECONDS = 0.5
"""from the order to play until it begins"""


@dataclass(frozen=True)
class Load:
    """Fixed rates of all hosts together, however many others there are."""

    writers: int = 4
    readers: int = 2
    blocks_per_second: float = 512.0
    """put, in batches of `BATCH`"""
    looks_per_second: float = 128.0
    """names that are looked up, in such batches"""
    gets: int = 4
    """blocks of each batch that are got"""
    files_per_second: float = 20.0
    """stored by the readers, when no blocks are"""


@dataclass
class Cost:
    """What a process and its hosts took during a phase."""

    hosts: int
    seconds: float
    processor: float
    sent: int
    received: int
    switches: int
    """of the main thread: how often it slept"""

    @property
    def microseconds(self) -> float:
        """Of the processor, of one host in one second."""
        return 1e6 * self.processor / self.hosts / self.seconds

    def added(self, other: Cost) -> Cost:
        """Of two processes at the same time."""
        sums = {name: getattr(self, name) + getattr(other, name) for name in asdict(self) if name != "seconds"}
        return Cost(seconds=self.seconds, **sums)


@dataclass
class Phase:
    """Some seconds of one load: of each role, and of the servers."""

    name: str
    seconds: float
    done: dict[str, int]
    ms: dict[str, float]
    """median of each call"""
    costs: dict[str, Cost]
    """idle, writers, readers"""
    etcd_processor: float = 0.0
    index_processor: float = 0.0
    etcd_bytes: tuple[int, int] = (0, 0)
    """(received of clients, sent to them), as etcd counts them"""


@dataclass
class Scale:
    """One number of hosts."""

    hosts: int
    open_seconds: float = 0.0
    """until all were open"""
    open_processor: float = 0.0
    """seconds of all hosts together, meanwhile"""
    open_etcd: float = 0.0
    close_seconds: float = 0.0
    memory: float = 0.0
    """bytes of an idle host"""
    threads: float = 0.0
    """of an idle host"""
    phases: list[Phase] = field(default_factory=list)
    look_up_ms: dict[str, float] = field(default_factory=dict)
    """of `LOOKED_UP` names by a host that did not know them: present, absent"""
    is_clean: bool = False
    """the check of the volume, after all hosts had left"""

    def phase(self, name: str) -> Phase:
        return next(phase for phase in self.phases if phase.name == name)


class _Process:
    """Hosts of one role."""

    def __init__(self, stack: ExitStack, role: str, count: int, conf: Path) -> None:
        self.role, self.count = role, count
        self._process = WorkerProcess(stack, f"hosts ({role})", "kvfuse_bench.scale.program", str(conf))

    def begin(self, operation: str, **words: Any) -> None:
        self._process.ask({"operation": operation, **words})

    def end(self) -> dict[str, Any]:
        """KvfuseError."""
        answer: dict[str, Any] = self._process.answer()
        if "error" in answer:
            raise KvfuseError(f"hosts ({self.role}): {answer['error']}")
        return answer

    def ask(self, operation: str, **words: Any) -> dict[str, Any]:
        self.begin(operation, **words)
        return self.end()


class Servers:
    """What the hosts share, on this machine."""

    def __init__(self, stack: ExitStack, folder: Path, memory: Path, index: str) -> None:
        self.etcd = EtcdServers.start(memory / "etcd", 1, SETTINGS)
        stack.callback(self.etcd.stop)
        self.redis: RedisServer | None = None
        lines = [f'slab_size = "{SLAB_SIZE}"', f'segment_size = "{SEGMENT_SIZE}"']
        records = records_conf("scale", CAPACITY, self.etcd).replace("[records]", "\n".join([*lines, "[records]"]))
        segments = json.dumps(str(folder / "segments"))
        text = f'{records}{PATIENCE}[segments]\npath = {segments}\n[cache]\ntier_size = "16MiB"\n'
        text += f'[index]\nengine = "{index}"\n'
        if index == "redis":
            self.redis = RedisServer(memory)
            self.redis.begin()
            stack.callback(self.redis.stop)
            text += f'url = "{self.redis.url}"\n'
        self.conf = memory / "scale.conf"
        self.conf.write_text(text)

    def look(self) -> tuple[float, float, tuple[int, int]]:
        """Seconds of etcd's processor and of Redis's, and bytes that etcd received and sent."""
        return _cpu(self.etcd.members[0]), _cpu(self.redis) if self.redis else 0.0, self._etcd_bytes()

    def _etcd_bytes(self) -> tuple[int, int]:
        with urllib.request.urlopen(f"{self.etcd.endpoints[0]}/metrics", timeout=10) as answer:
            lines = answer.read().decode().splitlines()
        counts = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
        names = ("etcd_network_client_grpc_received_bytes_total", "etcd_network_client_grpc_sent_bytes_total")
        received, sent = (int(float(counts[name])) for name in names)
        return received, sent


def _cpu(server: Server) -> float:
    return cpu_seconds_of(server.pid)


def measure_scales(
    counts: list[int],
    seconds: float,
    load: Load,
    index: str,
    folders: tuple[Path, Path],
    progress: Callable[[str], None],
) -> Iterator[Scale]:
    """Each number of ``counts``, on a new volume. ``folders``: on the disk, for segments; in memory, for etcd."""
    for count in counts:
        if count < load.writers + load.readers:
            raise KvfuseError(f"{count} hosts are fewer than {load.writers} that write and {load.readers} that read")
        part = f"{count}-{secrets.token_hex(4)}"
        disk, memory = (folder / part for folder in folders)
        for folder in (disk, memory):
            folder.mkdir()
        yield _Run(count, seconds, load, progress).measure(disk, memory, index)


class _Run:
    """One number of hosts."""

    def __init__(self, count: int, seconds: float, load: Load, progress: Callable[[str], None]) -> None:
        self._result = Scale(count)
        self._seconds = seconds
        self._load = load
        self._progress = progress
        self._processes: list[_Process] = []

    def _tell(self, text: str) -> None:
        self._progress(f"{self._result.hosts:,} hosts: {text}")

    def measure(self, disk: Path, memory: Path, index: str) -> Scale:
        load, result = self._load, self._result
        with ExitStack() as servers_end:
            servers = Servers(servers_end, disk, memory, index)
            options = config.load(servers.conf).options
            ensure_volume(options)
            with ExitStack() as hosts_end:
                self._open_all(hosts_end, servers)
                self._tell("settling")
                time.sleep(SETTLE_SECONDS)
                self._phase("quiet", servers, {})
                self._tell("warming up")  # writers take slabs, once
                self._play(self._block_plays(), min(WARM_SECONDS, self._seconds))
                plays = self._block_plays()
                self._phase("blocks", servers, plays)
                self._look_up(plays["writers"]["schedule"])
                files = {"label": secrets.token_hex(4), "period": load.readers / load.files_per_second}
                begin = time.monotonic() + LEAD_SECONDS
                self._phase("files", servers, {"readers": {"role": "files", "schedule": {**files, "start": begin}}})
                self._tell("closing")
                closing = time.monotonic()
            result.close_seconds = time.monotonic() - closing
            result.is_clean = _is_clean(servers.conf)
        return result

    def _block_plays(self) -> dict[str, dict[str, Any]]:
        """Of writers and readers, from now on: role -> what it is asked for."""
        load, begin = self._load, time.monotonic() + LEAD_SECONDS
        writes = {
            "label": secrets.token_hex(4),
            "period": BATCH * load.writers / load.blocks_per_second,
            "start": begin,
        }
        looks = {"label": "", "period": BATCH * load.readers / load.looks_per_second, "start": begin}
        writers = {**writes, "count": load.writers}
        return {
            "writers": {"role": "store", "schedule": writes},
            "readers": {
                "role": "look", "schedule": looks, "writers": writers, "gets": load.gets,
            },
        }  # fmt: skip

    def _open_all(self, stack: ExitStack, servers: Servers) -> None:
        load, result = self._load, self._result
        roles = [("writers", load.writers), ("readers", load.readers)]
        left = result.hosts - load.writers - load.readers
        roles += [("idle", min(PROCESS_HOSTS, left - start)) for start in range(0, left, PROCESS_HOSTS)]
        began, (etcd, _, _) = time.monotonic(), servers.look()
        opened = 0
        before_all = 0.0
        memory: list[float] = []
        threads: list[float] = []
        for role, count in roles:
            process = _Process(stack, role, count, servers.conf)
            before = process.ask("sample")
            before_all += before["processor"]  # imports
            process.ask("open", count=count)
            after = process.ask("sample")
            if role == "idle" or left == 0:
                memory.append((after["memory"] - before["memory"]) / count)
                threads.append((after["threads"] - before["threads"]) / count)
            self._processes.append(process)
            if role == "writers":
                process.ask("make_folders")
            opened += count
            self._tell(f"{opened:,} open")
        result.open_seconds = time.monotonic() - began
        result.open_processor = sum(process.ask("sample")["processor"] for process in self._processes) - before_all
        result.open_etcd = servers.look()[0] - etcd
        result.memory, result.threads = median(memory), median(threads)

    def _sample(self) -> list[dict[str, Any]]:
        for process in self._processes:
            process.begin("sample")
        return [process.end() for process in self._processes]

    def _phase(self, name: str, servers: Servers, plays: dict[str, dict[str, Any]]) -> None:
        self._tell(name)
        before, servers_before = self._sample(), servers.look()
        began = time.monotonic()
        done, ms = self._play(plays, self._seconds)
        after, servers_after = self._sample(), servers.look()
        phase = Phase(name, time.monotonic() - began, done, ms, {})
        for process, one, other in zip(self._processes, before, after, strict=True):
            differences = {key: other[key] - one[key] for key in ("processor", "sent", "received", "switches")}
            cost = Cost(process.count, other["time"] - one["time"], **differences)
            known = phase.costs.get(process.role)
            phase.costs[process.role] = cost if known is None else known.added(cost)
        phase.etcd_processor, phase.index_processor = (
            after - before for before, after in zip(servers_before[:2], servers_after[:2], strict=True)
        )
        (received, sent), (received_after, sent_after) = servers_before[2], servers_after[2]
        phase.etcd_bytes = received_after - received, sent_after - sent
        self._result.phases.append(phase)

    def _play(self, plays: dict[str, dict[str, Any]], seconds: float) -> tuple[dict[str, int], dict[str, float]]:
        """For so many seconds. (what was done, median ms of each call)"""
        players = [process for process in self._processes if process.role in plays]
        for process in players:
            process.begin("play", seconds=seconds, **plays[process.role])
        if not players:
            time.sleep(seconds)
        done: dict[str, int] = {}
        ms: dict[str, float] = {}
        for process in players:
            answer = process.end()
            done |= answer["done"]
            ms |= answer["ms"]
        return done, ms

    def _look_up(self, writes: dict[str, Any]) -> None:
        """By the last process's first host, which did not look before if it is idle."""
        self._tell("look-ups")
        batches = int(self._seconds / writes["period"])
        names = [name for batch in range(batches) for name in names_of(writes["label"], 0, batch)]
        times: dict[str, list[float]] = {"present": [], "absent": []}
        for turn in range(LOOK_UPS):
            asked = names[turn * LOOKED_UP : (turn + 1) * LOOKED_UP]
            if asked:
                answer = self._processes[-1].ask("look_up", names=[name.decode() for name in asked])
                times["present"].append(answer["ms"] * LOOKED_UP / len(asked))
            absent = [secrets.token_hex(16) for _ in range(LOOKED_UP)]
            times["absent"].append(self._processes[-1].ask("look_up", names=absent)["ms"])
        self._result.look_up_ms = {kind: median(some) for kind, some in times.items() if some}


def _is_clean(conf: Path) -> bool:
    """Once nobody has the volume: hosts that were killed are waited for."""
    import trio

    from kvfuse.volume.check.volume_check import fsck

    report = trio.run(fsck, config.load(conf).options)
    return bool(report.clean)
