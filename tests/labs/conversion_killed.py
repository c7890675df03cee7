"""Opens a volume, and kills itself in the middle of its conversion: ``conversion_killed.py FOLDER STEP``."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import trio

from kvfuse.options.config import load
from kvfuse.remote.records.lmdb.store import LmdbRecords
from kvfuse.remote.segments.file.store import FileSegments
from kvfuse.volume.running import open_volume


def deadly(call: Callable[..., Awaitable[Any]], left: list[int], *, is_torn: bool = False) -> Callable[..., Any]:
    async def answer(self: Any, *args: Any, **words: Any) -> Any:
        left[0] -= 1
        if left[0] == 0 and is_torn:
            await call(self, args[0][: len(args[0]) // 2])
        if left[0] <= 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return await call(self, *args, **words)

    return answer


async def main(folder: Path, step: int) -> None:
    left = [step]
    FileSegments.write = deadly(FileSegments.write, left, is_torn=True)  # type: ignore[method-assign]
    FileSegments.sync = deadly(FileSegments.sync, left)  # type: ignore[method-assign]
    LmdbRecords.commit = deadly(LmdbRecords.commit, left)  # type: ignore[method-assign]
    async with open_volume(load(folder).options):
        pass


if __name__ == "__main__":
    trio.run(main, Path(sys.argv[1]), int(sys.argv[2]))
