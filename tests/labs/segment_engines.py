"""Every engine of segments, for tests of what all promise: files, devices of this machine and of others, RADOS."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest
import trio
from bucket_lab import bucket_options
from cluster_lab import rados_place
from loop_lab import loop_device, loop_devices

from kvfuse.errors import VolumeError
from kvfuse.remote.segments import decorators
from kvfuse.remote.segments.api import SegmentStore
from kvfuse.remote.segments.block.making import make_set
from kvfuse.remote.segments.block.places import DevicePlaces
from kvfuse.remote.segments.block.store import BlockSegments
from kvfuse.remote.segments.file.store import FileSegments
from kvfuse.remote.segments.rados.store import RadosSegments
from kvfuse.remote.segments.s3.store import S3Segments

MIB = 1 << 20
SIZE = 4 * MIB
DEVICE_SIZE = 1024 * MIB
SET_ID = b"volume" * 2 + b"id!!"

Opener = Callable[[], Awaitable[SegmentStore]]

FILES: dict[str, Callable[[Path], SegmentStore]] = {
    "file": FileSegments.open,
    "file, direct": lambda path: FileSegments.open(path, direct=True),
    "file on tmpfs": FileSegments.open,
    "passing": lambda path: decorators.SegmentDecorator(FileSegments.open(path)),
}
DEVICES = ("device", "device, a plain file")
SETS = ("block, a plain file", "block", "block, two devices")
OBJECTS: dict[str, dict[str, int]] = {
    "rados": {},
    "rados, small objects": {"object_size": 20 * 4096, "in_flight_max": 7},
}
"""a Ceph cluster's; more options"""
BUCKETS: dict[str, dict[str, int]] = {
    "s3": {},
    "s3, small objects": {"object_size": 20 * 4096, "in_flight_max": 7},
    "rados gateway": {},
}
"""buckets of SeaweedFS, and of a Ceph cluster; more options"""
FABRICS = "block, NVMe over TCP and RDMA"
"""in the virtual machine of tests/nvmeof, and nothing else there"""
IN_MACHINE = "KVFUSE_RDMA_VM" in os.environ
ENGINES = [FABRICS] if IN_MACHINE else [*FILES, *DEVICES, *SETS, *OBJECTS, *BUCKETS]
TURNS = itertools.cycle(range(2))
"""which of two hosts opens a store: all tests together let each have half of them"""


@contextlib.contextmanager
def image(folder: Path) -> Iterator[Path]:
    """A plain file in the place of a device, with what others left in many places."""
    path = folder / "image"
    with path.open("wb") as file:
        file.truncate(DEVICE_SIZE)
        for offset in range(0, 256 * MIB, MIB):
            os.pwrite(file.fileno(), b"\xee" * 8192, offset)
    yield path
    path.unlink()


def one_by_one(devices: list[Path]) -> Opener:
    """Each time another host opens the store: all hosts have one device. It is empty at first."""

    async def empty() -> None:
        store = await BlockSegments.open(devices[:1], SET_ID)
        for segment in await store.list():
            await store.remove(segment.segment)
        await store.aclose()

    try:
        trio.run(empty)
    except VolumeError:
        make_set(devices[:1], SET_ID, 8 * SIZE, SIZE, 30, replace=True)
    return lambda: BlockSegments.open([devices[next(TURNS)]], SET_ID, deadline=60)


@contextlib.contextmanager
def opening(engine: str, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Opener]:
    """Opens the same store of an engine (of `ENGINES`) again and again. ``request``: of the test that asks."""
    if engine in OBJECTS:
        servers = request.getfixturevalue("ceph")
        # the machine may be busy, and what is tried here is not how late an answer may be
        options = rados_place(servers, request.node.name, deadline=60, **OBJECTS[engine])
        yield lambda: RadosSegments.open(options)
        return
    if engine in BUCKETS:
        server = request.getfixturevalue("gateway" if engine == "rados gateway" else "seaweed")
        bucket = bucket_options(server, request.node.name, **BUCKETS[engine])
        yield lambda: S3Segments.open(bucket)
        return
    if engine in DEVICES:
        with loop_device(tmp_path / "image", DEVICE_SIZE) if engine == "device" else image(tmp_path) as device:

            async def open_device() -> SegmentStore:
                return FileSegments(DevicePlaces(device, b"owner" * 3 + b"!", 8 * SIZE))

            yield open_device
        return
    if engine == FABRICS:
        target = request.getfixturevalue("fabric")
        yield one_by_one([target.patient_host(kind, kind).device for kind in ("tcp", "rdma")])
        return
    if engine in SETS:
        with contextlib.ExitStack() as stack:
            if engine == "block":
                paths = [stack.enter_context(loop_devices(tmp_path / "image", DEVICE_SIZE, 2))[0]]
            elif engine == "block, two devices":
                paths = [stack.enter_context(loop_device(tmp_path / name, DEVICE_SIZE // 2)) for name in ("a", "b")]
            else:
                paths = [stack.enter_context(image(tmp_path))]
            make_set(paths, SET_ID, 8 * SIZE, 8 * SIZE, 30, replace=True)
            yield lambda: BlockSegments.open(paths, deadline=60)
        return
    path = Path(tempfile.mkdtemp(dir="/dev/shm")) if "tmpfs" in engine else tmp_path

    async def open_files() -> SegmentStore:
        return FILES[engine](path / "segments")

    yield open_files
    if path != tmp_path:
        shutil.rmtree(path)
