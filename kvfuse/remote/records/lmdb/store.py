"""Records in an LMDB environment: one file, no server, crash-safe, read by other processes without a call.

**Layout.** Directory ``PATH`` with LMDB's ``data.mdb`` and ``lock.mdb``; one unnamed database. A stored
value is the record's version (8 bytes, big-endian: the id of the LMDB transaction that put it, which
only grows) followed by the record's value.

**Durability.** The environment is opened without ``metasync``. LMDB then commits by writing the new pages
to pages that neither of the two last snapshots uses, ``fdatasync``, and writing the meta page, unsynced.

* *Ordered*: a meta page never reaches the disk before the pages it points to. The next commit's
  ``fdatasync`` makes it durable before a page of the snapshot before it is overwritten, so after a loss of power
  the newer valid meta page names a whole snapshot: a prefix of the commits, never a hole.
* *Durable*: one more ``fdatasync`` (``env.sync(True)``) carries the meta page, and so this commit and all before
  it, to the disk. That costs as much as LMDB's default, which writes the meta page synchronously.

``sync=False`` would make an ordered commit cheaper by one ``fdatasync``, but lets the kernel write a meta page
before its pages: a loss of power could then destroy the store. It breaks the contract and is not used.

**A failed sync.** The kernel may have dropped what it could not write, and calls it clean. Pages of the failed commit
are written again by the next one. But the meta page of the commit before, which this one was to carry to the disk,
would not be: so before the next commit both meta pages are written again, as they were, and synced (`metapages`).
Then the store is opened anew, with nothing of it in the kernel's cache (`medium.drop_cache`).

**A file system that turned read-only.** The store is opened for reading then; each commit tries to open it for writing.

**Threads.** Reads run on the event loop's thread: the map is memory, a get costs about a microsecond.
A write transaction belongs to the thread that began it, so one worker thread owns them all. It
would lose the interpreter lock at every put and, beside a busy event loop, wait up to the switch interval
to get it back: seconds for a thousand puts. Therefore the loop stands still while a chunk is put - as
long as the puts themselves take - and goes on while the worker flushes and syncs, which is where
the time goes. Measured beside a loop that never idles, 1,000 puts: 10 ms instead of 4,500.

**Size.** A *meter* has the store keep a record of what all others weigh, put by every transaction that changes one. Its
version is that transaction's id, so one that another program left behind is known by it, and counted anew. The map is
all that the store may ever take of the disk (`bound`).

This process must be the only writer (the volume's own lock sees to it) and must not fork with a store open.
"""

from __future__ import annotations

import errno
import logging
import os
import weakref
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Self, TypeVar

import lmdb
import trio

from kvfuse.errors import Corrupt, EngineError, EngineFull, EngineReadOnly, ReadOnly
from kvfuse.remote.records.api import Following, Lease, Meter, Record, RecordLimits, RecordStore, Usage, Versioned
from kvfuse.remote.records.lmdb import medium, record_rows
from kvfuse.remote.records.lmdb.commits import MediumFailed, WriteTransaction, recorded_usage
from kvfuse.remote.records.lmdb.local import LocalFollowing, LocalLease, own_lease
from kvfuse.remote.records.lmdb.medium import DATA_FILE, Medium
from kvfuse.remote.records.lmdb.metapages import MetaPages
from kvfuse.remote.records.lmdb.record_rows import VERSION_SIZE
from kvfuse.remote.records.lmdb.residency import MappedFile

_T = TypeVar("_T")
log = logging.getLogger(__name__)

MAP_SIZE = 4 << 40
"""Address space asked for, not disk; less where the process may not have as much. `bound` makes it less."""
MAP_SIZE_MIN = 1 << 30
PARKED_OPERATIONS_MAX = 512
"""Operations put while the event loop stands still: about a millisecond."""

LIMITS = RecordLimits(
    key_size_max=511,
    value_size_max=4 << 20,
    # Dirty pages stay in memory until the commit, and LMDB keeps them for the next: at most a page an operation.
    commit_operations_max=1 << 19,
    commit_bytes_max=256 << 20,
    shared=False,
)


