"""Blocks that are open in the file door when the daemon is killed are read on, as they were."""

from __future__ import annotations

import os
import random
import signal

from mounting import temporary_mount, wait_until
from ring_lab import stats


def test_a_block_that_is_open_is_read_on(rng: random.Random) -> None:
    """By the same descriptor: the next daemon goes on with the handle that C had given."""
    with temporary_mount(("outlive=true", "standby=true")) as mount:
        folder = mount.point / "kv"
        folder.mkdir()
        os.setxattr(folder, "user.kvfuse.namespace", b"kind=blocks admission=all")
        blocks = {f"block-{number}": rng.randbytes(200_000) for number in range(20)}
        for name, data in blocks.items():
            (folder / f"{name}.tmp").write_bytes(data)
            (folder / f"{name}.tmp").rename(folder / name)
        mount.terminate()
        mount.mount()
        for name, data in [*blocks.items(), *blocks.items()]:  # the second time, into memory
            assert (folder / name).read_bytes() == data
        opened = {name: os.open(folder / name, os.O_RDONLY) for name in blocks}
        assert stats(mount)["fs"]["answered_in_c"]["open"] >= len(blocks)
        for _ in range(3):
            former = stats(mount)["pid"]
            os.kill(former, signal.SIGKILL)
            wait_until(lambda former=former: bool(stats(mount)["pid"] != former), "the next daemon")
            for name, descriptor in opened.items():
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)  # the kernel has to ask
                offset = rng.randrange(200_000)
                assert os.pread(descriptor, 5000, offset) == blocks[name][offset : offset + 5000]
                assert os.fstat(descriptor).st_size == 200_000
        for descriptor in opened.values():
            os.close(descriptor)
        wait_until(lambda: stats(mount)["fs"]["open_handle_count"] <= 1, "the end of all handles")
