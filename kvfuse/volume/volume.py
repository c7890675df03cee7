"""Offers a mounted volume to the doors: its operations by topic, and its statistics."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable
from typing import Any

import trio

from kvfuse.volume.api import FIRST_INODE, ROOT_INODE, Handle, NearApi, RowApi, SearchApi, Statfs
from kvfuse.volume.blocks.block_numbers import is_block, split_inode
from kvfuse.volume.blocks.kernel_answers import KeptRows
from kvfuse.volume.hosts.neighbourhood import Neighbourhood
from kvfuse.volume.measures.measures import SegmentsTier
from kvfuse.volume.measures.profiling import PROFILE
from kvfuse.volume.namespaces.namespace_registry import Namespace
from kvfuse.volume.namespaces.namespace_uses import NamespaceUse
from kvfuse.volume.namespaces.settings import ROOT
from kvfuse.volume.operations import Files, Inodes, Tree
from kvfuse.volume.parts import Parts
from kvfuse.volume.restored_files import RestoredFiles
from kvfuse.volume.views.kernel_cache import KernelCache
from kvfuse.volume.views.neighbours import Neighbours


class Volume:
    """Implements `api.VolumeApi` and `api.RingApi`. Opened by `running.open_volume`."""

    def __init__(self, parts: Parts, background: trio.Nursery) -> None:
        self.tier = parts.core.tier
        self.reading_threads = parts.core.reads.threads
        self.sections: dict[str, Callable[[], object]] = {}
        self.user_sections: dict[str, Callable[[int], object]] = {}
        self.listings: dict[str, Callable[[int | None], object]] = {}
        PROFILE.name_of = self._namespace_at
        self.listings["profile"] = PROFILE.listing
        self._background = background
        self._opened = time.time()
        self.take_parts(parts)

    def take_parts(self, parts: Parts) -> None:
        """Continue with the parts of another membership."""
        self.parts = parts
        self.inodes = Inodes(parts)
        self.files = Files(parts, self.inodes, self._background)
        self.tree = Tree(parts, self.files)
        self.blocks = parts.blocks
        self.seal = parts.core.unstored.seal if parts.core.unstored is not None else None
        self.gates = parts.core.namespaces.gates
        if parts.delegations is not None:
            self.sections["delegations"] = parts.delegations.statistics
        self.sections["drain"] = parts.drain.statistics
        self.neighbourhood: Neighbourhood | None = None
        """this host among those that share the volume"""
        if parts.coherence is not None and parts.leases is not None:
            self.neighbourhood = Neighbourhood(
                parts.core, parts.coherence.member, parts.leases.view, parts.coherence.giving.reports
            )
            self.sections["coherence"] = parts.coherence.statistics
            self.sections["leases"] = parts.leases.statistics
            self.sections["reports"] = parts.coherence.giving.reports.statistics

    def hand_over(self) -> None:
        """Leave the volume to the next daemon: the end of this one stores everything, and keeps all that is this
        client's as it is. Called before that end."""
        self.parts.core.nodes.handover.leave()
        if self.parts.coherence is not None:
            self.parts.coherence.member.stay()

    def connect_kernel(self, kernel: KernelCache) -> None:
        """Connect the kernel's cache, which other hosts' changes invalidate."""
        self.parts.core.kernel.connect(kernel)

    @property
    def left_open(self) -> RestoredFiles:
        return RestoredFiles(self.parts)

    def begin_kernel_answers(
        self, attr_timeout: float, kept: KeptRows, add_handle: Callable[[int, Handle, int], bool]
    ) -> object | None:
        """What C may answer the kernel by; see `Door`. ``attr_timeout``: seconds for which it keeps attributes.
        ``kept``: see `KernelAnswers.begin`. ``add_handle``: as `OpenFiles.add_given`. It gets handles that C gave, once
        C does not know all of their files any more, and those of files that C was making when the former daemon ended.
        None: there is nothing that C may answer."""
        engine, names = self.parts.engine, self.parts.block_names
        if engine is None or names is None or engine.is_shared:
            return None

        def take_handles(ino: int) -> None:
            for fh, handle in names.files.open_blocks.take_over(ino):
                if not add_handle(fh, handle, 0):
                    names.files.open_blocks.release(handle)

        way = engine.begin_answers(attr_timeout, kept, take_handles)
        for fh, handle in names.files.take_over(is_all=True):
            if not add_handle(fh, handle, handle.unique):
                del handle.sketch.handles[handle]
        return way

    def end_kernel_answers(self) -> None:
        """C uses what is kept no more."""
        if self.parts.engine is not None:
            self.parts.engine.answers.end()

    def kernel_answers(self) -> dict[str, int]:
        """How many requests of each kind were answered in C; ``absent`` of them, and ``open_handles`` now."""
        return self.parts.engine.answers.statistics() if self.parts.engine is not None else {}

    @property
    def rows(self) -> RowApi | None:
        return self.parts.engine

    @property
    def search(self) -> SearchApi:
        return self.blocks.search

    @property
    def near(self) -> NearApi:
        return self.blocks.promotion

    def connect_neighbours(self, neighbours: Neighbours | None) -> None:
        """Connect the neighbours, which reads ask for blocks before the engine."""
        self.parts.core.reads.connect(neighbours)

    def is_known_to_kernel(self, ino: int) -> bool:
        """The kernel may have cached something of the inode. From any thread."""
        core = self.parts.core
        return ino == ROOT_INODE or core.places.known(ino) or ino < core.nodes.handover.known_below

    def path_of(self, ino: int) -> str:
        node = self.parts.core.nodes.get(ino)
        if ino == ROOT_INODE or node is None:
            return "/" if ino == ROOT_INODE else f"#{ino}"
        return "/" + os.fsdecode(self.parts.core.path_of(node))

    def _namespace_at(self, place: int) -> str | None:
        """The path of the namespace that a place of a profile is in; "?" where that is not in memory.

        None: it is one of the daemon's own files, which whoever looks at the profile reads.
        """
        if ROOT_INODE < place < FIRST_INODE:
            return None
        engine, node = self.parts.engine, self.parts.core.nodes.get(place)
        number = node.namespace if node is not None else ROOT if place == ROOT_INODE else None
        if engine is not None and number is None:
            written = engine.answers.door.find_written(place)  # the kernel wrote a block by this number
            table_place = split_inode(place)[0] if is_block(place) else written[0] if written is not None else -1
            table = engine.tables.all.get(table_place)
            number = table.namespace if table is not None else None
        return "?" if number is None else os.fsdecode(self.parts.names.folders.path_of(number))

    def space(self) -> Statfs:
        slabs, core = self.parts.core.slabs, self.parts.core
        if self.parts.leases is not None:
            free, file_count = self.parts.leases.space()
        else:
            free = slabs.free_bytes + slabs.pending_bytes + self.parts.journal.freeing_bytes
            file_count = core.file_count
        if core.blocks is not None:
            block_count, free_here = core.blocks.room()
            free, file_count = free + free_here, file_count + block_count
        inodes_free = core.metadata.inodes_free(file_count)
        return Statfs(core.geometry.data_size, free, file_count + inodes_free, inodes_free)

    async def sync(self) -> None:
        if not self.parts.core.read_only:
            self.parts.mapper.access.store_all()
            await self.parts.journal.sync()

    def stats(self) -> dict[str, Any]:
        core = self.parts.core
        slabs = core.slabs.statistics()
        counters, answered = dataclasses.asdict(core.counters), self.kernel_answers()
        counters["lookups"] += answered.get("lookup", 0)
        counters["absent_lookups"] += answered.get("absent", 0)
        return {
            "volume": core.superblock.volume_id.hex(),
            "degraded": core.health.rows(),
            "uptime": round(time.time() - self._opened, 3),
            "counters": counters,
            "records": {**dataclasses.asdict(core.records.counters), "round_trips": core.records.counters.round_trips},
            "segments": {
                **dataclasses.asdict(core.segments.counters),
                "moved_slots": self.parts.journal.flusher.elsewhere.moved,
                "resting_slots": self.parts.journal.flusher.elsewhere.resting,
                "owed_heads": self.parts.journal.flusher.headers.owed,
            },
            "journal": dataclasses.asdict(self.parts.journal.counters),
            "blocks": self.blocks.statistics(),
            "store": core.blocks.statistics() if core.blocks is not None else None,
            "block_files": self._block_files(),
            "tier": core.tier.statistics()._asdict(),
            **{name: section() for name, section in self.sections.items()},
            "memory": {
                "nodes": len(core.nodes),
                "known_inodes": len(core.places),
                "staged_bytes": self.parts.journal.flusher.staged_bytes,
                "unstored_bytes": core.unstored.size if core.unstored is not None else 0,
            },
            "slabs": {**slabs._asdict(), "classes": [row._asdict() for row in slabs.classes]},
            "metadata": {"bytes": core.metadata.size, "limit": core.metadata.limit},
            "namespaces": [self._describe(namespace) for namespace in core.namespaces.all.values()],
            "capacity": core.geometry.capacity,
            "slab_size": core.geometry.slab_size,
        }

    def _block_files(self) -> dict[str, int] | None:
        return self.parts.block_names.files.statistics() if self.parts.block_names is not None else None

    def _describe(self, namespace: Namespace) -> dict[str, Any]:
        """Number, path, settings, use (of all hosts, and this one's part) and counters of a namespace.

        The root's use is the volume's.
        """
        core, number, space = self.parts.core, namespace.number, self.space()
        used, here = core.namespaces.accounts.use_of_hosts(number), core.namespaces.accounts.use(number)
        segments_tier: SegmentsTier = "remote" if core.records.limits.shared else "disk"
        measures, size, count, figures = core.namespaces.measures[number], 0, 0, None
        if core.blocks is not None:
            size, count = core.blocks.use(number)
            if core.blocks.is_block_namespace(number):
                figures = core.blocks.describe(number, measures.unread, segments_tier)
            used = here = NamespaceUse(used.size + size, used.files + count)
        if number == ROOT:
            used = here = NamespaceUse(space.size - space.free, space.files - space.files_free)
        return {
            "number": number,
            "path": os.fsdecode(self.parts.names.folders.path_of(number)),
            "settings": namespace.settings.shown,
            "used": {"bytes": used.size, "files": used.files, "blocks": count, "block_bytes": size},
            "used_here": {"bytes": here.size, "files": here.files},
            "capacity": min(core.namespaces.accounts.limit(number, "capacity") or space.size, space.size),
            "measures": measures.statistics(),
            "compression": self.parts.compression_of(namespace),
            "cache": figures,
        }

    def stats_of(self, uid: int) -> dict[str, object]:
        return {name: section(uid) for name, section in self.user_sections.items()}
