"""Namespaces of a shared volume, as their records say: every host follows those, and takes over what others did.

The watch brings changes one by one, in the order of their commits. After it broke, and when it begins, all records are
read. Whoever changes a namespace here puts that in at once (`stored`), when its transaction is in the store. The newest
version of each record counts.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import trio

from kvfuse import errors
from kvfuse.remote.records.api import ABSENT
from kvfuse.volume.api import ROOT_INODE
from kvfuse.volume.commit.journal import Journal
from kvfuse.volume.inodes.core import Core
from kvfuse.volume.names.folders import Folders, end_access, has_other_token
from kvfuse.volume.names.lookup import Lookup
from kvfuse.volume.namespaces.grants import GrantBook, decode_grants
from kvfuse.volume.namespaces.settings import ROOT, Settings, decode_settings
from kvfuse.volume.store import schema
from kvfuse.volume.store.sealed import ScanPages, get_sound

KINDS = (schema.NAMESPACE_PREFIX, schema.USE_PREFIX, schema.GRANTS_PREFIX)
"""prefixes of the records that are followed; settings before what belongs to their namespaces"""

log = logging.getLogger(__name__)


@dataclass
class NamespaceNews:
    """Follows the records of namespaces. One of each membership of a shared volume."""

    core: Core
    journal: Journal
    lookup: Lookup
    folders: Folders

    def __post_init__(self) -> None:
        self.grants = GrantBook(self.core.namespaces.accounts, self.core.client)
        self.versions: dict[bytes, int] = {}
        """key of a record that is there -> its version"""
        self._newest: dict[bytes, int] = {}
        """key -> version of the newest change, removals among them"""
        self._has_unfound = trio.Event()
        """folders were heard of whose paths are not known"""
        self.heard = trio.Event()
        """set, and made anew, after each change"""
        self._counted = ABSENT
        """version of the number of changes when all settings were read last"""

    async def run(self) -> None:
        """Find the folders of namespaces that others make, until cancelled."""
        while True:
            await self.folders.find_all()
            await self._has_unfound.wait()
            self._has_unfound = trio.Event()

    # -- reading -------------------------------------------------------------------------------------

    async def renew(self) -> None:
        """Read all records: changes may have been missed. EngineError."""
        for kind in KINDS:
            await self._read(kind)
        self.grants.begin()

    async def read_settings(self) -> tuple[int, int]:
        """Read all settings. Returns (number of changes, version of that record) as they were before.

        A transaction that expects this version was decided by the settings as they are.
        """
        (row,) = await get_sound(self.core.records, [schema.COUNTER_NAMESPACES])
        await self._read(schema.NAMESPACE_PREFIX)
        self._counted = row.version if row is not None else ABSENT
        return (schema.decode_u64(row.value), row.version) if row is not None else (0, ABSENT)

    async def look(self) -> None:
        """Know all changes of settings until now, however late the watch is: one small question. EngineError."""
        (row,) = await get_sound(self.core.records, [schema.COUNTER_NAMESPACES])
        if row is not None and row.version != self._counted:
            await self.read_settings()

    async def read(self, number: int) -> None:
        """Read the records of one namespace, but for those of its use. EngineError."""
        keys = [schema.namespace_key(number), schema.grants_key(number)]
        before = [self.versions.get(key, 0) for key in keys]
        for key, row, version in zip(keys, await get_sound(self.core.records, keys), before, strict=True):
            if row is not None:
                await self.take(key, row.value, row.version)
            elif version and self.versions.get(key) == version:
                await self.take(key, None, version)

    async def _read(self, kind: bytes) -> None:
        gone = {key: version for key, version in self.versions.items() if key.startswith(kind)}
        async for rows, damaged in ScanPages(self.core.records, kind):
            for row in rows:
                gone.pop(row.key, None)
                await self.take(*row)
            for key in damaged:
                gone.pop(key, None)
                log.error("record %s of a namespace is damaged: 'kvfuse fsck --repair' mends it", key.hex())
        for key, version in gone.items():
            if self.versions.get(key) == version:
                await self.take(key, None, version)

    # -- one change ----------------------------------------------------------------------------------

    async def take(self, key: bytes, value: bytes | None, version: int) -> None:
        """A record was put, or removed (None). Reads where the folder of a new namespace is. EngineError."""
        if version < self._newest.get(key, 0):
            return
        number = schema.key_inode(key)
        above = ROOT
        if key[:1] == schema.NAMESPACE_PREFIX and value is not None and number not in self.core.namespaces.all:
            try:
                above = await self.above(number)
            except errors.Stale:
                return  # it was removed since
        try:
            self.stored(key, value, version, above)
        except ValueError as error:
            log.warning("record %s of a namespace is damaged, 'kvfuse fsck' mends what can be: %s", key.hex(), error)

    def stored(self, key: bytes, value: bytes | None, version: int, above: int = ROOT) -> None:
        """As `take`, without waiting. ``above``: the namespace that a new one is in. ValueError: it makes no sense."""
        if version < self._newest.get(key, 0):
            return
        self._newest[key] = version
        if value is None:
            self.versions.pop(key, None)
        else:
            self.versions[key] = version
        if key[:1] == schema.NAMESPACE_PREFIX:
            self._take_settings(schema.key_inode(key), value, above)
        elif key[:1] == schema.USE_PREFIX:
            self._take_use(key, value)
        else:
            self.grants.hear(schema.key_inode(key), decode_grants(value) if value is not None else None)
        self.heard.set()
        self.heard = trio.Event()

    async def above(self, number: int) -> int:
        """The namespace that a namespace is in. Stale: its folder is gone."""
        if number == ROOT:
            return ROOT
        folder = await self.lookup.find_node(number)
        return (await self.lookup.find_directory(folder.parent or ROOT_INODE)).namespace

    def _take_settings(self, number: int, value: bytes | None, above: int) -> None:
        namespaces = self.core.namespaces
        if value is None and number != ROOT:
            self._remove(number)
            return
        settings = decode_settings(value) if value is not None else Settings()
        if has_other_token(self.core, number, settings):
            end_access(self.core, self.core.nodes.get(number))
        is_new = number not in namespaces.all
        namespaces.put(number, settings, above if is_new else None)
        self.grants.settle(number)
        if self.core.blocks is not None:
            self.core.blocks.settings_changed(number)
        if is_new and self.folders.hold_path(number) is None:
            self._has_unfound.set()

    def _remove(self, number: int) -> None:
        """Forget a namespace, with this client's record of its use."""
        if number in self.core.namespaces.accounts.records:
            self.journal.put(schema.use_key(number, self.core.client), None)
        if has_other_token(self.core, number, Settings()):
            end_access(self.core, self.core.nodes.get(number))
        self.core.namespaces.remove(number, at_once=True)
        if self.core.blocks is not None:
            self.core.blocks.settings_changed(number)

    def _take_use(self, key: bytes, value: bytes | None) -> None:
        number, client = schema.split_use_key(key)
        if client != self.core.client:
            counts = schema.decode_counts(value) if value is not None else None
            self.core.namespaces.accounts.hear(number, client, counts)
