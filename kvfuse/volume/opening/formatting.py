"""Making a volume, reading its superblock, and the lock of one that is in a folder.

With embedded records a volume is a folder::

    superblock     4 KiB: identity, geometry, format version; written last, so a folder with it is a volume
    records/       the record store (lmdb)
    segments/      the segment files
    lock           held by the daemon that has the volume open; says who that is

With shared records it is what they say: the superblock is a record, written last, and who has the volume open is a
record under a lease (``member.py``).
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import re
import shutil
import socket
import stat
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path
from uuid import uuid4

import trio

from kvfuse.errors import EngineError, VolumeBusy, VolumeError
from kvfuse.kept.keeper import NO_KEEPER, Keeper
from kvfuse.options.config import Options
from kvfuse.remote.records.api import ABSENT, RecordLimits, RecordStore
from kvfuse.remote.segments.api import SegmentStore, Transfer
from kvfuse.remote.segments.file.fileio import sync_directory
from kvfuse.slab import layout
from kvfuse.slab.layout import Geometry, Superblock
from kvfuse.volume.api import FIRST_INODE, ROOT_INODE
from kvfuse.volume.inodes.metadata_budget import growth, own_size
from kvfuse.volume.inodes.node import Node
from kvfuse.volume.namespaces.settings import ROOT, Settings, encode_settings
from kvfuse.volume.opening import engines
from kvfuse.volume.store import schema, sealed
from kvfuse.volume.store.member import Member, membership

log = logging.getLogger(__name__)

SUPERBLOCK_FILE = "superblock"
LOCK_FILE = "lock"
DESTROYED_FILE = "destroyed"
"""in place of the superblock of a volume that is being destroyed; see `destroying`"""
KEPT_LOCK = "lock"
"""with the open file that has the lock; see `keeper`"""
READ_ONLY_REMEDY = (
    "mount the volume with -o ro; where an error of its disk has turned it so (dmesg tells), check that, mount it again"
)
KNOWN_FILES = frozenset({SUPERBLOCK_FILE, DESTROYED_FILE, LOCK_FILE, "records", "segments", "log"})
"""Names that may stand in a volume's folder: a folder with others is not ours to format."""
RECORD_FILES = r"(data|lock)\.mdb"
SEGMENT_FILES = r"[0-9a-f]{8}\.(seg|new).*"
"""what files of an engine's folder are called"""


def is_volume(path: Path) -> bool:
    """A volume was formatted in this folder (it may be damaged)."""
    return (path / SUPERBLOCK_FILE).exists()


def read_superblock(path: Path) -> Superblock:
    """Of the volume in folder ``path``. VolumeError when there is none, it is damaged or of a newer format."""
    try:
        image = (path / SUPERBLOCK_FILE).read_bytes()
    except FileNotFoundError:
        check_not_destroyed(path)
        raise VolumeError(
            f"{path} is no kvfuse volume: it has no superblock; 'kvfuse format {path}' makes one"
        ) from None
    except OSError as error:
        raise VolumeError(f"the superblock of {path} cannot be read: {error.strerror}") from error
    return _parse_superblock(image, str(path))


async def read_shared_superblock(records: RecordStore, title: str) -> Superblock:
    """Of the shared volume whose records these are. VolumeError as `read_superblock`."""
    found, destroyed = await records.get([schema.SUPERBLOCK, schema.DESTROYED])
    if found is None:
        if destroyed is not None:
            raise being_destroyed(title)
        raise VolumeError(f"{title} holds no kvfuse volume: it has no superblock; 'kvfuse format' makes one")
    return _parse_superblock(found.value, title)


async def read_header(segments: SegmentStore, segment: int) -> Superblock:
    """The volume's superblock as a segment begins with it. VolumeError where it is damaged, EngineError."""
    image = bytearray(layout.SUPERBLOCK_SIZE)
    await segments.read([Transfer(segment, 0, image)])
    return layout.parse_superblock(image)


