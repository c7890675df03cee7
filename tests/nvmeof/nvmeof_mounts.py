"""Two mounts on etcd and one NVMe device of another machine, as two hosts have it: over TCP and over RDMA.

In the machine of scripts/rdma-vm, where `test_virtual_machine` runs this. Nothing here asserts a time:
programs are slow there.
"""

from __future__ import annotations

import errno
import mmap
import os
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from fault_load import Load
from mounting import KvfuseMount, wait_until
from nvmeof_lab import Target
from vm_mounts import vm_mounts

from kvfuse.usrbio.client import BlockStore
from kvfuse_cluster.etcd import EtcdServers

WORDS = ("volume.capacity=48MiB", "volume.segment_size=16MiB", "client.lease=45")
SIZE = 1_000_000
LATE = b"late" * 1000


@pytest.fixture(scope="module")
def mounts(fabric: Target, etcd: EtcdServers) -> Iterator[list[KvfuseMount]]:
    """The first one comes a way to the disk that can be held up, by TCP. Clean at the end."""
    fabric.add_slow_way()
    fabric.open_port("tcp", "slow")
    hosts = fabric.connect("first", "tcp", "slow"), fabric.connect("second", "rdma")
    with vm_mounts(etcd, [WORDS, WORDS], devices=[host.device for host in hosts]) as made:
        yield made
        for mount in made:
            print(mount.log.read_text())


def test_hosts_read_each_others_files_and_blocks(mounts: list[KvfuseMount]) -> None:
    first, second = mounts
    data = os.urandom(300_000)
    (first.point / "file").write_bytes(data)
    assert (second.point / "file").read_bytes() == data
    (second.point / "blocks").mkdir()
    wait_until((first.point / "blocks").is_dir, "the folder")
    block = np.frombuffer(os.urandom(65536), np.uint8)
    with BlockStore(second.point, "blocks") as ours, BlockStore(first.point, "blocks") as theirs:
        ours.put(b"key", block)
        wait_until(lambda: theirs.exists([b"key"])[0], "the block")
        view = theirs.get(b"key")
        assert view is not None
        assert bytes(view) == block.tobytes()


def test_a_target_that_goes_away_under_load_comes_back(fabric: Target, mounts: list[KvfuseMount], seed: int) -> None:
    """For one host; the other one goes on meanwhile."""
    with Load(mounts, seed) as work:
        work.wait_progress(0, 1, blocks=1)
        before = work.errors(0).total()
        fabric.close_port("tcp", "slow")
        try:
            wait_until(lambda: work.errors(0).total() > before, "an error")
            work.wait_progress(1, blocks=1)
        finally:
            fabric.open_port("tcp", "slow")
        work.wait_progress(0, 1, blocks=1)
    print(f"{len(work.calls)} calls, errors {dict(work.errors(0, 1))}, slowest {work.longest(0, 1)}")
    for mount in mounts:
        work.check(mount.point)


def test_what_a_dead_host_wrote_late_is_not_shown(fabric: Target, mounts: list[KvfuseMount]) -> None:
    """Its write is on the way when it dies, and may happen after another host has its slabs, as far as the target let
    it in: then the files whose slots it hits are lost, and never have its bytes."""
    victim, survivor = mounts
    fabric.hold_up()

    def write() -> None:
        with suppress(OSError):
            (victim.point / "late").write_bytes(LATE * (SIZE // len(LATE)))

    late = threading.Thread(target=write)
    late.start()
    wait_until(lambda: "did not answer" in victim.log.read_text(), "a call that is late")
    fabric.close_port("tcp", "slow")
    victim.kill()
    late.join()
    stored = fill(survivor.point)
    device = fabric.hosts["second"].device
    assert not is_on(device, LATE)
    fabric.go_on()
    fabric.open_port("tcp", "slow")
    survivor.unmount()
    survivor.mount()
    lost = [path for path, data in stored.items() if is_lost(path, data)]
    print(f"{len(lost)} of {len(stored)} files are lost; the late write happened: {is_on(device, LATE)}")
    assert (survivor.point / "late").read_bytes() == b"", "it was made, and then its bytes were held up"
    for path in (*stored, survivor.point / "late"):
        path.unlink()
    (survivor.point / "after").write_bytes(bytes(SIZE))


def fill(folder: Path) -> dict[Path, bytes]:
    """Write files until there is no room for one more, with the slabs of a host that died a moment ago."""
    stored: dict[Path, bytes] = {}
    before = -1
    while len(stored) > before:  # there may be more room some seconds later
        before = len(stored)
        wait_until(lambda: os.statvfs(folder).f_bavail > 0, "room")
        with suppress(OSError):
            while True:
                path, data = folder / f"file-{len(stored)}", b"%07d\n" % len(stored) * (SIZE // 8)
                path.write_bytes(data)
                stored[path] = data
        path.unlink(missing_ok=True)
    return stored


def is_on(device: Path, data: bytes) -> bool:
    """The device has these bytes somewhere, whatever this machine has of it in memory."""
    memory = mmap.mmap(-1, 1 << 20)
    descriptor = os.open(device, os.O_RDONLY | os.O_DIRECT)
    try:
        return any(data in memory[:count] for count in iter(lambda: os.readv(descriptor, [memory]), 0))
    finally:
        os.close(descriptor)


def is_lost(path: Path, data: bytes) -> bool:
    """Its bytes cannot be read; never are they others."""
    try:
        assert path.read_bytes() == data
    except OSError as error:
        assert error.errno == errno.EIO
        return True
    return False
