"""`mount.nice`: the nice value of a daemon's threads."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from mounting import FOREGROUND, KvfuseMount, temporary_mount

from kvfuse.usrbio.client import BlockStore

WITHOUT = ["setpriv", "--bounding-set=-sys_nice", "--inh-caps=-all"]

pytestmark = pytest.mark.root


def values_of(pid: int) -> set[int]:
    """Nice values of all threads of a process."""
    fields = [path.read_text().rpartition(")")[2].split() for path in Path(f"/proc/{pid}/task").glob("*/stat")]
    return {int(row[16]) for row in fields}


def in_use(mount: KvfuseMount) -> set[int]:
    """The same, once it has threads of all kinds."""
    (mount.point / "file").write_bytes(b"x")
    (mount.point / "blocks").mkdir()
    os.setxattr(mount.point / "blocks", "user.kvfuse.namespace", b"kind=blocks")
    with BlockStore(mount.point, "blocks", deadline=30) as store:
        store.put(b"name", b"data")
        assert len(list(Path(f"/proc/{mount.pid}/task").iterdir())) > 3
        return values_of(mount.pid)


@pytest.mark.parametrize("wanted", [-5, 3])
def test_all_threads_have_the_nice_value(wanted: int) -> None:
    with temporary_mount(["volume.capacity=64MiB", f"nice={wanted}"]) as mount:
        assert in_use(mount) == {wanted}


def test_a_daemon_without_that_right_says_so_and_goes_on() -> None:
    with temporary_mount(["volume.capacity=64MiB", "nice=-5"], command=[*WITHOUT, *FOREGROUND]) as mount:
        assert in_use(mount) == {os.getpriority(os.PRIO_PROCESS, 0)}
        assert "mount.nice is -5, which this process may not have" in mount.log.read_text()
