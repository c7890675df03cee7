"""Heads of slabs that other hosts have (`BlockEngine` of a shared volume has it).

Records of slabs, which all hosts follow, say which are lent, and with which token. A *round* reads the heads of all
slabs that other hosts have, and enters their blocks as rows of the tables here, flagged `FOREIGN`: for who wants to
know all names of a folder, as one that lists it. Who looks for names asks the index (`IndexedBlocks`).

A row only says what was so then. Before bytes count that were read by it, the slot's head, read behind them, has to be
the one that the row was made of (`are_confirmed`). If it is another one, the block is absent.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import trio

from kvfuse.checksum import crc32c
from kvfuse.errors import EngineError, EngineTimeout
from kvfuse.native import blockforms as forms
from kvfuse.native._blocks import Core
from kvfuse.volume.blocks.head_tables import HeadTables

log = logging.getLogger(__name__)

READ_AT_ONCE = 256
"""slabs whose heads are read together"""
RENEWED_SECONDS = 1.0
"""age of a round that is young enough for a relaxed namespace"""
WAIT_SECONDS = 2.0
"""for which a call waits for a round"""

Numbers = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint64]


@dataclass
class OtherSlabs:
    """Event loop only.

    ``lent``: token of each slab that is lent, as far as records are known. ``is_own``: the core has it.
    ``open_tables``: gets heads before they count.
    """

    native: Core
    heads: HeadTables
    lent: Callable[[], Mapping[int, bytes]]
    is_own: Callable[[int], bool]
    open_tables: Callable[[Sequence[bytes]], Awaitable[None]]
    began: float = -math.inf
    """when the last complete round began, in trio's time"""
    rounds: int = 0
    """that were begun"""
    failures: int = 0
    _complete: int = 0
    """number of the last complete round"""
    _sizes: dict[int, int] = field(default_factory=dict)
    """slab -> bytes of its heads in the last round"""
    _asked: trio.Event = field(default_factory=trio.Event)
    _moved: trio.Event = field(default_factory=trio.Event)
    """set, and made anew, at the end of each round"""

    # -- how much is known -----------------------------------------------------------------------------

    def distrust(self) -> None:
        """Rows of other hosts have gone: the next call waits for another round."""
        self.began = -math.inf

    async def renew(self, *, is_strict: bool) -> None:
        """Know what other hosts have on the medium: as of now, or (relaxed) a second ago.

        EngineTimeout where it is strict: that cannot be read. A relaxed call goes on with what is known.
        """
        if not is_strict and trio.current_time() - self.began < RENEWED_SECONDS:
            return
        wanted, failures = self.rounds + 1, self.failures
        with trio.move_on_after(WAIT_SECONDS):
            while self._complete < wanted and (is_strict or self.failures == failures):
                self._asked.set()
                await self._moved.wait()
        if is_strict and self._complete < wanted:
            raise EngineTimeout("what other hosts have stored cannot be read in time")

    # -- rounds ----------------------------------------------------------------------------------------

    async def run(self) -> None:
        while True:
            await self._asked.wait()
            self._asked = trio.Event()
            try:
                await self._go_round()
            except EngineError as error:
                self.failures += 1
                log.warning("heads of other hosts' blocks cannot be read: %s", error)
            moved, self._moved = self._moved, trio.Event()
            moved.set()
            await trio.lowlevel.checkpoint()

    async def _go_round(self) -> None:
        self.rounds += 1
        began, number = trio.current_time(), self.rounds
        wanted = {slab: token for slab, token in self.lent().items() if not self.is_own(slab)}
        for slab in self._sizes.keys() - wanted.keys():
            self._sizes.pop(slab)
            self.native.forget_foreign(slab)
        slabs = sorted(wanted)
        for start in range(0, len(slabs), READ_AT_ONCE):
            await self._read(slabs[start : start + READ_AT_ONCE], wanted)
        self.began, self._complete = began, number

    async def _read(self, slabs: Sequence[int], wanted: Mapping[int, bytes]) -> None:
        tables = await self.heads.read_heads(slabs, [self._sizes.get(slab, forms.PAGE) for slab in slabs])
        await self.open_tables(tables)
        for slab, table in zip(slabs, tables, strict=True):
            if not self.is_own(slab) and self.lent().get(slab) == wanted[slab]:
                self.native.load_foreign(slab, int.from_bytes(wanted[slab], "little"), table)
                self._sizes[slab] = len(table)
            await trio.lowlevel.checkpoint()

    # -- reading ---------------------------------------------------------------------------------------

    async def are_confirmed(self, found: npt.NDArray[np.void]) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
        """(whether heads still say what rows do, of which a copy was made before their bytes were read; whether they
        say for sure that the block is no more). EngineError.
        """
        head_size = forms.HEAD.itemsize
        places = list(zip(found["slab"].tolist(), found["slot"].tolist(), strict=True))
        wanted = [(slab, head_size * (slot + 1)) for slab, slot in places] + [(slab, 0) for slab, _ in places]
        heads = await self.heads.read([(slab, offset, head_size) for slab, offset in wanted])
        lent, answers, are_gone = self.lent(), [], []
        for row, own, first in zip(found, heads[: len(found)], heads[len(found) :], strict=True):
            head, slab = np.frombuffer(own, forms.HEAD)[0], np.frombuffer(first, forms.HEAD)[0]
            token = lent.get(int(row["slab"]), b"")
            is_same = _is_sound(own, head, forms.BLOCK_HEAD) and _is_sound(first, slab, forms.SLAB_HEAD)
            is_same &= all(head[name] == row[name] for name in ("low", "high", "sequence", "length", "checksum"))
            is_known = any(_is_sound(own, head, state) for state in (forms.BLOCK_HEAD, forms.FREE_HEAD))
            are_gone.append(is_known and not is_same)
            is_same &= bool(head["incarnation"] == slab["incarnation"])
            answers.append(is_same and int(slab["token"]) == int.from_bytes(token, "little") and bool(token))
        return np.array(answers, np.bool_), np.array(are_gone, np.bool_)

    def statistics(self) -> dict[str, int]:
        return {"rounds": self.rounds, "failed_rounds": self.failures}


def _is_sound(data: bytes, head: np.void, state: int) -> bool:
    is_head = head["magic"] == forms.HEAD_MAGIC and head["state"] == state
    return bool(is_head and int(head["crc"]) == crc32c(data[:-4]))
