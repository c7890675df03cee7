"""A client that punches holes into its memory waits for that itself: nobody else does."""

from __future__ import annotations

import os

import pytest
from hostile_lab import ask_daemon, attacker, slowest
from mounting import temporary_mount
from ring_lab import wait_for_rings

pytestmark = [pytest.mark.root, pytest.mark.alone]

WORDS = ("allow_other", "volume.capacity=256MiB", "volume.segment_size=64MiB")
SIZE = 512 << 20
SECONDS = 1.0
ROUNDS_MAX = 8


def test_holes_that_are_punched_under_small_copies_delay_nobody_else() -> None:
    """A copy waits until the hole is there, 0.2 s for each GiB: it held the interpreter lock meanwhile."""
    with temporary_mount(WORDS) as mount:
        wait_for_rings(mount)
        (mount.point / "public").mkdir()
        (mount.point / "public" / "data").write_bytes(os.urandom(1 << 20))
        (mount.point / "public" / "data").chmod(0o644)
        with attacker("attack_punches.py", mount, SIZE) as attack:
            assert attack.hear()["ready"]
            for _ in range(ROUNDS_MAX):
                attack.tell("begin a round")
                attack.hear()
                wait = slowest(lambda: ask_daemon(mount), SECONDS)
                attack.tell("end it")
                done = attack.hear()
                print(
                    f"{done['answered']} reads; {done['longest']:.3f} s for the longest punch, {wait:.3f} s for others"
                )
                if done["answered"] and wait < done["longest"] / 3:
                    return
    raise AssertionError("each time others waited about as long as the owner of the memory")
