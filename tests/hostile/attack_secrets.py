"""``attack_secrets.py UID MOUNT [bare]``: what a user finds out of a daemon. ``bare``: uid 0 that may nothing."""

from __future__ import annotations

import ctypes
import json
import sys
from pathlib import Path

from attacker_kit import Attacker, become, memfd, say, wait_for_word


def drop_capabilities() -> None:
    """As a container's root: uid 0 with nothing."""
    libc = ctypes.CDLL(None, use_errno=True)
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    assert libc.capset(header, (ctypes.c_uint32 * 6)()) == 0


def main() -> None:
    uid, mount = int(sys.argv[1]), sys.argv[2]
    if "bare" in sys.argv:
        drop_capabilities()
    else:
        become(uid)
    client = Attacker(mount)
    client.iov(memfd(4096), 4096)
    folder = Path(mount, ".kvfuse")
    say(uid=uid, **{name: json.loads((folder / name).read_text()) for name in ("stats", "config")})
    wait_for_word()  # what it has registered stays


if __name__ == "__main__":
    main()