class LmdbRecords(RecordStore):
    """The embedded record store. Made by ``open``."""

    def __init__(
        self, environment: lmdb.Environment, path: Path, *, read_only: bool, meter: Meter | None = None
    ) -> None:
        super().__init__(LIMITS)
        self._path = path
        self._read_only = read_only
        self._take(environment)
        self._map_size_max = self._medium.size
        self._meter = meter
        self._usage = self._reading(lambda transaction: recorded_usage(transaction, meter)) if meter else None
        self._writer = _Writer()
        self._commit_lock = trio.Lock()  # fair: commits are applied in the order of the calls
        self._closed = False
        self._followings: weakref.WeakSet[LocalFollowing] = weakref.WeakSet()

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        *,
        read_only: bool = False,
        map_size: int = MAP_SIZE,
        meter: Meter | None = None,
    ) -> Self:
        """Open the store in directory ``path``; made if absent, unless ``read_only``.

        ``map_size`` is the most bytes the store may have; see `bound`. EngineError when it cannot be opened.
        """
        directory = Path(path)
        try:
            if not read_only:
                directory.mkdir(parents=True, exist_ok=True)
            medium.check(directory)
            environment = _open_environment(directory, read_only or not _is_writable(directory), map_size)
            return cls(environment, directory, read_only=read_only, meter=meter)
        except (OSError, lmdb.Error) as error:
            raise _translated(error, directory) from error

    def _take(self, environment: lmdb.Environment) -> None:
        self._environment = environment
        self._mapped = MappedFile(self._path / DATA_FILE)
        self._medium = Medium(self._path, environment.info()["map_size"])
        self._meta_pages = MetaPages(self._path / DATA_FILE, environment.stat()["psize"])
        self._is_usable = self._read_only or not environment.flags()["readonly"]

    def _open_anew(self) -> None:
        """In the turn of a commit: after a failed sync, where the file system had turned read-only, or LMDB gave up.
        EngineError: it may not be open at all, until the next commit tries it again.
        """
        size = self._medium.size
        try:
            if not _is_writable(self._path):
                raise OSError(errno.EROFS, os.strerror(errno.EROFS))
            self._is_usable = False
            self._environment.close()
            self._medium.close()
            medium.drop_cache(self._path)
            self._take(_open_environment(self._path, False, size))
        except (OSError, lmdb.Error) as error:
            raise _translated(error, self._path) from error
        log.warning("%s was opened anew", self._path)

    def distrust_cache(self) -> None:
        self._meta_pages.is_doubtful = True

    @property
    def usage(self) -> Usage | None:
        return self._usage

    async def bound(self, size: int) -> int:
        """Never more than was mapped at first, nor less than the file has."""
        size = min(size, self._map_size_max)
        async with self._turn():  # no transaction is open: those for reading end where they began
            if size != self._medium.size:
                try:
                    self._environment.set_mapsize(size)
                except lmdb.Error as error:
                    raise _translated(error, self._path) from error
                self._medium.close()
                self._mapped = MappedFile(self._path / DATA_FILE)
                self._medium = Medium(self._path, size)
        return size

    async def get(self, keys: Sequence[bytes]) -> list[Versioned | None]:
        self.counters.gets += 1
        sizes = [len(key) for key in keys]
        if sizes and (max(sizes) > self.limits.key_size_max or not min(sizes)):
            raise ValueError(f"a key is empty or longer than {self.limits.key_size_max} bytes")
        values = self._reading(lambda transaction: [transaction.get(key) for key in keys])
        self._mapped.touched(len(keys))
        return [
            None if value is None else Versioned(value[VERSION_SIZE:], record_rows.version_of(value))
            for value in values
        ]

    async def scan(self, prefix: bytes, after: bytes = b"", limit: int = 1000) -> list[Record]:
        self.counters.scans += 1
        if max(len(prefix), len(after)) > self.limits.key_size_max:
            raise ValueError(f"a prefix or key is longer than {self.limits.key_size_max} bytes")
        records = self._reading(lambda transaction: record_rows.scan(transaction.cursor(), prefix, after, limit))
        self._mapped.touched(len(records))
        return records

    async def seek(self, prefixes: Sequence[bytes]) -> list[Record | None]:
        """As the contract says, in one transaction."""
        self.counters.scans += 1
        found = self._reading(lambda transaction: record_rows.seek(transaction.cursor(), prefixes))
        self._mapped.touched(len(found))
        return found

    def _reading(self, call: Callable[[lmdb.Transaction[bytes]], _T]) -> _T:
        """The result of ``call`` on a snapshot. EngineError."""
        if self._medium.failed:
            raise self._lost()
        try:
            transaction = self._environment.begin()
            try:
                found = call(transaction)
            finally:
                transaction.abort()
        except lmdb.Error as error:
            raise _translated(error, self._path) if self._medium.is_intact() else self._lost() from error
        if not self._medium.is_intact():
            raise self._lost()
        return found

    def _lost(self) -> EngineError:
        """The file is not used any more, by nobody."""
        error = f"{self._medium.path}: bytes of it cannot be read any more: 'kvfuse fsck --rebuild' recovers blocks"
        self.counters.medium_failures += 1
        if self.counters.medium_failures == 1:
            log.error("%s", error)
        self._medium.give_up()
        return EngineError(error)

    async def commit(
        self,
        puts: Mapping[bytes, bytes],
        deletes: Collection[bytes] = (),
        expect: Mapping[bytes, int] | None = None,
        *,
        durable: bool = False,
        lease: Lease | None = None,
    ) -> int:
        """As the contract says. One that has begun is not abandoned: when cancelled, it still finishes.

        The version is the id of LMDB's transaction.
        """
        if self._read_only:
            raise ReadOnly(f"{self._path} is open for reading only")
        own = own_lease(lease, self)
        self.limits.check_commit(puts, deletes, expect or {})
        transaction = WriteTransaction(puts, deletes, expect or {}, durable, self._meter)
        self.counters.commits += 1
        self.counters.commit_operations += transaction.operation_count
        async with self._turn():
            transaction.wants_changes = own is not None
            applied = not (own and own.revoked) and await self._apply(transaction)
            if applied and own:
                own.attach(transaction.changes)
        self._mapped.touched(transaction.operation_count)
        self.counters.conflicts += not applied
        return transaction.id if applied else 0

    @asynccontextmanager
    async def _turn(self) -> AsyncIterator[None]:
        """Commits take turns in the order in which they came. A write transaction must not outlive its call."""
        async with self._commit_lock:
            if self._closed:
                raise EngineError(f"{self._path} is closed")
            with trio.CancelScope(shield=True):
                yield

    def follow(self) -> Following:
        following = LocalFollowing()
        self._followings.add(following)
        if self._closed:
            following.end()
        return following

    async def lease(self, ttl: float) -> Lease:
        if ttl <= 0:
            raise ValueError(f"a lease of {ttl} seconds")
        return LocalLease(ttl, self, self._end_lease)

    async def _end_lease(self, lease: LocalLease) -> None:
        """Delete what was put under the lease and not put anew since."""
        async with self._turn():
            found = self._reading(lambda transaction: {key: transaction.get(key) for key in lease.attached})
            deletes = [
                key for key, value in found.items() if value and record_rows.version_of(value) == lease.attached[key]
            ]
            await self._apply(WriteTransaction({}, deletes, {}, False, self._meter))

    async def aclose(self) -> None:
        with trio.CancelScope(shield=True):
            async with self._commit_lock:
                if self._closed:
                    return
                self._closed = True
                self._writer.close()
                self._environment.close()
                self._medium.close()
        for following in list(self._followings):
            following.end()

    async def _apply(self, transaction: WriteTransaction) -> bool:
        if not self._medium.is_intact():
            raise self._lost()
        if self._meta_pages.is_doubtful:
            try:
                await self._writer.run(self._meta_pages.renew)
            except OSError as error:
                raise _translated(error, self._path) from error
        if self._meta_pages.is_doubtful or not self._is_usable:
            self._open_anew()
        transaction.use(self._environment, self._medium, self._meta_pages)
        transaction.usage = self._usage
        transaction.wants_changes |= bool(self._followings)
        try:
            if not await self._stage(transaction):
                return False
            await self._writer.run(transaction.finish)
        except (lmdb.Error, MediumFailed, OSError) as error:
            self._is_usable = not isinstance(error, lmdb.PanicError)
            raise self._commit_error(transaction, error) from error
        finally:
            if transaction.is_open:
                self._writer.run_parked(transaction.abort)
            if transaction.committed:
                self._usage = transaction.usage
                for following in list(self._followings):
                    for change in transaction.changes:
                        following.offer(change)
        return True

    async def _stage(self, transaction: WriteTransaction) -> bool:
        """Check and put in chunks, the loop standing still during each. False: a version had moved."""
        stop = PARKED_OPERATIONS_MAX
        is_as_expected = self._writer.run_parked(transaction.begin, stop)
        while is_as_expected and stop < transaction.operation_count:
            await trio.lowlevel.checkpoint()
            is_as_expected = self._writer.run_parked(transaction.step, stop, stop + PARKED_OPERATIONS_MAX)
            stop += PARKED_OPERATIONS_MAX
        return is_as_expected

    def _commit_error(self, transaction: WriteTransaction, error: Exception) -> EngineError:
        """EngineFull only where nothing was done: LMDB writes the meta page last."""
        if not self._medium.is_intact():
            return self._lost()
        if transaction.committed or self._environment.info()["last_txnid"] >= transaction.id > 0:
            return EngineError(f"{self._path}: {error}; the commit may have happened")
        if getattr(error, "code", getattr(error, "errno", errno.EIO)) == errno.EIO and medium.is_full(self._path):
            return EngineFull(f"{self._path}: no space left for records")
        return _translated(error, self._path)


