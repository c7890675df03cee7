"""What callers of a shared volume did and saw, and whether there is an order of events in which all of it is true.

Everything that is written here is a *register* that holds one version at a time: a name of a folder (None: there is no
such name), a cell of a file. `Write` and `Read` say between which times each happened. A read is explained if some
write of what it found began before the read ended, and was not replaced for sure: by a write that began after it had
ended, and that had ended when the read began.

* In a strict folder, and where it was synced, an acknowledged write happened when the call returned.
* In a relaxed folder it is seen on its own mount at once, and by others `PUBLISHED_SECONDS` later. It may be lost
  if its daemon or what that stores in was disturbed before that.
* A call that failed may have its effect at any later time, or never.
* A read through a mount that was cut off may be as old as the disturbance.
"""

from __future__ import annotations

import errno
import json
import math
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import schedule_content as content

PUBLISHED_SECONDS = 2.0
"""after which a relaxed write of an undisturbed mount is in the record store"""
NEWS_SECONDS = 2.0
"""after which an undisturbed mount knows of what is in the record store without asking for it"""
DEFINITE = frozenset({errno.ENOENT, errno.EEXIST, errno.ENOTEMPTY})
"""answers after which nothing has happened"""
TOLD_MAX = 12
"""writes that a problem names"""
PRESENT = "present"
"""found, of whatever version"""

Value = int | str | None


class Register(NamedTuple):
    folder: str
    name: str
    cell: int = -1
    """of a file; -1: the name itself"""


class Span(NamedTuple):
    """While something was broken, and recovering."""

    what: str
    begin: float
    end: float


@dataclass(frozen=True)
class Write:
    """``value`` came to be there. `PRESENT`: some version did, by a rename."""

    value: Value
    mount: int
    begin: float
    acknowledged: float
    """seconds on the clock; infinite where it failed"""
    published: float
    """from then on all hosts have it; infinite where that is not sure"""


@dataclass(frozen=True)
class Read:
    """``value`` was found; `PRESENT`: any version; a size: see ``size``."""

    value: Value
    mount: int
    begin: float
    end: float
    as_of: float
    """what had been published by then it has to show"""
    size: int = -1
    told: str = ""
    """of the call, for people"""

    def matches(self, value: Value) -> bool:
        """Whether a write of ``value`` may be what was found."""
        if self.value == PRESENT:
            return value is not None and (self.size < 0 or value == PRESENT or content.size_of(int(value)) == self.size)
        return value == self.value or (value == PRESENT and isinstance(self.value, int))


class _Replacing:
    """Writes that happened for sure: which ended first of those that began after some time?"""

    def __init__(self, rows: Iterable[tuple[float, float]]) -> None:
        ordered = sorted(row for row in rows if row[1] < math.inf)
        self._begins = [begin for begin, _ in ordered]
        self._ends = [end for _, end in ordered]
        for index in range(len(ordered) - 2, -1, -1):
            self._ends[index] = min(self._ends[index], self._ends[index + 1])

    def first_end(self, after: float) -> float:
        index = bisect_right(self._begins, after)
        return self._ends[index] if index < len(self._ends) else math.inf


@dataclass
class _Log:
    """What is known of one register."""

    writes: list[Write] = field(default_factory=list)
    reads: list[Read] = field(default_factory=list)
    misses: list[Read] = field(default_factory=list)
    """through rings: allowed at any time"""


@dataclass
class Call:
    """The slowest call of an operation."""

    what: str
    mount: int
    began: float
    seconds: float


