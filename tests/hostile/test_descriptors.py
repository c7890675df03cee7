"""Passed descriptors whose close waits for the attacker hold up nobody else, and the daemon has none of them left."""

from __future__ import annotations

import time

import pytest
from attack_descriptors import CONNECTIONS, WAYS
from hostile_lab import AttackProcess, attacker
from mounting import temporary_mount, wait_until
from ring_lab import nothing_left_behind, wait_for_rings

pytestmark = pytest.mark.root

WORDS = (
    "allow_other",
    "volume.capacity=256MiB",
    "volume.segment_size=64MiB",
    "cache.tier_size=32MiB",
    f"usrbio.user_connections={CONNECTIONS}",
)
BYSTANDER = 65532
PASSED_MIN = 100
ROUNDS, ROUND_S = 5, 0.05
CALL_S = 2.0
"""the longest that a call of another user may take. Alone it takes milliseconds; the descriptors linger for an hour"""


def test_descriptors_that_linger_hold_up_nobody() -> None:
    with temporary_mount(WORDS) as mount:
        wait_for_rings(mount)
        (mount.point / "file").write_bytes(b"content")
        with (
            nothing_left_behind(mount),
            attacker("attack_descriptors.py", mount) as attack,
            attacker("bystander.py", mount, uid=BYSTANDER) as bystander,
        ):
            for way in WAYS:
                attack.tell("go on")
                watch(bystander, f"descriptors passed {way.__name__}")
                assert attack.hear()["way"] == way.__name__
                attack.tell("hang up")
                watch(bystander, f"the end of clients that passed descriptors {way.__name__}")
            bystander.kill()
            wait_until(lambda: _are_closed(attack), "the close of all that was passed, while the attacker lives")


def _are_closed(attack: AttackProcess) -> bool:
    attack.tell("count")
    said = attack.hear()
    assert said["passed"] > PASSED_MIN
    return bool(said["still_open"] == [])


def watch(bystander: AttackProcess, event: str) -> None:
    """AssertionError where another user waits for long."""
    for _ in range(ROUNDS):
        bystander.tell("how long?")
        said = bystander.hear()
        assert said["works"], event
        assert said["waits"] < CALL_S, f"{event}: a call waits"
        assert all(seconds < CALL_S for seconds in said["longest"].values()), f"{event}: {said}"
        time.sleep(ROUND_S)  # the attack goes on meanwhile: a freeze may begin at any moment of it
