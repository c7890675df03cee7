"""How much memory a process may have, as /proc and control groups say."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvfuse.machine_memory import dirty_size_max, find_own_group, free_memory_size, memory_size

MIB = 1 << 20
V1 = "30 25 0:26 {seen_from} /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory"
V2 = "35 25 0:31 {seen_from} /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text("MemTotal:       16777216 kB\nMemFree: 1 kB\nMemAvailable: 2048 kB\n")
    (tmp_path / "proc/self/cgroup").write_text("")
    (tmp_path / "proc/self/mountinfo").write_text("22 1 8:1 / / rw shared:1 - ext4 /dev/root rw\n")
    return tmp_path


def grouped(root: Path, cgroup: str, mountinfo: str, limits: dict[str, str]) -> Path:
    (root / "proc/self/cgroup").write_text(cgroup)
    (root / "proc/self/mountinfo").write_text(mountinfo + "\n")
    for name, limit in limits.items():
        path = root / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(limit + "\n")
    return root


def test_without_a_group_it_is_the_machines(root: Path) -> None:
    assert memory_size(root) == 16384 * MIB
    assert free_memory_size(root) == 2 * MIB


@pytest.mark.parametrize(
    ("size", "ratio", "limit", "expected"),
    [("0", "20", "max", 2 * MIB // 5), ("0", "50", str(MIB), MIB // 2), ("4096", "0", "max", 4096), ("", "", "max", 0)],
)
def test_bytes_that_may_be_dirty_are_a_part_of_memory_or_a_number(
    root: Path, size: str, ratio: str, limit: str, expected: int
) -> None:
    grouped(root, "0::/a\n", V2.format(seen_from="/"), {"a/memory.max": limit})
    (root / "proc/sys/vm").mkdir(parents=True)
    (root / "proc/sys/vm/dirty_bytes").write_text(size + "\n")
    (root / "proc/sys/vm/dirty_ratio").write_text(ratio + "\n")
    assert dirty_size_max(root) == (expected or 16384 * MIB // 5)


@pytest.mark.parametrize("seen_from", ["/", "/docker/abc"])
def test_the_least_limit_of_a_group_and_those_above_holds(root: Path, seen_from: str) -> None:
    below = "" if seen_from == "/" else seen_from
    limits = {"a/b/memory.max": "max", "a/memory.max": str(512 * MIB), "memory.max": str(1024 * MIB)}
    grouped(root, f"0::{below}/a/b\n", V2.format(seen_from=seen_from), limits)
    assert memory_size(root) == 512 * MIB


def test_mounts_may_have_any_names(root: Path) -> None:
    """Whoever may mount anything on the machine chooses them."""
    grouped(root, "0::/a\n", V2.format(seen_from="/"), {"a/memory.max": str(128 * MIB)})
    table = root / "proc/self/mountinfo"
    table.write_bytes(b"40 22 0:40 / /mnt/\xff\x1c\xc2\x85\x0c rw - fuse.kvfuse /\x80 rw\n" + table.read_bytes())
    assert memory_size(root) == 128 * MIB


def test_version_1_names_the_controller(root: Path) -> None:
    limits = {"memory/job/memory.limit_in_bytes": str(256 * MIB), "memory/memory.limit_in_bytes": str((1 << 63) - 4096)}
    grouped(root, "3:cpu:/job\n4:memory:/job\n0::/\n", V1.format(seen_from="/"), limits)
    assert memory_size(root) == 256 * MIB


def test_a_group_that_is_not_seen_from_here_counts_by_what_is_seen(root: Path) -> None:
    grouped(root, "0::/elsewhere\n", V2.format(seen_from="/docker/abc"), {"memory.max": str(128 * MIB)})
    assert memory_size(root) == 128 * MIB


def test_the_own_group_is_the_one_that_can_be_limited(root: Path) -> None:
    """In a container it is the top of what is seen; that of the machine has no limit."""
    with pytest.raises(FileNotFoundError):
        find_own_group(grouped(root, "0::/\n", V2.format(seen_from="/"), {}))
    grouped(root, "0::/\n", V2.format(seen_from="/"), {"memory.max": "max"})
    assert find_own_group(root) == root / "sys/fs/cgroup"
    grouped(root, "0::/a\n", V2.format(seen_from="/"), {"a/memory.max": "max"})
    assert find_own_group(root) == root / "sys/fs/cgroup/a"