class History:
    """Filled from the callers' logs; `problems` judges it."""

    def __init__(self, disturbed: Sequence[Span]) -> None:
        self.disturbed = disturbed
        """see `_spans`"""
        self.registers: defaultdict[Register, _Log] = defaultdict(_Log)
        self.calls: list[Call] = []
        self.counts: Counter[str] = Counter()
        self.errors: Counter[str] = Counter()
        self.unexplained: list[str] = []
        """errors while nothing was broken"""
        self._lengths: list[tuple[int, dict[str, Any]]] = []
        """operations that read all cells of a file"""
        self._by_mount: dict[tuple[int, bool], list[Span]] = {}

    # -- what was broken -----------------------------------------------------------------------------

    def _spans(self, mount: int, *, stores: bool) -> list[Span]:
        """When a mount was cut off, in order, overlapping ones put together. ``stores``: or what has its bytes was."""
        if (mount, stores) not in self._by_mount:
            wanted = {"etcd", f"daemon {mount}"} | ({"osd", f"device {mount}"} if stores else set())
            merged: list[Span] = []
            for span in sorted((span for span in self.disturbed if span.what in wanted), key=lambda span: span.begin):
                if merged and span.begin <= merged[-1].end:
                    merged[-1] = merged[-1]._replace(end=max(merged[-1].end, span.end))
                else:
                    merged.append(span)
            self._by_mount[mount, stores] = merged
        return self._by_mount[mount, stores]

    def _is_quiet(self, mount: int, begin: float, end: float, *, stores: bool) -> bool:
        spans = self._spans(mount, stores=stores)
        index = bisect_right([span.begin for span in spans], end) - 1
        return index < 0 or spans[index].end < begin

    def _connected(self, mount: int, time: float) -> float:
        """The latest time, ``time`` or before it, at which the mount was not cut off."""
        spans = self._spans(mount, stores=False)
        index = bisect_right([span.begin for span in spans], time) - 1
        return spans[index].begin if index >= 0 and spans[index].end >= time else time

    def _settled(self, mount: int, time: float) -> float:
        """The end of the last disturbance that began before ``time``."""
        spans = self._spans(mount, stores=True)
        index = bisect_right([span.begin for span in spans], time) - 1
        return spans[index].end if index >= 0 else -math.inf

    # -- taking logs in ------------------------------------------------------------------------------

    def take(self, log: Path, mount: int) -> None:
        """The lines of one caller. What began and did not end is taken for failed."""
        begun: dict[str, Any] | None = None
        for line in log.read_text().splitlines():
            row = json.loads(line)
            if "do" in row:
                begun = row
            elif "error" in row and begun is not None:
                self.add(mount, {**row, **begun, "end": row["t"]})
                begun = None
        if begun is not None and "version" in begun:
            self.add(mount, {**begun, "end": begun["t"], "error": errno.EINTR, "slow": ("", 0.0, 0.0)})

    def add(self, mount: int, row: dict[str, Any]) -> None:
        """One operation, with its times and what it found."""
        self.counts[f"{'ring ' * bool(row.get('ring'))}{row['do']}"] += 1
        what, began, seconds = row["slow"]
        if what:
            self.calls.append(Call(what, mount, began, seconds))
        number = int(row["error"])
        if number and number not in DEFINITE:
            self.errors[errno.errorcode[number]] += 1
            if self._is_quiet(mount, row["t"], row["end"], stores=True):
                self.unexplained.append(f"{errno.errorcode[number]}: {row}")
        getattr(self, f"_add_{row['do']}", self._add_nothing)(mount, row)

    def _add_nothing(self, mount: int, row: dict[str, Any]) -> None:
        pass

    def _write(self, mount: int, row: dict[str, Any], register: Register, value: Value) -> None:
        """An operation changed a register, or tried to."""
        number, begin, end = int(row["error"]), row["t"], row["end"]
        if number in DEFINITE:
            return
        acknowledged = row.get("acknowledged", end) if number == 0 or "acknowledged" in row else math.inf
        is_stored = (register.folder == "strict" and acknowledged < math.inf) or (number == 0 and row.get("durable"))
        published = acknowledged if register.folder == "strict" else end if is_stored else math.inf
        late = acknowledged + PUBLISHED_SECONDS
        if not is_stored and acknowledged < math.inf and self._is_quiet(mount, begin, late, stores=True):
            published = late
        self.registers[register].writes.append(Write(value, mount, begin, acknowledged, published))

    def _read(
        self,
        mount: int,
        row: dict[str, Any],
        register: Register,
        value: Value,
        size: int = -1,
        *,
        is_miss: bool = False,
    ) -> None:
        """An operation says what was there. A miss through a ring says nothing, but is counted."""
        begin = row["t"]
        is_asked = register.folder == "strict" and not row.get("ring")
        as_of = min(self._connected(mount, begin), self._connected(mount, row["end"]))
        if not is_asked:
            as_of = min(self._connected(mount, begin - NEWS_SECONDS), as_of - NEWS_SECONDS)
        told = f"{row['do']} {register} on {mount} found {value}, {begin:.3f}-{row['end']:.3f}"
        read = Read(value, mount, begin, row["end"], as_of, size, told)
        log = self.registers[register]
        (log.misses if is_miss else log.reads).append(read)

    # -- kinds of operations -------------------------------------------------------------------------

    def _add_put(self, mount: int, row: dict[str, Any]) -> None:
        self._write(mount, row, Register(row["folder"], row["name"]), row["version"])

    def _add_read(self, mount: int, row: dict[str, Any]) -> None:
        """A ring's miss is no answer."""
        if row["error"] == 0 and "found" in row:
            self._read(mount, row, Register(row["folder"], row["name"]), row["found"])
        elif row["error"] == 0:
            self._read(mount, row, Register(row["folder"], row["name"]), None, is_miss=True)

    def _add_stat(self, mount: int, row: dict[str, Any]) -> None:
        register = Register(row["folder"], row["name"])
        if "size" in row:
            self._read(mount, row, register, PRESENT, row["size"])
        elif "found" in row:
            self._read(mount, row, register, None)

    def _add_unlink(self, mount: int, row: dict[str, Any]) -> None:
        register = Register(row["folder"], row["name"])
        self._saw(mount, row, register)
        self._write(mount, row, register, None)

    def _saw(self, mount: int, row: dict[str, Any], register: Register) -> None:
        """What the outcome says of what was there. A ring's "no" is no answer."""
        if row["error"] == 0:
            self._read(mount, row, register, PRESENT)
        elif row["error"] == errno.ENOENT and not row.get("ring"):
            self._read(mount, row, register, None)

    def _add_move(self, mount: int, row: dict[str, Any]) -> None:
        register = Register(row["folder"], row["name"])
        self._saw(mount, row, register)
        self._write(mount, row, register, None)
        self._write(mount, row, Register(row["folder"], row["to"]), PRESENT)

    def _add_link(self, mount: int, row: dict[str, Any]) -> None:
        register = Register(row["folder"], row["name"])
        if row["error"] in (0, errno.EEXIST):
            self._read(mount, row, register, PRESENT if row["error"] else None)
        self._write(mount, row, register, row["version"])

    def _add_mkdir(self, mount: int, row: dict[str, Any]) -> None:
        self._add_link(mount, row)

    def _add_rmdir(self, mount: int, row: dict[str, Any]) -> None:
        self._add_unlink(mount, row)

    def _add_list(self, mount: int, row: dict[str, Any]) -> None:
        if row["error"]:
            return
        everything = content.BLOCKS if row.get("ring") else content.BLOCKS + content.CHILDREN + content.LINKS
        for name in everything:
            is_there = name in row["names"]
            if is_there or not row.get("ring"):
                self._read(mount, row, Register(row["folder"], name), PRESENT if is_there else None)

    def _add_append(self, mount: int, row: dict[str, Any]) -> None:
        if "size" in row:
            first = -(-row["size"] // content.CELL)
            for index, version in enumerate(row["versions"], first):
                self._write(mount, row, Register(row["folder"], row["name"], index), version)

    def _add_change(self, mount: int, row: dict[str, Any]) -> None:
        for index, version in row["places"].items():
            self._write(mount, row, Register(row["folder"], row["name"], int(index)), version)

    def _add_cells(self, mount: int, row: dict[str, Any]) -> None:
        if row["error"] or "cells" not in row:
            return
        for index, value in enumerate(row["cells"]):
            self._read(mount, row, Register(row["folder"], row["name"], index), value)
        self._lengths.append((mount, row))

    def _read_missing_cells(self) -> None:
        """Who read a file to its end found nothing in the cells behind it."""
        counts: defaultdict[tuple[str, str], int] = defaultdict(int)
        for register in self.registers:
            place = register.folder, register.name
            counts[place] = max(counts[place], register.cell + 1)
        for mount, row in self._lengths:
            for index in range(len(row["cells"]), counts[row["folder"], row["name"]]):
                self._read(mount, row, Register(row["folder"], row["name"], index), None)
        self._lengths.clear()

    # -- judging -------------------------------------------------------------------------------------

    def strict_share(self) -> float:
        """Of the reads, those of mounts that were not cut off."""
        reads = [read for log in self.registers.values() for read in log.reads]
        return sum(read.as_of > read.begin - 2 * NEWS_SECONDS for read in reads) / max(len(reads), 1)

    def problems(self) -> list[str]:
        """Every read that no order of events explains, in words; empty where all is well."""
        self._read_missing_cells()
        return [problem for log in self.registers.values() for problem in _Judge(self, log).problems(log.reads)]

    def false_misses(self) -> list[str]:
        """Gets through rings that found nothing where something was; allowed, but rare while nothing is broken."""
        return [problem for log in self.registers.values() for problem in _Judge(self, log).problems(log.misses)]


class _Judge:
    """One register."""

    def __init__(self, history: History, log: _Log) -> None:
        self._history = history
        initial = Write(None, -1, -math.inf, -math.inf, -math.inf)
        self._writes = sorted([initial, *log.writes], key=lambda write: write.begin)
        self._begins = [write.begin for write in self._writes]
        mounts = {write.mount for write in self._writes}
        self._published = _Replacing((write.begin, write.published) for write in log.writes)
        self._by_mount = {
            mount: _Replacing((write.begin, write.published) for write in log.writes if write.mount == mount)
            for mount in mounts
        }
        self._seen_at_home = {
            mount: _Replacing((write.begin, write.acknowledged) for write in log.writes if write.mount == mount)
            for mount in mounts
        }

    def problems(self, reads: Sequence[Read]) -> list[str]:
        """What is not explained."""
        return [problem for read in reads if (problem := self._problem(read))]

    def _problem(self, read: Read) -> str:
        count = bisect_left(self._begins, read.end)
        reasons = []
        for write in reversed(self._writes[:count]):
            if read.matches(write.value):
                until = self._replaced(write, read)
                if until >= read.as_of:
                    return ""
                reasons.append((write, until))
        if not reasons:
            return f"{read.told}: nobody had written that"
        write, until = reasons[0]
        later = [other for other in self._writes[:count] if other.begin > write.begin]
        told = f"{read.told}: replaced for sure at {until:.3f}; as of {read.as_of:.3f}; written by {write}"
        return "\n    ".join([told, *map(str, later[:TOLD_MAX])])

    def _replaced(self, write: Write, read: Read) -> float:
        """When, at the latest, something else was there, for who reads as this read does."""
        until = self._published.first_end(write.published)
        if write.mount in self._by_mount:  # in the order of their calls
            until = min(until, self._by_mount[write.mount].first_end(write.acknowledged))
        if read.mount in self._seen_at_home:
            settled = self._history._settled(read.mount, read.end)
            done = write.acknowledged if write.mount == read.mount else write.published
            at_home = self._seen_at_home[read.mount].first_end(max(done, settled))
            if at_home < read.begin:
                return -math.inf
        return until
