"""What /proc says of a process: for callers through the kernel, which names a process but not what it may do."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple, Self

CAP_FSETID = 4
CAP_SYS_ADMIN = 21
"""numbers of bits, as in linux/capability.h"""


class Credentials(NamedTuple):
    """Supplementary groups, and effective capabilities: none, where those are of a user namespace of its own."""

    groups: frozenset[int] = frozenset()
    capabilities: int = 0

    @classmethod
    def of(cls, pid: int, uid: int) -> Self:
        """Of a process that acts as ``uid``. Where /proc does not show it, root has all capabilities, others none.

        It does not show a process that has ended, nor one outside the daemon's pid namespace (``pid`` 0).
        """
        process = Path(f"/proc/{pid}")
        try:
            fields = dict(line.split(":", 1) for line in (process / "status").read_text().splitlines())
            groups = frozenset(int(word) for word in fields["Groups"].split())
            if uid != 0:
                return cls(groups)
            is_ours = os.readlink(process / "ns/user") == os.readlink("/proc/self/ns/user")
            return cls(groups, int(fields["CapEff"], 16) if is_ours else 0)
        except (OSError, KeyError, ValueError):
            return cls(capabilities=-1 if uid == 0 else 0)

    def has(self, capability: int) -> bool:
        return bool(self.capabilities >> capability & 1)
