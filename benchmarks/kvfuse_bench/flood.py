"""A client that stores blocks as fast as it can, for ever: the neighbour in `qos`. A process of its own.

``python -m kvfuse_bench.flood puts|files FOLDER`` writes a line once the flood goes on.
"""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np

from kvfuse.sizes import KIB
from kvfuse.usrbio.client import BlockStore
from kvfuse_bench.cache import write_and_rename
from kvfuse_bench.mountpoint import mount_of
from kvfuse_bench.ringwork import connect_when_open

BLOCK_SIZE = 64 * KIB
BATCH = 64
NAMES = 32768
"""that are stored again and again: 2 GiB"""
Say = Callable[[], None]


def flood_puts(folder: Path, say: Say) -> None:
    with connect_when_open(mount_of(folder)) as client, BlockStore(client, folder, deadline=30) as store:
        memory = client.iov(BATCH * BLOCK_SIZE).array.reshape(BATCH, BLOCK_SIZE)
        memory[:] = np.frombuffer(os.urandom(BLOCK_SIZE), np.uint8)
        for number in itertools.count():
            first = number * BATCH % NAMES
            store.put_many([f"{name:08x}" for name in range(first, first + BATCH)], list(memory))
            say()


def flood_files(folder: Path, say: Say) -> None:
    data = os.urandom(BLOCK_SIZE)
    for number in itertools.count():
        path = f"{folder}/{number % NAMES:08x}"
        write_and_rename(f"{path}.part{os.getpid()}", path, data)
        if number % BATCH == 0:
            say()


FLOODS = {"puts": flood_puts, "files": flood_files}


def main() -> None:
    door, folder = sys.argv[1:]
    is_said = False

    def say() -> None:
        nonlocal is_said
        if not is_said:
            is_said = True
            print("going on", flush=True)

    FLOODS[door](Path(folder), say)


if __name__ == "__main__":
    main()
