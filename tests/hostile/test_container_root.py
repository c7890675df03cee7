"""A ring lets a root with few or no capabilities do what the kernel lets it do, and the limits of users hold for it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
from attack_container_root import CAPABILITY_COUNT, COPIES, FILES, FOLDERS, OTHER, RINGS_MAX
from hostile_lab import attacker
from mounting import KvfuseMount, temporary_mount
from ring_lab import wait_for_rings

pytestmark = pytest.mark.root

DAC_OVERRIDE, DAC_READ_SEARCH, FOWNER, SYS_ADMIN = 1, 2, 3, 21
USER_RINGS = 2
WORDS = (
    "allow_other",
    "volume.capacity=256MiB",
    "volume.segment_size=64MiB",
    "cache.tier_size=64MiB",
    f"usrbio.user_rings={USER_RINGS}",
)
KINDS: dict[str, tuple[str, list[int]]] = {
    "no capability": ("", []),
    "may read all": ("", [DAC_READ_SEARCH]),
    "may access all": ("", [DAC_OVERRIDE]),
    "may access all as its owner": ("", [DAC_OVERRIDE, FOWNER]),
    "owner of all": ("", [FOWNER]),
    "root of a child namespace": ("0", list(range(CAPABILITY_COUNT))),
    "root of a child namespace with another user": (f"0,{OTHER}", list(range(CAPABILITY_COUNT))),
    "powerless root of a child namespace": (f"0,{OTHER}", []),
}
"""(ids that the user namespace maps; "": the daemon's namespace), capabilities"""
REFUSED_MIN = {"may access all as its owner": 0, "root of a child namespace with another user": 0}


@pytest.fixture(scope="module")
def mount() -> Iterator[KvfuseMount]:
    with temporary_mount(WORDS) as mount:
        wait_for_rings(mount)
        yield mount


def attack(mount: KvfuseMount, name: str, mapped: str, kept: list[int]) -> dict[str, Any]:
    """What a root with these capabilities says that it could do in a new folder."""
    top = mount.point / name
    top.mkdir()
    for number, (uid, gid, mode) in enumerate(FOLDERS):
        folder = top / str(number)
        folder.mkdir()
        for file, (owner, group, bits) in enumerate(FILES):
            for copy in range(COPIES):
                path = folder / f"{file}-{copy}"
                path.write_bytes(b"secret")
                os.chown(path, owner, group)
                path.chmod(bits)
        os.chown(folder, uid, gid)
        folder.chmod(mode)
    with attacker("attack_container_root.py", mount, top, mapped, *kept, uid=0) as attack:
        said = attack.hear()
    print(f"{name}: {said}")
    return said


@pytest.mark.parametrize("kind", KINDS)
def test_a_ring_refuses_a_root_what_the_kernel_refuses_it(mount: KvfuseMount, kind: str) -> None:
    said = attack(mount, kind, *KINDS[kind])
    assert said["unlike"] == []
    assert said["allowed"] > 10
    assert said["refused"] >= REFUSED_MIN.get(kind, 10)
    assert said["rings"] == USER_RINGS - 1, "it has one, and no more than a user may have"


@pytest.mark.parametrize("kept", [[SYS_ADMIN], list(range(CAPABILITY_COUNT))], ids=["SYS_ADMIN", "all"])
def test_a_root_that_could_end_the_daemon_has_no_limits(mount: KvfuseMount, kept: list[int]) -> None:
    said = attack(mount, f"root with {len(kept)}", "", kept)
    assert said["unlike"] == []
    assert said["rings"] == RINGS_MAX
    if len(kept) == CAPABILITY_COUNT:
        assert said["refused"] == 0
