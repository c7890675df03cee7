"""Has caches of before, whose blocks were files, become namespaces of blocks when a volume is opened."""

from __future__ import annotations

from dataclasses import replace

import msgspec

from kvfuse.errors import ConfigError
from kvfuse.options.config import Options
from kvfuse.slab.layout import FEATURE_LENT
from kvfuse.volume.blocks.conversion import Conversion, Converted
from kvfuse.volume.namespaces.settings import ROOT, Settings, decode_settings, encode_settings
from kvfuse.volume.opening.held_volume import HeldVolume
from kvfuse.volume.store import schema
from kvfuse.volume.store.sealed import ScanPages


async def convert_caches(
    options: Options, held: HeldVolume, *, goes_on: bool = False
) -> tuple[HeldVolume, Converted | None]:
    """Make caches of before namespaces of blocks, and the root, if ``options`` say so. None: there was nothing to do.

    Before the volume is served, with the superblock that it has then. ``goes_on``: a former daemon served it, and the
    kernel knows its files: they stay files until the next mount. ConfigError: the root has blocks, and the options want
    files. VolumeError, EngineError: the next mount goes on.
    """
    if options.mount.read_only or options.is_shared:
        return held, None
    wanted = options.namespace.kind
    found = dict[int, Settings]()
    async for rows, _ in ScanPages(held.records, schema.NAMESPACE_PREFIX):
        for row in rows:
            found[schema.key_inode(row.key)] = decode_settings(row.value)
    root = found.setdefault(ROOT, Settings())
    if root.is_blocks and wanted not in (None, "blocks"):
        raise ConfigError(f"the root of {options.title} has blocks, which do not become files: leave out kind={wanted}")
    if wanted == "blocks" and root.kind == "files":
        found[ROOT] = msgspec.structs.replace(root, kind="cache")
    caches = {number: settings for number, settings in found.items() if settings.kind == "cache"}
    if not caches or (goes_on and not any(settings.epoch for settings in caches.values())):
        return held, None
    begun = {number: settings if settings.epoch else settings.begun() for number, settings in caches.items()}
    if held.change_superblock is not None and not held.superblock.features & FEATURE_LENT:
        superblock = await held.change_superblock(lambda found: replace(found, features=found.features | FEATURE_LENT))
        held = held._replace(superblock=superblock)
    records = {schema.namespace_key(number): encode_settings(settings) for number, settings in begun.items()}
    await held.records.commit(records, durable=True)
    return held, await Conversion(held.superblock, held.records, held.segments, begun).run()
