"""Another user's requests while all rings that a user may have are busy: a few times what they take alone, no more."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from hostile_lab import ATTACKER, AttackProcess, attacker
from mounting import KvfuseMount, temporary_mount, wait_until
from ring_lab import stats, wait_for_rings

pytestmark = [pytest.mark.root, pytest.mark.alone]

WORDS = ("allow_other", "volume.capacity=1GiB", "volume.segment_size=64MiB", "cache.tier_size=128MiB")
VICTIM = 65532
RINGS = 256
ROUNDS_MAX = 8
SAMPLES = 100
FACTORS = {"stat of an absent name": 3.0, "open and read": 3.0, "get": 3.0, "connect": 5.0}
"""who connects stands in the kernel's queue of the socket, behind all that came before"""
KINDS = ("refused", "reads", "exists", "puts", "bells", "fsyncs", "cancels", "deletes")
CONNECTIONS = 250
CONTROL_KINDS = ("messages", "rings", "connects")


@pytest.fixture(scope="module")
def mount() -> Iterator[KvfuseMount]:
    with temporary_mount(WORDS) as mount:
        wait_for_rings(mount)
        for name, uid in ("public", ATTACKER), (f"public/{ATTACKER}", ATTACKER), ("victim", VICTIM):
            (mount.point / name).mkdir()
            os.chown(mount.point / name, uid, uid)
        (mount.point / "public" / "data").write_bytes(os.urandom(1 << 20))
        os.chmod(mount.point / "public" / "data", 0o644)
        yield mount


@pytest.fixture(scope="module")
def victim(mount: KvfuseMount) -> Iterator[AttackProcess]:
    with attacker("victim.py", mount, "victim", uid=VICTIM) as victim:
        assert victim.hear()["ready"]
        _measure(victim)
        yield victim


@pytest.mark.parametrize("kind", KINDS)
def test_busy_rings_of_one_user_leave_others_alone(mount: KvfuseMount, victim: AttackProcess, kind: str) -> None:
    with _attacking(mount, "attack_starvation.py", kind, RINGS, ATTACKER) as attack:
        assert stats(mount)["rings"]["rings"] == RINGS + 1
        _compare(attack, victim, RINGS)


@pytest.mark.parametrize("kind", CONTROL_KINDS)
def test_control_messages_of_one_user_leave_others_alone(mount: KvfuseMount, victim: AttackProcess, kind: str) -> None:
    uid = ATTACKER - 2 - CONTROL_KINDS.index(kind)  # a user is slow to connect for a while after it was bad
    with _attacking(mount, "attack_control.py", kind, CONNECTIONS, uid) as attack:
        _compare(attack, victim, 1)


@contextmanager
def _attacking(mount: KvfuseMount, program: str, kind: str, count: int, uid: int) -> Iterator[AttackProcess]:
    """An attacker that is ready, after the one before is gone."""
    wait_until(lambda: stats(mount)["rings"]["connections"] == 1, "the end of the attacker before")
    with attacker(program, mount, kind, count, uid=uid) as attack:
        assert attack.hear()["ready"]
        print(f"{kind}: {len(os.sched_getaffinity(0))} processors")
        yield attack


def _compare(attack: AttackProcess, victim: AttackProcess, submitted_min: int) -> None:
    """Alone, attacked, alone and so on, beside whatever else the machine does.

    Each doing must have had a round in which it took no longer than its factor times the slower round beside that one.
    """
    before, slowed = _measure(victim), dict[str, float]()
    for _ in range(ROUNDS_MAX):
        attack.tell("go")
        attack.hear()
        attacked = _measure(victim)
        attack.tell("stop")
        assert attack.hear()["submitted"] >= submitted_min  # a ring may have its one entry under way all the time
        after = _measure(victim)
        for doing, seconds in attacked.items():
            alone = max(before[doing], after[doing])
            print(f"  {doing}: p99 {alone * 1e6:.0f} us alone, {seconds * 1e6:.0f} us beside them")
            slowed[doing] = min(slowed.get(doing, seconds / alone), seconds / alone)
        if all(times < FACTORS[doing] for doing, times in slowed.items()):
            return
        before = after
    raise AssertionError(f"so many times as slow: {slowed}")


def _measure(victim: AttackProcess) -> dict[str, float]:
    """The 99th percentile of each of the victim's doings, in seconds."""
    victim.tell(str(SAMPLES))
    return {doing: times[len(times) * 99 // 100 - 1] for doing, times in victim.hear().items()}
