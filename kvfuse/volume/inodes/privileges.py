"""Clearing setuid and setgid when an inode changes.

The rules are the kernel's since Linux 6.2 (``setattr_should_drop_suidgid``, ``setattr_prepare``,
``mode_strip_sgid``). Before a write to a file the kernel itself removes ``security.capability``, and requests a
mode without setuid, and without setgid if the group may execute. If the group may not execute, the kernel only
announces the write, by a setattr request that changes nothing.
"""

from __future__ import annotations

import stat

from kvfuse.credentials import Capability, Credentials
from kvfuse.errors import NotPermitted
from kvfuse.volume.api import Caller, Changes
from kvfuse.volume.inodes.node import Node

SET_ID = stat.S_ISUID | stat.S_ISGID
_EXECUTED_BY_GROUP = stat.S_ISGID | stat.S_IXGRP


def lose_privileges(node: Node, caller: Caller) -> bool:
    """Clear setuid and setgid before the bytes of a file change. True: the mode changed.

    A caller with CAP_FSETID clears none. Setgid of a file that its group may not execute stays for the group's members.
    """
    if not node.mode & SET_ID or not node.is_file or _keeps_all(caller):
        return False
    return _drop(node, stat.S_ISUID | _lost_setgid(node, caller))


def heed_word_of_write(node: Node, caller: Caller) -> None:
    """`lose_privileges` for a setattr request without changes: a write, or a chown by ``caller`` to its present owner.

    NotPermitted: a chown by a user who does not own the inode, which the kernel does not check either.
    """
    mode = node.mode
    if lose_privileges(node, caller) and not node.writers and caller.uid not in (0, node.uid):
        node.mode = mode
        raise NotPermitted(f"user {caller.uid} does not own inode {node.ino}")


def lose_privileges_to_kernel(node: Node, caller: Caller) -> bool:
    """`lose_privileges` for written pages that the kernel sends through a file that ``caller`` opened.

    The kernel has cleared the bits of the mode that it knew. Another host may have set them since.
    """
    if not node.mode & SET_ID or caller.is_privileged:
        return False
    return _drop(node, stat.S_ISUID | (stat.S_ISGID if node.mode & stat.S_IXGRP else 0))


def lose_privileges_to_owner(node: Node, caller: Caller) -> None:
    """Clear setuid and setgid before anything but a directory gets another owner or group, also by root."""
    if node.mode & SET_ID and not node.is_directory:
        _drop(node, stat.S_ISUID | _lost_setgid(node, caller))


def are_set_otherwise(node: Node, changes: Changes) -> bool:
    """Owner, group or permissions become others than they are: tools set many again to what they are."""
    wanted, present = (changes.mode, changes.uid, changes.gid), (stat.S_IMODE(node.mode), node.uid, node.gid)
    return any(new not in (None, old) for new, old in zip(wanted, present, strict=True))


def set_permissions(node: Node, permissions: int, caller: Caller) -> None:
    """chmod: without CAP_FSETID only members of the group may set setgid."""
    node.mode = stat.S_IFMT(node.mode) | permissions
    if permissions & stat.S_ISGID and not _may_act_for(caller, node.gid):
        node.mode &= ~stat.S_ISGID


def mode_of_new(directory: Node, mode: int, caller: Caller) -> int:
    """The mode of a new inode in ``directory``: no setgid program of a group to which the caller does not belong."""
    if stat.S_ISDIR(mode):
        return mode | directory.mode & stat.S_ISGID
    inherits_group = directory.mode & stat.S_ISGID and mode & _EXECUTED_BY_GROUP == _EXECUTED_BY_GROUP
    if inherits_group and not _may_act_for(caller, directory.gid):
        return mode & ~stat.S_ISGID
    return mode


def _drop(node: Node, bits: int) -> bool:
    before = node.mode
    node.mode &= ~bits
    return node.mode != before


def _lost_setgid(node: Node, caller: Caller) -> int:
    executes = node.mode & _EXECUTED_BY_GROUP == _EXECUTED_BY_GROUP
    if executes or (node.mode & stat.S_ISGID and not _may_act_for(caller, node.gid)):
        return stat.S_ISGID
    return 0


def _keeps_all(caller: Caller) -> bool:
    """The caller has CAP_FSETID."""
    if caller.keeps_privileges is not None:
        return caller.keeps_privileges
    return caller.uid == 0 and Credentials.of(caller.pid, caller.uid).has(Capability.FSETID)


def _may_act_for(caller: Caller, gid: int) -> bool:
    """The kernel's ``in_group_or_capable``."""
    if caller.gid == gid:
        return True
    if caller.groups is not None:
        return gid in caller.groups or _keeps_all(caller)
    credentials = Credentials.of(caller.pid, caller.uid)
    return gid in credentials.groups or _keeps_all(caller)


def acts_as_owner(node: Node, caller: Caller) -> bool:
    """The caller owns the inode, or may do what only its owner may."""
    if caller.uid == node.uid:
        return True
    return caller.uid == 0 and Credentials.of(caller.pid, caller.uid).has(Capability.FOWNER)
