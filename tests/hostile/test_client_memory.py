"""Memory of clients: whatever its owner does with it, the daemon lives and does not pay for it."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from errno import EDQUOT, EINVAL
from pathlib import Path
from typing import Any

import pytest
from hostile_lab import ATTACKER, ask_daemon, attacker
from memory_group import MemoryGroup, memory_group
from mounting import FOREGROUND, KvfuseMount, temporary_mount
from ring_lab import stats, wait_for_rings

pytestmark = pytest.mark.root

WORDS = ("allow_other", "volume.capacity=1GiB", "volume.segment_size=64MiB", "cache.tier_size=16MiB")
PROGRAM = "attack_client_memory.py"
MIB = 1 << 20
STEP = 8 * MIB
"""bytes that an attack reads at once"""
GROUP_SIZE = 512 * MIB
USER_MAX = GROUP_SIZE // 8
"""bytes of one user's memory that may be charged to the daemon"""
HUGE_PAGES = Path("/proc/sys/vm/nr_hugepages")


@contextmanager
def ring_mount(command: Sequence[str] = FOREGROUND) -> Iterator[KvfuseMount]:
    with temporary_mount(WORDS, command) as mount:
        wait_for_rings(mount)
        folder = mount.point / "attacker"
        folder.mkdir()
        os.chown(folder, ATTACKER, ATTACKER)
        yield mount


@contextmanager
def attackers_file(mount: KvfuseMount, data: bytes = b"", size: int | None = None) -> Iterator[Path]:
    """A file that the attacker may read and write, sparse behind ``data``."""
    path = mount.point / "attacker" / "file"
    path.write_bytes(data)
    os.truncate(path, len(data) if size is None else size)
    path.chmod(0o666)
    os.chown(path, ATTACKER, ATTACKER)
    yield path
    path.unlink()


# -- memory that cannot be filled -------------------------------------------------------------------


@contextmanager
def huge_pages(count: int) -> Iterator[Path]:
    """The machine has so many huge pages more: a file system of them, which everybody may use."""
    before = HUGE_PAGES.read_text()
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        try:
            HUGE_PAGES.write_text(str(int(before) + count))
            subprocess.run(["mount", "-t", "hugetlbfs", "-o", "mode=1777", "none", folder], check=True)
            try:
                yield Path(folder)
            finally:
                subprocess.run(["umount", "-l", folder], check=True)
        finally:
            HUGE_PAGES.write_text(before)


def test_memory_of_huge_pages_is_refused() -> None:
    with huge_pages(1) as pool, ring_mount() as mount, attackers_file(mount, bytes(STEP)) as file:
        with attacker(PROGRAM, mount, "huge", file, pool / "file") as attack:
            assert attack.hear()["answers"] == [EINVAL, EINVAL]
        ask_daemon(mount)


# -- memory that is charged to the daemon -----------------------------------------------------------


@dataclass
class Victim:
    """A daemon in a small control group."""

    mount: KvfuseMount
    group: MemoryGroup

    def attack(self, what: str, file: Path) -> dict[str, Any]:
        """What an attack says. It still has its memory when the daemon is looked at."""
        before = self.group.shared_size
        with attacker(PROGRAM, self.mount, what, file) as attack:
            said = attack.hear()
            ask_daemon(self.mount)
            assert self.group.shared_size - before < USER_MAX + 2 * STEP
        assert not self.group.kill_count
        return said


@pytest.fixture(scope="module")
def victim() -> Iterator[Victim]:
    with memory_group(GROUP_SIZE) as group, ring_mount(group.command(FOREGROUND)) as mount:
        yield Victim(mount, group)


@pytest.fixture
def file(victim: Victim) -> Iterator[Path]:
    with attackers_file(victim.mount, os.urandom(STEP)) as path:
        yield path


def test_holes_need_no_memory(victim: Victim) -> None:
    with attackers_file(victim.mount, size=1 << 40) as file:
        said = victim.attack("holes", file)
    assert said == {"results": [STEP], "there": 2 * 4096, "zeros": True}


@pytest.mark.parametrize("what", ["data", "shared_file"])
def test_what_the_daemon_fills_has_a_limit(victim: Victim, file: Path, what: str) -> None:
    said = victim.attack(what, file)
    assert said["results"][0] == [STEP, -EDQUOT]
    assert said["results"][1:] == [[-EDQUOT]] * (len(said["results"]) - 1)
    assert USER_MAX - STEP <= said["there"] <= USER_MAX


def test_memory_that_is_gone_counts_no_more(victim: Victim, file: Path) -> None:
    """Also when it was punched out while it was registered."""
    assert victim.attack("data", file)["results"][0] == [STEP, -EDQUOT]
    assert victim.attack("punched", file)["results"] == [STEP]
    assert stats(victim.mount)["rings"]["charged_bytes"] <= USER_MAX


def test_what_is_punched_out_behind_the_daemons_back_is_found_out(victim: Victim, file: Path) -> None:
    """Neither the owner's count of pages nor that of the memory changes: only the kernel knows who pays."""
    with attacker(PROGRAM, victim.mount, "swapped", file) as attack:
        said = attack.hear()
        assert victim.group.shared_size < 4 * USER_MAX
        assert said["results"] == [-EDQUOT, MIB - 4096]
        with attacker(PROGRAM, victim.mount, "touched", file, uid=ATTACKER - 1) as other:
            assert other.hear()["results"] == [STEP]
    assert not victim.group.kill_count


def test_memory_that_its_owner_touched_costs_nothing(victim: Victim, file: Path) -> None:
    """Also where the limit is reached."""
    with attacker(PROGRAM, victim.mount, "data", file) as attack:
        assert attack.hear()["results"][0] == [STEP, -EDQUOT]
        assert victim.attack("touched", file)["results"] == [STEP]


def test_writes_from_holes_need_no_memory_of_the_client(victim: Victim, file: Path) -> None:
    assert victim.attack("writes", file) == {"results": [STEP], "there": 0}
    assert file.read_bytes() == bytes(STEP)
