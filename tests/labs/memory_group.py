"""A real control group that limits the memory of a process, version 1 or 2, as the machine has it. Root only."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from mounting import wait_until

VERSION_1, VERSION_2 = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")


class MemoryGroup:
    """``folder`` has its files."""

    def __init__(self, folder: Path, limit: int) -> None:
        self.folder = folder
        self.limit = limit
        self._is_first = folder.is_relative_to(VERSION_1)
        folder.mkdir()
        (folder / ("memory.limit_in_bytes" if self._is_first else "memory.max")).write_text(str(limit))

    def command(self, words: Sequence[str]) -> list[str]:
        """A command line that runs in the group."""
        script = 'echo $$ > "$0"; exec "$@"'
        return ["sh", "-c", script, str(self.folder / "cgroup.procs"), *words]

    @property
    def kill_count(self) -> int:
        """How often the kernel killed one of its processes for want of memory."""
        name = "memory.oom_control" if self._is_first else "memory.events"
        return self._value(name, "oom_kill")

    @property
    def shared_size(self) -> int:
        """Bytes of shared memory that are charged to it."""
        return self._value("memory.stat", "shmem")

    def _value(self, file: str, key: str) -> int:
        rows = (line.split() for line in (self.folder / file).read_text().splitlines())
        return next(int(value) for name, value in rows if name == key)


@contextmanager
def memory_group(limit: int) -> Iterator[MemoryGroup]:
    """``limit``: bytes."""
    top = VERSION_1 if VERSION_1.is_dir() else VERSION_2
    if top == VERSION_2:
        _allow_limits(top)
    group = MemoryGroup(top / f"kvfuse-test-{secrets.token_hex(6)}", limit)
    try:
        yield group
    finally:
        wait_until(lambda: _is_removed(group.folder), "the end of the group's processes")


def _is_removed(folder: Path) -> bool:
    with suppress(OSError):  # EBUSY, until its last process is gone
        folder.rmdir()
    return not folder.exists()


def _allow_limits(top: Path) -> None:
    """Version 2: groups below ``top`` may limit memory, for which a container's top must have no process itself."""
    control = top / "cgroup.subtree_control"
    if "memory" in control.read_text().split():
        return
    with suppress(OSError):
        control.write_text("+memory")
        return
    (top / "init").mkdir(exist_ok=True)
    for pid in (top / "cgroup.procs").read_text().split():
        with suppress(ProcessLookupError):
            (top / "init" / "cgroup.procs").write_text(pid)
    control.write_text("+memory")
