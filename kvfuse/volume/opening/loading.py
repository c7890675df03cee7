"""The state of a volume, read from its records when it is opened."""

from __future__ import annotations

import dataclasses
import logging
import struct
from collections.abc import Mapping
from functools import partial
from time import perf_counter
from typing import Any

import trio

from kvfuse import errors
from kvfuse.kept.alive import Alive, seconds_to_wait
from kvfuse.kept.keeper import NO_KEEPER, Keeper
from kvfuse.kept.log import KeptLog
from kvfuse.options.config import Options
from kvfuse.remote.records.api import RecordStore
from kvfuse.remote.segments.api import SegmentStore
from kvfuse.slab.allocator import Allocator
from kvfuse.slab.image import SlabState
from kvfuse.slab.layout import PAGE_SIZE, Superblock
from kvfuse.volume.api import ROOT_INODE
from kvfuse.volume.inodes.core import Core
from kvfuse.volume.inodes.doubt import Doubt, kept_page
from kvfuse.volume.inodes.grace import Grace
from kvfuse.volume.inodes.known_inodes import KnownInodes
from kvfuse.volume.inodes.metadata_budget import Metadata, bound_store, default_size, size_in
from kvfuse.volume.inodes.node import Nodes
from kvfuse.volume.inodes.regime import regime_of
from kvfuse.volume.namespaces.namespace_registry import Namespaces
from kvfuse.volume.namespaces.namespace_uses import NO_USE
from kvfuse.volume.namespaces.settings import Settings, decode_settings
from kvfuse.volume.opening.formatting import read_header
from kvfuse.volume.opening.held_volume import HeldVolume
from kvfuse.volume.store import schema
from kvfuse.volume.store.kept_membership import NOTHING, read_left, read_own_uses
from kvfuse.volume.store.member import Member
from kvfuse.volume.store.noted_segments import NotedSegments
from kvfuse.volume.store.numbers import NumberRange, SharedNumberRange
from kvfuse.volume.store.sealed import DamagedRecords, ScanPages, describe, get_sound
from kvfuse.volume.tier.arena_pool import NO_REGIME
from kvfuse.volume.tier.kept_arenas import KeptArena, check_volume, find_left
from kvfuse.volume.tier.placement import checked_placement
from kvfuse.volume.tier.shared_tier import ReadClass, SharedTier
from kvfuse.volume.views.handover import Handover

log = logging.getLogger(__name__)

GIVEN = "volume/given"
"""what the keeper knows a page by: of inodes and of generations, the number after the last one that was given"""
OWN_CLIENT = 0
"""number of the client of a volume that one host has"""
REUSE_SECONDS_MIN = 1.0
"""for which a freed slot of a shared volume rests; twice the longer of the engines' deadlines, where that is more"""


async def load_core(
    options: Options, held: HeldVolume, keeper: Keeper = NO_KEEPER, handover: Handover | None = None
) -> Core:
    """The state of a volume from its records. ``keeper``: has the tier of a daemon before this one.

    ``handover``: has its open files.
    """
    keys = [schema.COUNTER_INODE, schema.COUNTER_GENERATION, schema.COUNTER_FILES, schema.inode_key(ROOT_INODE)]
    try:
        *found, budget = await held.records.get([*keys, schema.EXACT_SIZES, schema.METADATA_SIZE])
        values = [record.value for record in found if record is not None]
        if len(values) < len(found):
            raise errors.VolumeError(
                f"{options.title}: the record store is damaged (no counters): 'kvfuse fsck --rebuild' recovers blocks"
            )
        own_budget = schema.decode_u64(budget.value) if budget is not None else None
        core = await _load_values(options, held, values, own_budget, keeper, handover or Handover())
    except errors.InvalidArgument as error:
        raise errors.ConfigError(f"the root's namespace, stored settings with this mount's options: {error}") from None
    except DamagedRecords as error:
        raise errors.VolumeError(f"{options.title}: the record store is damaged: {error}") from error
    except (ValueError, struct.error) as error:
        raise errors.VolumeError(
            f"{options.title}: the record store is damaged ({error}): 'kvfuse fsck --repair' mends what can be"
        ) from error
    return core if held.member is None else await _shared(core, held.member)


