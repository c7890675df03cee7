"""Has a daemon kill itself between what a request does and its answer; for PYTHONPATH.

It does so once for each file in the folder KVFUSE_TESTS_DEADLY, which has the name of a kind of request.
"""

from __future__ import annotations

import functools
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any


def deadly(handler: Callable[..., Awaitable[Any]], armed: Path) -> Callable[..., Awaitable[Any]]:
    @functools.wraps(handler)
    async def answer(*args: Any) -> Any:
        if not armed.exists():
            return await handler(*args)
        armed.unlink()
        await handler(*args)
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("still alive")

    return answer


if "KVFUSE_TESTS_DEADLY" in os.environ and "kvfuse.cli" in sys.orig_argv:
    from kvfuse.fs.ops import KvfuseOperations

    for kind, method in list(vars(KvfuseOperations).items()):
        if hasattr(method, "__wrapped__"):
            path = Path(os.environ["KVFUSE_TESTS_DEADLY"]) / kind
            setattr(KvfuseOperations, kind, deadly(method, path))
