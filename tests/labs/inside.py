"""The only way of tests into the parts of a mounted volume: a part that moves, or is called otherwise, moves here.

A test that can say what it means by the contract of the volume (`kvfuse.volume.api`) does not need these. Parts are
those of the present membership: a client whose lease has ended has others from then on.
"""

from __future__ import annotations

from kvfuse.remote.records.api import RecordStore
from kvfuse.remote.segments.api import SegmentStore
from kvfuse.slab.allocator import Allocator
from kvfuse.volume.commit.journal import Journal
from kvfuse.volume.content.cutting import Cutter
from kvfuse.volume.content.mapper import Mapper
from kvfuse.volume.content.reader import Reader
from kvfuse.volume.hosts.coherence import Coherence
from kvfuse.volume.hosts.slab_leases import SlabLeases
from kvfuse.volume.inodes.core import Core
from kvfuse.volume.inodes.dentries import Dentries
from kvfuse.volume.inodes.node import Nodes
from kvfuse.volume.names.changes import Names
from kvfuse.volume.names.delegations import Delegations
from kvfuse.volume.names.lookup import Lookup
from kvfuse.volume.namespaces.namespace_registry import Namespaces
from kvfuse.volume.parts import Lifetime, Parts
from kvfuse.volume.slots.space import RoomFinder
from kvfuse.volume.tenancy.xattrs import Xattrs
from kvfuse.volume.tier.shared_tier import SharedTier
from kvfuse.volume.volume import Volume


def parts(volume: Volume) -> Parts:
    return volume.parts


def core(volume: Volume) -> Core:
    """State that all parts share."""
    return volume.parts.core


# -- of the core ------------------------------------------------------------------------------------


def records(volume: Volume) -> RecordStore:
    """The record store, as the parts use it: with its counters."""
    return volume.parts.core.records


def segments(volume: Volume) -> SegmentStore:
    return volume.parts.core.segments


def slabs(volume: Volume) -> Allocator:
    """The allocator."""
    return volume.parts.core.slabs


def nodes(volume: Volume) -> Nodes:
    """Inodes in memory."""
    return volume.parts.core.nodes


def dentries(volume: Volume) -> Dentries:
    return volume.parts.core.dentries


def namespaces(volume: Volume) -> Namespaces:
    return volume.parts.core.namespaces


def tier(volume: Volume) -> SharedTier:
    """Blocks in shared memory."""
    return volume.parts.core.tier


def client(volume: Volume) -> int:
    """The number that this host's membership has; 0 where nobody shares the volume."""
    return volume.parts.core.client


# -- parts ------------------------------------------------------------------------------------------


def journal(volume: Volume) -> Journal:
    """What waits for a commit, and commits."""
    return volume.parts.journal


def leases(volume: Volume) -> SlabLeases:
    """Slabs that this host holds; A test asks for them where hosts share the volume."""
    assert volume.parts.leases is not None
    return volume.parts.leases


def coherence(volume: Volume) -> Coherence:
    """What follows other hosts; A test asks for them where hosts share the volume."""
    assert volume.parts.coherence is not None
    return volume.parts.coherence


def space(volume: Volume) -> RoomFinder:
    """Takes slots, and makes room for them."""
    return volume.parts.space


def lookups(volume: Volume) -> Lookup:
    return volume.parts.lookups


def names(volume: Volume) -> Names:
    """Changes of names."""
    return volume.parts.names


def reader(volume: Volume) -> Reader:
    return volume.parts.reader


def cutter(volume: Volume) -> Cutter:
    return volume.parts.cutter


def mapper(volume: Volume) -> Mapper:
    """Pages of files that clients map."""
    return volume.parts.mapper


def xattrs(volume: Volume) -> Xattrs:
    return volume.parts.xattrs


def life(volume: Volume) -> Lifetime:
    """The tasks of the membership."""
    return volume.parts.life


def delegations(volume: Volume) -> Delegations:
    """Strict folders in which this host alone adds names. A test asks for them where hosts share the volume."""
    assert volume.parts.delegations is not None
    return volume.parts.delegations
