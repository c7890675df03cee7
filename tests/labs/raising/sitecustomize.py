"""Has a daemon raise at an await of any of its tasks; for PYTHONPATH.

In the folder KVFUSE_TESTS_RAISING, ``start`` has the number of the await, counted from the beginning of the next
daemon's event loop, and ``now`` that from now on in the daemon that serves. The file is taken away by who reads it, and
``taken`` has his process then.
When an await raises, ``raised`` says at which time of CLOCK_MONOTONIC, and where. Places that are named in ``known`` do
not count, for a while: what is done a thousand times a second would else be nearly all that is drawn. ``adoptions`` has
how many clients of rings are not taken over, as that raises.
"""

from __future__ import annotations

import functools
import gc
import inspect
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

KINDS = ("cr", "cr_await"), ("gi", "gi_yieldfrom"), ("ag", "ag_await")
PATIENCE_SECONDS = 1.0
"""after which places count that are known"""


class Injected(Exception):
    """Nobody foresees it."""


def place_of(task: Any) -> str:
    """The innermost line of ours that a task awaits at; "": none."""
    own = ""
    for frame in awaiting(task.coro):
        code = frame.f_code
        if "/kvfuse/" in code.co_filename:
            own = f"{Path(code.co_filename).name}:{code.co_qualname}:{frame.f_lineno}"
    return own


def awaiting(waiter: Any) -> Iterator[Any]:
    """The frames of what awaits what, from the outermost; also through what pyfuse3, which is compiled, awaits."""
    while waiter is not None:
        kind = next((kind for kind in KINDS if hasattr(waiter, f"{kind[0]}_frame")), None)
        if kind is None:
            inner = [thing for thing in gc.get_referents(waiter) if any(hasattr(thing, f"{k}_frame") for k, _ in KINDS)]
            waiter = inner[0] if inner else None
            continue
        frame = getattr(waiter, f"{kind[0]}_frame")
        if frame is not None:
            yield frame
        waiter = getattr(waiter, kind[1], None)


def raise_somewhere(folder: Path) -> None:
    import outcome
    import trio

    run = trio.run

    class Raiser(trio.abc.Instrument):
        def __init__(self) -> None:
            self.known = set[str]()
            self.until = 0.0
            self.left = self.take("start")

        def take(self, name: str) -> int:
            try:
                number = int((folder / name).read_text())
                (folder / name).unlink()
                (folder / "taking").write_text(str(os.getpid()))
                (folder / "taking").rename(folder / "taken")
            except FileNotFoundError:
                return 0
            self.known = set((folder / "known").read_text().splitlines())
            self.until = time.monotonic() + PATIENCE_SECONDS
            return number

        def before_task_step(self, task: Any) -> None:
            self.left = self.left or self.take("now")
            is_own = not task.name.startswith(("trio.", "<"))  # trio's own tasks
            is_awaiting = is_own and inspect.getcoroutinestate(task.coro) != inspect.CORO_CREATED
            if not self.left or not is_awaiting or not isinstance(task._next_send, outcome.Value):
                return
            place = place_of(task)
            is_late = time.monotonic() > self.until
            if not place or (place in self.known and not is_late):
                return
            self.left = 0 if is_late else self.left - 1
            if not self.left:
                text = f"{time.monotonic()} {place} {task.name}"
                (folder / "raising").write_text(text)
                (folder / "raising").rename(folder / "raised")
                task._next_send = outcome.Error(Injected(text))

    @functools.wraps(run)
    def running(*arguments: Any, **keywords: Any) -> Any:
        return run(*arguments, **keywords, instruments=[Raiser()])

    trio.run = running


def fail_adoptions(folder: Path) -> None:
    from kvfuse.usrbio.daemon import restored_connection

    restore = restored_connection.restore

    async def adopting(*arguments: Any) -> Any:
        left = folder / "adoptions"
        if left.exists() and (count := int(left.read_text())):
            left.write_text(str(count - 1))
            raise Injected("a client")
        return await restore(*arguments)

    restored_connection.restore = adopting


if "KVFUSE_TESTS_RAISING" in os.environ and "KVFUSE_HOLDER" in os.environ and "mount" in sys.orig_argv:
    raise_somewhere(Path(os.environ["KVFUSE_TESTS_RAISING"]))
    fail_adoptions(Path(os.environ["KVFUSE_TESTS_RAISING"]))
