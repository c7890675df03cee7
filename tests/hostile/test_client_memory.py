"""Memory of clients: whatever its owner does with it, the daemon lives and does not pay for it."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from errno import EINVAL
from pathlib import Path

import pytest
from hostile_lab import ATTACKER, ask_daemon, attacker
from mounting import KvfuseMount, temporary_mount
from ring_lab import wait_for_rings

pytestmark = pytest.mark.root

WORDS = ("allow_other", "volume.capacity=1GiB", "volume.segment_size=64MiB", "cache.tier_size=16MiB")
HUGE_PAGES = Path("/proc/sys/vm/nr_hugepages")


@contextmanager
def ring_mount(*words: str) -> Iterator[KvfuseMount]:
    with temporary_mount((*WORDS, *words)) as mount:
        wait_for_rings(mount)
        folder = mount.point / "attacker"
        folder.mkdir()
        os.chown(folder, ATTACKER, ATTACKER)
        yield mount


def attackers_file(mount: KvfuseMount, size: int, data: bytes = b"") -> Path:
    """A file that the attacker may read and write, sparse behind ``data``."""
    path = mount.point / "attacker" / "file"
    path.write_bytes(data)
    os.truncate(path, size)
    os.chown(path, ATTACKER, ATTACKER)
    return path


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
    with huge_pages(1) as pool, ring_mount() as mount:
        file = attackers_file(mount, 4096, b"x" * 4096)
        with attacker("attack_client_memory.py", mount, "huge", file.parent, pool / "file") as attack:
            assert attack.hear()["answers"] == [EINVAL, EINVAL]
        ask_daemon(mount)
