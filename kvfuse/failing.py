"""What a daemon does where something in it raises: the rule, in one place.

*The core* is what a mount cannot do without, and what cannot be begun anew alone: start and end of the volume, the loop
that reads the kernel's requests, write-back and commits, the lock or the lease, the watch of a shared volume, news for
the kernel's cache, rings (listener, call queue, every thread), the talk with the holder. An exception there ends the
process at once, as `kill -9` does, and the next daemon goes on with all that is kept. Nothing is unwound: a ``finally``
on the way out would give back what the next daemon needs, or wait for somebody who waits for this daemon. `vital` and
`vital_task` mark it.

*A service* is all else that runs beside requests: metrics, peers, evictions ahead of need and sweeps, removals of
several commits, access times, paths of namespaces, scrubbing, the disk tier, files that were open before. Its failure
is logged and counted, it is begun anew with pauses that grow, and it never ends the mount. `service` runs one. What is
done once beside a request (`once`) is a service that is not begun anew.

*One request* is neither: its caller gets EIO (`fs.ops`, `usrbio.daemon.loop_calls`), and a client of rings whose
connection cannot be served loses it (`usrbio.daemon.listener`): else a client could end one daemon after the other.

A process that no next one follows (``outlive=false``, the first start of a mount, tools, tests) has not called
`end_by`: there an exception of the core is raised as ever, all is unwound, and what can be stored is.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import trio

from kvfuse.errors import KvfuseError, innermost

PAUSE_MIN, PAUSE_MAX = 0.1, 60.0
"""seconds before a service is begun anew: twice as long after each failure"""
PROVEN_SECONDS = 60.0
"""a service that ran for so long begins with the shortest pause again"""

log = logging.getLogger(__name__)

End = Callable[[BaseException], NoReturn]
"""ends this process at once, for that reason"""

_end: End | None = None
failures: Counter[str] = Counter()
"""of each service of this process, by its name"""


def end_by(end: End | None) -> None:
    """There is a next daemon: from now on an exception of the core, or of a thread, ends this process. None: not so."""
    global _end
    _end = end
    threading.excepthook = threading.__excepthook__ if end is None else _thread_failed


def _thread_failed(raised: threading.ExceptHookArgs) -> None:
    if raised.exc_value is not None and not isinstance(raised.exc_value, SystemExit):
        end_process(raised.exc_value)


def end_process(error: BaseException) -> None:
    """End this process at once, if there is a next one to go on."""
    if _end is not None:
        _end(error)


@contextmanager
def vital() -> Iterator[None]:
    """The body is of the core. Whatever it raises is raised here where no next daemon follows. Cancellations pass."""
    try:
        yield
    except GeneratorExit:
        raise
    except BaseException as error:
        if (mistake := _without_cancellations(error)) is not None:
            end_process(mistake)
        raise


async def vital_task(work: Callable[..., Awaitable[object]], *arguments: Any, **keywords: Any) -> None:
    """Run a task of the core."""
    with vital():
        await work(*arguments, **keywords)


class Begun:
    """A `trio.TaskStatus` for each start of a service."""

    def __init__(self) -> None:
        self._event = trio.Event()

    def started(self, _: object = None) -> None:
        self._event.set()

    @property
    def is_set(self) -> bool:
        return self._event.is_set()

    async def wait(self) -> None:
        await self._event.wait()


async def service(name: str, work: Callable[[], Awaitable[object]], must_begin: Begun | None = None) -> None:
    """Run a service until it returns, or until this is cancelled; anew after each failure.

    ``must_begin``: what it raises before that is set is raised here, as whoever began it is to hear of it.
    """
    pause = PAUSE_MIN
    while True:
        began = trio.current_time()
        try:
            await work()
        except BaseException as error:
            mistake = _without_cancellations(error)
            if mistake is None or (must_begin is not None and not must_begin.is_set):
                raise
            if trio.current_time() - began > PROVEN_SECONDS:
                pause = PAUSE_MIN
            _note(name, mistake, f"it is begun anew in {pause:g} s")
        else:
            return
        await trio.sleep(pause)
        pause = min(2 * pause, PAUSE_MAX)


async def once(name: str, work: Callable[..., Awaitable[object]], *arguments: object) -> None:
    """Do something beside requests. Where it fails, it is not done."""
    try:
        await work(*arguments)
    except BaseException as error:
        mistake = _without_cancellations(error)
        if mistake is None:
            raise
        _note(name, mistake, "it is left undone")
        await trio.lowlevel.checkpoint_if_cancelled()


def _note(name: str, mistake: BaseException, what: str) -> None:
    failures[name] += 1
    first = innermost(mistake)
    unforeseen = None if isinstance(first, KvfuseError) else mistake
    log.error("%s failed, %s: %s", name, what, str(first) or repr(first), exc_info=unforeseen)


def _without_cancellations(error: BaseException) -> BaseException | None:
    """None: it is nothing else."""
    if isinstance(error, trio.Cancelled):
        return None
    return error.split(trio.Cancelled)[1] if isinstance(error, BaseExceptionGroup) else error
