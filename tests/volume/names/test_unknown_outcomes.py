"""A change of a name whose commit happened, without its host hearing so: never is the answer that nothing happened.

"Not found" of a removal, or "exists" of a creation, would say that the caller's own change was another's.
"""

from __future__ import annotations

import os
import random
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass

import inside
import pytest
import trio
import trio.testing
from shared_lab import as_by_path, make, names_in, quiet, until, volumes
from volume_lab import CALLER, Chaos, Disk, lab_options

from kvfuse import errors
from kvfuse.volume.api import RENAME_EXCHANGE, RENAME_NOREPLACE, ROOT_INODE
from kvfuse.volume.store import schema
from kvfuse.volume.volume import Volume

COMMITS_MAX = 4
"""of one change, with what it prepares"""


@dataclass
class LosesAnswer(Chaos):
    """The outcome of one commit is not told, though it happened."""

    wanted: int = 0
    """how many commits from now that one is; 0: none"""
    then: Callable[[], None] = lambda: None
    """what happens just after it"""

    def fails(self, probability: float) -> bool:
        if not probability or not self.wanted:  # else this is after a commit
            return False
        self.wanted -= 1
        if not self.wanted:
            self.then()
        return not self.wanted


async def create(volume: Volume) -> None:
    handle, _ = await volume.tree.create(ROOT_INODE, b"new", 0o644, CALLER, os.O_RDWR | os.O_EXCL)
    await volume.files.release(handle)


async def delete(volume: Volume) -> None:
    """Through a ring."""
    if await volume.blocks.delete(ROOT_INODE, [b"file"]) == [0]:
        raise errors.NotFound("file")


def rename(name: bytes, to: bytes, flags: int = 0) -> Callable[[Volume], Awaitable[object]]:
    return lambda volume: volume.tree.rename(ROOT_INODE, name, ROOT_INODE, to, flags)


async def link(volume: Volume) -> None:
    node = await volume.tree.lookup(ROOT_INODE, b"file")
    await volume.tree.link(node.ino, ROOT_INODE, b"new")


CHANGES: dict[str, tuple[Callable[[Volume], Awaitable[object]], set[bytes]]] = {
    "unlink": (lambda volume: volume.tree.unlink(ROOT_INODE, b"file"), {b"folder", b"other"}),
    "delete": (delete, {b"folder", b"other"}),
    "rmdir": (lambda volume: volume.tree.remove_directory(ROOT_INODE, b"folder"), {b"file", b"other"}),
    "rename": (rename(b"file", b"new", RENAME_NOREPLACE), {b"folder", b"new", b"other"}),
    "replace": (rename(b"file", b"other"), {b"folder", b"other"}),
    "exchange": (rename(b"file", b"folder", RENAME_EXCHANGE), {b"file", b"folder", b"other"}),
    "rename of a folder": (rename(b"folder", b"new"), {b"file", b"new", b"other"}),
    "create": (create, {b"file", b"folder", b"new", b"other"}),
    "mkdir": (
        lambda volume: volume.tree.make_directory(ROOT_INODE, b"new", 0o755, CALLER),
        {b"file", b"folder", b"new", b"other"},
    ),
    "symlink": (
        lambda volume: volume.tree.make_symlink(ROOT_INODE, b"new", b"target", CALLER),
        {b"file", b"folder", b"new", b"other"},
    ),
    "link": (link, {b"file", b"folder", b"new", b"other"}),
}


@pytest.mark.parametrize("loses_lease", [False, True], ids=["", "lease lost"])
@pytest.mark.parametrize("strict", [True, False], ids=["strict", "relaxed"])
@pytest.mark.parametrize("kind", CHANGES)
@pytest.mark.parametrize("commit", range(1, COMMITS_MAX + 1))
async def test_a_change_that_happened_is_not_told_as_one_that_did_not(
    commit: int, kind: str, strict: bool, loses_lease: bool, rng: random.Random, autojump_clock: trio.testing.MockClock
) -> None:
    """Whichever of its commits it is. The kernel walks the path once more where it is told to."""
    change, names = CHANGES[kind]
    options = lab_options(strict=strict)
    disk = Disk.format(options, shared=True)
    losing = LosesAnswer(random.Random(rng.random()), commit_error_after=1.0)
    if loses_lease:
        losing.then = lambda: disk.apply({}, [schema.member_key(1)])
    async with volumes(disk, options, 2, rng, [losing, Chaos(random.Random(rng.random()))]) as (one, two):
        await make(one, b"file")
        await make(one, b"other")
        await one.tree.make_directory(ROOT_INODE, b"folder", 0o755, CALLER)
        await quiet(one, two)
        before = set(await names_in(two))
        losing.wanted = commit
        try:
            await as_by_path(lambda: change(one))
            is_told = True
        except errors.EngineError:
            is_told = False
        is_lost, losing.wanted = loses_lease and not losing.wanted, 0
        if is_lost:
            if inside.client(one) == 1:  # else it has heard of it already
                with suppress(errors.EngineError):
                    await make(one, b"hears of it")
            await until(lambda: inside.client(one) != 1)
        await quiet(one, two)
        after = set(await names_in(two))
        assert after == set(await names_in(one))
        if is_lost and not strict and is_told:
            assert after in (names, before)  # not stored yet when the lease was lost
        else:
            assert after == names or (not is_told and after == before)
        assert await make(one, b"after")  # the host goes on
