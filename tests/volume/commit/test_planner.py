"""A plan of a commit changes nothing of what it is made of: the same is planned as often as one asks."""

from __future__ import annotations

import os
from dataclasses import replace

import inside
import trio.testing
from volume_lab import CALLER, Disk, lab_options, opened

from kvfuse.remote.records.lmdb.store import LIMITS
from kvfuse.volume.api import ROOT_INODE
from kvfuse.volume.commit.batch import Batch
from kvfuse.volume.commit.planner import Planner
from kvfuse.volume.volume import Volume


async def change_much(volume: Volume) -> None:
    """New files, one renamed and one removed; a commit has none of it yet."""
    for name in (b"kept", b"renamed", b"removed"):
        handle, _ = await volume.tree.create(ROOT_INODE, name, 0o644, CALLER, os.O_RDWR)
        await volume.files.write(handle, 0, name * 3000)
        await volume.files.release(handle)
    await inside.journal(volume).flusher.flush(list(inside.journal(volume).pending.dirty))
    await volume.tree.rename(ROOT_INODE, b"renamed", ROOT_INODE, b"other", 0)
    await volume.tree.unlink(ROOT_INODE, b"removed")


async def test_a_draft_changes_nothing(autojump_clock: trio.testing.MockClock) -> None:
    async with opened(Disk.format(lab_options()), lab_options()) as volume:
        await change_much(volume)
        journal = inside.journal(volume)
        pending, planner = journal.pending, Planner(journal.pending, journal.terms)
        before = dict(pending.dirty), dict(pending.names), dict(pending.gone), dict(pending.loose.changes)
        first, second = planner.draft_all(set()), planner.draft_all(set())
        assert first.puts
        assert (first.puts, first.deletes, first.slabs) == (second.puts, second.deletes, second.slabs)
        assert before == (pending.dirty, pending.names, pending.gone, pending.loose.changes)


async def test_a_draft_of_some_has_the_oldest(autojump_clock: trio.testing.MockClock) -> None:
    limits = replace(LIMITS, commit_operations_max=16)
    async with opened(Disk.format(lab_options()), lab_options(), limits=limits) as volume:
        journal = inside.journal(volume)
        pending, planner = journal.pending, Planner(journal.pending, journal.terms)
        await change_much(volume)
        for number in range(20):
            handle, _ = await volume.tree.create(ROOT_INODE, b"%d" % number, 0o644, CALLER, os.O_RDWR)
            await volume.files.release(handle)
        batch = Batch()
        draft = planner.draft_some(batch)
        left = [node for node in pending.dirty if node in batch.late]
        assert draft.nodes
        assert left
        assert {*draft.nodes, *left} == set(pending.dirty)
        assert batch.left_serial is not None
        assert max(pending.dirty[node] for node in draft.nodes) < min(pending.dirty[node] for node in left)
