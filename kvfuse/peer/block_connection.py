"""A connection by which blocks of another host are read: questions go out at once, a thread receives the answers."""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import trio

from kvfuse.native._peers import Reader
from kvfuse.peer.peer_wire import BLOCK_ANSWER, QUESTION_BYTES_MAX, ROWS_MAX, Rows, WireError
from kvfuse.volume.views.neighbours import WantedBlocks

QUESTIONS_MAX = 16
"""that are open at a time: so their bytes always have room in the kernel"""
SLACK = 0.25
"""part of the patience by which it is exceeded: who asked has given up by then"""
_TOLD = struct.Struct("<Q I I")

Numbers = npt.NDArray[np.int64]


class BlockQuestion(NamedTuple):
    """Some blocks of a batch: ``chosen``, their places in it. Flags, ``without``: as of a `BLOCK_QUESTION`."""

    asker: BlockAsker
    chosen: Numbers
    flags: int
    without: int
    size: int


class BlockAsker(Protocol):
    """Who waits for answers."""

    wanted: WantedBlocks
    places: npt.NDArray[np.uint32]
    way: object | None
    parent: bytes
    """the packed span that it belongs to; empty: none"""

    def answered(self, question: BlockQuestion, rows: Rows) -> None:
        """Results of some of its rows: `BLOCK_ANSWER`, as `Reader.take` has them."""

    def ended(self, question: BlockQuestion) -> None:
        """Those without a result by now are lost."""


def cut(chosen: Numbers, lengths: npt.NDArray[np.uint32], bytes_max: int = QUESTION_BYTES_MAX) -> list[Numbers]:
    """Parts of a choice that one question each may want. No length is more than ``bytes_max``, or it is alone."""
    if len(chosen) <= ROWS_MAX and int(lengths[chosen].sum()) <= bytes_max:
        return [chosen]
    parts, start, size = [], 0, 0
    for place, length in enumerate(lengths[chosen].tolist()):
        if place > start and (size + length > bytes_max or place - start == ROWS_MAX):
            parts.append(chosen[start:place])
            start, size = place, 0
        size += length
    return [*parts, chosen[start:]]


class BlockConnection:
    """Greeted, and running as long as `run`. Event loop only.

    ``own_load``: bytes that this host has still to send. ``told``: called with the other one's. ``is_traced``: the
    other one takes the spans that questions belong to.
    """

    def __init__(
        self, descriptor: int, patience: float, own_load: Callable[[], int], told: Callable[[int], None],
        *, is_traced: bool = False,
    ) -> None:  # fmt: skip
        """The descriptor is closed by this."""
        self.bytes = 0
        """that were asked for, and have not come"""
        self._reader = Reader(descriptor)
        self._patience, self._own_load, self._told = patience, own_load, told
        self._is_traced = is_traced
        self._open: dict[int, BlockQuestion] = {}
        self._waiting: deque[BlockQuestion] = deque()
        self._asked = trio.Event()

    def ask(self, question: BlockQuestion) -> None:
        """Its asker hears of all its rows some time, unless it abandons it."""
        self.bytes += question.size
        self._waiting.append(question)
        self._ask_more()

    def _ask_more(self) -> None:
        while self._waiting and len(self._open) < QUESTIONS_MAX:
            question = self._waiting.popleft()
            asker, wanted = question.asker, question.asker.wanted
            number = self._reader.ask(
                wanted.addresses, wanted.generations, wanted.lengths, wanted.checksums, wanted.targets, asker.places,
                question.chosen, question.flags, question.without, asker.way, self._own_load(),
                asker.parent if self._is_traced else b"",
            )  # fmt: skip
            self._open[number] = question
            self._asked.set()

    def abandon(self, asker: BlockAsker) -> None:
        """Nothing is written for it from now on. It hears of what came until now, and then of nothing."""
        numbers = [number for number, question in self._open.items() if question.asker is asker]
        for number in numbers:
            self._reader.abandon(number)
        self._take()  # what was shown by a landing may not be read anew to the same place
        for number in numbers:
            if (question := self._open.pop(number, None)) is not None:
                self.bytes -= question.size
        for question in [question for question in self._waiting if question.asker is asker]:
            self._waiting.remove(question)
            self.bytes -= question.size
        self._ask_more()

    async def run(self) -> None:
        """Until the connection breaks, or nothing comes although something should. WireError."""
        bell, is_over = self._reader.bell(), 0
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._watch, nursery.cancel_scope)
            while not is_over:
                await trio.lowlevel.wait_readable(bell)
                self._take()
                _, load, _, is_over, _ = self._reader.facts()
                self._told(load)
            nursery.cancel_scope.cancel()
        if self._reader.facts()[4]:
            raise WireError("it answers what it was not asked")

    def close(self) -> None:
        """Nothing is written any more; what has not come is lost. `run` has ended, and nobody asks by it any more."""
        self._reader.close()
        self._waiting, waiting = deque(), self._waiting
        self._take()
        for question in [*self._open.values(), *waiting]:
            question.asker.ended(question)

    async def _watch(self, scope: trio.CancelScope) -> None:
        """End the connection where nothing comes for longer than the patience."""
        while True:
            await self._asked.wait()
            await trio.sleep(self._patience * SLACK)
            left, _, silence, *_ = self._reader.facts()
            if silence > self._patience * (1 + SLACK):
                scope.cancel()
            if not left:
                self._asked = trio.Event()

    def _take(self) -> None:
        told, at = self._reader.take(), 0
        while at < len(told):
            number, left, count = _TOLD.unpack_from(told, at)
            rows = np.frombuffer(told, BLOCK_ANSWER, count, at + _TOLD.size)
            at += _TOLD.size + rows.nbytes
            question = self._open.get(number)
            if question is None:
                continue  # it was abandoned
            if not left:
                del self._open[number]
                self.bytes -= question.size
            question.asker.answered(question, rows)
            if not left:
                question.asker.ended(question)
        self._ask_more()
