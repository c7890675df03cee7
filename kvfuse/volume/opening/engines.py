"""The engines of a volume, opened as its options say. Drivers of engines that are not used are not loaded."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import msgspec
import trio

from kvfuse.errors import ConfigError
from kvfuse.options.config import Options, disk_free
from kvfuse.options.options import (
    AutoIndexOptions,
    BlockOptions,
    BucketOptions,
    ColdBucketOptions,
    EtcdIndexOptions,
    EtcdOptions,
    FileOptions,
    LmdbOptions,
    OmapIndexOptions,
    RadosOptions,
    RedisIndexOptions,
    S3Options,
)
from kvfuse.options.secret_files import check_private
from kvfuse.remote.index.api import BlockIndex
from kvfuse.remote.records.api import Meter, RecordStore
from kvfuse.remote.records.decorators import Delayed
from kvfuse.remote.records.lmdb.store import LmdbRecords
from kvfuse.remote.segments.api import SegmentStore
from kvfuse.remote.segments.block import making
from kvfuse.remote.segments.block.segment_map import MapName
from kvfuse.remote.segments.block.store import BlockSegments
from kvfuse.remote.segments.file.store import FileSegments
from kvfuse.slab.layout import Geometry, Superblock

if TYPE_CHECKING:
    from kvfuse.remote.records.etcd.calls import EtcdPlace
    from kvfuse.remote.segments.rados.librados import PoolPlace
    from kvfuse.remote.segments.rados.store import RadosSegments

Store = TypeVar("Store", bound=RecordStore | SegmentStore | BlockIndex)


@asynccontextmanager
async def open_records(
    options: Options, *, read_only: bool = False, meter: Meter | None = None
) -> AsyncIterator[RecordStore]:
    """The record store, closed at the end. ``read_only``: a folder's store is not changed at all. EngineError.

    ``meter``: counts the records of a folder's store.
    """
    async with _closing(await RECORDS[type(options.records)](options, options.records, read_only, meter)) as records:
        delay = options.records.commit_delay
        yield Delayed(records, delay) if delay else records


@asynccontextmanager
async def open_segments(
    options: Options, *, read_only: bool = False, direct: bool = False, superblock: Superblock | None = None
) -> AsyncIterator[SegmentStore]:
    """The segment store, closed at the end. EngineError; VolumeError where devices are not this volume's.

    ``direct``: past the page cache, whatever the options say. ``superblock``: of the volume, where that is known.
    """
    opener = SEGMENTS[type(options.segments)]
    async with _closing(await opener(options, options.segments, read_only, direct, superblock)) as store:
        yield store


@asynccontextmanager
async def open_index(options: Options, *, volume_id: bytes = b"") -> AsyncIterator[BlockIndex | None]:
    """The index of a shared volume's blocks, closed at the end; None where it has none. ConfigError, EngineError.

    ``volume_id``: each has entries of its own, also where volumes of one name are made one after the other.
    """
    index = await INDEXES[type(options.index)](options, options.index, volume_id)
    if index is None:
        yield None
        return
    async with _closing(index):
        yield index


@asynccontextmanager
async def _closing(store: Store) -> AsyncIterator[Store]:
    try:
        yield store
    finally:
        with trio.CancelScope(shield=True):
            await store.aclose()


async def free_space(options: Options) -> tuple[int | None, str]:
    """(bytes that the segments' medium has room for, or None where it does not say; what to call it)"""
    if isinstance(options.segments, FileOptions):
        return disk_free(options.segments_path), f"below {options.segments_path}"
    if isinstance(options.segments, BlockOptions):
        sizes = await trio.to_thread.run_sync(making.sizes_of, device_paths(options.segments))
        return _room(options, sizes), f"on {', '.join(options.segments.devices)}"
    if isinstance(options.segments, S3Options):
        return None, f"in the bucket {options.segments.bucket}"
    async with _closing(await _open_rados(options, options.segments)) as segments:
        return await segments.free_bytes(), f"in the pool {options.segments.pool}"


async def _open_lmdb(options: Options, records: LmdbOptions, read_only: bool, meter: Meter | None) -> RecordStore:
    return LmdbRecords.open(options.records_path, read_only=read_only, meter=meter)


async def _open_etcd(options: Options, records: EtcdOptions, *_: object) -> RecordStore:
    from kvfuse.remote.records.etcd.store import EtcdRecords

    return await EtcdRecords.open(_etcd_place(options, records))


def _etcd_place(options: Options, records: EtcdOptions) -> EtcdPlace:
    """ConfigError where the password cannot be read, or others may read it, or the key."""
    from kvfuse.remote.records.etcd.calls import EtcdPlace

    if records.key_file is not None:
        check_private(records.key_file, "records.key_file")
    password = read_password(records.password_file) if records.password_file else ""
    return EtcdPlace(records, options.key_prefix.encode(), password)


async def _open_files(
    options: Options, files: FileOptions, read_only: bool, direct: bool, superblock: Superblock | None
) -> SegmentStore:
    return FileSegments.open(options.segments_path, direct=direct or files.direct, read_only=read_only)


async def _open_rados(options: Options, rados: RadosOptions, *_: object) -> RadosSegments:
    from kvfuse.remote.segments.rados.store import RadosSegments

    return await RadosSegments.open(_pool_place(options, rados))


async def _open_bucket(options: Options, bucket: S3Options, *_: object) -> SegmentStore:
    """ConfigError where others may read the keys, or the package is missing."""
    check_bucket(bucket, "segments")
    from kvfuse.remote.segments.s3.store import S3Segments

    return await S3Segments.open(msgspec.structs.replace(bucket, prefix=bucket_prefix(options, bucket)))


def bucket_prefix(options: Options, bucket: BucketOptions) -> str:
    """Of all objects of a volume."""
    name = options.volume.name if options.is_shared and options.volume.name else options.volume_path.name
    return bucket.prefix or f"{re.sub('[^A-Za-z0-9_.-]', '_', name)[:60]}/"


def cold_bucket(options: Options, volume_id: bytes) -> ColdBucketOptions | None:
    """Where the cold tier of a volume is, with a prefix of its own; None: it has none. ConfigError."""
    if not isinstance(options.cold, ColdBucketOptions):
        return None
    check_bucket(options.cold, "cold")
    prefix = f"{bucket_prefix(options, options.cold)}{volume_id.hex()[:16]}/"
    return msgspec.structs.replace(options.cold, prefix=prefix)


def check_bucket(bucket: BucketOptions, table: str) -> None:
    """ConfigError: the bucket is not named, its keys are others' to read, or obstore is not installed."""
    if bucket.bucket is None:
        raise ConfigError(f"{table}.bucket is not set: engine 's3' needs one")
    if bucket.credentials_file is not None:
        check_private(bucket.credentials_file, f"{table}.credentials_file")
    if importlib.util.find_spec("obstore") is None:
        raise ConfigError(f"{table}.engine 's3' needs the package obstore: pip install 'obstore>=0.8'")


def _pool_place(options: Options, rados: RadosOptions) -> PoolPlace:
    """ConfigError where others may read the key."""
    from kvfuse.remote.segments.rados.librados import PoolPlace

    if rados.pool is None:
        raise ConfigError("segments.pool is not set")
    if rados.keyring is not None:
        check_private(rados.keyring, "segments.keyring")
    return PoolPlace(rados, rados.pool, rados.namespace or options.volume.name)


async def _open_devices(
    options: Options, devices: BlockOptions, read_only: bool, direct: bool, superblock: Superblock | None
) -> SegmentStore:
    return await BlockSegments.open(
        device_paths(devices),
        superblock.volume_id if superblock is not None else None,
        MapName(*superblock.segment_map) if superblock is not None else None,
        alone=superblock is not None and not options.is_shared,
        deadline=devices.deadline,
        quarantine=devices.quarantine,
        read_only=read_only,
        reservations=devices.reservations,
    )


async def _open_auto_index(options: Options, index: AutoIndexOptions, volume_id: bytes) -> BlockIndex | None:
    if not options.is_shared:
        return None
    if isinstance(options.segments, RadosOptions):
        from kvfuse.remote.index.omap.store import NoOmap

        try:
            return await _open_omap_index(options, OmapIndexOptions(), volume_id)
        except NoOmap:
            pass  # an erasure-coded pool
    return await _open_etcd_index(options, EtcdIndexOptions(), volume_id)


async def _open_etcd_index(options: Options, index: EtcdIndexOptions, volume_id: bytes) -> BlockIndex:
    from kvfuse.remote.index.etcd.store import EtcdIndex

    if not isinstance(options.records, EtcdOptions):
        raise ConfigError("index.engine 'etcd' needs records.engine 'etcd'")
    place = _etcd_place(options, options.records)
    return await EtcdIndex.open(replace(place, prefix=options.index_prefix(volume_id).encode()))


async def _open_omap_index(options: Options, index: OmapIndexOptions, volume_id: bytes) -> BlockIndex:
    from kvfuse.remote.index.omap.store import OmapIndex

    if not isinstance(options.segments, RadosOptions):
        raise ConfigError("index.engine 'omap' needs segments.engine 'rados'")
    place = _pool_place(options, options.segments)
    return await OmapIndex.open(place, f"index.{volume_id.hex()[:8]}", index.shards)


async def _open_redis_index(options: Options, index: RedisIndexOptions, volume_id: bytes) -> BlockIndex:
    """ConfigError where the password cannot be read, or others may read it."""
    try:
        from kvfuse.remote.index.redis.store import RedisIndex, RedisPlace
    except ImportError as error:
        raise ConfigError(f"index.engine 'redis' needs a package ({error}): pip install 'hiredis>=3'") from None
    password = read_password(index.password_file, "index.password_file") if index.password_file else ""
    return await RedisIndex.open(RedisPlace(index, options.index_prefix(volume_id).encode(), password))


def device_paths(devices: BlockOptions) -> list[Path]:
    return [Path(path) for path in devices.devices]


def _room(options: Options, sizes: Sequence[int]) -> int:
    """The capacity of a volume that takes all of devices with these sizes."""
    segment_size = options.volume.segment_size
    while True:
        places = sum(making.place_count(size, segment_size) for size in sizes)
        capacity = places * segment_size
        try:
            geometry = Geometry.choose(capacity, options.volume.slab_size, options.volume.segment_size)
        except ValueError:
            return capacity
        if geometry.segment_count <= places or geometry.segment_size(0) >= segment_size:
            return capacity
        segment_size = geometry.segment_size(0)  # whole slabs and their heads: a little less


async def make_medium(options: Options, superblock: Superblock, *, replace: bool) -> Superblock:
    """What a volume's segments need before there are any: devices get labels. The superblock that names their map.

    ConfigError where they are too small; VolumeError where something is on one that may not be replaced; EngineError.
    """
    if not isinstance(options.segments, BlockOptions):
        return superblock
    geometry = superblock.geometry
    call = partial(
        making.make_set,
        device_paths(options.segments),
        superblock.volume_id,
        geometry.step,
        geometry.data_start(0),  # nothing else is read before it is written
        geometry.segment_count,
        options.segments.weights,
        options.segments.domains,
        replace=replace,
    )
    return superblock.mapped((await trio.to_thread.run_sync(call)).name)


RECORDS: dict[type, Callable[..., Awaitable[RecordStore]]] = {LmdbOptions: _open_lmdb, EtcdOptions: _open_etcd}
SEGMENTS: dict[type, Callable[..., Awaitable[SegmentStore]]] = {
    FileOptions: _open_files,
    RadosOptions: _open_rados,
    BlockOptions: _open_devices,
    S3Options: _open_bucket,
}
INDEXES: dict[type, Callable[..., Awaitable[BlockIndex | None]]] = {
    AutoIndexOptions: _open_auto_index,
    EtcdIndexOptions: _open_etcd_index,
    OmapIndexOptions: _open_omap_index,
    RedisIndexOptions: _open_redis_index,
}
"""the options of an engine -> what opens it"""


def read_password(file: Path, key: str = "records.password_file") -> str:
    """The first line of a file. ConfigError where there is none, or others may read it."""
    check_private(file, key)
    try:
        password = file.read_text().partition("\n")[0]
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise ConfigError(f"{key}: {file} cannot be read: {reason}") from None
    if not password:
        raise ConfigError(f"{key}: the first line of {file} is empty")
    return password
