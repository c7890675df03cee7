"""A mount whose root has compression: less room for the same bytes at every door, also after it was killed."""

from __future__ import annotations

import json
import os
import random
import subprocess

import numpy as np
import pytest
from mounting import KVFUSE, KvfuseMount, temporary_mount, wait_until
from packing_lab import compressible

from kvfuse.usrbio.client import BlockStore, connect

pytestmark = pytest.mark.root

BLOCK = 700_000
COUNT = 12
CAPACITY = 64 << 20


def read_file(mount: KvfuseMount, name: str) -> bytes:
    """Past the kernel's cache."""
    with (mount.point / name).open("rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        return file.read()


def read_ring(mount: KvfuseMount, name: str, offset: int, size: int) -> bytes:
    with connect(mount.point) as client, client.iov(size) as iov, client.ring(8) as ring:
        ring.prep_reads(iov, np.array([0]), client.file(mount.point / name, "r"), np.array([offset]), size)
        ring.submit()
        (result,) = ring.wait(1)["result"]
        return bytes(iov.array[: int(result)])


def used(mount: KvfuseMount) -> int:
    """Bytes."""
    found = os.statvfs(mount.point)
    return (found.f_blocks - found.f_bfree) * found.f_frsize


def test_blocks_and_files_take_less_room(rng: random.Random) -> None:
    words = [f"volume.capacity={CAPACITY}", "namespace.compression=zstd", "publish.mode=relaxed"]
    blocks = {f"block{number}": compressible(rng, BLOCK) for number in range(COUNT)}
    with temporary_mount(words) as mount:
        with BlockStore(str(mount.point), mount.point, deadline=30) as store:
            for name, data in list(blocks.items())[::2]:
                store.put(name, data)
        for name, data in list(blocks.items())[1::2]:
            (mount.point / name).write_bytes(data)
        usage = [*KVFUSE, "namespace", "usage", mount.point]

        def smaller() -> int:
            said = subprocess.run([*usage, "--json"], check=True, capture_output=True, text=True).stdout
            return int(json.loads(said)["compression"]["smaller"])

        wait_until(lambda: smaller() == COUNT, "all blocks to be stored")
        assert used(mount) < 0.6 * BLOCK * COUNT
        assert "of slots saved" in subprocess.run(usage, check=True, capture_output=True, text=True).stdout
        for _ in range(2):
            for name, data in blocks.items():
                assert read_file(mount, name) == data
                start = rng.randrange(BLOCK)
                size = rng.randrange(1, BLOCK)
                assert read_ring(mount, name, start, size) == data[start : start + size]
            with BlockStore(str(mount.point), mount.point, deadline=30) as store:
                buffer = np.zeros(BLOCK, np.uint8)
                for name, data in list(blocks.items())[::2]:
                    assert store.get_into(name, buffer) == BLOCK
                    assert buffer.tobytes() == data
            mount.kill()
            mount.mount()
        mount.unmount()
        mount.fsck(verify=True)
