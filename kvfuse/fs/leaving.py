"""How a daemon makes way for the next one, as its holder asks (`holder.main`): calls wait, and nothing is lost.

1. The gate is shut: what the kernel sends waits there. What was read is answered.
2. All changes are stored. Until here the way back is to open the gate again: calls have waited, no more.
3. Doors end, and leave what their clients have. What these did since is stored.
4. From here on nothing that is kept is dropped, whatever ends (`Keeper.seal`). The main loop ends, then the volume.

Whatever goes wrong from the third step on is a crash like any other: the next daemon copes with that.
"""

from __future__ import annotations

import logging
from typing import Protocol

import trio

from kvfuse.errors import KvfuseError
from kvfuse.fs.turns import RequestGate

log = logging.getLogger(__name__)

LOOK_SECONDS = 0.001
"""between looks at whether requests are under way"""
TRY_SECONDS, PAUSE_SECONDS = 0.25, 0.02
"""Some requests end only after others that came later: while the daemon drops pages of a file from the kernel's cache,
that may wait for somebody who reads them. So the gate is opened for a moment now and then, until none is under way."""


class Asking(Protocol):
    """Asks a daemon to make way; `daemon_side.Holding` does."""

    async def answer_holder(self) -> None:
        """Hear what it says, until cancelled; for as long as there is an event loop."""
        ...

    async def wait_until_asked(self) -> float:
        """Wait until it is asked; returns the seconds that storing everything may take."""
        ...

    def refuse_to_leave(self, why: str) -> None:
        """It cannot, and goes on as if nothing had been."""
        ...


class Storing(Protocol):
    """What `volume.Volume` does here."""

    async def sync(self) -> None: ...


class Serving(Protocol):
    """What `ops.KvfuseOperations` tells here."""

    under_way_count: int


class Leaving:
    """Of one daemon. ``asking``: None: nobody ever asks."""

    def __init__(self, asking: Asking | None = None) -> None:
        self._asking = asking
        self._waiting = trio.CancelScope()
        self.gate = RequestGate()
        self.begun = trio.Event()
        """there is no way back: doors are to leave what they have"""
        self.is_done = False
        """everything is stored, and left to the next daemon"""

    async def answer_holder(self) -> None:
        """Hear and answer whoever asks, until cancelled."""
        if self._asking is not None:
            await self._asking.answer_holder()

    async def wait_to_leave(self, operations: Serving, volume: Storing) -> bool:
        """Return when the daemon is asked to leave, the gate is shut, and everything stored. False after `give_up`."""
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
                    what = f"{count} requests are under way" if count else "changes are not stored"
                    why = f"{what} after {seconds:g} s"
                else:
                    self.begun.set()
                    return True
                finally:
                    if not self.begun.is_set():
                        self.gate.open()
                log.warning("the daemon does not make way for another one: %s", why)
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
            while operations.under_way_count:  # noqa: ASYNC110  an event would cost each request something
                await trio.sleep(LOOK_SECONDS)
        return not operations.under_way_count

    def give_up_leaving(self) -> None:
        """The mount is to end: it needs its daemon for that."""
        self._waiting.cancel()
