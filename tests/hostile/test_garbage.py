"""The attacker's kit itself: it speaks the protocol as docs/usrbio.md has it, and what means nothing is refused."""

from __future__ import annotations

import pytest
from hostile_lab import ask_daemon, attacker
from mounting import KvfuseMount, temporary_mount
from ring_lab import nothing_left_behind, wait_for_rings

pytestmark = pytest.mark.root

WORDS = ("allow_other", "volume.capacity=256MiB", "volume.segment_size=64MiB", "cache.tier_size=32MiB")


def test_garbage_is_refused_and_costs_its_own_connection() -> None:
    with temporary_mount(WORDS) as mount:
        wait_for_rings(mount)
        with nothing_left_behind(mount):
            _attack(mount)
        ask_daemon(mount)


def _attack(mount: KvfuseMount) -> None:
    with attacker("attack_garbage.py", mount) as attack:
        said = attack.hear()
    assert said["results"] == said["expected"]
    assert said["hung_up"]
