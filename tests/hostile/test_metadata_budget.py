"""Names, inodes and attributes have a budget: whoever fills it is refused, and nobody loses anything by it."""

from __future__ import annotations

import os
import shutil
from errno import ENOSPC
from pathlib import Path

import pytest
from hostile_lab import ATTACKER, attacker
from mounting import KvfuseMount, temporary_mount, wait_until
from ring_lab import stats, wait_for_rings

pytestmark = pytest.mark.root

LIMIT = 384 << 10
STORE_SHARE = 6
"""The store's file may have so many times the budget: copies of pages, and pages that are not full."""
WORDS = (
    "allow_other",
    "volume.capacity=64MiB",
    "volume.segment_size=32MiB",
    "cache.tier_size=16MiB",
    f"volume.metadata_size={LIMIT}",
)
KINDS = ("attributes", "files", "names", "directories", "symlinks", "links", "deep", "puts")
LARGEST = {"attributes": 72 << 10, "symlinks": 9 << 10, "deep": 1 << 10, "puts": 16 << 10}
"""what one step takes at most; others less than 600 bytes"""


@pytest.mark.parametrize("kind", KINDS)
def test_names_and_attributes_end_where_the_budget_does(kind: str) -> None:
    with temporary_mount(WORDS) as mount:
        wait_for_rings(mount)
        kept = _keep_files(mount.point / "victim")
        _attack_folder(mount)
        begin = stats(mount)["metadata"]["bytes"]
        with attacker("attack_metadata.py", mount, kind) as attack:
            said = attack.hear()
            assert said["error"] == ENOSPC
            assert said["made"] > 5
            _check_full(mount, LARGEST.get(kind, 600))
            _work_goes_on(mount, kept)
            if kind != "puts":
                attack.tell("again")
                again = attack.hear()
                assert again["error"] == ENOSPC
                assert again["made"] >= min(0.8 * again["removed"], 1), "what was removed has left no room"
                _check_full(mount, LARGEST.get(kind, 600))
        os.sync()
        full = stats(mount)["metadata"]["bytes"]
        mount.unmount()
        mount.mount()
        assert full - 1024 <= stats(mount)["metadata"]["bytes"] <= full, "but for a removed file that was known"
        _check_files(kept)
        shutil.rmtree(mount.point / "attack")
        wait_until(lambda: stats(mount)["metadata"]["bytes"] <= begin, "room to come back")


def test_a_full_budget_leaves_to_a_crash_what_was_acknowledged() -> None:
    """Names that were made before a killed daemon's last commit are there; the count is that of what is there."""
    with temporary_mount(WORDS) as mount:
        wait_for_rings(mount)
        _attack_folder(mount)
        with attacker("attack_metadata.py", mount, "files") as attack:
            made = attack.hear()["made"]
            os.sync()
            mount.kill()
        mount.mount()
        found = len(os.listdir(mount.point / "attack"))
        assert found == made
        space = os.statvfs(mount.point)
        assert space.f_files - space.f_ffree == made + 2, "inodes"
        _check_full(mount, 600)


def _keep_files(folder: Path) -> dict[Path, bytes]:
    folder.mkdir()
    kept = {folder / str(number): os.urandom(20_000) for number in range(20)}
    for path, content in kept.items():
        path.write_bytes(content)
        os.setxattr(path, "user.name", content[:100])
    return kept


def _check_files(kept: dict[Path, bytes]) -> None:
    for path, content in kept.items():
        assert path.read_bytes() == content
        assert os.getxattr(path, "user.name") == content[:100]


def _attack_folder(mount: KvfuseMount) -> None:
    folder = mount.point / "attack"
    folder.mkdir()
    os.chown(folder, ATTACKER, ATTACKER)


def _check_full(mount: KvfuseMount, largest: int) -> None:
    """The budget is not exceeded, and has room for less than one step more."""
    space, metadata = os.statvfs(mount.point), stats(mount)["metadata"]
    assert LIMIT - largest < metadata["bytes"] <= LIMIT == metadata["limit"]
    assert space.f_ffree <= largest // 256 + 1
    assert (mount.volume / "records" / "data.mdb").stat().st_blocks * 512 <= STORE_SHARE * LIMIT


def _work_goes_on(mount: KvfuseMount, kept: dict[Path, bytes]) -> None:
    """Everything that adds no record: bytes of files that are there, their modes and times, removal."""
    _check_files(kept)
    *_, last = kept
    for path in kept:
        kept[path] = os.urandom(30_000)
        path.write_bytes(kept[path])
        path.chmod(0o640)
        os.chown(path, 1000, 1000)
        os.utime(path, (1, 1))
        os.setxattr(path, "user.name", kept[path][:100])
    os.sync()
    _check_files(kept)
    os.removexattr(last, "user.name")
    last.unlink()
    del kept[last]
