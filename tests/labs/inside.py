"""The only way of tests into the parts of a mounted volume: a part that moves, or is called otherwise, moves here.

A test that can say what it means by the contract of the volume (`kvfuse.volume.api`) does not need these. Parts are
those of the present membership: a client whose lease has ended has others from then on.
"""

from __future__ import annotations

from typing import Any

from kvfuse.volume.inodes.core import Core
from kvfuse.volume.parts import Parts
from kvfuse.volume.volume import Volume


def parts(volume: Volume) -> Parts:
    return volume.parts


def core(volume: Volume) -> Core:
    """State that all parts share."""
    return volume.parts.core


# -- of the core ------------------------------------------------------------------------------------


def records(volume: Volume) -> Any:
    """The record store, as the parts use it: with its counters."""
    return volume.parts.core.records


def segments(volume: Volume) -> Any:
    return volume.parts.core.segments


def slabs(volume: Volume) -> Any:
    """The allocator."""
    return volume.parts.core.slabs


def nodes(volume: Volume) -> Any:
    """Inodes in memory."""
    return volume.parts.core.nodes


def dentries(volume: Volume) -> Any:
    return volume.parts.core.dentries


def namespaces(volume: Volume) -> Any:
    return volume.parts.core.namespaces


def caches(volume: Volume) -> Any:
    """Namespaces of kind cache, by directory: what is in them, and who is evicted next."""
    return volume.parts.core.caches


def tier(volume: Volume) -> Any:
    """Blocks in shared memory."""
    return volume.parts.core.tier


def client(volume: Volume) -> int:
    """The number that this host's membership has; 0 where nobody shares the volume."""
    return volume.parts.core.client


# -- parts ------------------------------------------------------------------------------------------


def journal(volume: Volume) -> Any:
    """What waits for a commit, and commits."""
    return volume.parts.journal


def leases(volume: Volume) -> Any:
    """Slabs that this host holds; None where nobody shares the volume."""
    return volume.parts.leases


def coherence(volume: Volume) -> Any:
    """What follows other hosts; None where nobody shares the volume."""
    return volume.parts.coherence


def space(volume: Volume) -> Any:
    """Takes slots, and makes room for them."""
    return volume.parts.space


def lookups(volume: Volume) -> Any:
    return volume.parts.lookups


def names(volume: Volume) -> Any:
    """Changes of names."""
    return volume.parts.names


def reader(volume: Volume) -> Any:
    return volume.parts.reader


def cutter(volume: Volume) -> Any:
    return volume.parts.cutter


def mapper(volume: Volume) -> Any:
    """Pages of files that clients map."""
    return volume.parts.mapper


def xattrs(volume: Volume) -> Any:
    return volume.parts.xattrs


def life(volume: Volume) -> Any:
    """The tasks of the membership."""
    return volume.parts.life
