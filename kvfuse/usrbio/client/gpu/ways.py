"""The ways by which bytes get to a GPU and back, and which of them a machine can take.

=========  ========================================================================================================
dma-buf    the daemon's RDMA device has the GPU's memory registered, and writes blocks there
pinned     staging memory and arenas are pinned: the GPU copies them itself, while the next block is brought
staging    as pinned, from memory that is not: the driver copies it once more
=========  ========================================================================================================
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple


class Way(Enum):
    """Best first."""

    DMABUF = "dma-buf"
    PINNED = "pinned"
    STAGING = "staging"


class Capabilities(NamedTuple):
    """What is there. Each text says why not; it is "" where it is there."""

    lacks_device: str
    """cuda-bindings, a driver and a GPU"""
    lacks_pinning: str
    """of this process's memory, by the driver"""
    lacks_export: str
    """of memory of the GPU, as a dma-buf"""
    lacks_adapter: str
    """a daemon that can register a dma-buf"""


class Choice(NamedTuple):
    """Which way is taken. None: there is no device."""

    way: Way | None
    why_not: dict[Way, str]
    """the better ways, and why they cannot be taken"""


def choose_way(capabilities: Capabilities) -> Choice:
    """The best way that a machine can take."""
    device = capabilities.lacks_device
    lacks = {
        Way.DMABUF: device or capabilities.lacks_export or capabilities.lacks_adapter,
        Way.PINNED: device or capabilities.lacks_pinning,
        Way.STAGING: device,
    }
    why_not: dict[Way, str] = {}
    for way, reason in lacks.items():
        if not reason:
            return Choice(way, why_not)
        why_not[way] = reason
    return Choice(None, why_not)
