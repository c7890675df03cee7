"""Hosts of one shared volume in one process, each a volume of its own without a mount. A program.

It takes one JSON request a line on stdin, {"operation": NAME, ...}, and answers each with one line on stdout. Hosts
that store and look have a schedule: what each does when follows from its number alone. So hosts that look know, without
a word between processes, which names were stored some time ago.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import trio

from kvfuse import errors
from kvfuse.cli.daemon import calm_collector
from kvfuse.native.blockforms import name_columns
from kvfuse.options import config
from kvfuse.options.config import Options
from kvfuse.sizes import KIB
from kvfuse.volume.api import ROOT_INODE, Caller, RowTerms
from kvfuse.volume.running import open_volume
from kvfuse.volume.volume import Volume
from kvfuse_bench.content import BlockContent, block_key

BLOCKS, FILES = b"blocks", b"files"
"""folders of the volume: a namespace of blocks, and one of files"""
BATCH = 16
"""blocks of one put, of one look-up, and of one get"""
BLOCK_SIZE = 4 * KIB
LAG_SECONDS = 0.5
"""after which others look for blocks that were stored"""
OPENING_AT_ONCE = 4
SEEN_SECONDS_MAX = 30.0
CALLER = Caller(0, 0)
TCP_INFO_SENT = 120
"""offset of tcpi_bytes_acked in struct tcp_info; tcpi_bytes_received follows"""


@dataclass(frozen=True)
class Schedule:
    """Batches of one host of ``count`` that do the same: one every ``period`` seconds from ``start`` (monotonic)."""

    label: str
    number: int
    count: int
    period: float
    start: float

    def time_of(self, batch: int) -> float:
        """Hosts take turns within the period."""
        return self.start + (batch + self.number / self.count) * self.period


def names_of(label: str, writer: int, batch: int, count: int = BATCH) -> list[bytes]:
    """Names of the blocks of one batch."""
    return [block_key(f"{label} {writer}", batch * BATCH + place).hex().encode() for place in range(count)]


class Host:
    """One host: its volume, and what it did since it was asked last."""

    def __init__(self, volume: Volume) -> None:
        self.volume = volume
        self.done: Counter[str] = Counter()
        self.seconds: dict[str, list[float]] = {}
        """of each call, by its kind"""

    async def find_folder(self, name: bytes) -> int:
        """Its inode, once this host knows it."""
        with trio.fail_after(SEEN_SECONDS_MAX):
            while True:
                with contextlib.suppress(errors.NotFound):
                    ino = (await self.volume.tree.lookup(ROOT_INODE, name)).ino
                    if name != BLOCKS or await self.volume.blocks.block_namespace(ino) is not None:
                        return ino
                await trio.sleep(0.05)

    @contextlib.contextmanager
    def timed(self, kind: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.seconds.setdefault(kind, []).append(time.perf_counter() - began)

    async def keep_to(self, schedule: Schedule, seconds: float, act: Callable[[int], Awaitable[None]]) -> None:
        """``act`` on each batch of ``seconds``. One that is late is done at once, and counted."""
        batch = 0
        while (due := schedule.time_of(batch)) < schedule.start + seconds:
            late = time.monotonic() - due
            self.done["late"] += late > schedule.period
            await trio.sleep(max(0.0, -late))
            await act(batch)
            batch += 1

    # -- roles ---------------------------------------------------------------------------------------

    async def store_blocks(self, schedule: Schedule, seconds: float) -> None:
        folder = await self.find_folder(BLOCKS)
        rows, number = self.volume.rows, await self.volume.blocks.block_namespace(folder)
        assert rows is not None
        assert number is not None
        table, content = rows.table(folder, number, 0, 0, 0o644), BlockContent(BLOCK_SIZE)

        async def put(batch: int) -> None:
            names = names_of(schedule.label, schedule.number, batch)
            buffers = [memoryview(bytes(content.fill(bytes.fromhex(name.decode())))) for name in names]
            with self.timed("put"):
                await rows.put(table, names, buffers, RowTerms(is_strict=False))
            self.done["blocks"] += BATCH

        await self.keep_to(schedule, seconds, put)

    async def look_for_blocks(self, schedule: Schedule, seconds: float, writers: Schedule, gets: int) -> None:
        """Look each batch of names up that a writer stored a moment ago, and get ``gets`` of its blocks."""
        folder = await self.find_folder(BLOCKS)
        rows, number = self.volume.rows, await self.volume.blocks.block_namespace(folder)
        assert rows is not None
        assert number is not None
        content = BlockContent(BLOCK_SIZE)

        async def look(batch: int) -> None:
            writer = (batch + schedule.number) % writers.count
            stored = int((time.monotonic() - LAG_SECONDS - writers.start) / writers.period) - 1
            if stored < 0:
                return
            names = names_of(writers.label, writer, stored)
            with self.timed("look"):
                found = await self._look_up(folder, number, names)
            self.done["looked"] += len(names)
            self.done["found"] += int(np.count_nonzero(found))
            for name in names[:gets]:
                with self.timed("get"):
                    data = await self._get(folder, name)
                self.done["got"] += data is not None
                if data is not None and content.difference(bytes.fromhex(name.decode()), data) is not None:
                    self.done["wrong"] += 1

        await self.keep_to(schedule, seconds, look)

    async def _look_up(self, folder: int, number: int, names: list[bytes]) -> Any:
        """As a ring's EXISTS."""
        rows, columns = self.volume.rows, name_columns(names)
        assert rows is not None
        await rows.renew(is_strict=False, directory=folder, names=names)
        return rows.look_up(folder, number, columns, is_timed=False)[0]

    async def _get(self, folder: int, name: bytes) -> memoryview | None:
        """As a ring's GET of what is not in memory."""
        rows = self.volume.rows
        assert rows is not None
        if rows.find(folder, name) is None:
            await rows.renew(is_strict=False, directory=folder, names=[name])
        if (found := rows.find(folder, name)) is None:
            return None
        data = await rows.read(found[0], name)
        return memoryview(data) if data is not None else None

    async def store_files(self, schedule: Schedule, seconds: float) -> None:
        """One small file each time, durable when it is closed: the folder is strict."""
        folder = await self.find_folder(FILES)
        data = memoryview(bytes(BLOCK_SIZE))

        async def store(batch: int) -> None:
            name = f"{schedule.label}-{schedule.number}-{batch}".encode()
            with self.timed("file"):
                handle, node = await self.volume.tree.create(folder, name, 0o644, CALLER, os.O_RDWR)
                try:
                    await self.volume.files.write(handle, 0, data)
                    await self.volume.files.flush(handle)
                finally:
                    await self.volume.files.release(handle)
                    self.volume.tree.forget(node.ino, 1)
            self.done["files"] += 1

        await self.keep_to(schedule, seconds, store)

    async def look_up_many(self, names: list[bytes]) -> dict[str, float]:
        """Milliseconds of one look-up of ``names``, and how many there are."""
        folder = await self.find_folder(BLOCKS)
        number = await self.volume.blocks.block_namespace(folder)
        assert number is not None
        began = time.perf_counter()
        found = await self._look_up(folder, number, names)
        return {"ms": 1e3 * (time.perf_counter() - began), "found": int(np.count_nonzero(found))}


