"""Two hosts mount one volume, and daemons of both are killed over and over: neither notices what the other one suffers.

The daemon after one that was killed is the same client of the volume, so nothing of it is adopted.
"""

from __future__ import annotations

import json
import os
import re
import signal
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import trio
from cluster_lab import BYTES_OF_HOSTS, MEMORY
from killer import serving_of
from loop_lab import loop_devices
from mounting import KvfuseMount, conf_elsewhere, shared_conf, stopped, wait_until
from test_outlive_load import kill_beside

from kvfuse.options import config
from kvfuse.volume.opening import engines
from kvfuse.volume.store import schema
from kvfuse_cluster.etcd import EtcdServers

pytestmark = [pytest.mark.root, pytest.mark.ring(3)]  # one kill beside another host is in test_outlive_shared.py

WORDS = "outlive=true", "publish=strict", "records.deadline=5"
KILLS = 3
DEVICE_SIZE = 640 << 20
LEASE = 60.0
"""seconds: longer than a machine that does much else lets a daemon wait for its turn"""
NOTICED = re.compile("lease|adopt|cut off|is gone|makes no sense|loses")
"""words of what a log says when another host has noticed"""


@contextmanager
def two_hosts(
    base: Path, etcd: EtcdServers, engine: str, request: pytest.FixtureRequest, lease: float = LEASE
) -> Iterator[list[KvfuseMount]]:
    """One volume, mounted twice; at the end both are unmounted, and it must be clean."""
    with ExitStack() as stack:
        if engine == "block":
            memory = stack.enter_context(tempfile.TemporaryDirectory(dir=MEMORY))
            devices = stack.enter_context(loop_devices(Path(memory) / "image", DEVICE_SIZE, 2))
            confs = [shared_conf(base, etcd, device=devices[0])]
            confs.append(conf_elsewhere(confs[0], *devices))
        else:
            ceph = request.getfixturevalue("ceph") if engine == "rados" else None
            confs = [shared_conf(base, etcd, ceph)] * 2
        for conf in set(confs):
            conf.write_text(conf.read_text().replace("client.lease = 6.0", f"client.lease = {lease}"))
        mounts = []
        for name, conf, words in zip(("one", "two"), confs, (WORDS, (*WORDS, "standby")), strict=True):
            (base / name).mkdir()
            mounts.append(KvfuseMount(base / name, words, source=conf))
            stack.callback(mounts[-1].remove)
            mounts[-1].mount()
        yield mounts
        for mount in mounts:
            mount.check_unexpected_errors()
            # Before that its slabs, and so its lease, are not given back.
            wait_until(lambda mount=mount: not stats(mount)["leases"]["resting_count"], "slabs to have rested")
            mount.unmount()
        mounts[0].fsck(verify=True)


def stats(mount: KvfuseMount) -> Any:
    return json.loads((mount.point / ".kvfuse" / "stats").read_text())


def clients(conf: Path) -> set[int]:
    """Those that the record store takes for alive."""

    async def scan() -> set[int]:
        async with engines.open_records(config.load(conf).options) as records:
            return {schema.key_client(row.key) for row in await records.scan(schema.MEMBER_PREFIX)}

    return trio.run(scan)


def kill_daemon(mount: KvfuseMount) -> None:
    pid = serving_of(mount.pid)
    assert pid is not None
    os.kill(pid, signal.SIGKILL)


def noticed(mounts: list[KvfuseMount]) -> list[str]:
    """What logs say of other clients."""
    return [line for mount in mounts for line in mount.log.read_text().splitlines() if NOTICED.search(line)]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("engine", BYTES_OF_HOSTS)
def test_neither_host_notices_kills(
    engine: str, request: pytest.FixtureRequest, etcd_alone: EtcdServers, tmp_path: Path, seed: int
) -> None:
    with two_hosts(tmp_path, etcd_alone, engine, request) as mounts:
        before = clients(mounts[0].source)
        kill_beside(mounts, ("stores", "names", "appends", "pages", "rings"), seed, KILLS)
        assert noticed(mounts) == []
        assert clients(mounts[0].source) == before


class Program:
    """Has looked at everything in a folder, and has files and folders of it open: whose host is killed."""

    NAMES = "written", "replaced", "renamed", "removed", "cut", "moded", "linked", "grown", "gone"

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in self.NAMES:
            (folder / name).write_bytes(OLD)
        for name in ("full", "empty", "moved"):
            (folder / name).mkdir()
        (folder / "full" / "inside").write_bytes(OLD)
        (folder / "moved" / "inside").write_bytes(OLD)
        self.descriptors = {name: os.open(folder / name, os.O_RDWR) for name in self.NAMES}
        self.directory = os.open(folder / "moved", os.O_DIRECTORY | os.O_RDONLY)
        self.look()
        assert all(found == OLD for found in self.by_descriptor().values())
        assert not (folder / "new").exists()

    def look(self) -> dict[str, bytes | list[str]]:
        """By paths."""
        found: dict[str, bytes | list[str]] = {}
        for root, folders, files in os.walk(self.folder):
            found[root.removeprefix(str(self.folder))] = sorted(folders + files)
            for name in files:
                path = Path(root) / name
                found[str(path).removeprefix(str(self.folder))] = path.read_bytes()
                assert path.stat().st_size == len(path.read_bytes())
        return found

    def by_descriptor(self) -> dict[str, bytes]:
        return {name: os.pread(file, 2 * len(OLD), 0) for name, file in self.descriptors.items()}

    def close(self) -> None:
        for descriptor in (*self.descriptors.values(), self.directory):
            os.close(descriptor)


