"""Bytes that can be compressed, and volumes that compress whatever they can."""

from __future__ import annotations

import random

import pytest

from kvfuse.slab.layout import PAGE_SIZE
from kvfuse.volume.inodes.chunk import Staged
from kvfuse.volume.inodes.node import Node
from kvfuse.volume.namespaces.settings import Settings
from kvfuse.volume.slots.packer import Packer


def compressible(rng: random.Random, size: int) -> bytes:
    """Bytes that zstd makes some four times smaller."""
    words = [rng.randbytes(16) for _ in range(64)]
    return b"".join([rng.choice(words) + rng.randbytes(2) for _ in range(size // 18 + 1)])[:size]


def pack_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the settings are, and also chunks that are still being written."""

    def wants(packer: Packer, node: Node, staged: Staged) -> bool:
        return staged.capacity > PAGE_SIZE

    monkeypatch.setattr(Packer, "wants", wants)
    monkeypatch.setattr(Settings, "compression", "zstd")