async def _shared(core: Core, member: Member) -> Core:
    """As one of several clients has the volume: slabs and numbers are this one's only when they are leased."""
    core.namespaces.accounts.keeps_unknown = True
    for account in core.namespaces.accounts.all.values():
        account.bound = NO_USE  # until its grants were read
    grace = max(REUSE_SECONDS_MIN, 2 * core.records.limits.deadline, 2 * core.segments.limits.deadline)
    left, rest = NOTHING, max(grace, core.segments.limits.quarantine)
    if member.before is not None:
        left = await read_left(core.records, member.client, member.version, rest, member.before.resting)
        for number, counts in (await read_own_uses(core.records, member.client)).items():
            core.namespaces.accounts.load(number, counts)
    generations = SharedNumberRange(schema.COUNTER_GENERATION)
    return dataclasses.replace(
        core,
        segments=NotedSegments(core.segments, core.geometry, rest),
        inodes=SharedNumberRange(schema.COUNTER_INODE),
        generations=generations,
        doubt=Doubt(generations),
        file_count=left.counts.inodes,
        client=member.client,
        left=left,
        grace=Grace(grace),
    )


async def _load_values(
    options: Options, held: HeldVolume, values: list[bytes], own_budget: int | None, keeper: Keeper, handover: Handover
) -> Core:
    """``values``: of the counters, the root directory, the exact sizes. ``own_budget``: see `own_size`."""
    superblock, records, segments, member, _, change_superblock, index = held
    geometry, is_alone = dataclasses.replace(superblock.geometry), member is None
    limit = own_budget if own_budget is not None else default_size(geometry.capacity, is_shared=options.is_shared)
    inode, generation = [schema.decode_u64(value) for value in values[:2]]
    sizes = {*schema.decode_u64s(values[4]), *options.volume.exact_sizes}
    exact_sizes = {-(-size // PAGE_SIZE) * PAGE_SIZE for size in sizes if size <= geometry.slab_size}
    slabs = Allocator(geometry, exact_sizes, granted=is_alone)
    states: list[SlabState] = []
    async for rows, damaged in ScanPages(records, b"s"):
        if damaged and is_alone:  # where others are, too, each takes slabs whose records it can read
            raise DamagedRecords(dict.fromkeys(damaged, 0))
        states += [SlabState(schema.key_slab(row.key), *schema.decode_slab(row.value)) for row in rows]
    if is_alone:
        slabs.restore(states)
    cache = options.cache
    placement = checked_placement(hugepages=cache.tier_hugepages, node=cache.tier_node)
    namespaces = await _read_namespaces(records, options.namespace.given)
    tier = SharedTier(cache.tier_size, placement, keeper)
    if keeper.outlives:
        is_ours = check_volume(keeper, superblock.volume_id)
        began = perf_counter()
        await _adopt(tier, find_left(keeper, placement), records, namespaces, began, is_alone, is_ours=is_ours)
        await trio.sleep(seconds_to_wait(keeper))
        tier.validity.alive = Alive(keeper)
        tier.validity.live_on()
    if is_alone:
        await _read_uses(records, namespaces)
    used = {geometry.locate_head(state.slab)[0] for state in states}
    await _check_segments(options.title, superblock, segments, used)
    kept_size = options.mount.outlive_size if is_alone and keeper.outlives and not options.mount.read_only else 0
    given = kept_page(keeper if is_alone else NO_KEEPER, GIVEN, superblock.volume_id)
    generations = NumberRange(schema.COUNTER_GENERATION, generation, given[1:2])
    return Core(
        unstored_log=KeptLog(kept_size) if kept_size else None,
        superblock=dataclasses.replace(superblock, geometry=geometry),
        change_superblock=change_superblock,
        geometry=geometry,
        records=records,
        segments=segments,
        block_index=index,
        slabs=slabs,
        nodes=Nodes(options.cache.nodes, tier, handover),
        places=KnownInodes(handover),
        tier=tier,
        chunk_size=min(schema.decode_inode(values[3]).chunk_size or options.volume.chunk_size, geometry.slab_size),
        strict=options.publish_mode == "strict",
        strict_blocks=options.publish.mode == "strict",
        read_only=options.mount.read_only,
        exported=options.mount.export and not options.mount.read_only,
        inodes=NumberRange(schema.COUNTER_INODE, inode, given[:1]),
        generations=generations,
        doubt=Doubt(generations, keeper if is_alone else NO_KEEPER, superblock.volume_id),
        metadata=Metadata(await bound_store(records, limit, geometry.data_size), partial(size_in, records)),
        has_own_budget=own_budget is not None,
        file_count=records.usage.items if records.usage is not None else schema.decode_counts(values[2]).inodes,
        namespaces=namespaces,
    )


async def _adopt(
    tier: SharedTier,
    found: list[KeptArena],
    records: RecordStore,
    namespaces: Namespaces,
    began: float,
    is_alone: bool,
    *,
    is_ours: bool,
) -> None:
    """Take over what the daemon before this one left in shared memory, if those who may use the directories are the
    same. Where no other host could change that, what is not known is the same."""
    directories = list({left.facts.read_class.directory for left in found})
    rows = await get_sound(records, [schema.inode_key(directory) for directory in directories])
    regimes = {
        directory: regime_of(schema.decode_inode(row.value), namespaces)
        for directory, row in zip(directories, rows, strict=True)
        if row is not None
    }

    def may_adopt(readers: ReadClass, regime: bytes) -> bool:
        if not is_ours:
            return False
        is_known = regime != NO_REGIME
        return readers.directory in regimes and (regime == regimes[readers.directory] if is_known else is_alone)

    tier.adopt(found, may_adopt, began)


async def _read_namespaces(records: RecordStore, overrides: Mapping[str, Any]) -> Namespaces:
    """All namespaces. InvalidArgument of ``overrides``."""
    settings = await _read_settings(records)
    above = await _read_above(records, list(settings))
    return Namespaces(settings, above, overrides=overrides)


async def _read_uses(records: RecordStore, namespaces: Namespaces) -> None:
    """The use of each namespace, which this client alone changes."""
    async for rows, damaged in ScanPages(records, schema.USE_PREFIX):
        for row in rows:
            is_own = row.key == schema.use_key(schema.key_inode(row.key), OWN_CLIENT)
            namespaces.accounts.load(schema.key_inode(row.key), schema.decode_counts(row.value), is_own=is_own)
        for key in damaged:
            log.error("%s is damaged: 'kvfuse fsck --repair' counts it anew", describe(key))


async def _read_above(records: RecordStore, numbers: list[int]) -> dict[int, int]:
    """Namespace -> that of the directory in which its folder is."""
    folders = await get_sound(records, [schema.inode_key(number) for number in numbers])
    parents = {
        number: schema.decode_inode(row.value).parent
        for number, row in zip(numbers, folders, strict=True)
        if row is not None
    }
    rows = await get_sound(records, [schema.inode_key(parent) for parent in parents.values()])
    return {
        number: schema.decode_inode(row.value).namespace
        for number, row in zip(parents, rows, strict=True)
        if row is not None
    }


async def _read_settings(records: RecordStore) -> dict[int, Settings]:
    """Of the namespaces, by number. Damaged ones are left out: their files are not evicted."""
    settings = {}
    async for rows, damaged in ScanPages(records, schema.NAMESPACE_PREFIX):
        for row in rows:
            settings[schema.key_inode(row.key)] = decode_settings(row.value)
        for key in damaged:
            log.error(
                "the settings of namespace %d are damaged: 'kvfuse fsck --repair' removes them", schema.key_inode(key)
            )
    return settings


async def _check_segments(title: str, superblock: Superblock, segments: SegmentStore, used: set[int]) -> None:
    """VolumeError unless every segment that holds bytes is there, whole, and this volume's."""
    remedy = "'kvfuse fsck --verify' tells which files are lost"
    sizes = {info.segment: info.size for info in await segments.list()}
    for segment in sorted(used):
        size = superblock.geometry.segment_size(segment)
        if sizes.get(segment) != size:
            found = f"has {sizes[segment]} bytes instead of {size}" if segment in sizes else "is missing"
            raise errors.VolumeError(f"{title}: segment {segment} {found}: {remedy}")
        try:
            header = await read_header(segments, segment)
        except errors.VolumeError as error:
            raise errors.VolumeError(f"{title}: segment {segment}: {error}: {remedy}") from None
        if (header.volume_id, header.segment) != (superblock.volume_id, segment):
            raise errors.VolumeError(f"{title}: the file of segment {segment} is another segment's: {remedy}")