class Traffic:
    """Bytes of this process's TCP connections, by the kernel's count of each. Those of one that ended after the last
    look are lost."""

    def __init__(self) -> None:
        self._of: dict[int, tuple[int, int]] = {}

    def look(self) -> tuple[int, int]:
        """(sent and acknowledged, received) since the start."""
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError, ValueError):
                link = os.readlink(f"/proc/self/fd/{name}")
                if not link.startswith("socket:["):
                    continue
                with socket.socket(fileno=os.dup(int(name))) as one:
                    if one.family in (socket.AF_INET, socket.AF_INET6) and one.type == socket.SOCK_STREAM:
                        info = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                        self._of[int(link[8:-1])] = struct.unpack_from("QQ", info, TCP_INFO_SENT)
        sent = sum(one for one, _ in self._of.values())
        return sent, sum(other for _, other in self._of.values())


class Process:
    """The hosts of this process, and the requests that it answers."""

    def __init__(self, options: Options, nursery: trio.Nursery) -> None:
        self._options = options
        self._nursery = nursery
        self._hosts: list[Host] = []
        self._traffic = Traffic()
        self._end = trio.Event()
        self._opening = trio.CapacityLimiter(OPENING_AT_ONCE)

    async def open(self, count: int) -> dict[str, Any]:
        """Open so many hosts. Seconds of each."""
        seconds: list[float] = []
        async with trio.open_nursery() as nursery:
            for _ in range(count):
                nursery.start_soon(self._open_one, seconds)
        calm_collector()
        return {"seconds": seconds}

    async def _open_one(self, seconds: list[float]) -> None:
        async with self._opening:
            began = time.perf_counter()
            await self._nursery.start(self._be_host)
            seconds.append(time.perf_counter() - began)

    async def _be_host(self, *, task_status: trio.TaskStatus[None]) -> None:
        async with open_volume(self._options) as volume:
            self._hosts.append(Host(volume))
            task_status.started()
            await self._end.wait()

    async def sample(self) -> dict[str, Any]:
        """Figures of the process: they only grow, but for memory and threads."""
        sent, received = self._traffic.look()
        status = Path("/proc/self/status").read_text()
        switches = int(status.partition("\nvoluntary_ctxt_switches:")[2].split()[0])  # of the main thread
        memory = sum(int(status.partition(f"\n{field}:")[2].split()[0]) for field in ("RssAnon", "RssShmem"))
        return {
            "time": time.monotonic(),
            "processor": time.process_time(),
            "sent": sent,
            "received": received,
            "switches": switches,
            "memory": memory * KIB,
            "threads": len(os.listdir("/proc/self/task")),
        }

    async def make_folders(self) -> dict[str, Any]:
        """The folders of all hosts, by the first host of this process."""
        volume = self._hosts[0].volume
        for name, settings in ((BLOCKS, b"kind=blocks"), (FILES, b"kind=files")):
            ino = (await volume.tree.make_directory(ROOT_INODE, name, 0o755, CALLER)).ino
            await volume.inodes.set_xattr(ino, b"user.kvfuse.namespace", settings)
        await volume.sync()
        return {}

    async def play(self, role: str, schedule: dict[str, Any], seconds: float, **more: Any) -> dict[str, Any]:
        """Every host of this process does so, at the same time; it answers when all have done."""
        for host in self._hosts:
            host.done.clear()
            host.seconds.clear()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._look_each_second, nursery)
            async with trio.open_nursery() as hosts:
                for number, host in enumerate(self._hosts):
                    own = Schedule(number=number, count=len(self._hosts), **schedule)
                    if role == "look":
                        writers, gets = Schedule(number=0, **more["writers"]), more["gets"]
                        hosts.start_soon(host.look_for_blocks, own, seconds, writers, gets)
                    elif role == "files":
                        hosts.start_soon(host.store_files, own, seconds)
                    else:
                        hosts.start_soon(host.store_blocks, own, seconds)
            nursery.cancel_scope.cancel()
        done, times = Counter[str](), dict[str, list[float]]()
        for host in self._hosts:
            done.update(host.done)
            for kind, some in host.seconds.items():
                times.setdefault(kind, []).extend(some)
        return {"done": done, "ms": {kind: 1e3 * float(np.median(some)) for kind, some in times.items()}}

    async def look_up(self, names: list[str]) -> dict[str, Any]:
        return await self._hosts[0].look_up_many([name.encode() for name in names])

    async def _look_each_second(self, nursery: trio.Nursery) -> None:
        while True:
            self._traffic.look()
            await trio.sleep(1)

    def close(self) -> None:
        self._end.set()


async def serve(conf: str, words: list[str]) -> None:
    """Answer requests until there are no more; then the hosts leave the volume."""
    options = config.load(Path(conf), words=words).options
    with contextlib.suppress(ValueError):
        import resource

        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    async with trio.open_nursery() as nursery:
        process = Process(options, nursery)
        operations: dict[str, Callable[..., Awaitable[dict[str, Any]]]] = {
            name: getattr(process, name) for name in ("open", "sample", "make_folders", "play", "look_up")
        }
        while line := await trio.to_thread.run_sync(sys.stdin.readline, abandon_on_cancel=True):
            request = json.loads(line)
            try:
                answer = await operations[request.pop("operation")](**request)
            except (errors.KvfuseError, trio.TooSlowError) as error:
                answer = {"error": f"{type(error).__name__}: {error}"}
            await trio.to_thread.run_sync(partial(print, json.dumps(answer), flush=True))
        process.close()


if __name__ == "__main__":
    trio.run(serve, sys.argv[1], sys.argv[2:])
