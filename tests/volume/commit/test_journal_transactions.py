"""Transactions: all or nothing, several in one commit, and never twice whatever the record store answers."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import inside
import pytest
import trio
import trio.testing
from volume_lab import CALLER, Chaos, Disk, MemoryRecords, check, lab_options, opened

from kvfuse.errors import EngineError
from kvfuse.remote.records.api import ABSENT, RecordLimits, Versioned
from kvfuse.remote.records.lmdb.store import LIMITS
from kvfuse.volume.commit.committer import RESERVED_OPERATIONS, Committer, Sequence, UseRecords
from kvfuse.volume.namespaces.namespace_uses import OwnUses
from kvfuse.volume.store.schema import Counts
from kvfuse.volume.store.transaction import Transaction

SEQUENCE = b"k-client"
COUNTS = b"c-client"


@asynccontextmanager
async def committing(
    disk: Disk,
    chaos: Chaos,
    *,
    sequence: bytes | None = None,
    limits: RecordLimits = LIMITS,
    uses: UseRecords | None = None,
) -> AsyncIterator[Committer]:
    """A committer at work over the disk's records."""
    begun = Sequence(sequence, counts_key=COUNTS) if sequence else None
    committer = Committer(MemoryRecords(disk, chaos, limits), begun, uses)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(committer.run)
        yield committer
        nursery.cancel_scope.cancel()


@pytest.fixture
def disk() -> Disk:
    return Disk.format(lab_options())


async def transact_all(committer: Committer, transactions: list[Transaction]) -> list[bool]:
    """Hand them over at the same moment."""
    answers = [False] * len(transactions)

    async def one(number: int, transaction: Transaction) -> None:
        answers[number] = await committer.transact(transaction)

    async with trio.open_nursery() as nursery:
        for number, transaction in enumerate(transactions):
            nursery.start_soon(one, number, transaction)
    return answers


async def test_those_that_wait_share_one_commit(disk: Disk, chaos: Chaos, autojump_clock: trio.abc.Clock) -> None:
    chaos.delay = 1
    async with committing(disk, chaos) as committer:
        made = [Transaction({b"k%d" % number: ABSENT}, {b"k%d" % number: b"v"}) for number in range(50)]
        assert all(await transact_all(committer, made))
    assert chaos.commits <= 2  # the first may leave alone
    assert all(b"k%d" % number in disk.records for number in range(50))


async def test_a_loser_changes_nothing_and_the_others_are_done(disk: Disk, chaos: Chaos) -> None:
    disk.apply({b"taken": b"theirs"}, ())
    told: list[tuple[str, int]] = []
    async with committing(disk, chaos) as committer:
        answers = await transact_all(
            committer,
            [
                Transaction({b"mine": ABSENT}, {b"mine": b"1"}, (), lambda version: told.append(("mine", version))),
                Transaction({b"taken": ABSENT}, {b"taken": b"2", b"side": b"2"}, (), lambda _: told.append(("", 0))),
                Transaction({b"third": ABSENT}, {b"third": b"3"}),
            ],
        )
    assert answers == [True, False, True]
    assert disk.records[b"taken"].value == b"theirs"
    assert b"side" not in disk.records
    assert told == [("mine", disk.records[b"mine"].version)]


async def test_what_concerns_the_same_records_happens_one_after_the_other(disk: Disk, chaos: Chaos) -> None:
    async with committing(disk, chaos) as committer:
        answers = await transact_all(
            committer, [Transaction({b"lock": ABSENT}, {b"lock": b"%d" % n}) for n in range(9)]
        )
    assert sum(answers) == 1
    assert disk.records[b"lock"].value == b"%d" % answers.index(True)


async def test_one_that_reads_what_another_writes_is_not_in_the_same_commit(disk: Disk, chaos: Chaos) -> None:
    disk.apply({b"door": b"open"}, ())
    version = disk.records[b"door"].version
    async with committing(disk, chaos) as committer:
        shut, enter = await transact_all(
            committer,
            [Transaction({b"door": version}, {b"door": b"shut"}), Transaction({b"door": version}, {b"guest": b"in"})],
        )
    assert shut
    if enter:  # then it was first
        assert disk.records[b"guest"].version < disk.records[b"door"].version
    else:
        assert b"guest" not in disk.records


