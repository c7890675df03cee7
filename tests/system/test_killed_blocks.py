"""Daemons are killed over and over beside programs and rings that store blocks: no call fails, no block is lost.

A block is there once its put, or the close of its file, has returned: see `mixed_load`, whose processes compare all
that they did. Nothing is published strictly here. KVFUSE_TEST_SCALE makes it more kills; ``-s`` shows the stalls.
"""

from __future__ import annotations

import os

import pytest
from mounting import temporary_mount
from scale import scaled
from test_outlive_load import kill_beside

WORDS = ("outlive=true", "standby", "volume.capacity=1GiB", "volume.segment_size=64MiB")
KINDS = ("stores", "stores", "rings", "rings", "clients")
KILLS = 30


def kill(seed: int, kills: int) -> None:
    with temporary_mount(WORDS) as mount:
        folder = mount.point / "kv"
        folder.mkdir()
        os.setxattr(folder, "user.kvfuse.namespace", b"kind=blocks")
        kill_beside([mount], KINDS, seed, kills, "kv")


@pytest.mark.ring(2)
@pytest.mark.timeout(scaled(900))
def test_nothing_is_lost(seed: int) -> None:
    kill(seed, KILLS)


@pytest.mark.ring(3)
@pytest.mark.timeout(scaled(5400))
def test_nothing_is_lost_in_the_long_run(seed: int) -> None:
    kill(seed, 10 * KILLS)