async def is_vacant(records: RecordStore) -> bool:
    """No volume was ever made of these records, or none is left of it."""
    keys = [schema.SUPERBLOCK, schema.DESTROYED, schema.COUNTER_INODE, schema.inode_key(ROOT_INODE)]
    return not any(await records.get(keys))


def check_not_destroyed(path: Path) -> None:
    """VolumeError where somebody was destroying the volume in folder ``path``, and did not end."""
    if (path / DESTROYED_FILE).exists() and not is_volume(path):
        raise being_destroyed(str(path))


def being_destroyed(title: str) -> VolumeError:
    return VolumeError(f"the volume {title} was being destroyed, and a part is left: 'kvfuse destroy' removes it")


def _parse_superblock(image: bytes, title: str) -> Superblock:
    try:
        return layout.parse_superblock(image)
    except VolumeError as error:
        raise VolumeError(f"{title}: {error}") from None


@contextmanager
def locked(path: Path, mountpoint: str = "", wait_seconds: float = 0.0, keeper: Keeper = NO_KEEPER) -> Iterator[None]:
    """Hold the volume in folder ``path`` alone. VolumeBusy says who else does.

    With a ``keeper`` the lock outlives this process: the daemon after it has it, also while threads of this one are
    not gone yet.

    A daemon whose mount was just taken away is still flushing: that one is waited for, up to ``wait_seconds``.
    """
    left = keeper.take(KEPT_LOCK)
    descriptor = left.descriptors[0] if left else _open_lock(path)
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
        _say_holder(path, descriptor, holder)
        keeper.keep(KEPT_LOCK, descriptors=[descriptor])
        yield
        _say_holder(path, descriptor, {})
        keeper.drop(KEPT_LOCK)
    finally:
        os.close(descriptor)


