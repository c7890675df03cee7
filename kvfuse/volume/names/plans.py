"""What a change of names does, planned from what the names mean now: the rules of POSIX stand here. Nothing waits.

An executor looks at the ends, has one of these functions plan, and carries the plan out: in memory first
(`apply_first`), or in the record store first (`commit_first`). Link counts follow from the names.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from kvfuse import errors
from kvfuse.volume.api import LINK_MAX, RENAME_EXCHANGE, RENAME_NOREPLACE, SYMLINK_MAX, Caller
from kvfuse.volume.inodes import metadata_budget
from kvfuse.volume.inodes.node import Node
from kvfuse.volume.names.lookup import Found


class Place(msgspec.Struct, frozen=True, eq=False):
    """A name that is to be changed. ``is_entered``: the directory must be there then, or has more or fewer in it."""

    parent: int
    name: bytes
    is_entered: bool = True


class End(msgspec.Struct, eq=False):
    """A place as it is now."""

    directory: Node
    name: bytes
    found: Found
    above: Sequence[Node] = ()
    """the directory, and those above it but for the root, where a directory may come there"""


class NewInode(msgspec.Struct, frozen=True, eq=False):
    """What an inode is to be that is made for ``caller``, see mknod(2)."""

    caller: Caller
    mode: int
    rdev: int = 0
    target: bytes = b""
    """of a symbolic link"""


class Plan(msgspec.Struct, eq=False):
    """A change of one name or two, all of it or nothing."""

    ends: Sequence[End]
    means: Sequence[Node | None]
    """what the name of each end means then; empty: nothing changes"""
    node: Node
    """the inode that it is about"""
    made: Node | None = None
    """this is new"""
    linked: Node | None = None
    """this has one name more"""
    unlinked: Node | None = None
    """this file loses the name of the last end"""
    removed: Node | None = None
    """this directory does, and is gone then; it must be empty"""
    is_move: bool = False
    """what the names mean then only changes its place"""
    counts: Sequence[tuple[Node, int]] = ()
    """(directory, how many directories more it has)"""
    weight: int = 0
    """bytes of records that come, at the most"""


Planning = Callable[..., Plan]
"""is given an `End` for each `Place`, waits for nothing, and raises what the caller of the change is to get"""
Make = Callable[[End, NewInode], Node]
"""makes an inode in memory, which nobody knows of yet"""
Fits = Callable[..., bool]
"""is given the same: where many hosts have the volume, a relaxed folder may publish the change later"""


def never(*ends: End) -> bool:
    return False


def plan_create(end: End, new: NewInode, make: Make) -> Plan:
    """A new inode."""
    target = new.target
    if len(target) > SYMLINK_MAX:
        raise errors.NameTooLong(f"a symbolic link's target of {len(target)} bytes: at most {SYMLINK_MAX}")
    _check_free(end)
    node = make(end, new)
    is_directory = node.is_directory
    weight = metadata_budget.new_inode(end.name, is_directory=is_directory, target=target)
    return Plan((end,), (node,), node, made=node, counts=[(end.directory, 1)] if is_directory else (), weight=weight)


def plan_replacement(end: End, new: NewInode, make: Make) -> Plan:
    """A new file takes the name from whatever file has it, as if it had been made elsewhere and renamed."""
    if end.directory.nlink == 0:
        raise errors.NotFound(f"directory {end.directory.ino} was removed")
    old = end.found.node
    if old is not None and old.is_directory:
        raise errors.IsADirectory(f"{end.name!r} is a directory")
    node = make(end, new)
    return Plan((end,), (node,), node, made=node, unlinked=old, weight=metadata_budget.new_inode(end.name))


def plan_link(end: End, node: Node) -> Plan:
    """One name more for a file."""
    if node.is_directory:
        raise errors.NotPermitted(f"inode {node.ino} is a directory: it has one name only")
    _check_free(end)
    if node.nlink == 0:
        raise errors.NotFound(f"inode {node.ino} was removed")
    if node.nlink >= LINK_MAX:
        raise errors.TooManyLinks(f"inode {node.ino} has {LINK_MAX} names, it may not have more")
    return Plan((end,), (node,), node, linked=node, weight=metadata_budget.new_name(end.name, node))


def plan_unlink(end: End) -> Plan:
    """A name of a file goes, the last one with the file."""
    node = _existing(end)
    if node.is_directory:
        raise errors.IsADirectory(f"{end.name!r} is a directory")
    return Plan((end,), (None,), node, unlinked=node)


def plan_rmdir(end: End) -> Plan:
    """A directory goes."""
    node = _existing(end)
    if not node.is_directory:
        raise errors.NotADirectory(f"{end.name!r} is no directory")
    return Plan((end,), (None,), node, removed=node, counts=[(end.directory, -1)])


def plan_rename(source: End, target: End, flags: int) -> Plan:
    """An inode moves from one name to another, and takes it from what has it, or gives its own in exchange."""
    if flags not in (0, RENAME_NOREPLACE, RENAME_EXCHANGE):
        raise errors.InvalidArgument(f"rename flags {flags:#x} are not offered")
    node = _existing(source)
    is_exchange = flags == RENAME_EXCHANGE
    other = _existing(target) if is_exchange else target.found.node
    if target.directory.nlink == 0:
        raise errors.NotFound(f"directory {target.directory.ino} was removed")
    if other is not None and flags == RENAME_NOREPLACE:
        raise errors.Exists(f"{target.name!r} exists")
    plan = Plan((source, target), (), node)
    if other is node:
        return plan
    if node in target.above or (is_exchange and other in source.above):
        raise errors.InvalidArgument(f"directory {node.name!r} cannot go into itself")
    plan.means, plan.is_move = (other if is_exchange else None, node), True
    plan.weight = max(0, len(target.name) - len(source.name))
    comes, goes = node.is_directory, other is not None and other.is_directory
    if comes or goes:
        plan.counts = _directory_counts(plan)
    if other is not None and not is_exchange:
        if comes != goes:
            kind = errors.IsADirectory if goes else errors.NotADirectory
            raise kind(f"{target.name!r} is {'a' if goes else 'no'} directory")
        plan.unlinked, plan.removed = (None, other) if goes else (other, None)
    return plan


def _directory_counts(plan: Plan) -> list[tuple[Node, int]]:
    counts: dict[Node, int] = {}
    for end, node in zip(plan.ends, plan.means, strict=True):
        more = (node is not None and node.is_directory) - (end.found.node is not None and end.found.node.is_directory)
        counts[end.directory] = counts.get(end.directory, 0) + more
    return [(directory, more) for directory, more in counts.items() if more]


def _existing(end: End) -> Node:
    node = end.found.node
    if node is None:
        raise errors.NotFound(f"{end.name!r} does not exist in directory {end.directory.ino}")
    return node


def _check_free(end: End) -> None:
    """A name may come there where none is."""
    if end.found.node is not None:
        raise errors.Exists(f"{end.name!r} exists in directory {end.directory.ino}")
    if end.directory.nlink == 0:
        raise errors.NotFound(f"directory {end.directory.ino} was removed")
