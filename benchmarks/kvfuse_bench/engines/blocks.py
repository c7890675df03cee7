"""Calls about blocks: through the store that adapters use, through a ring, and a memcpy of the same size."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np

from kvfuse.connectors.steady_store import SteadyStore
from kvfuse.errors import KvfuseError
from kvfuse.sizes import KIB, MIB
from kvfuse.usrbio.client import BlockStore
from kvfuse_bench.batches import LISTS, Cell
from kvfuse_bench.engines.measuring import Meter
from kvfuse_bench.engines.readers import READER_COUNT, Readers
from kvfuse_bench.references import Bytes, memcpy
from kvfuse_bench.ringwork import KEYS_PER_CALL, OPERATIONS, BlockWork, Puts, Session, Work, block_keys
from kvfuse_bench.timing import Batch, time_batches

STORE, SINGLE, RING, MEMCPY = "kvfuse store", "kvfuse get_into", "kvfuse ring", "memcpy"
DEADLINE_S = 60.0
"""of the store: nothing here is to be a miss"""

CALLS = (
    *(Cell(operation, size, depth) for operation in ("put", "get")
      for size, depth in ((4 * KIB, 64), (64 * KIB, 64), (MIB, 8), (4 * MIB, 8))),
    Cell("get", 4 * KIB, 1),
    Cell("view", 4 * MIB, 8),
    Cell("exists", 4 * KIB, KEYS_PER_CALL),
    Cell("write", MIB, 8),
    Cell("write", 4 * KIB, 256),
    Cell("write", 4 * KIB, 1),
)  # fmt: skip
TOGETHER = (Cell("get", MIB, 8), Cell("get", 4 * KIB, 64))
"""by several processes at once"""

Run = Callable[[Meter], None]


@dataclass(frozen=True)
class CallSides:
    """A call as each side does it."""

    name: str
    sides: Mapping[str, Run]
    """side -> one round of it"""


class BlockCalls:
    """Makes the sides of each call."""

    def __init__(self, session: Session, seconds: float) -> None:
        """``seconds``: of each side in a round. The session's iov is what is put, and got into."""
        self._session = session
        self._seconds = seconds
        self._target = np.empty_like(session.pattern)

    @contextlib.contextmanager
    def of(self, cell: Cell) -> Iterator[CallSides]:
        """All that the call needs is there while the body runs, and every side was checked once."""
        session = self._session
        session.iov.array[:] = session.pattern
        with OPERATIONS[cell.operation](session, cell.size) as work, contextlib.ExitStack() as stack:
            depth = min(cell.depth, work.piece_count)
            cell = cell._replace(depth=depth)
            work.check(depth)
            batches: dict[str, Batch] = {}
            if isinstance(work, BlockWork) and cell.operation != "view":
                calls = stack.enter_context(contextlib.closing(StoreCalls(session, work)))
                batches[STORE] = calls.checked(cell)
                if cell.operation == "get" and depth == 1:
                    batches[SINGLE] = calls.singles(cell)
            batches[RING] = work.batch(depth)
            if cell.operation not in LISTS:
                batches[MEMCPY] = memcpy(session.pattern, self._target, cell.size, depth)
            yield CallSides(cell.name, {name: partial(self._run, cell, batch, work) for name, batch in batches.items()})

    @contextlib.contextmanager
    def together(self, cell: Cell) -> Iterator[CallSides]:
        """The same by several processes at once, and as many that copy memory."""
        session = self._session
        session.iov.array[:] = session.pattern
        with OPERATIONS[cell.operation](session, cell.size) as work:
            assert isinstance(work, BlockWork)
            cell = cell._replace(depth=min(cell.depth, work.piece_count))
            with Readers(session.mountpoint, work.folder.name, cell.size, cell.depth, work.keys) as readers:

                def run(operation: str, meter: Meter) -> None:
                    with meter.phase(name) as phase:
                        readers.run(operation, self._seconds, phase)

                name = f"{cell.name}, {READER_COUNT} processes"
                yield CallSides(name, {STORE: partial(run, "get"), MEMCPY: partial(run, "memcpy")})

    def _run(self, cell: Cell, batch: Batch, work: Work, meter: Meter) -> None:
        size = cell.size * cell.depth if cell.moves_bytes and cell.operation not in LISTS else 0
        with meter.phase(cell.name) as phase:
            for seconds in time_batches(batch, self._seconds, work.batch_count_max(cell.depth)):
                phase.add(seconds, size, cell.depth)
        work.settle()


class StoreCalls:
    """What adapters call, on the blocks of a `BlockWork`."""

    def __init__(self, session: Session, work: BlockWork) -> None:
        self._session = session
        self._work = work
        self._store = SteadyStore(
            session.mountpoint, work.folder.name, descriptor={"made by": "bench engines"}, deadline=DEADLINE_S
        )
        self._region = self._store.register(session.iov.array)
        self._numbers = itertools.count()
        self._block_store = BlockStore(session.client, work.folder)

    def close(self) -> None:
        self._store.close()
        self._block_store.close()

    def checked(self, cell: Cell) -> Batch:
        """The batches of a call, the first of which moved the right bytes."""
        batch = {"get": self._gets, "put": self._puts, "exists": self._exists}[cell.operation](cell)
        if cell.operation == "get":
            self._session.iov.array[:] = 0
        batch(0)
        if cell.operation == "get":
            pieces, places = self._work.rows(cell.depth)
            found: Bytes = self._session.iov.array.reshape(-1, cell.size)
            for piece, place in zip(pieces[0].tolist(), places[0].tolist(), strict=True):
                self._work.expect(found[place], piece)
        self._work.settle()
        return batch

    def _gets(self, cell: Cell) -> Batch:
        key_rows, (_, offsets) = self._work.key_rows(cell.depth), self._work.offsets(cell.depth)
        places, sizes = offsets.tolist(), [cell.size] * cell.depth

        def batch(number: int) -> None:
            row = number % len(key_rows)
            _all(self._store.get(key_rows[row], self._region, places[row], sizes) == cell.size)

        return batch

    def singles(self, cell: Cell) -> Batch:
        """Gets of one block each, by the call for one block."""
        keys = [key for (key,) in self._work.key_rows(1)]
        places = list(self._session.iov.array[: len(keys) * cell.size].reshape(-1, cell.size))

        def batch(number: int) -> None:
            row = number % len(keys)
            if self._block_store.get_into(keys[row], places[row]) != cell.size:
                raise KvfuseError("a block was not moved")

        return batch

    def _puts(self, cell: Cell) -> Batch:
        work, (_, offsets) = self._work, self._work.offsets(cell.depth)
        assert isinstance(work, Puts)
        places, sizes = offsets.tolist(), [cell.size] * cell.depth

        def batch(number: int) -> None:
            keys = block_keys(f"stored-{next(self._numbers)}", cell.depth)
            work.stored.append(keys)
            _all(self._store.put(keys, self._region, places[number % len(places)], sizes))

        return batch

    def _exists(self, cell: Cell) -> Batch:
        keys = self._work.keys[: cell.depth]
        return lambda _: _all(self._store.exists(keys))


def _all(answers: np.ndarray[tuple[int, ...], np.dtype[np.bool_]]) -> None:
    if not answers.all():
        raise KvfuseError(f"{int((~answers).sum())} of {len(answers)} blocks were not moved")
