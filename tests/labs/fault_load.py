"""Writers and readers of a shared volume while parts of it fail: what was acknowledged, and how long each call took.

Each mount has threads of its own, which call the file system and nothing else. Blocks are replaced all the time, a
temporary name, strict close, rename, so what one reads has to be of the version that was acknowledged before, or of
a later one. A log has records that were synced one by one.
"""

from __future__ import annotations

import errno
import itertools
import math
import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self, TypeVar

from mounting import PATIENCE_S, KvfuseMount, wait_until

from kvfuse_cluster.ceph import CephServers
from kvfuse_cluster.etcd import EtcdServers

BLOCKS = 6
"""names that each writer replaces in turn"""
NEWS_S = 1.0
"""how long news of another host may take on a busy machine"""
RECORD_SIZE = 4096
"""of the log"""
SIZES = (4096, 70_001, 300_000)
IN_TIME = frozenset({errno.EIO, errno.ETIMEDOUT, errno.ESTALE})
"""what a call may be answered with while something is broken; ESTALE: what is open was replaced, and with the lease
ended what kept its bytes"""
UNMOUNTED = frozenset({errno.ENOTCONN, errno.ECONNABORTED})
"""what the kernel answers when the daemon is dead"""

_T = TypeVar("_T")


def block(name: str, version: int) -> bytes:
    """Whole or not, and of which version, can be told from the bytes alone."""
    header = f"{name} {version:08d} ".encode()
    size = SIZES[version % len(SIZES)]
    return header + blake2b(header).digest() * (size // 64)


def says_eio(path: Path) -> bool:
    try:
        path.read_bytes()
    except OSError as error:
        return error.errno == errno.EIO
    return False


def version_of(name: str, data: bytes) -> int:
    """AssertionError where the bytes are not those of any version."""
    fields = data[:64].split(b" ")
    assert fields[0] == name.encode(), f"{name} holds {data[:40]!r}"
    version = int(fields[1])
    assert data == block(name, version), f"{name}: {len(data)} bytes that are not those of version {version}"
    return version


class Call(NamedTuple):
    """One system call on a mount."""

    mount: int
    what: str
    began: float
    """on the monotonic clock, like ``ended``"""
    ended: float
    error: int
    """errno; 0 where it succeeded"""

    @property
    def seconds(self) -> float:
        return self.ended - self.began


class Load:
    """The threads. As a context manager: they end with the body, and whatever was wrong is raised."""

    def __init__(self, mounts: Sequence[KvfuseMount], seed: int) -> None:
        self.folders = [mount.point for mount in mounts]
        self.calls: list[Call] = []
        self.wrong: list[BaseException] = []
        self.stored: dict[str, int] = {}
        """block -> the last version that was acknowledged"""
        self.acknowledged: dict[str, list[tuple[float, int]]] = {}
        """block -> (when, version) of all of them"""
        self.begun: dict[str, int] = {}
        """block -> the last version that may be there"""
        self.logged: Counter[int] = Counter()
        """mount -> records of its log that were synced"""
        self._silent_from = math.inf
        self._dead: set[int] = set()
        self._under_way: dict[int, tuple[int, str, float]] = {}
        self._seed = seed
        self._end = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, args=(work, index), name=f"{work.__name__} {index}", daemon=True)
            for index in range(len(mounts))
            for work in (self._write, self._read, self._log)
        ]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._end.set()
        for thread in self._threads:
            thread.join(max(20, PATIENCE_S / 3))
            if thread.is_alive() and error is None:
                raise AssertionError(f"{thread.name} hangs: {list(self._under_way.values())}")
        if self.wrong and error is None:
            raise self.wrong[0]

    def forget(self, mount: int) -> None:
        """This daemon is about to die: its threads end with it."""
        self._dead.add(mount)

    @contextmanager
    def silence(self) -> Iterator[None]:
        """The record store falls silent: what hosts did not hear of each other by then they do not know meanwhile.

        Cached names and blocks are still read.
        """
        self._silent_from = time.monotonic()
        try:
            yield
        finally:
            self._silent_from = math.inf

    # -- what the test asks --------------------------------------------------------------------------

    def wait_progress(self, *mounts: int, blocks: int = 4) -> float:
        """Wait until each mount has stored, synced and read a few from now on; how many seconds that took."""
        start = time.monotonic()
        wanted = ("rename", "fsync", "read")

        def has_gone_on() -> bool:
            if self.wrong:
                raise self.wrong[0]
            done = Counter((row.mount, row.what) for row in self.calls if row.began >= start and not row.error)
            return all(done[mount, what] >= blocks for mount in mounts for what in wanted)

        wait_until(has_gone_on, f"reads and writes of mounts {mounts}")
        return time.monotonic() - start

    def longest(self, *mounts: int, since: float = 0.0) -> Call:
        """The slowest call that ended since then."""
        return max(
            (row for row in self.calls if row.mount in mounts and row.ended >= since), key=lambda row: row.seconds
        )

    def longest_gap(self, *mounts: int, since: float = 0.0) -> float:
        """Seconds for which a mount did not get a single block stored."""
        gaps = [0.0]
        for mount in mounts:
            times = [row.ended for row in self.calls if (row.mount, row.what, row.error) == (mount, "rename", 0)]
            gaps += [late - early for early, late in itertools.pairwise(times) if late >= since]
        return max(gaps)

    def errors(self, *mounts: int) -> Counter[str]:
        return Counter(errno.errorcode[row.error] for row in self.calls if row.error and row.mount in mounts)

    def failed(self) -> list[Call]:
        """The first calls that were answered with errors."""
        return [row for row in self.calls if row.error][:10]

    def check(self, folder: Path, damaged: Collection[str] = ()) -> None:
        """Every acknowledged block and record is there, as this mount has it. ``damaged``: files that may say EIO."""
        for name, stored in self.stored.items():
            if name in damaged and says_eio(folder / name):
                continue
            version = version_of(name, (folder / name).read_bytes())
            assert stored <= version <= self.begun[name], f"{name}: {version}, acknowledged {stored}"
        for mount, count in self.logged.items():
            if f"log-{mount}" in damaged and says_eio(folder / f"log-{mount}"):
                continue
            data = (folder / f"log-{mount}").read_bytes()
            for number in range(count):
                record = data[number * RECORD_SIZE : (number + 1) * RECORD_SIZE]
                found = f"{folder}/log-{mount}, record {number} of {count}: {record[:40]!r}"
                assert record == log_record(mount, number), found

    # -- the threads ---------------------------------------------------------------------------------

    def _run(self, work: Callable[[int, random.Random], None], mount: int) -> None:
        rng = random.Random(f"{self._seed} {work.__name__} {mount}")
        while not self._end.is_set():
            try:
                work(mount, rng)
            except OSError as error:
                if mount in self._dead and error.errno in UNMOUNTED | IN_TIME:
                    return
                if error.errno not in IN_TIME:
                    self.wrong.append(error)
                    return
                self._end.wait(0.05)  # an error at once is no reason to ask again at once
            except BaseException as error:
                self.wrong.append(error)
                return

    def _call(self, mount: int, what: str, call: Callable[[], _T]) -> _T:
        began = time.monotonic()
        key = threading.get_ident()
        self._under_way[key] = mount, what, began
        number = 0
        try:
            return call()
        except OSError as error:
            number = error.errno or errno.EIO
            raise
        finally:
            del self._under_way[key]
            self.calls.append(Call(mount, what, began, time.monotonic(), number))

    def _write(self, mount: int, rng: random.Random) -> None:
        name = f"block-{mount}-{rng.randrange(BLOCKS)}"
        version = self.begun.get(name, 0) + 1
        temporary = self.folders[mount] / f"{name}.tmp-{version}"
        file = self._call(mount, "create", lambda: os.open(temporary, os.O_CREAT | os.O_WRONLY))
        with self._closing(mount, file):
            self._call(mount, "write", lambda: _write_all(file, block(name, version)))
        self.begun[name] = version
        self._call(mount, "rename", lambda: temporary.rename(self.folders[mount] / name))
        self.stored[name] = version
        self.acknowledged.setdefault(name, []).append((time.monotonic(), version))

    def _read(self, mount: int, rng: random.Random) -> None:
        name = rng.choice([*self.stored, ""])
        if not name:
            self._end.wait(0.01)
            return
        least = self._least(mount, name)
        file = self._call(mount, "open", lambda: os.open(self.folders[mount] / name, os.O_RDONLY))
        with self._closing(mount, file):
            data = b""
            while part := self._call(mount, "read", lambda: os.pread(file, max(SIZES), len(data))):  # noqa: B023
                data += part  # fewer where the bytes behind could not be read: then it is asked for them again
        version = version_of(name, data)
        assert least <= version <= self.begun[name], f"{name}: read {version}, acknowledged {least}"

    def _least(self, mount: int, name: str) -> int:
        """The version that a read on the mount has to show, or a later one."""
        if self._silent_from == math.inf or name.startswith(f"block-{mount}-"):
            return self.stored[name]
        heard_until = self._silent_from - NEWS_S
        return max((version for when, version in self.acknowledged[name] if when < heard_until), default=1)

    def _log(self, mount: int, rng: random.Random) -> None:
        path = self.folders[mount] / f"log-{mount}"
        file = self._call(mount, "open", lambda: os.open(path, os.O_CREAT | os.O_WRONLY))
        with self._closing(mount, file):
            for _ in range(rng.randrange(1, 20)):
                number = self.logged[mount]
                record = log_record(mount, number)
                self._call(mount, "write", lambda: os.pwrite(file, record, number * RECORD_SIZE))  # noqa: B023
                self._call(mount, "fsync", lambda: os.fsync(file))
                self.logged[mount] += 1
                if self._end.is_set():
                    return

    @contextmanager
    def _closing(self, mount: int, file: int) -> Iterator[None]:
        try:
            yield
        except BaseException:
            _close_quietly(file)
            raise
        self._call(mount, "close", lambda: os.close(file))


def _close_quietly(file: int) -> None:
    """After an error close may have one of its own."""
    try:
        os.close(file)
    except OSError:
        pass


def _write_all(file: int, data: bytes) -> None:
    while data:
        data = data[os.write(file, data) :]


def log_record(mount: int, number: int) -> bytes:
    header = f"log {mount} {number:08d} ".encode()
    return (header + blake2b(header).digest() * (RECORD_SIZE // 64))[:RECORD_SIZE]


# -- the clusters -----------------------------------------------------------------------------------


def heal(etcd: EtcdServers, ceph: CephServers | None) -> None:
    """All members, OSDs and the monitor run and answer again."""
    osds, monitors = ([], []) if ceph is None else (ceph.osds, [ceph.monitor])
    for server in [*etcd.members, *osds, *monitors]:
        server.kill(signal.SIGCONT)
    for index, member in enumerate(etcd.members):
        if not member.pid:
            member.launch()
        etcd.wait_ready(index)
    for index, osd in enumerate(osds):
        assert ceph is not None
        if not osd.pid:
            ceph.restart(index)
        ceph.wait_up(index)
