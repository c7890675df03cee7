"""Plans changes of names, from the present inodes of the names, by POSIX's rules. Nothing waits.

An executor looks up the ends, has one of these functions make a plan, and executes it: in memory first
(`apply_first`), or in the record store first (`commit_first`). Executors derive link counts from the names.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from kvfuse import errors
from kvfuse.volume.api import LINK_MAX, RENAME_EXCHANGE, RENAME_NOREPLACE, SYMLINK_MAX, Caller
from kvfuse.volume.inodes import metadata_budget
from kvfuse.volume.inodes.node import Node
from kvfuse.volume.names.lookup import Found
from kvfuse.volume.views.handover import DECIDED


class NamePlace(msgspec.Struct, frozen=True, eq=False):
    """A name to change. ``is_entered``: the directory must exist, or its number of directories changes."""

    parent: int
    name: bytes
    is_entered: bool = True


class End(msgspec.Struct, eq=False):
    """A place and its present inode."""

    directory: Node
    name: bytes
    found: Found
    above: Sequence[Node] = ()
    """if a directory may be moved there: the directory and those above it, without the root"""


class NewInode(msgspec.Struct, frozen=True, eq=False):
    """The attributes of an inode to make for ``caller``, see mknod(2)."""

    caller: Caller
    mode: int
    rdev: int = 0
    target: bytes = b""
    """a symbolic link's target"""
    ino: int = 0
    """its number, if it has one already"""


class Plan(msgspec.Struct, eq=False):
    """A change of one or two names, which is executed whole or not at all."""

    ends: Sequence[End]
    means: Sequence[Node | None]
    """the new inode of each end's name, None for none; empty: nothing changes"""
    node: Node
    """the inode that is made, linked, removed or renamed"""
    made: Node | None = None
    """this inode is new"""
    linked: Node | None = None
    """this file gets another name"""
    unlinked: Node | None = None
    """this file loses the name of the last end"""
    removed: Node | None = None
    """this directory, which must be empty, is removed"""
    is_move: bool = False
    """inodes only change places"""
    counts: Sequence[tuple[Node, int]] = ()
    """(directory, change of its number of directories)"""
    weight: int = 0
    """most bytes of records that it may add"""


Planning = Callable[..., Plan]
"""makes a plan of an `End` for each `NamePlace`, without waiting, and raises the errors of the change"""
Make = Callable[[End, NewInode], Node]
"""makes a node that no table has yet"""
Fits = Callable[..., bool]
"""decides from the ends whether a relaxed folder of a shared volume may publish the change later"""


def never(*ends: End) -> bool:
    return False


def tell_decision(plan: Plan) -> None:
    """Report the inodes of a plan that is about to be executed (`DECIDED`)."""
    decided = DECIDED.get()
    if decided is not None:
        other = plan.ends[-1].found.node
        decided(plan.node.ino, other.ino if other is not None else 0)


def plan_create(end: End, new: NewInode, make: Make) -> Plan:
    """Plan a new inode. NameTooLong, Exists, NotFound."""
    target = new.target
    if len(target) > SYMLINK_MAX:
        raise errors.NameTooLong(f"a symbolic link's target of {len(target)} bytes: at most {SYMLINK_MAX}")
    _check_free(end)
    node = make(end, new)
    is_directory = node.is_directory
    weight = metadata_budget.new_inode(end.name, is_directory=is_directory, target=target)
    return Plan((end,), (node,), node, made=node, counts=[(end.directory, 1)] if is_directory else (), weight=weight)


def plan_replacement(end: End, new: NewInode, make: Make) -> Plan:
    """Plan a new file that replaces the one that has the name, like a rename from another directory."""
    if end.directory.nlink == 0:
        raise errors.NotFound(f"directory {end.directory.ino} was removed")
    old = end.found.node
    if old is not None and old.is_directory:
        raise errors.IsADirectory(f"{end.name!r} is a directory")
    node = make(end, new)
    return Plan((end,), (node,), node, made=node, unlinked=old, weight=metadata_budget.new_inode(end.name))


