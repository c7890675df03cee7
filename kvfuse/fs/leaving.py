"""Makes way for the next daemon when the holder asks (`holder.main`): calls wait, and nothing is lost.

1. The daemon shuts the gate: new requests wait in the kernel. It answers those that it has read.
2. It stores all changes. Until here it can go back by opening the gate again: calls have waited, no more.
3. Doors hand their clients' state over and end. The daemon stores what these clients changed meanwhile.
4. From here on no keeper entry is dropped, whatever ends (`Keeper.seal`). The main loop ends, then the volume.

A failure from the third step on is a crash like any other: the next daemon restores what is kept.
"""

from __future__ import annotations

import logging
from typing import Protocol

import trio

from kvfuse.errors import KvfuseError
from kvfuse.fs.turns import RequestGate
from kvfuse.native import fusewire

log = logging.getLogger(__name__)

LOOK_SECONDS = 0.001
"""between looks at whether requests are in flight"""
TRY_SECONDS, PAUSE_SECONDS = 0.25, 0.02
"""Some requests end only after later ones: an invalidation of a file's pages, for example, waits for a read of them.
So the daemon opens the gate for a moment now and then, until no request is in flight."""


class Asking(Protocol):
    """The holder's requests to leave; `daemon_side.Holding` implements it."""

    async def answer_holder(self) -> None:
        """Receive and answer the holder's messages, until cancelled."""
        ...

    async def wait_until_asked(self) -> float:
        """Wait for a request to leave. Returns the seconds that storing everything may take."""
        ...

    def refuse_to_leave(self, why: str) -> None:
        """Report that the daemon cannot leave and goes on."""
        ...


class Storing(Protocol):
    """The part of `volume.Volume` that leaving uses."""

    async def sync(self) -> None: ...


class Serving(Protocol):
    """The part of `ops.KvfuseOperations` that leaving uses."""

    under_way_count: int


class Leaving:
    """The way out of one daemon. ``asking``: None where no holder asks."""

    def __init__(self, asking: Asking | None = None) -> None:
        self._asking = asking
        self._waiting = trio.CancelScope()
        self.gate = RequestGate()
        self.begun = trio.Event()
        """the daemon cannot go back: doors hand their state over"""
        self.is_done = False
        """everything is stored, and handed over to the next daemon"""

    async def answer_holder(self) -> None:
        """Answer the holder, if any, until cancelled."""
        if self._asking is not None:
            await self._asking.answer_holder()

    async def wait_to_leave(self, operations: Serving, volume: Storing) -> bool:
        """Wait until the holder has asked, the gate is shut and all is stored. False after `give_up_leaving`."""
        if self._asking is None:
            return False
        with self._waiting:
            while True:
                seconds = await self._asking.wait_until_asked()
                try:
                    await self._store_everything(operations, volume, seconds)
                except KvfuseError as error:
                    why = str(error)
                except trio.TooSlowError:
                    count = operations.under_way_count
                    what = f"{count} requests are in flight" if count else "changes are not stored"
                    why = f"{what} after {seconds:g} s"
                else:
                    self.begun.set()
                    return True
                finally:
                    if not self.begun.is_set():
                        self.gate.open()
                log.warning("the daemon cannot make way for the next one: %s", why)
                self._asking.refuse_to_leave(why)
        return False

    async def _store_everything(self, operations: Serving, volume: Storing, seconds: float) -> None:
        log.info("the daemon makes way for the next one")
        with trio.fail_after(seconds):
            while not await self._drain_requests(operations):
                self.gate.open()
                await trio.sleep(PAUSE_SECONDS)
            await volume.sync()

    async def _drain_requests(self, operations: Serving) -> bool:
        self.gate.shut()
        with trio.move_on_after(TRY_SECONDS):
            while self._is_busy(operations):  # noqa: ASYNC110  an event would cost each request something
                await trio.sleep(LOOK_SECONDS)
        return not self._is_busy(operations)

    @staticmethod
    def _is_busy(operations: Serving) -> bool:
        return operations.under_way_count > 0 or fusewire.are_queued()

    def give_up_leaving(self) -> None:
        """Stop waiting for a request to leave: the mount ends, and needs this daemon for that."""
        self._waiting.cancel()
