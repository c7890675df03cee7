"""What /proc says of a process: for callers through the kernel, which names a process but not what it may do."""

from __future__ import annotations

import os
from enum import IntEnum
from pathlib import Path
from typing import NamedTuple, Self


class Capability(IntEnum):
    """Numbers of bits, as in linux/capability.h."""

    CHOWN = 0
    DAC_OVERRIDE = 1
    DAC_READ_SEARCH = 2
    FOWNER = 3
    FSETID = 4
    SYS_ADMIN = 21
    SYS_RESOURCE = 24


def process_status(pid: int) -> dict[str, str]:
    """The fields of /proc/PID/status. OSError, ValueError. The name of a process may be any bytes but a newline."""
    text = Path(f"/proc/{pid}/status").read_bytes().decode("latin-1")
    return dict(line.split(":", 1) for line in text.split("\n") if line)


def shares_user_namespace(pid: int) -> bool:
    """Whether the capabilities of a process count for what the daemon has. OSError: the daemon may not look."""
    return os.readlink(f"/proc/{pid}/ns/user") == os.readlink("/proc/self/ns/user")


class Credentials(NamedTuple):
    """Supplementary groups, and effective capabilities: none, where those are of a user namespace of its own."""

    groups: frozenset[int] = frozenset()
    capabilities: int = 0

    @classmethod
    def of(cls, pid: int, uid: int) -> Self:
        """Of a process that acts as ``uid``. Where /proc does not show it, root has all capabilities, others none.

        It does not show a process that has ended, nor one outside the daemon's pid namespace (``pid`` 0).
        """
        try:
            fields = process_status(pid)
            groups = frozenset(int(word) for word in fields["Groups"].split())
            if uid != 0:
                return cls(groups)
            return cls(groups, int(fields["CapEff"], 16) if shares_user_namespace(pid) else 0)
        except (OSError, KeyError, ValueError):
            return cls(capabilities=-1 if uid == 0 else 0)

    def has(self, capability: Capability) -> bool:
        return bool(self.capabilities >> capability & 1)
