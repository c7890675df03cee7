"""Blocks of other hosts, found by the heads of their slabs (`BlockEngine` of a shared volume has it).

A host puts blocks into slabs that it holds. Records of slabs, which all hosts follow, say which are lent, and with
which token. A *round* reads the heads of all slabs that other hosts have, and enters their blocks as rows of the tables
here, flagged `FOREIGN`: all that finds, reads and lists blocks does so with these, too. The highest sequence of a name
counts. Of two hosts that put a name, the later one has it, and the other one drops its block in its next round.

A row only says what was so in the last round. Before bytes count that were read by it, the slot's head, read behind
them, has to be the one that the row was made of (`are_confirmed`). If it is another one, the block is absent.

A block that is removed here while a slab of another host has it, or an older one of its name, is *buried*: an expired
block of that name, with a higher sequence, takes its place. The other host drops what it has when it sees that. The
grave goes when a round finds no older block of its name.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
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

GRAVE_EXPIRES = 1
"""second in which a grave expired"""
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
    """Event loop only, but for `is_young`.

    ``lent``: token of each slab that is lent, as far as records are known. ``is_own``: the core has it.
    ``open_tables``: gets heads before they count. ``is_active``: somebody used blocks since it was called last.
    ``interval``: seconds between rounds while that is so.
    """

    native: Core
    heads: HeadTables
    lent: Callable[[], Mapping[int, bytes]]
    is_own: Callable[[int], bool]
    open_tables: Callable[[Sequence[bytes]], Awaitable[None]]
    is_active: Callable[[], bool]
    interval: float
    began: float = -math.inf
    """when the last complete round began, in trio's time"""
    rounds: int = 0
    """that were begun"""
    failures: int = 0
    _began_real: float = -math.inf
    """the same, by `time.monotonic`"""
    _complete: int = 0
    """number of the last complete round"""
    _known: dict[int, tuple[bytes, int]] = field(default_factory=dict)
    """slab -> token, and a hash of its heads as they are in the tables"""
    _sizes: dict[int, int] = field(default_factory=dict)
    """slab -> bytes of its heads in the last round"""
    _asked: trio.Event = field(default_factory=trio.Event)
    _moved: trio.Event = field(default_factory=trio.Event)
    """set, and made anew, at the end of each round"""

    # -- how much is known -----------------------------------------------------------------------------

    def is_young(self, now: float) -> bool:
        """A relaxed namespace need not wait for another round. Any thread. ``now``: by `time.monotonic`."""
        return now - self._began_real < RENEWED_SECONDS

    def expire(self, slabs: Iterable[int] = ()) -> None:
        """Rows of these were not what they said: the next call waits for another round, in which their heads count
        anew. They may be as they were, if bytes were wrong just once."""
        for slab in slabs:
            self._known.pop(slab, None)
        self.began = self._began_real = -math.inf

    def distrust(self) -> None:
        """Rows of other hosts have gone with their tables: heads count anew."""
        self._known.clear()
        self.expire()

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
            with trio.move_on_after(self.interval):
                await self._asked.wait()
            if not self._asked.is_set() and not self.is_active():
                continue
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
        began, began_real, number = trio.current_time(), time.monotonic(), self.rounds
        found = self.native.statistics()
        wanted = {slab: token for slab, token in self.lent().items() if not self.is_own(slab)}
        for slab in self._known.keys() - wanted.keys():
            self._forget(slab)
        slabs = sorted(wanted)
        for start in range(0, len(slabs), READ_AT_ONCE):
            await self._read(slabs[start : start + READ_AT_ONCE], wanted, reads_all=bool(found["shadows"]))
        if found["shadows"]:
            self.native.settle_shadows(found["sequence"])
        self.began, self._began_real, self._complete = began, began_real, number

    def _forget(self, slab: int) -> None:
        self._known.pop(slab, None)
        self._sizes.pop(slab, None)
        self.native.forget_foreign(slab)

    async def _read(self, slabs: Sequence[int], wanted: Mapping[int, bytes], *, reads_all: bool) -> None:
        tables = await self.heads.read_heads(slabs, [self._sizes.get(slab, forms.PAGE) for slab in slabs])
        now = {slab: (wanted[slab], hash(table)) for slab, table in zip(slabs, tables, strict=True)}
        changed = [
            (slab, table)
            for slab, table in zip(slabs, tables, strict=True)
            if reads_all or self._known.get(slab) != now[slab]
        ]
        if not changed:
            return
        await self.open_tables([table for _, table in changed])
        for slab, table in changed:
            if not self.is_own(slab) and self.lent().get(slab) == wanted[slab]:
                self.native.load_foreign(slab, int.from_bytes(wanted[slab], "little"), table)
                self._known[slab], self._sizes[slab] = now[slab], len(table)
            await trio.lowlevel.checkpoint()

    # -- reading ---------------------------------------------------------------------------------------

    async def are_confirmed(self, found: npt.NDArray[np.void]) -> npt.NDArray[np.bool_]:
        """Whether heads still say what rows do, of which a copy was made before their bytes were read. EngineError."""
        head_size = forms.HEAD.itemsize
        places = list(zip(found["slab"].tolist(), found["slot"].tolist(), strict=True))
        wanted = [(slab, head_size * (slot + 1)) for slab, slot in places] + [(slab, 0) for slab, _ in places]
        heads = await self.heads.read([(slab, offset, head_size) for slab, offset in wanted])
        lent, answers = self.lent(), []
        for row, own, first in zip(found, heads[: len(found)], heads[len(found) :], strict=True):
            head, slab = np.frombuffer(own, forms.HEAD)[0], np.frombuffer(first, forms.HEAD)[0]
            token = lent.get(int(row["slab"]), b"")
            is_same = _is_sound(own, head, forms.BLOCK_HEAD) and _is_sound(first, slab, forms.SLAB_HEAD)
            is_same &= all(head[name] == row[name] for name in ("low", "high", "sequence", "length", "checksum"))
            is_same &= bool(head["incarnation"] == slab["incarnation"])
            answers.append(is_same and int(slab["token"]) == int.from_bytes(token, "little") and bool(token))
        return np.array(answers, np.bool_)

    def statistics(self) -> dict[str, int]:
        return {"slabs_elsewhere": len(self._known), "rounds": self.rounds, "failed_rounds": self.failures}


def _is_sound(data: bytes, head: np.void, state: int) -> bool:
    is_head = head["magic"] == forms.HEAD_MAGIC and head["state"] == state
    return bool(is_head and int(head["crc"]) == crc32c(data[:-4]))
