"""Executes plans in memory first; the next commit of the journal stores them.

A volume of one host executes all changes so, a shared volume some changes of regular files in relaxed folders. The
executor reads what a plan needs, which may wait; then it checks the ends again, and applies the plan with no await
between. It locks no name and no directory: no caller waits for another caller's change of one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvfuse import errors
from kvfuse.volume.api import ROOT_INODE
from kvfuse.volume.commit.journal import Journal
from kvfuse.volume.inodes.core import Core, put_directory
from kvfuse.volume.inodes.node import Node
from kvfuse.volume.names.lookup import Lookup
from kvfuse.volume.names.nameless import Nameless
from kvfuse.volume.names.plans import End, Fits, NamePlace, Plan, Planning, never, tell_decision
from kvfuse.volume.slots.space import RoomFinder
from kvfuse.volume.views import clock
from kvfuse.volume.views.handover import DECIDED


@dataclass
class ApplyFirst:
    """Executes plans in memory. `Names` has one."""

    core: Core
    journal: Journal
    space: RoomFinder
    lookup: Lookup
    nameless: Nameless

    async def carry_out(
        self, places: Sequence[NamePlace], planning: Planning, fits: Fits = never, node: Node | None = None
    ) -> Plan:
        """Plan a change of these places, and execute it. NoSpace: there is no room for the records.

        ``node``: an inode that the change concerns, and that has none of the places.
        """
        plan = await self.plan_later(places, planning)
        self.apply(plan)
        return plan

    async def plan_later(self, places: Sequence[NamePlace], planning: Planning) -> Plan:
        """Make a plan, with room for its records, that is valid until the next await. Errors of the plan; NoSpace."""
        nodes, dentries, pending = self.core.nodes, self.core.dentries, self.journal.pending
        while True:
            seen = dentries.noted, pending.epoch
            ends: list[End] = []
            meets_directory = False
            for place in places:
                directory = nodes.get(place.parent)
                if directory is None or not directory.is_directory:
                    directory = await self.lookup.find_directory(place.parent)
                found = await self.lookup.find_name(place.parent, place.name)
                meets_directory |= found.node is not None and found.node.is_directory
                ends.append(End(directory, place.name, found))
            if meets_directory and len(ends) > 1:
                await self._look_up_above(places, ends)
            plan = planning(*ends)
            is_new = len(ends) == 1 or seen == (dentries.noted, pending.epoch)
            if (is_new and self._is_ready(plan)) or not await self._wait_for_needs(plan):
                return plan

    async def publish(self, directory: Node, nodes: Sequence[Node]) -> None:
        """Return when the store has the changes of these inodes, for a strict folder. EngineError."""
        await self.journal.commit(*nodes, strict=True)

    # -- before --------------------------------------------------------------------------------------

    async def _look_up_above(self, places: Sequence[NamePlace], ends: list[End]) -> None:
        """Look up the directories above a directory into which another one is moved."""
        for here, there in ((0, 1), (1, 0)):
            coming = ends[there].found.node
            if places[here].is_entered and coming is not None and coming.is_directory:
                ends[here].above = await self._list_above(ends[here].directory)

    async def _list_above(self, directory: Node) -> list[Node]:
        above = []
        while directory.ino != ROOT_INODE:
            above.append(directory)
            directory = await self.lookup.find_node(directory.parent or ROOT_INODE)
        return above

    def _is_ready(self, plan: Plan) -> bool:
        """The plan can be applied without a wait."""
        if plan.removed is not None or (plan.unlinked is not None and self.nameless.needs_loading(plan.unlinked)):
            return False
        tied = self.journal.find_tied([end.found.node for end in plan.ends])
        if (plan.node.namespace or self.core.namespaces.accounts.root_blocks) and self._is_full(plan):
            return False
        return tied is None and self.core.metadata.fits(plan.weight)

    def _is_full(self, plan: Plan) -> bool:
        """The plan adds a file to a namespace that may have no more."""
        made, unlinked, namespace = plan.made, plan.unlinked, plan.node.namespace
        if made is None or not made.is_file or (unlinked is not None and unlinked.is_file and unlinked.nlink == 1):
            return False
        return self.core.namespaces.accounts.is_full(namespace)

    async def _wait_for_needs(self, plan: Plan) -> bool:
        """Wait for the plan's needs. False: its ends have not changed meanwhile."""
        ends, removed = plan.ends, plan.removed
        lost = plan.unlinked or removed
        if lost is not None and self.nameless.needs_loading(lost):
            await self.nameless.load(lost)
            return True
        if removed is not None:
            await self._check_empty(removed)
        tied = self.journal.find_tied([end.found.node for end in ends])
        if tied is not None:
            await self.journal.commit(*tied)
            return True
        if self._is_full(plan):
            await self.space.wait_for_file(plan.node.namespace)
            return True
        if not self.core.metadata.fits(plan.weight):
            what = f"{ends[-1].name!r} in directory {ends[-1].directory.ino}"
            return await self.space.wait_for_records(plan.weight, what)
        return not all(self.lookup.is_valid(end.directory.ino, end.name, end.found) for end in ends)

    async def _check_empty(self, directory: Node) -> None:
        """NotEmpty, unless the directory is empty, also in the store. Commits names that were moved out of it."""
        moved = [change.moved for change in self.core.dentries.changes_in(directory.ino).values()]
        leaving = [node for node in moved if node is not None and (node.writers or node.staged_count)]
        if leaving:  # inodes whose commit may yet have to wait for bytes
            await self.journal.commit(*leaving)
        if not await self.lookup.is_empty(directory.ino):
            raise errors.NotEmpty(f"directory {directory.name!r} is not empty")

    # -- in memory -----------------------------------------------------------------------------------

    def apply(self, plan: Plan) -> None:
        """Execute the plan in memory, and mark its changes for the journal. EngineError: the membership is over."""
        if not plan.means:
            return
        if DECIDED.get() is not None:
            tell_decision(plan)
        pending, unlinked, meant = self.journal.pending, plan.unlinked, None
        if plan.made is not None:
            self._add_node(plan.made)
        elif plan.linked is not None:
            self._link_node(plan.linked)
        for end, meant in zip(plan.ends, plan.means, strict=True):
            found, directory = end.found, end.directory
            was = found.node
            if meant is not None and self.core.blocks is not None:
                if meant.is_directory:
                    self.core.blocks.note_directories(directory.ino, directory.namespace, [end.name])
                else:
                    self.core.blocks.note_file(directory.ino, directory.namespace, end.name)
            leaves = was if was is unlinked else None
            moved = was if meant is None else None
            pending.set_name(directory.ino, end.name, meant, found.stored, moved, found.version, leaves)
            directory.mtime = directory.ctime = clock.now()
            pending.touch_times(directory)
        for directory, more in plan.counts:
            directory.nlink += more
            pending.touch(directory)
        if unlinked is not None:
            self._unlink_node(unlinked, meant)
        elif plan.removed is not None:
            plan.removed.nlink = 0
            self.nameless.note_removed(plan.removed)
        if plan.is_move:
            self._note_places(plan)
        if plan.weight:
            self.core.metadata.reserve(plan.node, plan.weight)

    def _add_node(self, node: Node) -> None:
        """Add a new inode."""
        core = self.core
        core.nodes.add(node)
        core.file_count += 1
        core.counters.creates += 1
        if node.namespace and node.is_file:
            core.namespaces.accounts.add_files(node.namespace, 1)
        if node.own_record:
            self.journal.pending.touch_times(node)
            core.dentries.directory_made(node.ino)
        self.journal.pending.touch(node)

    def _link_node(self, node: Node) -> None:
        """Add a name to a file. Its record moves from the only name, which becomes a reference, to a key of its own."""
        if not node.own_record:
            node.own_record = True
            self.journal.pending.set_name(node.parent, node.name, node, node.stored or node.committing)
        node.forget_copy()
        node.nlink += 1
        node.ctime = clock.now()
        self.journal.pending.touch(node, forced=True)

    def _unlink_node(self, node: Node, heir: Node | None) -> None:
        """Remove a name from a file. ``heir``: the file that has the name now, or None."""
        node.nlink -= 1
        node.ctime = clock.now()
        if not node.nlink:
            self.nameless.note_removed(node, heir)
            return
        self.journal.pending.touch(node, forced=True)
        if heir is not None:
            self.journal.pending.tie(heir, node)

    def _note_places(self, plan: Plan) -> None:
        """Note the new places of renamed inodes."""
        crosses = plan.ends[0].directory is not plan.ends[1].directory
        for end, node in zip(plan.ends, plan.means, strict=True):
            if node is None:
                continue
            if crosses:
                node.forget_copy()
            elif node.ino in self.core.tier.kept:
                self.core.tier.renamed(node.ino)
            if node.is_directory:
                put_directory(self.core, node, end.directory.ino)
            node.parent, node.name = end.directory.ino, end.name
            node.ctime = clock.now()
            self.core.places.set(node.ino, node.parent, node.name)
            self.journal.pending.touch(node, forced=True)
            if node.is_directory:
                self.journal.pending.touch_times(node)
        if plan.means[0] is not None:
            self.journal.pending.tie(plan.node, plan.means[0])

    def touch_entries(self, directory: Node) -> None:
        """Update the directory's times after a change of its entries."""
        directory.mtime = directory.ctime = clock.now()
        self.journal.pending.touch_times(directory)
