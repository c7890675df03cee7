"""Destroys a volume: removes all that it has in its engines, and nothing that is not its own.

First a note (`Remains`) takes the superblock's place in one step: from there on nobody can mount the volume, and the
note has all that later steps need to know. Then these are removed, in this order: entries of the index, segments or
labels of devices, records, the note. Killed anywhere in between, the same call goes on.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

import msgspec
import trio

from kvfuse.errors import Corrupt, EngineError, VolumeBusy, VolumeError
from kvfuse.options.config import Options
from kvfuse.options.options import BlockOptions
from kvfuse.remote.records.api import RecordStore
from kvfuse.remote.segments.api import SegmentStore, Transfer
from kvfuse.remote.segments.block import clearing
from kvfuse.remote.segments.file.fileio import sync_directory
from kvfuse.slab import layout
from kvfuse.slab.layout import Superblock
from kvfuse.volume.opening import engines, formatting
from kvfuse.volume.opening.cold_opening import GRAVES_FILE, remove_cold
from kvfuse.volume.opening.formatting import DESTROYED_FILE, LOCK_FILE, RECORD_FILES, SUPERBLOCK_FILE
from kvfuse.volume.store import schema, sealed
from kvfuse.volume.store.member import Member, describe, membership, others_of

CLIENTS_MAX = 1_000_000
"""records of clients that left slabs"""
HEADERS_READ = 64
"""headers of segments that are read at once"""

Step = Callable[[str], None]
"""is called with what is done next, in words"""


class Remains(msgspec.Struct, frozen=True):
    """What is left to be destroyed of a volume."""

    volume: str
    """its identity, in hexadecimal digits"""
    devices: tuple[str, ...] = ()
    """paths of all its devices, as this host saw them"""
    version: int = 1

    @property
    def volume_id(self) -> bytes:
        return bytes.fromhex(self.volume)


async def is_begun(options: Options) -> bool:
    """Somebody began to destroy the volume, and did not end. VolumeError: there is neither a volume nor a rest of one;
    VolumeBusy: somebody has it mounted, and who."""
    if not options.is_shared:
        path = options.volume_path
        if (path / DESTROYED_FILE).exists() and not formatting.is_volume(path):
            return True
        formatting.read_superblock(path)
        with formatting.locked(path):
            return False
    async with engines.open_records(options) as records:
        if others := await others_of(records):
            users = "; ".join(sorted(map(describe, others)))
            raise VolumeBusy(f"the volume {options.title} is in use by {users}: unmount it there first")
        found, destroyed = await records.get([schema.SUPERBLOCK, schema.DESTROYED])
        if found is None and destroyed is not None:
            return True
        await formatting.read_shared_superblock(records, options.title)
        return False


async def destroy(options: Options, step: Step, *, without_lost: bool = False) -> list[Path]:
    """Destroy the volume, or go on with that. Returns files and devices that were left alone: they are not its own.

    ``without_lost``: devices that are not found do not matter; else they are a VolumeError. VolumeBusy: somebody has
    it; EngineError: a server or device does not answer, so that it has to be called again. Before the first step all
    is as it was.
    """
    if options.is_shared:
        return await _destroy_shared(options, step, without_lost)
    with formatting.locked(options.volume_path):
        return await _destroy_folder(options, step, without_lost)


# -- a volume in a folder ------------------------------------------------------------------------------


async def _destroy_folder(options: Options, step: Step, without_lost: bool) -> list[Path]:
    path = options.volume_path
    if formatting.is_volume(path):
        superblock = formatting.read_superblock(path)
        remains = await _examine(options, superblock, without_lost)
        step("closing the volume to all")
        formatting.write_whole(path, DESTROYED_FILE, msgspec.json.encode(remains))
        (path / SUPERBLOCK_FILE).unlink()
        sync_directory(path)
    else:
        remains = _parse((path / DESTROYED_FILE).read_bytes(), str(path))
    await _remove_bytes(options, remains, step)
    await remove_cold(options, remains.volume_id, step)
    step("removing records")
    left = await _remove_records(options)
    for name in ("log", GRAVES_FILE, LOCK_FILE, f"{SUPERBLOCK_FILE}.new", f"{DESTROYED_FILE}.new"):
        (path / name).unlink(missing_ok=True)
    for folder in (path / "records", path / "segments"):
        with suppress(OSError):
            folder.rmdir()
    left += [path / name for name in sorted(os.listdir(path)) if name != DESTROYED_FILE]
    (path / DESTROYED_FILE).unlink()
    if not left:
        with suppress(OSError):  # somebody's mount point, or in a folder of others
            path.rmdir()
    return left + _strangers_in(options)


async def _remove_records(options: Options) -> list[Path]:
    """Returns LMDB's files that may be others': in a folder that mount.conf names, without records of a volume."""
    folder = options.records_path
    names = [name for name in os.listdir(folder) if re.fullmatch(RECORD_FILES, name)] if folder.is_dir() else []
    if names and folder.parent != options.volume_path and not await _has_records(options):
        return [folder / name for name in names]
    for name in sorted(names, reverse=True):  # data.mdb last: it says whose the folder is
        (folder / name).unlink(missing_ok=True)
    return []


async def _has_records(options: Options) -> bool:
    try:
        async with engines.open_records(options, read_only=True) as records:
            return not await formatting.is_vacant(records)
    except EngineError:
        return False


def _strangers_in(options: Options) -> list[Path]:
    """What is in a folder of segments that mount.conf names."""
    if not options.has_segment_files or not options.segments_path.is_dir():
        return []
    return sorted(options.segments_path.iterdir())


# -- a shared volume -----------------------------------------------------------------------------------


async def _destroy_shared(options: Options, step: Step, without_lost: bool) -> list[Path]:
    title = options.title
    async with (
        engines.open_records(options) as records,
        membership(records, options.client.lease, title) as member,
    ):
        found, destroyed = await records.get([schema.SUPERBLOCK, schema.DESTROYED])
        if found is not None:
            superblock = await formatting.read_shared_superblock(records, title)
            remains = await _examine(options, superblock, without_lost)
            await _cut_off(options, superblock, records, step)
            step("closing the volume to all")
            note = {schema.DESTROYED: msgspec.json.encode(remains)}
            expect = {schema.SUPERBLOCK: found.version, **member.fence}
            if not await records.commit(note, [schema.SUPERBLOCK], expect, durable=True):
                raise VolumeError(f"the volume {title} was changed meanwhile: look at it, and try again")
        elif destroyed is not None:
            remains = _parse(destroyed.value, title)
        else:
            raise VolumeError(f"{title} holds no kvfuse volume")
        step("removing entries of the index")
        async with engines.open_index(options, volume_id=remains.volume_id) as index:
            if index is not None:
                await index.clear()
        await _remove_bytes(options, remains, step)
        await remove_cold(options, remains.volume_id, step)
        step("removing records")
        await _drop_all(records, member, title)
    return _strangers_in(options)


async def _drop_all(records: RecordStore, member: Member, title: str) -> None:
    await formatting.drop_records(records, {*member.fence, schema.MOUNTED, schema.DESTROYED})
    if not await records.commit({}, [schema.DESTROYED], member.fence, durable=True):
        raise VolumeError(f"the lease of {title} ended meanwhile: destroy it again")


async def _cut_off(options: Options, superblock: Superblock, records: RecordStore, step: Step) -> None:
    """Return when no write can happen any more that a host sent which died: another may use the medium then."""
    try:
        rows = await sealed.as_formatted(records, superblock).scan(b"k", limit=CLIENTS_MAX)
        dead = {row.value for row in rows} - {schema.NOBODY_TO_CUT_OFF}
    except Corrupt:
        dead = {schema.NOT_CUT_OFF}  # nobody knows who it was
    if not dead or options.has_segment_files:
        return
    async with engines.open_segments(options, superblock=superblock) as segments:
        step("cutting off hosts that died")
        answers = [await segments.fence(identity) for identity in sorted(dead)]
        rest = segments.limits.quarantine
        if rest and not all(answers):
            step(f"waiting for the last writes of hosts that died, {rest:g} s")
            await trio.sleep(rest)


# -- both ----------------------------------------------------------------------------------------------


async def _examine(options: Options, superblock: Superblock, without_lost: bool) -> Remains:
    """What there is, before anything is removed. VolumeError where some of it is another volume's, or lost."""
    volume_id = superblock.volume_id
    if isinstance(options.segments, BlockOptions):
        paths = engines.device_paths(options.segments)
        find = partial(clearing.members_of, paths, volume_id, whole=not without_lost)
        devices = await trio.to_thread.run_sync(find)
        return Remains(volume_id.hex(), tuple(map(str, devices)))
    if not options.has_segment_files or options.segments_path.is_dir():
        async with engines.open_segments(options, read_only=True, superblock=superblock) as segments:
            await _check_owner(segments, volume_id, options.title)
    return Remains(volume_id.hex())


