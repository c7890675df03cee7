"""The volume's folder on the embedded engines: making one, reading its superblock, holding its lock.

::

    superblock     4 KiB: identity, geometry, format version; written last, so a folder with it is a volume
    records/       the record store (lmdb)
    segments/      the segment files
    lock           held by the daemon that has the volume open; says who that is
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import socket
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

from kvfuse.config import Options
from kvfuse.errors import VolumeBusy, VolumeError
from kvfuse.remote.records.api import RecordStore
from kvfuse.remote.records.decorators import Delayed
from kvfuse.remote.records.lmdb import LmdbRecords
from kvfuse.remote.segments.api import SegmentStore
from kvfuse.remote.segments.file import FileSegments
from kvfuse.slab import layout
from kvfuse.slab.layout import Geometry, Superblock
from kvfuse.volume import schema
from kvfuse.volume.api import FIRST_INODE, ROOT_INODE
from kvfuse.volume.node import Node

SUPERBLOCK_FILE = "superblock"
LOCK_FILE = "lock"
KNOWN_FILES = frozenset({SUPERBLOCK_FILE, LOCK_FILE, "records", "segments", "log"})
"""Names that may stand in a volume's folder: a folder with others is not ours to format."""


def is_volume(path: Path) -> bool:
    """A volume was formatted in this folder (it may be damaged)."""
    return (path / SUPERBLOCK_FILE).exists()


def read_superblock(path: Path) -> Superblock:
    """Of the volume in folder ``path``. VolumeError when there is none, it is damaged or of a newer format."""
    try:
        image = (path / SUPERBLOCK_FILE).read_bytes()
    except FileNotFoundError:
        raise VolumeError(
            f"{path} is no kvfuse volume: it has no superblock; 'kvfuse format {path}' makes one"
        ) from None
    except OSError as error:
        raise VolumeError(f"the superblock of {path} cannot be read: {error.strerror}") from error
    try:
        return layout.parse_superblock(image)
    except VolumeError as error:
        raise VolumeError(f"{path}: {error}") from None


def open_records(options: Options, *, read_only: bool = False) -> RecordStore:
    records: RecordStore = LmdbRecords.open(options.records_path, read_only=read_only)
    if options.records.commit_delay:
        records = Delayed(records, commit_seconds=options.records.commit_delay)
    return records


def open_segments(options: Options, *, read_only: bool = False) -> SegmentStore:
    return FileSegments.open(options.segments_path, direct=options.segments.direct, read_only=read_only)


@contextmanager
def locked(path: Path, mountpoint: str = "", wait_seconds: float = 0.0) -> Iterator[None]:
    """Hold the volume in folder ``path`` alone. VolumeBusy says who else does.

    A daemon whose mount was just taken away is still flushing: that one is waited for, up to ``wait_seconds``.
    """
    descriptor = os.open(path / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        deadline = time.monotonic() + wait_seconds
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise VolumeBusy(f"the volume {path} is in use by {describe_holder(path)}") from None
                time.sleep(0.05)
        holder = {"pid": os.getpid(), "host": socket.gethostname(), "mountpoint": mountpoint, "since": int(time.time())}
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps(holder).encode(), 0)
        yield
        os.ftruncate(descriptor, 0)
    finally:
        os.close(descriptor)


def holder(path: Path) -> dict[str, object]:
    """Who wrote the lock of this volume last: pid, host, mountpoint, since; empty when nobody holds it."""
    try:
        said = json.loads((path / LOCK_FILE).read_bytes() or b"{}")
    except (OSError, ValueError):
        return {}
    return said if isinstance(said, dict) else {}


def describe_holder(path: Path) -> str:
    said = holder(path)
    if not said:
        return "another process"
    where = f", mounted on {said['mountpoint']}" if said.get("mountpoint") else ""
    return f"process {said.get('pid')} on {said.get('host')}{where}"


async def format_volume(options: Options, *, replace: bool = False) -> Superblock:
    """Make an empty volume as ``options`` say. VolumeError, with nothing changed, where that cannot be.

    ``options.volume.capacity`` must be set. ``replace``: drop the volume that is there.
    """
    path = options.volume_path
    capacity = options.volume.capacity
    if capacity is None:
        raise ValueError("format_volume needs a capacity")
    try:
        geometry = Geometry.choose(capacity, options.volume.slab_size, options.volume.segment_size)
    except ValueError as error:
        raise VolumeError(f"{path} cannot be formatted: {error}") from None
    _check_folder(path, replace)
    for folder, ours in _engine_folders(options):
        _check_engine_folder(folder, ours)
    path.mkdir(parents=True, exist_ok=True)
    with locked(path):
        if replace:
            (path / SUPERBLOCK_FILE).unlink(missing_ok=True)
        for folder, _ in _engine_folders(options):
            if folder.exists():
                shutil.rmtree(folder)
            folder.mkdir(parents=True)
        superblock = Superblock(uuid4().bytes, geometry, time.time_ns())
        await write_first_records(options)
        write_superblock(path, superblock)
    return superblock


def write_superblock(path: Path, superblock: Superblock) -> None:
    _write_durably(path / SUPERBLOCK_FILE, layout.pack_superblock(superblock))


def _check_folder(path: Path, replace: bool) -> None:
    """VolumeError unless the folder is absent, empty, or a volume that may be replaced."""
    if not path.exists():
        return
    if not path.is_dir():
        raise VolumeError(f"{path} is no folder")
    strangers = sorted(set(os.listdir(path)) - KNOWN_FILES)
    if strangers:
        raise VolumeError(f"{path} is not empty ({strangers[0]!r} is in it): choose an empty folder for a volume")
    if is_volume(path) and not replace:
        raise VolumeError(f"{path} is a kvfuse volume already; 'kvfuse format --force' would drop all that is in it")


def _engine_folders(options: Options) -> list[tuple[Path, str]]:
    """The engines' folders, and what files of theirs are called."""
    return [(options.records_path, r"(data|lock)\.mdb"), (options.segments_path, r"[0-9a-f]{8}\.seg.*")]


def _check_engine_folder(folder: Path, ours: str) -> None:
    """VolumeError where formatting would remove a file that is not a volume's."""
    for name in sorted(os.listdir(folder)) if folder.is_dir() else []:
        if not re.fullmatch(ours, name):
            raise VolumeError(f"{folder} holds {name!r}, which is no part of a volume: choose an empty folder")


async def write_first_records(options: Options) -> None:
    """The records of an empty volume, in an empty record store."""
    options.records_path.mkdir(parents=True, exist_ok=True)
    records = open_records(options)
    try:
        await records.commit(first_records(options), durable=True)
    finally:
        await records.aclose()


def first_records(options: Options) -> dict[bytes, bytes]:
    """An empty root directory, and where the counters begin."""
    root = Node(ROOT_INODE, stat.S_IFDIR | 0o755, os.geteuid(), os.getegid(), options.volume.chunk_size)
    root.nlink = 2
    now = time.time_ns()
    return {
        schema.inode_key(ROOT_INODE): schema.encode_inode(root.record()),
        schema.times_key(ROOT_INODE): schema.encode_times(now, now, now),
        schema.COUNTER_INODE: schema.encode_u64(FIRST_INODE),
        schema.COUNTER_GENERATION: schema.encode_u64(1),
        schema.COUNTER_FILES: schema.encode_u64(1),
        schema.EXACT_SIZES: schema.encode_u64s(options.volume.exact_sizes),
    }


def _write_durably(path: Path, content: bytes) -> None:
    """The whole file or nothing, also after a loss of power."""
    temporary = path.with_suffix(".new")
    with temporary.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    temporary.rename(path)
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
