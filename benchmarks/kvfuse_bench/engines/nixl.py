"""NIXL's POSIX plug-in: one large file, batches of operations given to the kernel at once."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

from kvfuse_bench.engines.files import offers_direct, whole
from kvfuse_bench.engines.kernel_queues import IoUring, LinuxAio, Transfer
from kvfuse_bench.engines.measuring import Memory, Meter

DEPTH = 16
"""operations of a batch"""
Queue = LinuxAio | IoUring


def nixl_posix(folder: Path, meter: Meter, memory: Memory, *, queue: Callable[[int], Queue]) -> None:
    """O_DIRECT where it is offered: otherwise linux-aio waits in its submission."""
    flag = os.O_DIRECT if offers_direct(folder) else 0
    with queue(DEPTH) as opened:
        descriptor = os.open(folder / "nixl.bin", os.O_RDWR | os.O_CREAT | flag, 0o644)
        try:
            os.ftruncate(descriptor, memory.size)
            batches = [range(memory.count)[start : start + DEPTH] for start in range(0, memory.count, DEPTH)]
            for name, for_read in (("write", False), ("read", True)):
                with meter.phase(name) as phase:
                    for batch in batches:
                        phase.run(partial(_move, opened, descriptor, memory, batch, for_read=for_read), len(batch))
        finally:
            os.close(descriptor)


def _move(queue: Queue, descriptor: int, memory: Memory, batch: range, *, for_read: bool) -> int:
    size = memory.block_size
    start = (memory.target if for_read else memory.source).ctypes.data
    transfers = [Transfer(start + index * size, size, index * size) for index in batch]
    return whole(queue.move(descriptor, transfers, for_read=for_read), len(batch) * size)