def plan_link(end: End, node: Node) -> Plan:
    """Plan another name for a file. NotPermitted, NotFound, TooManyLinks, Exists, CrossesNamespaces."""
    if node.is_directory:
        raise errors.NotPermitted(f"inode {node.ino} is a directory: it has one name only")
    _check_free(end)
    if node.nlink == 0:
        raise errors.NotFound(f"inode {node.ino} was removed")
    if node.nlink >= LINK_MAX:
        raise errors.TooManyLinks(f"inode {node.ino} has {LINK_MAX} names, it may not have more")
    if node.namespace != end.directory.namespace:
        raise _make_crossing(end.name)
    return Plan((end,), (node,), node, linked=node, weight=metadata_budget.new_name(end.name, node))


def plan_unlink(end: End) -> Plan:
    """Plan the removal of a file's name. NotFound, IsADirectory."""
    node = _get_existing(end)
    if node.is_directory:
        raise errors.IsADirectory(f"{end.name!r} is a directory")
    return Plan((end,), (None,), node, unlinked=node)


def plan_rmdir(end: End) -> Plan:
    """Plan the removal of a directory. NotFound, NotADirectory."""
    node = _get_existing(end)
    if not node.is_directory:
        raise errors.NotADirectory(f"{end.name!r} is not a directory")
    return Plan((end,), (None,), node, removed=node, counts=[(end.directory, -1)])


def plan_rename(source: End, target: End, flags: int) -> Plan:
    """Plan a rename, which replaces the inode of the new name or exchanges both; errors as in renameat2(2)."""
    if flags not in (0, RENAME_NOREPLACE, RENAME_EXCHANGE):
        raise errors.InvalidArgument(f"rename flags {flags:#x} are not supported")
    node = _get_existing(source)
    is_exchange = flags == RENAME_EXCHANGE
    other = _get_existing(target) if is_exchange else target.found.node
    if target.directory.nlink == 0:
        raise errors.NotFound(f"directory {target.directory.ino} was removed")
    if other is not None and flags == RENAME_NOREPLACE:
        raise errors.Exists(f"{target.name!r} exists")
    if source.directory.namespace != target.directory.namespace:
        raise _make_crossing(target.name)
    plan = Plan((source, target), (), node)
    if other is node:
        return plan
    if node in target.above or (is_exchange and other in source.above):
        raise errors.InvalidArgument(f"directory {node.name!r} cannot be moved into itself")
    plan.means, plan.is_move = (other if is_exchange else None, node), True
    plan.weight = max(0, len(target.name) - len(source.name))
    is_directory, replaces_directory = node.is_directory, other is not None and other.is_directory
    if is_directory or replaces_directory:
        plan.counts = _directory_counts(plan)
    if other is not None and not is_exchange:
        if is_directory != replaces_directory:
            kind = errors.IsADirectory if replaces_directory else errors.NotADirectory
            raise kind(f"{target.name!r} is {'a' if replaces_directory else 'not a'} directory")
        plan.unlinked, plan.removed = (None, other) if replaces_directory else (other, None)
    return plan


def _directory_counts(plan: Plan) -> list[tuple[Node, int]]:
    counts: dict[Node, int] = {}
    for end, node in zip(plan.ends, plan.means, strict=True):
        more = (node is not None and node.is_directory) - (end.found.node is not None and end.found.node.is_directory)
        counts[end.directory] = counts.get(end.directory, 0) + more
    return [(directory, more) for directory, more in counts.items() if more]


def _make_crossing(name: bytes) -> errors.CrossesNamespaces:
    return errors.CrossesNamespaces(f"{name!r} would be in another namespace: copy it there")


def _get_existing(end: End) -> Node:
    node = end.found.node
    if node is None:
        raise errors.NotFound(f"{end.name!r} does not exist in directory {end.directory.ino}")
    return node


def _check_free(end: End) -> None:
    """Exists: the name exists. NotFound: the directory was removed."""
    if end.found.node is not None:
        raise errors.Exists(f"{end.name!r} exists in directory {end.directory.ino}")
    if end.directory.nlink == 0:
        raise errors.NotFound(f"directory {end.directory.ino} was removed")