class _Writer:
    """The one thread that owns the write transactions."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(1, "kvfuse-records")

    def run_parked(self, call: Callable[..., _T], *arguments: Any) -> _T:
        """Run with the event loop standing still: nobody competes for the interpreter lock."""
        return self._executor.submit(call, *arguments).result()

    async def run(self, call: Callable[[], _T]) -> _T:
        """Run beside the event loop. The caller shields this from cancellation."""
        token = trio.lowlevel.current_trio_token()
        done = trio.Event()

        def wake(_: Future[_T]) -> None:
            token.run_sync_soon(done.set)

        future = self._executor.submit(call)
        future.add_done_callback(wake)
        await done.wait()
        return future.result()

    def close(self) -> None:
        self._executor.shutdown()


def _open_environment(directory: Path, read_only: bool, map_size: int) -> lmdb.Environment:
    """Halve the map until the process may have it (RLIMIT_AS, containers)."""
    while True:
        try:
            return lmdb.open(
                str(directory),
                map_size=map_size,
                readonly=read_only,
                create=not read_only,
                mode=0o640,
                metasync=False,
                readahead=False,  # keys are scattered: readahead would fill memory with neighbours
                max_spare_txns=4,
                lock=read_only or medium.can_lock(directory),
            )
        except lmdb.MemoryError:
            if map_size <= MAP_SIZE_MIN:
                raise
            map_size //= 2


def _is_writable(directory: Path) -> bool:
    """The file system lets its files be opened for writing; or there is none yet. OSError."""
    try:
        os.close(os.open(directory / DATA_FILE, os.O_RDWR | os.O_CLOEXEC))
    except FileNotFoundError:
        return True
    except OSError as error:
        if error.errno != errno.EROFS:
            raise
        return False
    return True


def _translated(error: Exception, path: Path) -> EngineError:
    code = getattr(error, "code", getattr(error, "errno", 0))
    if isinstance(error, lmdb.MapFullError):
        return EngineFull(f"{path}: the records have reached the store's map size")
    if code == errno.EROFS:
        return EngineReadOnly(f"{path}: {os.strerror(errno.EROFS)}")
    if isinstance(error, lmdb.DiskError) or code in (errno.ENOSPC, errno.EDQUOT):
        return EngineFull(f"{path}: no space left for records ({error})")
    if isinstance(error, (lmdb.CorruptedError, lmdb.InvalidError, lmdb.PageNotFoundError, lmdb.VersionMismatchError)):
        return Corrupt(f"{path}: {error}")
    return EngineError(f"{path}: {error}")
