"""The number of inodes is that of what is there: after a crash at any moment, and in a volume that never counted."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from fsck_tree import Tree
from mounting import KvfuseMount, shared_conf, temporary_mount, wait_until

from kvfuse.volume.opening.held_volume import hold
from kvfuse.volume.store import schema
from kvfuse_cluster.etcd import EtcdServers

ROUNDS = 2
CHANGES = """
import os, sys
folder, number = sys.argv[1], 0
os.mkdir(folder)
try:
    while True:
        open(f"{folder}/{number}", "w").close()
        if number % 3:
            os.unlink(f"{folder}/{number - 1}")
        number += 1
except OSError:
    pass  # the daemon was killed
"""


@pytest.fixture(params=["lmdb", "etcd"])
def mount(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[KvfuseMount]:
    words = ("volume.capacity=64MiB", "volume.segment_size=32MiB", "publish.mode=relaxed")
    source = None
    if request.param == "etcd":
        servers: EtcdServers = request.getfixturevalue("etcd")
        source = shared_conf(tmp_path, servers)
        words = ("publish.mode=relaxed", "records.deadline=1", "client.lease=2")
    with temporary_mount(words, source=source) as mount:
        yield mount


@contextmanager
def changing(folder: Path) -> Iterator[None]:
    """A process makes and removes files meanwhile."""
    process = subprocess.Popen([sys.executable, "-c", CHANGES, str(folder)])
    try:
        yield
    finally:
        process.kill()
        process.wait()


@pytest.mark.root
def test_a_crash_does_not_change_what_is_counted(mount: KvfuseMount, rng: random.Random) -> None:
    for number in range(ROUNDS):
        folder, wanted = mount.point / f"round-{number}", rng.randint(1, 60)
        with changing(folder):
            wait_until(lambda: folder.is_dir() and len(os.listdir(folder)) >= wanted, "files")  # noqa: B023
            mount.kill()
        if mount.source == mount.volume:  # the other one is a client's until its lease ends
            mount.fsck()
        mount.mount()
        there = 1 + sum(len(folders) + len(files) for _, folders, files in os.walk(mount.point)) - _virtual(mount)
        wait_until(lambda: _counted(mount) == there, f"{there} inodes to be counted")  # noqa: B023


def _counted(mount: KvfuseMount) -> int:
    space = os.statvfs(mount.point)
    return space.f_files - space.f_ffree


def _virtual(mount: KvfuseMount) -> int:
    """What the daemon shows beside the volume, in a walk."""
    return sum(".kvfuse" in path for path, _, _ in os.walk(mount.point))


async def test_a_wrong_count_is_found_and_mended(tree: Tree) -> None:
    there = await tree.check()
    async with hold(tree.options) as held:
        await held.records.commit({schema.USAGE: schema.encode_usage(1 << 20, 97)}, durable=True)
    report = await tree.check()
    assert not report.clean
    assert f"97 inodes are counted, {there.files + there.directories} exist" in report.problems[0].text
    report = await tree.check(repair=True)
    assert report.clean
    assert (await tree.check()).clean


async def test_a_volume_that_never_counted_is_counted(tree: Tree) -> None:
    there = await tree.check()
    await tree.change(lambda records: records.pop(schema.USAGE))
    async with tree.volume() as volume:
        space = volume.space()
        assert space.files - space.files_free == there.files + there.directories
    assert (await tree.check()).clean
