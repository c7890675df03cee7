"""Two mounts on etcd and one block device, which each has under a name of its own: a daemon dies, the device goes away.

Whatever fails, no acknowledged block is wrong or lost, no call hangs, and all goes on by itself.
"""

from __future__ import annotations

import errno
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import trio
from cluster_lab import MEMORY
from fault_load import Load
from loop_lab import loop_devices, set_limit
from mounting import KvfuseMount, conf_elsewhere, shared_conf, wait_until

from kvfuse.cli.info import read_info
from kvfuse.options import config
from kvfuse.remote.segments.api import Transfer
from kvfuse.remote.segments.block.store import BlockSegments
from kvfuse_cluster.etcd import EtcdServers

pytestmark = [pytest.mark.root, pytest.mark.ring(3)]

DEVICE_SIZE = 640 << 20
DEADLINE = 2.0
CALL_MAX = 15.0
"""of a call, as a busy machine may have it"""


class Hosts:
    """A volume of the test's own, mounted as by two hosts."""

    def __init__(self, etcd: EtcdServers, folder: Path, devices: list[Path]) -> None:
        self.devices = devices
        self.conf = shared_conf(folder, etcd, device=devices[0])
        confs = [self.conf, conf_elsewhere(self.conf, *devices)]
        words = f"records.deadline={DEADLINE}", f"segments.deadline={DEADLINE}", "client.lease=6"
        bases = [folder / f"host-{number}" for number in range(2)]
        for base in bases:
            base.mkdir()
        self.mounts = [KvfuseMount(base, words, source=conf) for base, conf in zip(bases, confs, strict=True)]


@pytest.fixture
def hosts(etcd: EtcdServers) -> Iterator[Hosts]:
    """At the end the volume must be clean."""
    with tempfile.TemporaryDirectory(prefix="kvfuse-block-", dir=MEMORY) as folder, ExitStack() as stack:
        image = Path(folder) / "image"
        (device,) = stack.enter_context(loop_devices(image, DEVICE_SIZE, 1))
        made = Hosts(etcd, Path(folder), [device, image])  # a second loop device would be found in place of the first
        for mount in made.mounts:
            stack.callback(mount.remove)
            mount.mount()
        yield made
        for mount in made.mounts:
            print(mount.log.read_text())
            if mount.is_mounted:
                mount.check_unexpected_errors()
                mount.unmount()
        made.mounts[0].fsck()


def check_calls(work: Load) -> None:
    slowest = max(work.calls, key=lambda row: row.seconds)
    print(f"{len(work.calls)} calls, errors {dict(work.errors(0, 1))}, slowest {slowest}")
    assert slowest.seconds < CALL_MAX, slowest


def test_a_device_taken_away_under_load_comes_back(hosts: Hosts, seed: int) -> None:
    """From one host, as by its network; the other one goes on meanwhile."""
    with Load(hosts.mounts, seed) as work:
        work.wait_progress(0, 1)
        for _ in range(2):
            before = work.errors(0).total()
            set_limit(hosts.devices[0], 4096)
            wait_until(lambda: work.errors(0).total() > before, "an error")  # noqa: B023 - it is called here alone
            work.wait_progress(1)
            set_limit(hosts.devices[0], 0)
            work.wait_progress(0, 1)
    for mount in hosts.mounts:
        work.check(mount.point)
    check_calls(work)
    assert "was opened again" in hosts.mounts[0].log.read_text()
    assert not work.errors(1)


def test_a_killed_daemon_takes_nothing_with_it_and_its_late_write_is_not_shown(hosts: Hosts, seed: int) -> None:
    victim, survivor = hosts.mounts
    with Load(hosts.mounts, seed) as work:
        work.wait_progress(0, 1)
        (victim.point / "late").write_bytes(os.urandom(300_000))
        late, data = places_of(victim.point / "late"), (victim.point / "late").read_bytes()
        work.forget(0)
        victim.kill()
        work.wait_progress(1)
        (survivor.point / "late").unlink()
        reused = reuse(survivor.point, late)
        work.wait_progress(1)
    work.check(survivor.point)
    check_calls(work)
    files = [*work.stored, *[f"log-{mount}" for mount in work.logged]]
    hit = [
        name for name in files if overlap(places_of(survivor.point / name), late)
    ]  # the load's own may be there, too
    trio.run(write_late, hosts, late, data)  # as if it had been under way in the target since
    survivor.unmount()
    survivor.mount()
    with pytest.raises(OSError) as caught:
        (survivor.point / reused).read_bytes()
    assert caught.value.errno == errno.EIO
    assert not (survivor.point / "late").exists()
    (survivor.point / reused).unlink()
    work.check(survivor.point, damaged=hit)


Places = list[tuple[int, int, int]]
"""segment, offset, length of each piece of a file"""


def places_of(path: Path) -> Places:
    return [
        (extent["segment"], extent["offset"], extent["length"])
        for extent in read_info(path)["extents"]
        if not extent["staged"]
    ]


def overlap(some: Places, others: Places) -> bool:
    return any(
        one[0] == other[0] and one[1] < other[1] + other[2] and other[1] < one[1] + one[2]
        for one in some
        for other in others
    )


def reuse(folder: Path, places: Places) -> str:
    """Store files until one of them is where the other was, whose holder is dead; its name."""
    end = time.monotonic() + 60
    for number in range(10_000):
        name = f"new-{number}"
        (folder / name).write_bytes(b"%07d\n" % number * 37_500)
        if {place[:2] for place in places_of(folder / name)} & {place[:2] for place in places}:
            return name
        assert time.monotonic() < end, "no slab of the dead daemon was used again"
        if number >= 300:
            (folder / f"new-{number - 300}").unlink()
    raise AssertionError


async def write_late(hosts: Hosts, places: Places, data: bytes) -> None:
    """What the dead host had written there."""
    options = config.load(hosts.conf).options
    segments = await BlockSegments.open([Path(path) for path in options.segments.devices])  # type: ignore[union-attr]
    done = 0
    for segment, offset, length in places:
        await segments.write([Transfer(segment, offset, data[done : done + length])])
        done += length
    await segments.aclose()
