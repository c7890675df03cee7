"""What a change of an inode does to the bits that give privileges.

The rules for setuid and setgid are the kernel's since Linux 6.2 (``setattr_should_drop_suidgid``, ``setattr_prepare``,
``mode_strip_sgid``). Before a write through a file the kernel itself takes ``security.capability`` away, and asks for a
mode without setuid, and without setgid where the group may execute. Of setgid where it may not, the kernel only says
that somebody writes: by a change of attributes that changes none.
"""

from __future__ import annotations

import stat

from kvfuse.credentials import Capability, Credentials
from kvfuse.errors import NotPermitted
from kvfuse.volume.api import Caller
from kvfuse.volume.inodes.node import Node

SET_ID = stat.S_ISUID | stat.S_ISGID
_EXECUTED_BY_GROUP = stat.S_ISGID | stat.S_IXGRP


def lose_privileges(node: Node, caller: Caller) -> bool:
    """Take setuid and setgid away before the bytes of a file change; whether it had any to lose.

    A caller with CAP_FSETID takes none. Setgid where the group may not execute is no privilege: the group may write so.
    """
    if not node.mode & SET_ID or not node.is_file or _keeps_all(caller):
        return False
    return _drop(node, stat.S_ISUID | _lost_setgid(node, caller))


def heed_word_of_write(node: Node, caller: Caller) -> None:
    """As `lose_privileges`, where the kernel says no more than that ``caller`` writes, or owns what it wants to own.

    NotPermitted for the latter, by somebody else: the kernel leaves that to us, too.
    """
    mode = node.mode
    if lose_privileges(node, caller) and not node.writers and caller.uid not in (0, node.uid):
        node.mode = mode
        raise NotPermitted(f"inode {node.ino} is another user's")


def lose_privileges_to_kernel(node: Node, caller: Caller) -> bool:
    """As `lose_privileges`, of bytes that the kernel sends of a file that ``caller`` opened, whoever wrote them.

    The kernel did so before, by the mode that it knew. Another host may have set these bits since.
    """
    if not node.mode & SET_ID or caller.is_privileged:
        return False
    return _drop(node, stat.S_ISUID | (stat.S_ISGID if node.mode & stat.S_IXGRP else 0))


def lose_privileges_to_owner(node: Node, caller: Caller) -> None:
    """Take setuid and setgid away before a file that is no directory gets another owner or group, from root, too."""
    if node.mode & SET_ID and not node.is_directory:
        _drop(node, stat.S_ISUID | _lost_setgid(node, caller))


def set_permissions(node: Node, permissions: int, caller: Caller) -> None:
    """chmod: without CAP_FSETID only the group may set its setgid bit."""
    node.mode = stat.S_IFMT(node.mode) | permissions
    if permissions & stat.S_ISGID and not _may_act_for(caller, node.gid):
        node.mode &= ~stat.S_ISGID


def mode_of_new(directory: Node, mode: int, caller: Caller) -> int:
    """Of an inode that is made in ``directory``: nobody makes a setgid program of a group that is not its own."""
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