OLD, NEW = os.urandom(50_000), os.urandom(50_000)


def change_all(folder: Path) -> None:
    """What the other host does meanwhile."""
    with (folder / "written").open("r+b") as file:
        file.write(NEW)
    (folder / "temporary").write_bytes(NEW)
    (folder / "temporary").rename(folder / "replaced")
    (folder / "renamed").rename(folder / "new")
    (folder / "removed").unlink()
    os.truncate(folder / "cut", 10_000)
    (folder / "moded").chmod(0o600)
    os.link(folder / "linked", folder / "link")
    with (folder / "grown").open("ab") as file:
        file.write(NEW)
    (folder / "full" / "inside").unlink()
    (folder / "full").rmdir()
    (folder / "empty").rmdir()
    (folder / "moved").rename(folder / "away")
    (folder / "away" / "more").write_bytes(NEW)
    (folder / "gone").rename(folder / "away" / "here")
    with (folder / "away" / "here").open("r+b") as file:
        file.write(NEW)


AFTER: dict[str, bytes | list[str]] = {
    "": sorted(["written", "replaced", "new", "cut", "moded", "linked", "link", "grown", "away"]),
    "/written": NEW,
    "/replaced": NEW,
    "/new": OLD,
    "/cut": OLD[:10_000],
    "/moded": OLD,
    "/linked": OLD,
    "/link": OLD,
    "/grown": OLD + NEW,
    "/away": ["here", "inside", "more"],
    "/away/here": NEW,
    "/away/inside": OLD,
    "/away/more": NEW,
}
BY_DESCRIPTOR = {
    "written": NEW, "replaced": OLD, "renamed": OLD, "removed": OLD, "cut": OLD[:10_000], "moded": OLD, "linked": OLD,
    "grown": OLD + NEW, "gone": NEW,
}  # fmt: skip


def check_seen(program: Program) -> None:
    """By paths at once; and by descriptors, which tell nothing of what others do before the news is there."""
    assert program.look() == AFTER
    wait_until(lambda: program.by_descriptor() == BY_DESCRIPTOR, "what descriptors read")
    sizes = {name: os.fstat(file).st_size for name, file in program.descriptors.items()}
    assert sizes == {name: len(data) for name, data in BY_DESCRIPTOR.items()}
    links = {"removed": 0, "linked": 2}
    wait_until(
        lambda: all(os.fstat(program.descriptors[name]).st_nlink == count for name, count in links.items()),
        "what descriptors say of names",
    )
    assert os.fstat(program.descriptors["moded"]).st_mode & 0o777 == 0o600
    assert sorted(os.listdir(program.directory)) == ["here", "inside", "more"]


@pytest.mark.timeout(600)
def test_what_the_other_host_changes_is_seen(
    etcd_alone: EtcdServers, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Also where the daemon was dead that would have heard of it, or the one that did it dies afterwards."""
    with two_hosts(tmp_path, etcd_alone, "file", request) as mounts:
        for way in ("nobody is killed", "who looks is killed", "who changes is killed"):
            for here, there in (mounts, mounts[::-1]):
                name = f"{way}, {here.point.parent.name}"
                (here.point / name).mkdir()
                with closing(Program(here.point / name)) as program:
                    if way == "who looks is killed":
                        kill_daemon(here)
                    change_all(there.point / name)
                    if way == "who changes is killed":
                        kill_daemon(there)
                    check_seen(program)


@pytest.mark.timeout(600)
def test_a_lease_that_ends_meanwhile_makes_another_client(
    etcd_alone: EtcdServers, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """The other host adopts what it had; files stay open, and those that lost bytes say so."""
    with two_hosts(tmp_path, etcd_alone, "file", request, lease=8.0) as (here, there):
        conf = here.source
        names = [f"file-{number}" for number in range(20)]
        for name in names:
            (here.point / name).write_bytes(OLD)
        opened = {name: os.open(here.point / name, os.O_RDWR) for name in names[:4]}
        with (here.point / "unsynced").open("wb", buffering=0) as unsynced:
            assert (there.point / "unsynced").exists()  # its folder is given back for that, with this name
            unsynced.write(OLD)
            before = clients(conf)
            with stopped(here.pid):  # the holder, so that no daemon follows
                kill_daemon(here)
                wait_until(lambda: len(clients(conf)) == 1, "the end of the lease")
                (there.point / names[0]).rename(there.point / "renamed")
                (there.point / names[1]).write_bytes(NEW)
                (there.point / "meanwhile").write_bytes(NEW)
                (other,) = clients(conf)
            with pytest.raises(OSError, match="Input/output error"):
                os.fsync(unsynced.fileno())
            os.fsync(unsynced.fileno())  # it was told once
        wait_until(lambda: len(clients(conf)) == 2, "the new client")
        assert clients(conf) & before == {other}
        for point in (here.point, there.point):
            found = {path.name: path.read_bytes() for path in point.iterdir() if path.is_file()}
            expected = dict.fromkeys([*names[2:], "renamed"], OLD) | dict.fromkeys([names[1], "meanwhile"], NEW)
            assert found == {**expected, "unsynced": b""}
        for name, file in opened.items():
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            assert os.pread(file, len(OLD), 0) == (NEW if name == names[1] else OLD)
            assert os.pwrite(file, NEW, 0) == len(NEW)
            os.close(file)
        assert (there.point / "renamed").read_bytes() == NEW
