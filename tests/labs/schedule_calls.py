"""What each call of a caller under a random schedule is: timed, and logged before and after it."""

from __future__ import annotations

import errno
import json
import os
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from schedule_content import ACTORS

from kvfuse.errors import Disconnected

_T = TypeVar("_T")


class Unmounted(OSError):
    """The folder is of a mount that is gone."""


class Caller:
    """The log, the random numbers, and what one call is."""

    def __init__(self, point: Path, actor: int, seed: int, log: Path) -> None:
        self.point = point
        self.actor = actor
        self.rng = random.Random(f"{seed} {actor}")
        self._count = 0
        self._log = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        self._slowest: tuple[str, float, float] = ("", 0.0, 0.0)

    def new_version(self) -> int:
        self._count += 1
        return self._count * ACTORS + self.actor

    def call(self, what: str, function: Callable[[], _T]) -> _T:
        """One system call, or one of a ring."""
        began = time.monotonic()
        self._say(call=what, t=began)
        try:
            return function()
        finally:
            took = time.monotonic() - began
            if took >= self._slowest[2]:
                self._slowest = what, began, took

    @contextmanager
    def operation(self, do: str, folder: str, name: str, **more: object) -> Iterator[dict[str, object]]:
        """An operation of some calls. What the body puts into the result is logged, and so is an error."""
        self._slowest = "", 0.0, 0.0
        self._say(do=do, folder=folder, name=name, t=time.monotonic(), **more)
        result: dict[str, object] = {"error": 0}
        try:
            yield result
        except Disconnected:
            result["error"] = errno.ENOTCONN
            raise
        except OSError as error:
            result["error"] = error.errno or errno.EIO
            if error.errno in (errno.ENOTCONN, errno.ECONNABORTED):
                raise Unmounted(*error.args) from error
        finally:
            self._say(t=time.monotonic(), slow=self._slowest, **result)

    def _say(self, **event: object) -> None:
        os.write(self._log, json.dumps(event).encode() + b"\n")
