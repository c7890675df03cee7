"""The engines of a volume, opened as its options say. Drivers of engines that are not used are not loaded."""

from __future__ import annotations

import stat
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import trio

from kvfuse.errors import ConfigError
from kvfuse.options.config import Options, disk_free
from kvfuse.remote.records.api import Meter, RecordStore
from kvfuse.remote.records.decorators import Delayed
from kvfuse.remote.records.lmdb.store import LmdbRecords
from kvfuse.remote.segments.api import SegmentStore
from kvfuse.remote.segments.file.store import FileSegments

if TYPE_CHECKING:
    from kvfuse.remote.records.etcd.store import EtcdPlace
    from kvfuse.remote.segments.rados.librados import Place


@asynccontextmanager
async def open_records(
    options: Options, *, read_only: bool = False, meter: Meter | None = None
) -> AsyncIterator[RecordStore]:
    """The record store, closed at the end. ``read_only``: a folder's store is not changed at all. EngineError.

    ``meter``: counts the records of a folder's store.
    """
    records: RecordStore
    if options.is_shared:
        from kvfuse.remote.records.etcd.store import EtcdRecords

        records = await EtcdRecords.open(etcd_place(options))
    else:
        records = LmdbRecords.open(options.records_path, read_only=read_only, meter=meter)
    try:
        delay = options.records.commit_delay
        yield Delayed(records, delay) if delay else records
    finally:
        with trio.CancelScope(shield=True):
            await records.aclose()


@asynccontextmanager
async def open_segments(
    options: Options, *, read_only: bool = False, direct: bool = False
) -> AsyncIterator[SegmentStore]:
    """The segment store, closed at the end. ``direct``: past the page cache, whatever the options say. EngineError."""
    segments: SegmentStore
    if options.has_segment_files:
        segments = FileSegments.open(
            options.segments_path, direct=direct or options.segments.direct, read_only=read_only
        )
    else:
        from kvfuse.remote.segments.rados.store import RadosSegments

        segments = await RadosSegments.open(rados_place(options))
    try:
        yield segments
    finally:
        with trio.CancelScope(shield=True):
            await segments.aclose()


async def free_space(options: Options) -> tuple[int | None, str]:
    """(bytes that the segments' medium has room for, or None where it does not say; what to call it)"""
    if options.has_segment_files:
        return disk_free(options.segments_path), f"below {options.segments_path}"
    from kvfuse.remote.segments.rados.store import RadosSegments

    segments = await RadosSegments.open(rados_place(options))
    try:
        return await segments.free_bytes(), f"in the pool {options.segments.pool}"
    finally:
        with trio.CancelScope(shield=True):
            await segments.aclose()


def etcd_place(options: Options) -> EtcdPlace:
    """ConfigError where the password cannot be read, or others may read it, or the key."""
    from kvfuse.remote.records.etcd.store import EtcdPlace

    records = options.records
    if records.key_file is not None:
        check_private(records.key_file, "records.key_file")
    password = read_password(records.password_file) if records.password_file else ""
    return EtcdPlace(records, options.key_prefix.encode(), password)


def rados_place(options: Options) -> Place:
    """ConfigError where others may read the key."""
    from kvfuse.remote.segments.rados.librados import Place

    segments = options.segments
    if segments.pool is None:
        raise ConfigError("segments.pool is not set")
    if segments.keyring is not None:
        check_private(segments.keyring, "segments.keyring")
    return Place(segments, segments.pool, segments.namespace or options.volume.name)


def read_password(file: Path) -> str:
    """The first line of a file. ConfigError where there is none, or others may read it."""
    check_private(file, "records.password_file")
    try:
        password = file.read_text().partition("\n")[0]
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise ConfigError(f"records.password_file: {file} cannot be read: {reason}") from None
    if not password:
        raise ConfigError(f"records.password_file: the first line of {file} is empty")
    return password


def check_private(file: Path, key: str) -> None:
    """ConfigError where more users than its owner may read or replace a secret; the group, too, of a file of root's.

    A file that is not there, or cannot be looked at, is whoever's who reads it.
    """
    try:
        status = file.stat()
    except OSError:
        return
    allowed, remedy = (0o640, "o=,g-wx") if status.st_uid == 0 else (0o600, "go=")
    mode = stat.S_IMODE(status.st_mode)
    if mode & 0o077 & ~allowed:
        raise ConfigError(
            f"{key}: others may read {file} (mode {mode:03o}), which has a secret: type: chmod {remedy} {file}"
        )