async def _check_owner(segments: SegmentStore, volume_id: bytes, title: str) -> None:
    """VolumeError where a segment begins with the header of another volume. One without a header was just made."""
    numbers = [info.segment for info in await segments.list() if info.size >= layout.SUPERBLOCK_SIZE]
    for start in range(0, len(numbers), HEADERS_READ):
        images = {number: bytearray(layout.SUPERBLOCK_SIZE) for number in numbers[start : start + HEADERS_READ]}
        await segments.read([Transfer(number, 0, image) for number, image in images.items()])
        for number, image in images.items():
            owner = _owner_in(image)
            if owner not in (None, volume_id):
                raise VolumeError(
                    f"segment {number} is of the volume {owner.hex()}, and {title} is {volume_id.hex()}: nothing was"
                    " removed; correct [segments] of mount.conf"
                )


def _owner_in(header: bytearray) -> bytes | None:
    """The volume that a segment's header names; None: it has none, or a damaged one."""
    try:
        return layout.parse_superblock(header).volume_id
    except VolumeError:
        return None


async def _remove_bytes(options: Options, remains: Remains, step: Step) -> None:
    """Segments of a store, or labels of devices."""
    if isinstance(options.segments, BlockOptions):
        for device in remains.devices:
            step(f"clearing {device}")
            await trio.to_thread.run_sync(clearing.clear, Path(device), remains.volume_id)
    elif not options.has_segment_files or options.segments_path.is_dir():
        step("removing segments")
        async with engines.open_segments(options) as segments:
            await segments.discard()


def _parse(note: bytes, title: str) -> Remains:
    try:
        remains = msgspec.json.decode(note, type=Remains)
    except msgspec.DecodeError as error:
        raise VolumeError(f"the note of what is left of {title} cannot be read: {error}") from None
    if remains.version != 1:
        raise VolumeError(f"the rest of {title} is of version {remains.version}: use a newer kvfuse")
    return remains
