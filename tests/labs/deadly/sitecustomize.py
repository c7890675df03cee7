"""Has a daemon kill itself between what a request does and its answer; for PYTHONPATH.

It does so once for each file in the folder KVFUSE_TESTS_DEADLY, which has the name of a kind of request: of the kernel,
or, as ``KIND-done``, ``KIND-told`` and ``KIND-noted``, of a client of rings: before its reply, after it, and when
nothing but the message in the socket tells of it any more. Or, as ``accept-new``, before the socket of a client is
kept, and as ``hello-new``, before anything else is; as ``cut-told``, when it was kept that a client knows what is lost
of a file.
"""

from __future__ import annotations

import functools
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, NoReturn


def deadly(handler: Callable[..., Awaitable[Any]], armed: Path) -> Callable[..., Awaitable[Any]]:
    @functools.wraps(handler)
    async def answer(*args: Any) -> Any:
        if not armed.exists():
            return await handler(*args)
        armed.unlink()
        await handler(*args)
        return die()

    return answer


def die() -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("still alive")


def be_deadly_to_rings(folder: Path) -> None:
    from kvfuse.usrbio.daemon.connection import Connection
    from kvfuse.usrbio.daemon.connection_keeping import Arrivals, ConnectionKeeping
    from kvfuse.usrbio.protocol.wire import Message, Request

    answer, reply, answered, greet = (
        Connection._answer,
        Connection._reply,
        ConnectionKeeping.end_reply,
        ConnectionKeeping.keep_connection,
    )
    told, accept = ConnectionKeeping.clear_cut, Arrivals.keep
    present: list[str] = []

    def look(moment: str) -> None:
        armed = folder / f"{present[-1]}-{moment}"
        if armed.exists():
            armed.unlink()
            die()

    async def answer_(self: Any, message: Message) -> Any:
        answered = await answer(self, message)
        present[:] = [Request(message.request).name.lower()]
        look("done")
        return answered

    async def reply_(self: Any, *args: Any) -> None:
        await reply(self, *args)
        if present:
            look("told")

    def answered_(self: Any) -> None:
        answered(self)
        if present:
            look("noted")

    def greet_(self: Any, *args: Any) -> None:
        present[:] = ["hello"]
        look("new")
        greet(self, *args)

    def accept_(self: Any, *args: Any) -> str:
        present[:] = ["accept"]
        look("new")
        return accept(self, *args)

    def told_(self: Any, *args: Any) -> None:
        told(self, *args)
        present[:] = ["cut"]
        look("told")

    Connection._answer, Connection._reply, ConnectionKeeping.clear_cut = answer_, reply_, told_
    ConnectionKeeping.end_reply, ConnectionKeeping.keep_connection, Arrivals.keep = answered_, greet_, accept_


if "KVFUSE_TESTS_DEADLY" in os.environ and "kvfuse.cli" in sys.orig_argv:
    from kvfuse.fs.ops import KvfuseOperations

    for kind, method in list(vars(KvfuseOperations).items()):
        if hasattr(method, "__wrapped__"):
            path = Path(os.environ["KVFUSE_TESTS_DEADLY"]) / kind
            setattr(KvfuseOperations, kind, deadly(method, path))
    be_deadly_to_rings(Path(os.environ["KVFUSE_TESTS_DEADLY"]))
