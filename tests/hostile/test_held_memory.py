"""Memory that a client goes on to map is taken back from it, or counts for its user until it lets go of it."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hostile_lab import ATTACKER, AttackProcess, attacker
from mounting import FOREGROUND, KvfuseMount, temporary_mount, wait_until
from ring_lab import stats, wait_for_rings

pytestmark = pytest.mark.root

MIB = 1 << 20
TIER = 16 * MIB
CHARGED = 24 * MIB
WORDS = (
    "allow_other",
    "volume.capacity=256MiB",
    "volume.segment_size=64MiB",
    f"cache.tier_size={TIER}",
    f"user_charged_size={CHARGED}",
)
ROUNDS = 3
DESCRIPTORS = 1024


@pytest.fixture(scope="module")
def mount() -> Iterator[KvfuseMount]:
    with temporary_mount(WORDS) as mount:
        wait_for_rings(mount)
        yield mount


@pytest.fixture
def folder(mount: KvfuseMount, request: pytest.FixtureRequest) -> Path:
    folder = mount.point / request.node.name
    folder.mkdir()
    folder.chmod(0o755)
    os.chown(folder, ATTACKER, ATTACKER)
    return folder


@pytest.fixture
def outliving() -> Iterator[KvfuseMount]:
    with temporary_mount((*WORDS, "outlive=true")) as mount:
        wait_for_rings(mount)
        yield mount


def kill(mount: KvfuseMount) -> None:
    former = stats(mount)["pid"]
    os.kill(former, signal.SIGKILL)
    wait_until(lambda: bool(stats(mount)["pid"] != former), "the next daemon")
    wait_for_rings(mount)


def make_blocks(folder: Path) -> None:
    os.setxattr(folder, "user.kvfuse.namespace", b"kind=blocks")


def held(attack: AttackProcess) -> int:
    attack.tell("look")
    return int(attack.hear()["held"])


def test_arenas_that_were_given_back_are_taken_from_who_maps_them(mount: KvfuseMount, folder: Path) -> None:
    """It held another 64 MiB of a tier of 64 MiB with each round."""
    with attacker("attack_held_memory.py", mount, "arenas", folder) as attack:
        for _ in range(ROUNDS):
            assert attack.hear()["count"]
            wait_until(lambda: held(attack) == 0, "the memory of arenas that have ended")
            wait_until(lambda: stats(mount)["tier"]["used_bytes"] == 0, "the tier's memory")
            attack.tell("again")
        attack.hear()


def test_holes_of_arenas_that_a_reader_has_filled_are_taken_back(outliving: KvfuseMount) -> None:
    """Each page that it reads in a mapping takes memory. It had 16 GiB of a tier of 64 MiB, also when it had ended."""
    mount, folder = outliving, outliving.point / "folder"
    folder.mkdir()
    os.chown(folder, ATTACKER, ATTACKER)
    with attacker("attack_held_memory.py", mount, "holes", folder) as attack:
        attack.hear()
        assert stats(mount)["tier"]["used_bytes"] < MIB
        wait_until(lambda: held(attack) < MIB, "the memory of blocks alone")
        attack.tell("again")
        attack.hear()
        kill(mount)
        wait_until(lambda: held(attack) < MIB, "the same by the next daemon")


def test_the_tier_comes_back_whenever_its_daemon_is_killed(outliving: KvfuseMount, rng: random.Random) -> None:
    """64 of 67 MiB stayed used, by no block: of arenas that clients had mapped, and of folders that were closed."""
    mount, folder = outliving, outliving.point / "folder"
    folder.mkdir()
    folder.chmod(0o755)
    os.chown(folder, ATTACKER, ATTACKER)
    with attacker("attack_held_memory.py", mount, "arenas", folder) as attack:
        for _ in range(ROUNDS):
            attack.hear()
            attack.tell("again")
            time.sleep(rng.uniform(0, 0.3))  # it maps, stores, or ends arenas, or waits for the next daemon
            kill(mount)
        attack.hear()
        wait_until(lambda: held(attack) == 0, "the memory of arenas of killed daemons")
        wait_until(lambda: stats(mount)["tier"]["used_bytes"] == 0, "the tier's memory")
    (folder / "other").write_bytes(b"x" * 8 * MIB)
    wait_until(lambda: stats(mount)["tier"]["used_bytes"] == stats(mount)["tier"]["kept_bytes"], "the sum of blocks")


def test_all_but_the_head_of_an_index_that_ended_is_taken_back(mount: KvfuseMount, folder: Path) -> None:
    make_blocks(folder)
    with attacker("attack_held_memory.py", mount, "index", folder) as attack:
        for number in range(ROUNDS):
            assert attack.hear()["count"] == number + 1
            wait_until(lambda count=number + 1: held(attack) <= 4096 * count, "the memory of indexes")
            attack.tell("again")
        attack.hear()


def test_a_user_has_its_share_of_descriptors_for_indexes() -> None:
    """One user had all of the daemon's, and nobody else could connect."""
    limited = ("prlimit", f"--nofile={DESCRIPTORS}:{DESCRIPTORS}", *FOREGROUND)
    with temporary_mount(WORDS, limited) as mount:
        wait_for_rings(mount)
        folder = mount.point / "folder"
        folder.mkdir()
        os.chown(folder, ATTACKER, ATTACKER)
        make_blocks(folder)
        with attacker("attack_held_memory.py", mount, "indexes", folder) as attack:
            attack.hear()
            assert len(os.listdir(f"/proc/{stats(mount)['pid']}/fd")) < DESCRIPTORS * 3 / 4
            wait_for_rings(mount)


def test_rings_that_were_dropped_count_until_they_are_let_go_of(mount: KvfuseMount, folder: Path) -> None:
    with attacker("attack_held_memory.py", mount, "rings", folder) as attack:
        count = attack.hear()["count"]
        assert 1 < count <= CHARGED // (4 * MIB)
        assert held(attack) <= CHARGED
        attack.tell("again")
        assert attack.hear()["count"] == count, "the same user has no more, through another connection"
        attack.tell("free")
        attack.hear()
        attack.tell("again")
        assert attack.hear()["count"] == count, "all of them are to be had again"