@pytest.mark.parametrize("limits", [replace(LIMITS, commit_operations_max=16), replace(LIMITS, commit_bytes_max=350)])
async def test_commits_keep_to_the_limits(disk: Disk, chaos: Chaos, limits: RecordLimits) -> None:
    async with committing(disk, chaos, sequence=SEQUENCE, limits=limits) as committer:
        made = [Transaction({b"k%d" % number: ABSENT}, {b"k%d" % number: b"value"}) for number in range(40)]
        assert all(await transact_all(committer, made))
        with pytest.raises(ValueError):
            await committer.transact(Transaction({}, {b"k%d" % number: bytes(20) for number in range(40)}))
    assert chaos.commits > 4  # or the engine had refused what is too large


@pytest.mark.parametrize("uses", [{}, {1: Counts(1, 1)}])
async def test_the_largest_transaction_fits_with_what_is_committed_beside_it(
    disk: Disk, chaos: Chaos, uses: dict[int, Counts]
) -> None:
    limits = replace(LIMITS, commit_operations_max=16)
    use_records = UseRecords(OwnUses(lambda number: True), 3)
    async with committing(disk, chaos, sequence=SEQUENCE, limits=limits, uses=use_records) as committer:
        refused = 0
        for count in range(1, 17):
            rows = {b"%d-%d" % (count, number): b"value" for number in range(count)}
            try:
                assert await committer.transact(Transaction({}, rows, uses=uses, files=1, size=1))
            except ValueError:
                refused += 1
        assert refused == RESERVED_OPERATIONS + len(uses)


async def test_a_cancelled_caller_takes_it_back_before_it_began(disk: Disk, chaos: Chaos) -> None:
    async with committing(disk, chaos) as committer:
        with trio.move_on_after(1) as scope:
            scope.cancel()
            await committer.transact(Transaction({}, {b"never": b"x"}))
        assert scope.cancelled_caught
        assert await committer.transact(Transaction({}, {b"other": b"x"}))
    assert b"never" not in disk.records


async def test_nothing_waits_for_a_committer_that_has_ended(disk: Disk, chaos: Chaos) -> None:
    async with committing(disk, chaos) as committer:
        pass
    with pytest.raises(EngineError):
        await committer.transact(Transaction({}, {b"k": b"v"}))


async def test_nothing_happens_twice_whatever_fails(disk: Disk, chaos: Chaos, rng: random.Random) -> None:
    """Workers add to one number; half of the commits fail before or after they happened."""
    chaos.commit_error = 0.5
    number_key = b"number"
    disk.apply({number_key: b"0"}, ())
    applied = 0

    def count(version: int) -> None:
        nonlocal applied
        assert disk.records[number_key].version == version
        applied += 1

    async with committing(disk, chaos, sequence=SEQUENCE) as committer:

        async def add() -> None:
            for _ in range(40):
                row: Versioned = disk.records[number_key]
                await trio.lowlevel.checkpoint()
                put = {number_key: b"%d" % (int(row.value) + 1)}
                try:
                    await committer.transact(Transaction({number_key: row.version}, put, (), count))
                except EngineError:
                    pass  # it may have happened: the next commit finds out

        async with trio.open_nursery() as nursery:
            for _ in range(4):
                nursery.start_soon(add)
        chaos.commit_error = 0
        assert await committer.transact(Transaction({}, {b"last": b""}))
    assert applied == int(disk.records[number_key].value) > 0


async def test_a_transaction_goes_along_with_the_journals_batch(chaos: Chaos) -> None:
    disk = Disk.format(lab_options())
    async with opened(disk, lab_options(), chaos) as volume:
        commits = chaos.commits
        async with trio.open_nursery() as nursery, inside.journal(volume).committer.turn:
            await volume.tree.make_node(1, b"name", 0o100644, 0, CALLER)
            nursery.start_soon(volume.sync)
            await trio.testing.wait_all_tasks_blocked()
            nursery.start_soon(inside.journal(volume).transact, Transaction({b"absent": ABSENT}))
            await trio.testing.wait_all_tasks_blocked()
        assert chaos.commits == commits + 1
    assert (await check(disk)).clean
