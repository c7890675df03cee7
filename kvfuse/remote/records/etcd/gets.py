"""Questions that are asked for while others are under way, put together into one.

Where many tasks look for a few keys each, every one of their questions would cost this process, and the members, as
much as one about all of the keys. A question goes out at once while fewer than ``UNDER_WAY`` others are; those that
come after wait for one answer, or ``GATHER_SECONDS``, and go together. A question is never answered by one that was
sent before it was asked: what a caller is told was so after it had called.

Nothing runs beside the callers: the first of those that wait together asks for all. When it is cancelled the others
ask again.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

import trio

from kvfuse.errors import EngineError
from kvfuse.remote.records.api import Versioned

UNDER_WAY = 2
"""questions, before others wait to go together: one is computed here while the members answer the other"""
GATHER_SECONDS = 0.005
"""at most, however long the answers take: a member that is stalled holds up nobody else's question"""

Ask = Callable[[Sequence[bytes]], Awaitable[list[Versioned | None]]]
"""The rows of some keys, by one question. EngineError."""


class _Question:
    __slots__ = ("answered", "error", "keys", "rows")

    def __init__(self) -> None:
        self.keys: dict[bytes, None] = {}
        self.rows: dict[bytes, Versioned | None] | None = None
        """key -> row; None where there is no answer"""
        self.error: EngineError | None = None
        self.answered = trio.Event()
        """it is over, whatever came of it"""


class SharedGets:
    """``ask`` for up to ``keys_max`` keys at a time."""

    def __init__(self, ask: Ask, keys_max: int) -> None:
        self._ask = ask
        self._keys_max = keys_max
        self._under_way = 0
        self._ended = trio.Event()
        """the next question that is over sets it"""
        self._open: _Question | None = None
        """waits to be sent: more keys may join"""

    async def get(self, keys: Sequence[bytes]) -> list[Versioned | None]:
        """The rows, all of one moment. ``keys``: not more than ``keys_max``. EngineError."""
        while True:
            question = self._open
            if question is not None and len(question.keys) + len(keys) <= self._keys_max:
                question.keys.update(dict.fromkeys(keys))
                await question.answered.wait()
            else:
                question = self._open = _Question()
                question.keys.update(dict.fromkeys(keys))
                await self._answer(question)
            if question.error is not None:
                raise type(question.error)(*question.error.args) from question.error
            if question.rows is not None:
                rows = question.rows
                return [rows[key] for key in keys]

    async def _answer(self, question: _Question) -> None:
        try:
            if self._under_way >= UNDER_WAY:
                with trio.move_on_after(GATHER_SECONDS):
                    await self._ended.wait()
            self._close(question)
            self._under_way += 1
            try:
                keys = list(question.keys)
                question.rows = dict(zip(keys, await self._ask(keys), strict=True))
            except EngineError as error:
                question.error = error
            finally:
                self._under_way -= 1
                self._ended.set()
                self._ended = trio.Event()
        finally:
            self._close(question)
            question.answered.set()

    def _close(self, question: _Question) -> None:
        """Nobody joins it any more."""
        if self._open is question:
            self._open = None
