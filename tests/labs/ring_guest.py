"""What a user in a container does: ``python ring_guest.py ROOT MOUNT UID``; prints what came of it as JSON.

All it finds is the mount and /proc, below ROOT. It has imported what it needs before it goes there.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np

from kvfuse.usrbio.client import BlockStore, connect

PATIENCE_S = 30.0
SIZE = 1 << 20


def visit(mount: Path) -> dict[str, Any]:
    """Every kind of operation in a folder of its own."""
    folder = mount / "own"
    data = np.arange(SIZE, dtype=np.uint64).astype(np.uint8)
    with connect(folder) as client, client.iov(2 * SIZE) as iov, client.ring(16) as ring:
        file = client.file(folder / "file", "rw")
        iov.array[:SIZE] = data
        ring.prep_write(iov, 0, file, 0, SIZE)
        ring.submit()
        written = int(ring.wait(1, PATIENCE_S)["result"][0])
        ring.prep_fsync(file)
        ring.prep_read(iov, SIZE, file, 0, SIZE)
        ring.submit()
        results = sorted(ring.wait(2, PATIENCE_S)["result"].tolist())
        is_read = np.array_equal(iov.array[SIZE:], data)
        with BlockStore(client, "own/blocks") as store:
            store.put(b"a", data)
            with store.get(b"a") as view:
                is_viewed = bytes(view) == data.tobytes()
            shared = store.get_many([b"a"])
            is_shared = bool(client.session._arenas) and shared[0] is not None
            del shared
            known = store.exists([b"a", b"b"]).tolist()
            gone = store.delete(b"a")
        owner = os.stat(folder / "file").st_uid
        try:
            client.file(mount / "secret", "r")
            secret = 0
        except OSError as error:
            secret = error.errno or -1
    return {
        "root": sorted(os.listdir("/")), "networks": sorted(os.listdir("/proc/self/net/dev_snmp6")), "written": written,
        "results": results, "is_read": is_read, "is_viewed": is_viewed, "is_shared": is_shared, "known": known,
        "gone": gone, "owner": owner, "secret": secret,
    }  # fmt: skip


def main() -> None:
    root, mount, uid = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    os.chroot(root)
    os.chdir("/")
    os.setgroups([])
    os.setgid(uid)
    os.setuid(uid)
    print(json.dumps(visit(mount)))


if __name__ == "__main__":
    main()
