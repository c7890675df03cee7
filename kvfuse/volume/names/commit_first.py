"""Executes plans in the record store first, as one transaction each, because other hosts change names, too.

In strict folders, and for every change of a directory or of more than one name, a change is one `Transaction` that
expects every record by which it was decided: it happens for all hosts in one step, or it is planned again. In relaxed
folders the journal publishes three changes later: new regular files, their first names as long as the store does not
have them, and the removal of a regular file's only name, by itself or by a new file that takes it. So a file that the
store has, or is about to have, never has another place in memory: its rename waits for the store.

A strict folder that is delegated to this host (`delegations`) is like a relaxed one to files that are created: the
journal publishes them, with the close at the latest.

The first attempt plans from memory, which a watch keeps current: mostly the commit is the only round trip. After a
refused one, or instead of one that would fail, the executor reads the store: every error that a caller gets was read
there.

Nothing checks an answer without a commit: an error, or the success of a rename between two names of one inode, which
does nothing. Several reads that follow each other may show what never was at one moment: if another host renames the
source between the reads of both names, both mean one inode. So before such an answer the executor reads the versions
of these names at one moment: if they are those that it used, the answer is right at that moment.

A commit that adds a name to a directory expects the directory's record. A host that removes a directory first puts a
mark into that record, checks that the directory is empty, and deletes the record, expecting the marked version. So the
check sees a name that was added before the mark, and a later one has to clear the mark, so the removal conflicts. A
mark that is left behind is harmless.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

import trio

from kvfuse import errors
from kvfuse.remote.records.api import ABSENT
from kvfuse.volume.api import ROOT_INODE
from kvfuse.volume.commit.journal import Journal
from kvfuse.volume.inodes.core import Core
from kvfuse.volume.inodes.node import Node
from kvfuse.volume.names.apply_first import ApplyFirst
from kvfuse.volume.names.lookup import Found
from kvfuse.volume.names.name_change import PlanDraft
from kvfuse.volume.names.path_beliefs import Moved, outlive_beliefs
from kvfuse.volume.names.plans import End, Fits, NamePlace, Plan, Planning, never, tell_decision
from kvfuse.volume.names.shared_lookup import SharedLookup, check_name, expected_names_max
from kvfuse.volume.slots.space import RoomFinder
from kvfuse.volume.store import schema
from kvfuse.volume.views import clock

ATTEMPTS_MAX = 100
"""Attempts of a change whose transactions are refused. Each refusal means that another change succeeded."""
PAUSE_SECONDS = 0.002
"""Longest pause after the first refusal; random, and growing to sixteen times that."""


class _Unfit(Exception):
    """The change must not be published later."""


@dataclass
class CommitFirst:
    """Executes plans in the store; `Names` of a shared volume has one. ``later``: executes changes to publish later."""

    core: Core
    journal: Journal
    space: RoomFinder
    lookup: SharedLookup
    later: ApplyFirst

    def __post_init__(self) -> None:
        self.delegations = self.lookup.delegations

    async def carry_out(
        self, places: Sequence[NamePlace], planning: Planning, fits: Fits = never, node: Node | None = None
    ) -> Plan:
        """Plan a change and execute it. ``fits``: in relaxed folders the journal may publish it later, see `Fits`."""
        if fits is not never:
            with suppress(_Unfit):
                return await self._carry_out_later(places, planning, fits)
        plan = await self._retry_until_committed(places, planning, node)
        if plan.made is not None and plan.made.is_file and self.lookup.is_strict(plan.ends[0].directory):
            self.delegations.note_create(plan.ends[0].directory)
        if self._changes_paths(plan):
            await outlive_beliefs()
        return plan

    async def _carry_out_later(self, places: Sequence[NamePlace], planning: Planning, fits: Fits) -> Plan:
        """Execute a change in memory, where that is enough, see the module. _Unfit: it is not."""

        def fitting(*ends: End) -> Plan:
            if not fits(*ends):
                raise _Unfit
            return planning(*ends)

        delegation = 0
        if not await self._are_relaxed(places):
            is_creation = len(places) == 1 and places[0].is_entered
            delegation = self.delegations.holds(places[0].parent) if is_creation else 0
            if not delegation:
                raise _Unfit
        plan = await self.later.plan_later(places, fitting)
        if delegation:
            if self.delegations.holds(places[0].parent) != delegation:  # another host has asked for it
                raise _Unfit
            self.delegations.note_create(plan.ends[0].directory)
            self.delegations.note_created(plan.node)
        self.later.apply(plan)
        return plan

    async def publish(self, directory: Node, nodes: Sequence[Node]) -> None:
        """Return when no host uses the former state of these inodes. Changes by a transaction need no commit."""
        pending = [node for node in nodes if node.nlink and (node.changed or node.committing or not node.stored)]
        if pending and not self._is_published_later(directory, nodes):
            await self.journal.commit(*pending)
        if directory in nodes:  # its own attributes
            await outlive_beliefs()

    def _is_published_later(self, directory: Node, nodes: Sequence[Node]) -> bool:
        """These are new files that are open for writing, in a delegated folder: the close commits them."""
        if not all(node.writers and not node.version and not node.committing for node in nodes):
            return False
        return self.delegations.holds(directory.ino) > 0 and not self.journal.pending.load.is_crowded(nodes[0].uid)

    async def plan_later(self, places: Sequence[NamePlace], planning: Planning) -> Plan:
        """Make a plan, in a relaxed folder, that is valid until the next await; see `ApplyFirst.plan_later`."""
        for place in places:
            await self._find_directory(place, is_fresh=False)
        return await self.later.plan_later(places, planning)

    async def _are_relaxed(self, places: Sequence[NamePlace]) -> bool:
        for place in {place.parent: place for place in places}.values():
            if self.lookup.is_strict(await self._find_directory(place, is_fresh=False)):
                return False
        return True

    def _changes_paths(self, plan: Plan) -> bool:
        """The plan removes or moves a directory, whose former name other hosts may use unchecked for a while."""
        moved = [node for node in plan.means if plan.is_move and node is not None and node.is_directory]
        return (moved or plan.removed is not None) and any(self.lookup.is_strict(end.directory) for end in plan.ends)

    # -- planning ------------------------------------------------------------------------------------

    async def _retry_until_committed(self, places: Sequence[NamePlace], planning: Planning, node: Node | None) -> Plan:
        """Plan a change and commit it, until the store accepts it. EngineError after `ATTEMPTS_MAX`."""
        for attempt in range(ATTEMPTS_MAX):
            draft = self._begin_draft()
            try:
                plan = await self._draft_plan(draft, places, planning, node, is_fresh=attempt > 0)
            except (errors.EngineError, Moved):
                raise
            except errors.OperationError as error:  # one name that does not exist decides alone
                if attempt and (isinstance(error, errors.NotFound) or await self._is_current(draft)):
                    raise
                continue
            if plan.means:
                tell_decision(plan)
            if draft.is_empty:
                is_done = await self._is_current(draft)
            else:
                is_done = not draft.is_stale and await self._commit(plan, draft)
            if is_done:
                return plan
            await trio.sleep(random.random() * PAUSE_SECONDS * min(1 + attempt, 16))
        raise errors.EngineError(f"{places[0].name!r}: others changed the same names {ATTEMPTS_MAX} times in a row")

    async def _is_current(self, draft: PlanDraft) -> bool:
        """The store has the versions that the draft expects so far. EngineError."""
        keys = list(draft.expected)
        rows = await self.core.records.get(keys) if keys else []
        versions = [row.version if row is not None else ABSENT for row in rows]
        return not draft.is_stale and versions == list(draft.expected.values())

    async def _draft_plan(
        self,
        draft: PlanDraft,
        places: Sequence[NamePlace],
        planning: Planning,
        node: Node | None,
        *,
        is_fresh: bool,
    ) -> Plan:
        """Draft a change. ``is_fresh``: read all that it depends on from the store."""
        if node is not None:
            await self._commit_pending(node)
            if is_fresh:
                await self.lookup.refresher.renew(node)
        ends = await self._look_up(places, draft, is_fresh)
        plan = planning(*ends)
        gone = plan.unlinked
        if gone is not None and (is_fresh or gone.committing):  # its removal takes its other changes along
            await self._commit_pending(gone)
        if any(end.found.node is not None for end in ends):
            for directory in dict.fromkeys([end.directory.ino for end in ends]):
                draft.expect_all(await self.lookup.find_path_versions(directory, is_fresh))
        if plan.removed is not None:
            draft.expect_name(ends[-1])
            await self.mark_empty(plan.removed)  # no await after it: news of a name in it would pass for the mark
        draft.add(plan, clock.now())
        return plan

    async def _look_up(self, places: Sequence[NamePlace], draft: PlanDraft, is_fresh: bool) -> list[End]:
        """Look up the places. Expects the directories above the target of a moved directory, so that none moves."""
        directories = [await self._find_directory(place, is_fresh) for place in places]
        ends = []
        for directory, place in zip(directories, places, strict=True):
            check_name(place.name)
            ends.append(End(directory, place.name, await self._find_name(place.parent, place.name, is_fresh)))
        if len(ends) == 1:
            return ends
        await self._commit_pending(*[end.found.node for end in ends if end.found.node is not None])
        for end in ends:
            draft.expect_name(end)
        for number, coming in enumerate(reversed([end.found.node for end in ends])):
            if places[number].is_entered and coming is not None and coming.is_directory:
                ends[number].above = await self._expect_above(directories[number], draft, is_fresh)
        return ends

    async def _expect_above(self, directory: Node, draft: PlanDraft, is_fresh: bool) -> list[Node]:
        above: list[Node] = []
        most = expected_names_max(self.core.records.limits)
        while directory.ino != ROOT_INODE:
            if len(above) == most:
                raise errors.TooDeep(f"a directory of a shared volume cannot be moved below {most} others: copy it")
            if is_fresh:
                await self._commit_pending(directory)
                await self.lookup.refresher.renew(directory)
            draft.expect_inode(directory)
            above.append(directory)
            directory = await self.lookup.find_node(directory.parent or ROOT_INODE)
        return above

    async def renew_node(self, node: Node) -> None:
        """Commit an inode's pending changes, then read it from the store. Stale, EngineError."""
        await self._commit_pending(node)
        await self.lookup.refresher.renew(node)

    async def _commit_pending(self, *nodes: Node) -> None:
        """Commit pending changes of these inodes, because a transaction is built from their stored records."""
        changed = [node for node in nodes if node.nlink and (node.changed or node.committing or not node.version)]
        if changed:
            await self.journal.commit(*changed)

    async def _find_directory(self, place: NamePlace, is_fresh: bool) -> Node:
        """The directory of a place. NotFound: it was removed, and a name is to be added."""
        ino = place.parent
        directory = await self.lookup.find_directory(ino)
        if not place.is_entered:
            return directory
        if is_fresh:
            await self.delegations.await_names(ino)
        await self._commit_pending(directory)
        try:
            if directory.nlink == 0:
                raise errors.NotFound(f"directory {ino} was removed")
            while is_fresh or directory.flags & schema.FLAG_LEAVING:
                await self.lookup.refresher.renew(directory)
                if not directory.flags & schema.FLAG_LEAVING or await self._mark(directory, leaving=False):
                    break
        except errors.Stale:
            raise errors.NotFound(f"directory {ino} was removed") from None
        return directory

    async def _find_name(self, parent: int, name: bytes, is_fresh: bool) -> Found:
        """The stored inode of a name, from memory unless ``is_fresh``. Commits a pending change of the name first."""
        while True:
            change = self.core.dentries.get(parent, name).change
            if change is not None:
                await self.journal.commit(*[node for node in (change.node, change.moved) if node is not None])
                continue
            found = None if is_fresh else self.lookup.find_known(parent, name)
            if found is None and not is_fresh:
                return Found(None, False, None, self.journal.pending.epoch)
            if found is None or (found.node is not None and not found.version):
                found = await self.lookup.find_shared(parent, name, is_fresh=True)
            if found.change is None:
                return found

    def _begin_draft(self) -> PlanDraft:
        return PlanDraft(self.core.client, self.core.dentries.delegated)

    # -- removing directories ------------------------------------------------------------------------

    async def mark_empty(self, directory: Node) -> None:
        """Mark an empty directory: it may be removed while it has the mark, which new names clear. NotEmpty."""
        await self._commit_pending(directory)
        await self._check_empty(directory)
        while True:
            marked = await self._mark(directory, leaving=True)
            if marked:
                await self.delegations.await_names(directory.ino)
                await self._check_empty(directory)
                if directory.version == marked:
                    return
            await self.lookup.refresher.renew(directory)

    async def _check_empty(self, directory: Node) -> None:
        """NotEmpty, unless the directory is empty in the store. Commits pending removals of its names first."""
        while changes := self.core.dentries.changes_in(directory.ino):
            if any(change.node is not None for change in changes.values()):
                break
            await self.journal.commit(*self.journal.pending.find_changed_in(directory.ino))
        if not await self.lookup.is_empty(directory.ino):
            raise errors.NotEmpty(f"directory {directory.name!r} is not empty")

    async def _mark(self, directory: Node, *, leaving: bool) -> int:
        """Set or clear the mark of a directory that is about to be removed.

        Returns the version of the record then; 0: it has changed meanwhile, and nothing was done.
        """
        draft = self._begin_draft()
        change = draft.change_inode(directory)
        flag = schema.FLAG_LEAVING
        change.set_fields(flags=change.record.flags | flag if leaving else change.record.flags & ~flag)
        marked = [0]
        await self.journal.transact(draft.make_transaction(marked.append))
        return marked[-1]

    # -- committing ----------------------------------------------------------------------------------

    async def _commit(self, plan: Plan, draft: PlanDraft) -> bool:
        """Commit the draft. False: the store refused it. NoSpace: there is no room for the records. EngineError."""
        made, is_done = plan.made, False
        give_back = await self._reserve_file(made)
        transaction = replace(draft.make_transaction(partial(self._apply_commit, plan, draft)), refused=give_back)
        size = max(0, transaction.size)
        try:
            while await self.space.wait_for_records(size, f"{plan.ends[-1].name!r}"):
                pass  # the store refuses the commit if other callers changed the names during the wait
        except BaseException:
            give_back()
            raise
        self.lookup.follow_changed(draft)
        if made is not None and made.is_directory:
            self.core.dentries.directory_made(made.ino)  # before others can put names into it
        added = [(parent, name) for parent, name, meant in draft.names if meant is not None]
        try:
            with self.core.metadata.held(size), self.delegations.adding(added):
                is_done = await self.journal.transact(transaction)
        finally:
            if made is not None and not is_done:
                self.core.dentries.directory_removed(made.ino)
        return is_done

    async def _reserve_file(self, made: Node | None) -> Callable[[], None]:
        """Count a new file before the store has it. Returns a function that undoes this. QuotaExceeded, EngineError."""
        if made is None or not made.is_file or not made.namespace:
            return lambda: None
        accounts, number = self.core.namespaces.accounts, made.namespace
        await self.space.wait_for_file(number)
        accounts.add_files(number, 1)
        account = accounts.all.get(number)

        def give_back() -> None:
            if accounts.all.get(number) is account:  # else the namespace ended, with its counts
                accounts.add_files(number, -1)

        return give_back

    def _apply_commit(self, plan: Plan, draft: PlanDraft, version: int) -> None:
        """Apply the stored change to memory."""
        core, made = self.core, plan.made
        if made is not None:
            made.times_version = version if made.is_directory else 0
            # Another call may have looked the name up before the answer arrived.
            plan.node = core.nodes.get(made.ino) or core.nodes.add(made)
            core.file_count += 1
            core.counters.creates += 1
        crosses = plan.linked is not None or plan.ends[0].directory is not plan.ends[-1].directory
        for parent, name, meant in draft.names:
            if crosses and meant is not None and meant is not made:
                core.readers_change(meant)
            self._apply_name(parent, name, meant, version, is_made=made is not None)
        for node in draft.removed:
            self._note_removed(node)

    def _apply_name(self, parent: int, name: bytes, node: Node | None, version: int, *, is_made: bool) -> None:
        core = self.core
        if core.dentries.get(parent, name).version > version:
            return  # another host has changed it again, and it was read since
        core.dentries.note_stored(parent, name, node is not None)
        core.dentries.note(parent, name, node.ino if node is not None else 0, version)
        if node is not None:
            core.places.set(node.ino, parent, name)
            self.lookup.paths.note_moved(node, parent, name)
            if node.is_directory and not is_made:  # its times have a record of their own
                node.ctime = clock.now()
                self.journal.pending.touch_times(node)
        directory = core.nodes.get(parent)
        if directory is not None:
            self.later.touch_entries(directory)

    def _note_removed(self, node: Node) -> None:
        """Note that the store has removed the last name of an inode."""
        self.core.file_count -= 1
        if node.is_file and node.namespace:
            self.core.namespaces.accounts.add_files(node.namespace, -1)
        self.core.tier.drop(node.ino)
        if node.is_directory:
            self.core.tier.retire([node.ino])
            self.core.dentries.directory_removed(node.ino)
            self.delegations.note_removed(node.ino)
            if node.namespace == node.ino:
                self.core.namespaces.remove(node.ino, at_once=True)
            node.reaped = True
            self.journal.pending.loose.withdraw_attributes(node)
            if node.flags & schema.FLAG_XATTRS:
                self.journal.refusals.to_free.add(node.ino)
            if not self.core.places.known(node.ino):  # else a process may be in it
                self.core.nodes.drop(node)
        else:
            self.journal.refusals.note_removed(node)
