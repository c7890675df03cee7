"""Locks that the kernel holds while it waits for an attacker's page are none that the daemon waits for."""

from __future__ import annotations

import os

import pytest
from hostile_lab import ATTACKER, AttackProcess, attacker
from mounting import temporary_mount
from ring_lab import nothing_left_behind, wait_for_rings
from test_descriptors import BYSTANDER, WORDS, watch

pytestmark = pytest.mark.root


def test_pages_that_never_arrive_hold_up_nobody() -> None:
    with temporary_mount(WORDS) as mount:
        wait_for_rings(mount)
        (mount.point / "file").write_bytes(b"content")
        folder = mount.point / "attackers"
        folder.mkdir()
        (folder / "own").write_bytes(b"content")
        for path in (folder / "own", folder):
            os.chown(path, ATTACKER, ATTACKER)
        with (
            nothing_left_behind(mount),
            attacker("bystander.py", mount, uid=BYSTANDER) as bystander,
            attacker("attack_pages.py", mount, folder) as attack,
        ):
            _hold_and_watch(attack, bystander)


def _hold_and_watch(attack: AttackProcess, bystander: AttackProcess) -> None:
    assert attack.hear() == {"bell": "held", "first": -22}
    watch(bystander, "a bell whose lock an attacker holds")
    assert attack.hear() == {"bell": "rung", "found": [-2, -2, -2]}
    attack.tell("go on")
    assert attack.hear() == {"memory": "held"}
    watch(bystander, "memory whose lock an attacker holds")
    assert attack.hear() == {"memory": "written", "read": [7, 7, 7], "there": "content"}
    attack.tell("hang up")
    watch(bystander, "the end of that client")
    bystander.kill()
