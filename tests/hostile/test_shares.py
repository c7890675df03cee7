"""One user takes all that it gets of what the daemon can hold: the next one finds enough."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hostile_lab import ATTACKER, attacker
from mounting import FOREGROUND, KvfuseMount, temporary_mount, wait_until
from ring_lab import stats, wait_for_rings

pytestmark = pytest.mark.root

MIB = 1 << 20
WORDS = (
    "allow_other",
    "volume.capacity=1GiB",
    "volume.segment_size=64MiB",
    "cache.tier_size=64MiB",
    "user_iovs=99999",
)
OTHER = 65531


@pytest.fixture(scope="module")
def one_mount() -> Iterator[KvfuseMount]:
    with temporary_mount(WORDS, ("prlimit", "--nofile=3000", *FOREGROUND)) as mount:  # fewer are taken sooner
        wait_for_rings(mount)
        yield mount


@pytest.fixture
def mount(one_mount: KvfuseMount) -> Iterator[KvfuseMount]:
    """The module's, without any client before and after."""
    yield one_mount
    wait_until(lambda: not stats(one_mount)["ring_users"], "the end of the clients")


def own_folder(mount: KvfuseMount, name: str, uid: int) -> Path:
    folder = mount.point / name
    folder.mkdir(exist_ok=True)
    os.chown(folder, uid, uid)
    return folder


def test_iovs_of_one_user_leave_descriptors_for_the_next(mount: KvfuseMount) -> None:
    with attacker("attack_shares.py", mount, "iovs", mount.point) as first:
        taken = first.hear()["count"]
        with attacker("attack_shares.py", mount, "iovs", mount.point, uid=OTHER) as second:
            left = second.hear()["count"]
    print(f"{taken} iovs of one user, {left} of the next")
    assert taken > 300
    assert left > taken // 3


def test_aux_areas_count(mount: KvfuseMount) -> None:
    with attacker("attack_shares.py", mount, "aux", mount.point) as attack:
        assert attack.hear()["count"] * 64 * MIB <= 4 << 30


def test_a_put_that_is_not_allowed_takes_no_memory(mount: KvfuseMount) -> None:
    folder = own_folder(mount, "forbidden", 0)
    before = stats(mount)["tier"]
    with attacker("attack_shares.py", mount, "puts", folder) as attack:
        assert attack.hear()["count"] == 0
        after = stats(mount)["tier"]
        assert (after["used_bytes"], after["arenas"]) == (before["used_bytes"], before["arenas"])
        folder.chmod(0o777)
        attack.tell("again")
        assert attack.hear()["count"] == 32
        folder.chmod(0o755)
        attack.tell("again")
        assert attack.hear()["count"] == 0


def test_pinned_sizes_of_one_user_leave_arenas_for_the_next(mount: KvfuseMount) -> None:
    folders = own_folder(mount, "pinned", ATTACKER), own_folder(mount, "others", OTHER)
    with attacker("attack_shares.py", mount, "pins", folders[0]) as first:
        views = first.hear()["count"]
        with attacker("attack_shares.py", mount, "pins", folders[1], uid=OTHER) as second:
            others = second.hear()["count"]
    print(f"{views} views of one user, {others} of the next")
    assert views > 10
    assert others > 10
