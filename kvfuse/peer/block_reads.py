"""Blocks that one caller reads from other hosts: from the first questions to bytes that are verified.

Each is asked of the host that holds its slab; where that names others, of one of these; then of the first one again,
which answers itself. Threads receive, sum and show blocks: what is here happens for each question, not for each block.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Protocol

import numpy as np
import numpy.typing as npt
import trio

from kvfuse.peer.block_connection import BlockQuestion, Numbers
from kvfuse.peer.neighbour import Neighbour
from kvfuse.peer.peer_wire import FINAL, NAMED_MAX, Rows
from kvfuse.traceparent import SPAN
from kvfuse.volume.views.neighbours import Answer, LandsBlocks, WantedBlocks

LOST, WRONG = 0, -1
"""results of a block beside an `Answer`"""

Mask = npt.NDArray[np.bool_]
Results = npt.NDArray[np.int32]


class Turn(Enum):
    """Who is asked: the host that holds the slab; one that that named; that host, which now answers itself."""

    FIRST = 1
    NAMED = 2
    LAST = 3


class CountsBlocks(Protocol):
    """CountsBlocks how reads ended."""

    def count_blocks(self, neighbour: Neighbour, results: Results, right_size: int) -> None: ...


class _Asking:
    """Blocks that are asked of one host together: a `block_connection.BlockAsker`. ``holder``: of their slabs."""

    def __init__(self, reads: BlockReads, neighbour: Neighbour, chosen: Numbers, turn: Turn, holder: Neighbour) -> None:
        self.reads, self.neighbour, self.chosen, self.turn, self.holder = reads, neighbour, chosen, turn, holder
        self.wanted, self.places, self.way, self.parent = reads.wanted, reads.places, reads.way, reads.parent
        self.size = int(self.wanted.lengths[chosen].sum())
        self.results: Results = np.zeros(len(self.wanted.lengths), np.int32)
        """of each block"""
        self.began = trio.current_time()
        self.questions = 0

    def answered(self, question: BlockQuestion, rows: Rows) -> None:
        chosen = question.chosen[rows["row"]]
        self.results[chosen] = rows["answer"]
        is_right = rows["answer"] == Answer.HERE
        self.reads.is_right[chosen[is_right]] = True
        if not is_right.all():
            self.reads.go_on(self, chosen[~is_right], rows["named"][~is_right])

    def ended(self, question: BlockQuestion) -> None:
        self.lose(question.chosen[self.results[question.chosen] == LOST])
        self.questions -= 1
        if not self.questions:
            self.reads.end(self)

    def lose(self, lost: Numbers) -> None:
        if len(lost):
            self.reads.go_on(self, lost, np.zeros((len(lost), NAMED_MAX), np.uint64))


class BlockReads:
    """Event loop only. ``holders``: hosts that are asked first, and places of the blocks that are asked of each.

    ``landing``, ``places``: as of `Neighbours.read_blocks`.
    """

    def __init__(
        self, wanted: WantedBlocks, holders: Mapping[Neighbour, Numbers], neighbours: Mapping[int, Neighbour],
        counts: CountsBlocks, landing: LandsBlocks | None, places: npt.NDArray[np.uint32] | None,
    ) -> None:  # fmt: skip
        count = len(wanted.lengths)
        self.wanted = wanted
        self.way = landing.way() if landing is not None else None
        self.parent = SPAN.get()
        self.places = places if places is not None else np.zeros(count, np.uint32)
        self.is_right: Mask = np.zeros(count, np.bool_)
        self.stored: list[tuple[Neighbour, int]] = []
        """blocks that a host may have on disk"""
        self.rows = self.named = 0
        """how often blocks were asked for; and how often of hosts that others had named"""
        self.done = trio.Event()
        self._holders, self._neighbours, self._counts = holders, neighbours, counts
        self._open: set[_Asking] = set()
        self._is_over = False

    def begin(self) -> None:
        for holder, chosen in self._holders.items():
            self._ask(holder, chosen, Turn.FIRST, holder)

    def _ask(self, neighbour: Neighbour, chosen: Numbers, turn: Turn, holder: Neighbour, without: int = 0) -> None:
        asking = _Asking(self, neighbour, chosen, turn, holder)
        self._open.add(asking)
        self.rows += len(chosen)
        neighbour.speed.under_way += asking.size
        asking.questions = neighbour.ask_blocks(asking, chosen, 0 if turn is Turn.FIRST else FINAL, without)
        if not asking.questions:
            asking.lose(chosen)
            self.end(asking)

    def go_on(self, asking: _Asking, chosen: Numbers, named: npt.NDArray[np.uint64]) -> None:
        """With blocks that a host did not send. ``named``: clients that have them, as it says."""
        if self._is_over:
            return
        results = asking.results[chosen]
        is_stored = results == Answer.STORED
        self.stored += [(asking.neighbour, place) for place in chosen[is_stored].tolist()]
        if asking.turn is Turn.FIRST:
            others: dict[Neighbour, list[int]] = {}
            for number in np.flatnonzero(results == Answer.ELSEWHERE).tolist():
                known = [self._neighbours.get(client) for client in named[number].tolist() if client]
                ready = next((one for one in known if one is not None and one.has_blocks_ready), asking.holder)
                others.setdefault(ready, []).append(int(chosen[number]))
            for one, own in others.items():
                self.named += len(own)
                self._ask(one, np.array(own), Turn.LAST if one is asking.holder else Turn.NAMED, asking.holder)
        elif asking.turn is Turn.NAMED and not is_stored.all():
            self._ask(asking.holder, chosen[~is_stored], Turn.LAST, asking.holder, asking.neighbour.client)

    def end(self, asking: _Asking) -> None:
        """All that was asked together has results."""
        self._open.remove(asking)
        ahead, neighbour = asking.neighbour.speed.under_way, asking.neighbour
        neighbour.speed.under_way -= asking.size
        is_right = asking.results[asking.chosen] == Answer.HERE
        size = asking.size if is_right.all() else int(self.wanted.lengths[asking.chosen[is_right]].sum())
        if size:
            neighbour.speed.note(ahead, trio.current_time() - asking.began)
        self._counts.count_blocks(neighbour, asking.results[asking.chosen], size)
        if not self._open:
            self.done.set()

    def abandon(self, *, is_late: bool) -> int:
        """Nothing is written to targets any more. How many blocks were late."""
        late, self._is_over = 0, True
        for asking in list(self._open):
            asking.neighbour.abandon_blocks(asking)
            if asking in self._open:  # else it has just ended
                asking.neighbour.speed.under_way -= asking.size
                own = int(np.count_nonzero(asking.results[asking.chosen] == LOST))
                late += own
                if is_late:
                    asking.neighbour.note(is_well=False, count=own)
        self._open.clear()
        return late if is_late else 0
