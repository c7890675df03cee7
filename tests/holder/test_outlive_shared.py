"""Mounts of one shared volume, one of whose daemons is killed: the next daemon is the same client for the others."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio
from mounting import KvfuseMount, shared_conf, wait_until

from kvfuse.options import config
from kvfuse.volume.opening import engines
from kvfuse.volume.store import schema
from kvfuse_cluster.etcd import EtcdServers

WORDS = "outlive=true", "records.deadline=3", "client.lease=60"
DATA = os.urandom(300_000)


@pytest.fixture
def mounts(etcd_alone: EtcdServers, tmp_path: Path) -> Iterator[list[KvfuseMount]]:
    conf = shared_conf(tmp_path, etcd_alone)
    made = []
    try:
        for number in range(2):
            base = tmp_path / f"host-{number}"
            base.mkdir()
            made.append(KvfuseMount(base, WORDS, source=conf))
            made[-1].mount()
        yield made
    finally:
        for mount in made:
            mount.unmount()


def daemon_of(mount: KvfuseMount) -> int:
    pid = json.loads((mount.point / ".kvfuse" / "stats").read_text())["pid"]
    assert isinstance(pid, int)
    return pid


def clients(mount: KvfuseMount) -> dict[int, int]:
    """Process -> the client that it is."""

    async def scan() -> dict[int, int]:
        async with engines.open_records(config.load(mount.source).options) as records:
            rows = await records.scan(schema.MEMBER_PREFIX)
        return {schema.decode_member(row.value).pid: schema.key_client(row.key) for row in rows}

    return trio.run(scan)


def test_the_next_daemon_is_the_same_client(mounts: list[KvfuseMount]) -> None:
    one, two = mounts
    for number in range(5):
        (one.point / f"{number}").write_bytes(DATA)
    (two.point / "theirs").write_bytes(DATA)
    pid = daemon_of(one)
    before = clients(one)
    with (one.point / "0").open("rb") as reader:
        for kill in range(2):
            os.kill(pid, signal.SIGKILL)
            wait_until(lambda: daemon_of(one) != pid, "the next daemon")  # noqa: B023
            former, pid = pid, daemon_of(one)
            now = clients(one)
            assert now[pid] == before[former]
            assert set(now.values()) == set(before.values())
            (one.point / f"after {kill}").write_bytes(DATA)
            before = now
        assert reader.read() == DATA
    for mount in mounts:
        names = {path.name for path in mount.point.iterdir()} - {".kvfuse"}
        assert names == {*map(str, range(5)), "theirs", "after 0", "after 1"}
        assert all((mount.point / name).read_bytes() == DATA for name in names)
    assert "lost" not in one.log.read_text() + two.log.read_text()


def test_files_that_are_being_written_in_folders_of_blocks_go_on(mounts: list[KvfuseMount]) -> None:
    """The other host reads what was written before the kill and after it, once the files are closed."""
    one, two = mounts
    folder = one.point / "kv"
    folder.mkdir()
    os.setxattr(folder, "user.kvfuse.namespace", b"kind=blocks")
    (folder / "there").write_bytes(b"there before")
    made = os.open(folder / "made", os.O_RDWR | os.O_CREAT, 0o644)
    changed = os.open(folder / "there", os.O_RDWR)
    data = bytearray(DATA)
    os.write(made, data)
    os.write(changed, b"THERE")
    for kill in range(2):
        pid = daemon_of(one)
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda pid=pid: daemon_of(one) != pid, "the next daemon")
        assert os.pread(made, len(data), 0) == data
        assert os.pread(changed, 100, 0) == b"THERE before"
        data[kill] = kill
        os.pwrite(made, data[: kill + 1], 0)
    (folder / "made").rename(folder / "renamed")
    os.close(made)
    os.close(changed)
    for mount in mounts:
        # Other hosts hear of blocks a moment after the close.
        wait_until((mount.point / "kv" / "renamed").exists, "the block")
        assert (mount.point / "kv" / "renamed").read_bytes() == data
        assert (mount.point / "kv" / "there").read_bytes() == b"THERE before"
    assert "lost" not in one.log.read_text() + two.log.read_text()
