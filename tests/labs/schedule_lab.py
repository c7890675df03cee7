"""A volume on real servers with three mounts, callers on each of them, and eyes on all of it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import schedule_client
import schedule_content as content
import trio
from cut_links import Links
from mounting import PATIENCE_S, KvfuseMount, conf_elsewhere, mount_rows, shared_conf, wait_until
from records_audit import Audit
from schedule_history import History, Span
from schedule_settling import kernel_stacks
from volume_lab import Disk

from kvfuse.errors import EngineError, EngineTimeout
from kvfuse.options import config
from kvfuse.remote.records.api import Record, Versioned
from kvfuse.slab.layout import Superblock
from kvfuse.volume.opening import engines
from kvfuse.volume.opening.formatting import read_shared_superblock
from kvfuse.volume.store import schema
from kvfuse.volume.store.sealed import as_formatted
from kvfuse_cluster.ceph import CephServers
from kvfuse_cluster.etcd import EtcdServers

MOUNTS = 3
LEASE = 4.0
DEADLINE = 2.0
"""seconds, as the mounts have them"""
CALLERS = ("files", "files", "blocks")
"""on each mount"""
HANGS = 40.0
"""seconds after which a call is not slow any more; a daemon is not stopped for longer than a fraction of that"""
LETTING_GO = 5.0
"""seconds a killed daemon may take to end"""
LOOK_SECONDS = 0.5
"""between two looks at what dead clients hold"""
RECORDS_MAX = 1_000_000


class CallerProcess:
    """A process of `schedule_client`, and how far its log was read."""

    def __init__(self, mount: KvfuseMount, index: int, kind: str, actor: int, seed: int, folder: Path) -> None:
        self.mount = index
        self.kind = kind
        self.log = folder / f"caller-{actor}.log"
        self.errors = folder / f"caller-{actor}.err"
        command = [sys.executable, schedule_client.__file__, mount.point, kind, actor, seed, self.log]
        with self.errors.open("wb") as errors:
            self.process = subprocess.Popen([*map(str, command)], stdin=subprocess.PIPE, stderr=errors)
        self._read_to = 0
        self._call: dict[str, Any] | None = None

    def under_way(self) -> dict[str, Any] | None:
        """The call that it last began, and whether it is in one: by its log."""
        if not self.log.exists():
            return None
        with self.log.open("rb") as log:
            log.seek(self._read_to)
            lines = log.read().splitlines(keepends=True)
        for line in lines:
            if not line.endswith(b"\n"):
                break
            self._read_to += len(line)
            self._call = json.loads(line)
        return self._call if self._call is not None and "call" in self._call else None

    def what(self) -> str:
        """Who it is, and what it is at."""
        call = self.under_way()
        doing = f", {call['call']} for {time.monotonic() - call['t']:.1f} s" if call is not None else ""
        return f"a caller of {self.kind} on mount {self.mount}{doing}"

    def stack(self) -> str:
        """Where it is, as the kernel says."""
        return kernel_stacks(self.process.pid)

    def end(self) -> None:
        """It finishes its operation first."""
        assert self.process.stdin is not None
        self.process.stdin.close()


class Lab:
    """See the module."""

    def __init__(
        self, etcd: EtcdServers, ceph: CephServers | None, folder: Path, seed: int, devices: Sequence[Path] = ()
    ) -> None:
        """Bytes are in ``ceph``, or on the one device that the mounts know as ``devices``."""
        self.etcd, self.ceph, self.folder, self.seed, self.devices = etcd, ceph, folder, seed, devices
        self.conf = shared_conf(folder, etcd, ceph, device=devices[0] if devices else None)
        confs = [conf_elsewhere(self.conf, devices[0], device) for device in devices[1:]]
        confs = [self.conf, *confs, *[self.conf] * MOUNTS][:MOUNTS]
        self.links = [Links(etcd.endpoints) for _ in range(MOUNTS)]
        """of each mount to the members of etcd"""
        confs = [
            self._linked(conf, links, number)
            for number, (conf, links) in enumerate(zip(confs, self.links, strict=True))
        ]
        words = f"records.deadline={DEADLINE}", f"segments.deadline={DEADLINE}", f"client.lease={LEASE}"
        bases = [folder / f"host-{number}" for number in range(MOUNTS)]
        for base in bases:
            base.mkdir()
        self.mounts = [KvfuseMount(base, words, source=conf) for base, conf in zip(bases, confs, strict=True)]
        self.callers: list[CallerProcess] = []
        self.stops: list[Span] = []
        """while a daemon was stopped, or dead and did not end"""
        self.lost: list[Span] = []
        """around the time when a daemon said that its lease was lost"""
        self.aborted: list[str] = []
        """daemons that did not end after SIGKILL until their connection was aborted"""
        self._dead: dict[int, tuple[str, float]] = {}
        """client that still holds slabs -> (its daemon, when that was killed)"""
        self.adopted: list[Span] = []
        """from a daemon's death until all its slabs were somebody else's"""
        self._log_sizes = [0] * MOUNTS

    # -- mounts --------------------------------------------------------------------------------------

    def _linked(self, conf: Path, links: Links, number: int) -> Path:
        """The mount.conf of a host that reaches etcd by these links."""
        theirs = conf.with_name(f"linked-{number}.conf")
        text = conf.read_text()
        endpoints = json.dumps(list(self.etcd.endpoints))
        assert endpoints in text
        theirs.write_text(text.replace(endpoints, json.dumps(links.endpoints)))
        return theirs

    def prepare(self) -> None:
        """Folders and the files that are changed in place."""
        for mode in content.FOLDERS:
            folder = self.mounts[0].point / mode
            folder.mkdir()
            os.setxattr(folder, "user.kvfuse.publish", mode.encode())
            for name, cells in content.PAGES.items():
                with (folder / name).open("wb") as file:
                    file.write(bytes(cells * content.CELL))
                    os.fsync(file.fileno())
        for mount in self.mounts[1:]:
            wait_until(lambda: all((mount.point / mode).is_dir() for mode in content.FOLDERS), "the folders")  # noqa: B023

    def kill_daemon(self, index: int) -> None:
        """SIGKILL. A daemon that one of its own threads keeps from ending is let go, and that is noted."""
        mount = self.mounts[index]
        pid, client = mount.pid, self.client(mount)
        (row,) = [row for row in mount_rows() if f" {mount.point} " in row]
        os.kill(pid, signal.SIGKILL)
        killed = time.monotonic()
        if client is not None:
            self._dead[client] = f"daemon {index}", killed
        while not mount.has_ended:
            if time.monotonic() > killed + LETTING_GO:
                self.aborted.append(f"daemon {index}")
                self.stops.append(Span(f"daemon {index}", killed, time.monotonic()))
                Path("/sys/fs/fuse/connections", row.split(" ")[2].partition(":")[2], "abort").write_text("1")
                break
            threading.Event().wait(0.02)
        mount.wait(-9)

    def mount_again(self, index: int) -> None:
        """After `kill_daemon`. While etcd has no leader nothing can be mounted: then it is tried again."""
        mount = self.mounts[index]
        subprocess.run(["umount", "-l", str(mount.point)], check=True)
        until = time.monotonic() + PATIENCE_S
        while True:
            try:
                mount.mount()
            except AssertionError:
                if time.monotonic() > until:
                    raise
            else:
                return

    # -- callers -------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def working(self) -> Iterator[None]:
        """Callers on all mounts, around the body."""
        end = threading.Event()
        eye = threading.Thread(target=self._follow_the_dead, args=(end,), daemon=True)
        with ExitStack() as stack:
            eye.start()
            stack.callback(eye.join)
            stack.callback(end.set)
            for index, mount in enumerate(self.mounts):
                for number, kind in enumerate(CALLERS):
                    actor = index * len(CALLERS) + number
                    caller = CallerProcess(mount, index, kind, actor, self.seed, self.folder)
                    self.callers.append(caller)
                    stack.callback(caller.process.kill)
            yield
            for caller in self.callers:
                caller.end()
            self._wait_for_callers()

    def _wait_for_callers(self) -> None:
        """They were told to end: each finishes what it is doing."""
        until = time.monotonic() + HANGS
        while alive := [caller for caller in self.callers if caller.process.poll() is None]:
            self.watch()
            if time.monotonic() > until:
                raise AssertionError(f"{alive[0].what()} does not end\n{alive[0].stack()}")
            threading.Event().wait(0.02)

    def watch(self) -> None:
        """AssertionError for a call that hangs, and for a caller that fell. Notes leases that were lost."""
        now = time.monotonic()
        for caller in self.callers:
            if caller.process.poll() not in (None, 0):
                raise AssertionError(f"{caller.what()} fell:\n{caller.errors.read_text()}")
            call = caller.under_way()
            if call is not None and now - call["t"] > HANGS and caller.process.poll() is None:
                raise AssertionError(f"{caller.what()} hangs\n{caller.stack()}")
        for index, mount in enumerate(self.mounts):
            text = mount.log.read_bytes()
            if b"lease of the volume" in text[self._log_sizes[index] :]:
                self.lost.append(Span(f"daemon {index}", now - LEASE - 2, now + LEASE + 2))
            self._log_sizes[index] = len(text)

    def history(self, spans: list[Span]) -> History:
        """What all callers did and saw."""
        made = History([*spans, *self.lost])
        for caller in self.callers:
            made.take(caller.log, caller.mount)
        return made

    def operations(self, name: str) -> list[str]:
        """Lines of the callers' logs with that name, by time, and who wrote them."""
        found = [
            (json.loads(line)["t"], f"{log.stem} {line}")
            for log in self.folder.glob("*.log")
            for line in log.read_text().splitlines()
            if f'"{name}"' in line
        ]
        return [line for _, line in sorted(found)]

    # -- records -------------------------------------------------------------------------------------

    async def _scan(self, prefix: bytes) -> list[Record]:
        """All records that begin with it, as they are at one moment."""
        async with engines.open_records(config.load(self.conf).options) as records:
            superblock = await read_shared_superblock(records, "the volume")
            return await as_formatted(records, superblock).scan(prefix, limit=RECORDS_MAX)

    async def _superblock(self) -> Superblock:
        async with engines.open_records(config.load(self.conf).options) as records:
            return await read_shared_superblock(records, "the volume")

    def client(self, mount: KvfuseMount) -> int | None:
        """The client that a daemon is; None without a lease, or where the store does not answer."""
        try:
            members = trio.run(self._scan, schema.MEMBER_PREFIX)
        except EngineError:
            return None
        rows = {schema.decode_member(row.value).pid: schema.key_client(row.key) for row in members}
        return rows.get(mount.pid)

    def audit(self) -> list[str]:
        """What is wrong with the records now."""
        found: list[tuple[Superblock, list[Record]]] = []

        def ask() -> bool:
            with contextlib.suppress(EngineTimeout):  # servers that come back may still look for a leader
                found.append((trio.run(self._superblock), trio.run(self._scan, b"")))
            return bool(found)

        wait_until(ask, "the records")
        superblock, records = found[0]
        disk = Disk(superblock)
        disk.records = {row.key: Versioned(row.value, row.version) for row in records}
        found = Audit(disk)
        return [*found.slot_problems(), *found.tree_problems()]

    def _follow_the_dead(self, end: threading.Event) -> None:
        """In a thread of its own: everything else may wait for something."""
        while not end.wait(LOOK_SECONDS):
            if self._dead:
                self._look_for_the_dead()

    def _look_for_the_dead(self) -> None:
        """Whose slabs have become somebody else's. Nothing, while the store does not answer."""
        try:
            rows = trio.run(self._scan, b"l")
        except EngineError:
            return
        holders = {schema.decode_holder(row.value).client for row in rows}
        for client in [client for client in self._dead if client not in holders]:
            daemon, killed = self._dead.pop(client)
            self.adopted.append(Span(daemon, killed, time.monotonic()))

    def has_adopted(self) -> bool:
        """Nothing is held by a client that was killed."""
        return not self._dead