def _open_lock(path: Path) -> int:
    """VolumeError."""
    try:
        return os.open(path / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        if error.errno == errno.EROFS:
            raise VolumeError(f"{path} is in a read-only file system: {READ_ONLY_REMEDY}") from None
        raise VolumeError(f"{path / LOCK_FILE}, the lock of the volume: {error.strerror}") from error


def _say_holder(path: Path, descriptor: int, said: Mapping[str, object]) -> None:
    """In place of what is there: a block that the file has is enough on a full disk. The lock holds without it."""
    text = json.dumps(said).encode()
    try:
        os.pwrite(descriptor, text, 0)
        os.ftruncate(descriptor, len(text))
    except OSError as error:
        log.warning("%s does not say who holds the volume: %s", path / LOCK_FILE, error.strerror)


@contextmanager
def shared(path: Path) -> Iterator[None]:
    """Hold the volume in folder ``path``, of a read-only file system, beside others who read it.

    VolumeBusy where somebody may change it by another path to the same files.
    """
    try:
        descriptor = os.open(path / LOCK_FILE, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:  # a copy without it
        yield
        return
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            raise VolumeBusy(f"the volume {path} is in use by {describe_holder(path)}") from None
        yield
    finally:
        os.close(descriptor)


def holder(path: Path) -> dict[str, object]:
    """The last writer of this volume's lock: pid, host, mountpoint, since; empty when nobody holds it."""
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


async def format_volume(options: Options, *, replace: bool = False, overwrite: bool = False) -> Superblock:
    """Make an empty volume as ``options`` say. VolumeError, with nothing changed, where that cannot be.

    ``options.volume.capacity`` must be set. ``replace``: drop the volume that is there. ``overwrite``: and whatever is
    on its devices.
    """
    capacity = options.volume.capacity
    if capacity is None:
        raise ValueError("format_volume needs a capacity")
    try:
        geometry = Geometry.choose(capacity, options.volume.slab_size, options.volume.segment_size)
    except ValueError as error:
        raise VolumeError(f"{options.title} cannot be formatted: {error}") from None
    superblock = Superblock(uuid4().bytes, geometry, time.time_ns(), features=layout.NEW_FEATURES)
    make = _format_shared if options.is_shared else _format_folder
    return await make(options, superblock, replace, overwrite)


async def _format_folder(options: Options, superblock: Superblock, replace: bool, overwrite: bool) -> Superblock:
    path = options.volume_path
    _check_folder(path, replace)
    folders = [(options.records_path, RECORD_FILES)]
    folders += [(options.segments_path, SEGMENT_FILES)] if options.has_segment_files else []
    for folder, ours in folders:
        _check_engine_folder(folder, ours)
    path.mkdir(parents=True, exist_ok=True)
    with locked(path):
        if replace:
            for name in (SUPERBLOCK_FILE, DESTROYED_FILE):
                (path / name).unlink(missing_ok=True)
        for folder, _ in folders:
            if folder.exists():
                shutil.rmtree(folder)
            folder.mkdir(parents=True)
        superblock = await engines.make_medium(options, superblock, replace=replace or overwrite)
        async with engines.open_records(options) as records:
            await sealed.as_formatted(records, superblock).commit(first_records(options), durable=True)
        write_superblock(path, superblock)
    return superblock


async def _format_shared(options: Options, superblock: Superblock, replace: bool, overwrite: bool) -> Superblock:
    """The superblock goes first and comes last, so that one who dies in between leaves no volume."""
    title = options.title
    if options.has_segment_files:
        _check_engine_folder(options.segments_path, SEGMENT_FILES)
    async with AsyncExitStack() as stack:
        records = await stack.enter_async_context(engines.open_records(options))
        member = await stack.enter_async_context(membership(records, options.client.lease, title))
        segments = None  # those of devices end with their labels
        if not options.has_devices:
            segments = await stack.enter_async_context(engines.open_segments(options))
        found, destroyed = await records.get([schema.SUPERBLOCK, schema.DESTROYED])
        if destroyed is not None:
            raise being_destroyed(title)
        if found is not None and not replace:
            raise VolumeError(
                f"{title} is a kvfuse volume already; 'kvfuse format --force' would drop all that is in it"
            )
        present = await segments.list() if segments is not None else []
        if present and not replace:
            raise VolumeError(
                f"{title} has no superblock, but {len(present)} segments: 'kvfuse fsck --rebuild' recovers their"
                " blocks, 'kvfuse format --force' drops them"
            )
        await records.commit({}, [schema.SUPERBLOCK], member.fence)
        superblock = await engines.make_medium(options, superblock, replace=replace or overwrite)
        await drop_records(records, {*member.fence, schema.MOUNTED})
        for info in present:
            assert segments is not None
            await segments.remove(info.segment)
        records = sealed.as_formatted(records, superblock)
        await write_shared_superblock(records, superblock, member, first_records(options))
    return superblock


async def drop_records(records: RecordStore, kept: Collection[bytes]) -> None:
    """All of a volume, of which the superblock is gone, but these."""
    after = b""
    while rows := await records.scan(b"", after, 1000):
        await commit_in_parts(records, deletes=[row.key for row in rows if row.key not in kept])
        after = rows[-1].key


async def write_shared_superblock(
    records: RecordStore, superblock: Superblock, member: Member, others: Mapping[bytes, bytes] | None = None
) -> None:
    """With the ``others``, or none of them. VolumeError where somebody else did meanwhile, or the lease is lost."""
    puts = {**(others or {}), schema.SUPERBLOCK: layout.pack_superblock(superblock)}
    expect = {schema.SUPERBLOCK: ABSENT, **member.fence}
    if not await records.commit(puts, (), expect, durable=True):
        raise VolumeError("the volume was changed by another client while it was made: look at it, and try again")


async def commit_in_parts(
    records: RecordStore, puts: Mapping[bytes, bytes] | None = None, deletes: Collection[bytes] = ()
) -> None:
    """Commits of at most what the store takes at once: not all or nothing. For volumes that nobody else has open."""
    for part in _parts({**(puts or {}), **dict.fromkeys(deletes)}, records.limits):
        part_puts = {key: value for key, value in part.items() if value is not None}
        await records.commit(part_puts, [key for key in part if key not in part_puts])


def _parts(rows: Mapping[bytes, bytes | None], limits: RecordLimits) -> Iterator[dict[bytes, bytes | None]]:
    """Of a change, None for what is deleted."""
    part: dict[bytes, bytes | None] = {}
    size = 0
    for key, value in rows.items():
        more = len(key) + len(value or b"")
        if part and (len(part) >= limits.commit_operations_max or size + more > limits.commit_bytes_max):
            yield part
            part, size = {}, 0
        part[key] = value
        size += more
    if part:
        yield part


def write_superblock(path: Path, superblock: Superblock) -> None:
    write_whole(path, SUPERBLOCK_FILE, layout.pack_superblock(superblock))


def write_whole(path: Path, name: str, content: bytes) -> None:
    """The whole file ``name`` in folder ``path`` or nothing, also after a loss of power. OSError."""
    temporary = path / f"{name}.new"
    with temporary.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    temporary.rename(path / name)
    sync_directory(path)


async def change_superblock(path: Path, turn: trio.Lock, change: Callable[[Superblock], Superblock]) -> Superblock:
    """Of the volume in folder ``path``, which this process holds; the new one. EngineError, VolumeError."""
    async with turn:
        present = read_superblock(path)
        wanted = change(present)
        if wanted != present:
            try:
                await trio.to_thread.run_sync(write_superblock, path, wanted)
            except OSError as error:
                raise EngineError(f"the superblock of {path} cannot be written: {error.strerror}") from error
        return wanted


async def change_shared_superblock(records: RecordStore, change: Callable[[Superblock], Superblock]) -> Superblock:
    """Of a shared volume, which other clients may change, too; the new one. EngineError, VolumeError."""
    while True:
        (found,) = await records.get([schema.SUPERBLOCK])
        if found is None:
            raise EngineError("the volume has no superblock any more")
        present = layout.parse_superblock(found.value)
        wanted = change(present)
        puts = {schema.SUPERBLOCK: layout.pack_superblock(wanted)}
        if wanted == present or await records.commit(puts, (), {schema.SUPERBLOCK: found.version}, durable=True):
            return wanted


def _check_folder(path: Path, replace: bool) -> None:
    """VolumeError unless the folder is absent, empty, or a volume that may be replaced."""
    if not path.exists():
        return
    if not path.is_dir():
        raise VolumeError(f"{path} is no folder")
    check_not_destroyed(path)
    strangers = sorted(set(os.listdir(path)) - KNOWN_FILES)
    if strangers:
        raise VolumeError(f"{path} is not empty ({strangers[0]!r} is in it): choose an empty folder for a volume")
    if is_volume(path) and not replace:
        raise VolumeError(f"{path} is a kvfuse volume already; 'kvfuse format --force' would drop all that is in it")


def _check_engine_folder(folder: Path, ours: str) -> None:
    """VolumeError where formatting would remove a file that is not a volume's."""
    for name in sorted(os.listdir(folder)) if folder.is_dir() else []:
        if not re.fullmatch(ours, name):
            raise VolumeError(f"{folder} holds {name!r}, which is no part of a volume: choose an empty folder")


def first_records(options: Options) -> dict[bytes, bytes]:
    """An empty root directory, and where the counters begin."""
    root = Node(ROOT_INODE, stat.S_IFDIR | 0o755, os.geteuid(), os.getegid(), options.volume.chunk_size)
    root.nlink = 2
    size = own_size(options)
    now = time.time_ns()
    directory = {
        schema.inode_key(ROOT_INODE): schema.encode_inode(root.record()),
        schema.times_key(ROOT_INODE): schema.encode_times(now, now, now),
    }
    settings = options.namespace.given
    return {
        **directory,
        **({schema.namespace_key(ROOT): encode_settings(Settings().changed(settings))} if settings else {}),
        schema.COUNTER_INODE: schema.encode_u64(FIRST_INODE),
        schema.COUNTER_GENERATION: schema.encode_u64(1),
        schema.COUNTER_FILES: schema.encode_counts(1, growth(directory, (), {})),
        schema.EXACT_SIZES: schema.encode_u64s(options.volume.exact_sizes),
        **({} if size is None else {schema.METADATA_SIZE: schema.encode_u64(size)}),
    }
