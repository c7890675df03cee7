"""Defines the volume's interfaces for doors: plain types, and the operations by topic.

``volume.Volume`` is the FUSE door's `VolumeApi` and the rings' door's `RingApi`; its ``tree`` implements `TreeApi`, its
``inodes`` `InodeApi`, its ``files`` `FileApi`, its ``blocks`` `BlockApi`. Inodes are numbers, names
are bytes, times are nanoseconds since the epoch, errors are ``kvfuse.errors``. No operation waits longer than its
engines' deadlines. All are for the event loop's thread, except where a docstring says otherwise.

Coherence inside one host: every change is visible to every later call, through whichever door, when the call that made
it returned. *Publishing* (strict or relaxed) only says when other hosts, and a restart, see it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from kvfuse.remote.segments.api import Target
from kvfuse.volume.measures.gates import Gate, Gates
from kvfuse.volume.measures.measures import Measures
from kvfuse.volume.tier.shared_tier import SharedTier, TierBlock
from kvfuse.volume.views.ancestors import Ancestors
from kvfuse.volume.views.content_map import ContentMap
from kvfuse.volume.views.kernel_cache import KernelCache
from kvfuse.volume.views.news import Watch
from kvfuse.volume.views.ring_files import KeptFile

Numbers: TypeAlias = npt.NDArray[np.int64]

ROOT_INODE = 1
FIRST_INODE = 1024
"""Inodes below are reserved: 1 is the root, the others are the doors' virtual files."""
VIRTUAL_NAME = b".kvfuse"
"""their folder's name, in the root"""

NAME_MAX = 255
SYMLINK_MAX = 4095
FILE_SIZE_MAX = (1 << 63) - 1 - (1 << 32)
LINK_MAX = 65000

RENAME_NOREPLACE = 1
RENAME_EXCHANGE = 2


class Caller(NamedTuple):
    """The caller. The kernel checks permission bits, if users other than root may enter; this is for ownership."""

    uid: int
    gid: int
    pid: int = 0
    keeps_privileges: bool | None = None
    """whether it has CAP_FSETID; None: it calls through the kernel, which does not say"""
    groups: frozenset[int] | None = None
    """supplementary ones; None: as for ``keeps_privileges``"""

    @property
    def is_kernel(self) -> bool:
        """It calls through the kernel."""
        return self.keeps_privileges is None

    @property
    def is_privileged(self) -> bool:
        """A write by this caller leaves setuid and setgid bits where they are."""
        return self.uid == 0 if self.keeps_privileges is None else self.keeps_privileges


class Attributes(Protocol):
    """The fields of a stat. The objects are live and owned by the volume: read, do not keep across an await."""

    @property
    def ino(self) -> int: ...
    @property
    def mode(self) -> int: ...
    @property
    def nlink(self) -> int: ...
    @property
    def uid(self) -> int: ...
    @property
    def gid(self) -> int: ...
    @property
    def rdev(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def atime(self) -> int: ...
    @property
    def mtime(self) -> int: ...
    @property
    def ctime(self) -> int: ...
    @property
    def blocks(self) -> int:
        """Allocated 512-byte units."""


@dataclass(slots=True)
class Changes:
    """Attributes to set; None leaves one alone. Times in nanoseconds."""

    mode: int | None = None
    uid: int | None = None
    gid: int | None = None
    size: int | None = None
    atime: int | None = None
    mtime: int | None = None
    ctime: int | None = None


class DirEntry(NamedTuple):
    """One row of a directory listing."""

    name: bytes
    cookie: int
    """resume after this entry; stable for the entry's life whatever else changes; above 2, below 2**63"""
    attributes: Attributes


class Statfs(NamedTuple):
    """statfs in bytes and counts, of what was promised, not of the disk below."""

    size: int
    free: int
    files: int
    files_free: int


class Handle(Protocol):
    """An open file. Made by ``open`` or ``create``, ended by ``release``."""

    id: int
    """never 0, unique in this process"""
    cache_valid: bool
    """the kernel's cache of the content, from an earlier open, is still valid"""
    direct: bool
    """opened with O_DIRECT"""
    appends: bool
    """opened with O_APPEND"""
    caller: Caller
    """who opened it"""

    @property
    def number(self) -> int:
        """Inode by which the next daemon finds the file; 0: the one by which it was opened."""

    @property
    def size(self) -> int:
        """Size of the file, now."""

    @property
    def is_new(self) -> bool:
        """The file was made here and is not stored yet."""

    @property
    def place(self) -> tuple[int, bytes]:
        """(directory, name) of the file, or its last ones."""


H = TypeVar("H", bound=Handle)


class Binding:
    """A name's file, for threads that use it repeatedly. The event loop makes and invalidates it; any thread reads.

    It is valid until the name means another file, or other users may read the file: ``valid`` is cleared before
    anything changes, so a thread that saw it set after a copy has a block that the name meant at some time during it.
    """

    __slots__ = ("directory", "gid", "ino", "map", "mode", "name", "uid", "valid")

    def __init__(self, directory: int, file: Attributes, name: bytes, shown: ContentMap) -> None:
        self.valid = True
        self.directory = directory
        self.name = name
        self.ino = file.ino
        self.uid = file.uid
        self.gid = file.gid
        self.mode = file.mode
        self.map = shown


class ReadingThread(Protocol):
    """A thread that reads by content maps."""

    def tell_when_done(self, told: Callable[[], None]) -> bool:
        """Call ``told`` in the event loop when the thread's present reads are done. False: it reads nothing now.

        Reads that it begins after this call use the present maps.
        """


class WritePlaces(NamedTuple):
    """Places of some writes' bytes. Columns, a number for each write, in the order of their places."""

    numbers: Numbers
    """numbers of these writes among those of the call"""
    segments: Numbers
    offsets: Numbers
    """in the segment, bytes"""
    targets: Mapping[int, Target]
    """segment -> its target"""


SlotSource: TypeAlias = Sequence[memoryview] | Callable[[WritePlaces], Awaitable[None]]


class TreeApi(Protocol):
    """Looks names up, and changes them. ``async`` operations may wait; the room of each says for what."""

    async def lookup(self, parent: int, name: bytes) -> Attributes:
        """The inode called ``name`` ("." and ".." too), counted once more as known to the kernel. NotFound."""

    def look_up_at_once(self, parent: int, name: bytes) -> Attributes | Literal[False] | None:
        """As `lookup`, in a directory whose names the kernel may cache. False: no such name. None: ask `lookup`."""

    def forget(self, ino: int, count: int) -> None:
        """The kernel dropped ``count`` of its references."""

    def remember(self, parent: int, entry: DirEntry) -> None:
        """Count the inode of an entry of directory ``parent`` once more as known to the kernel (readdirplus)."""

    def may_keep(self, directory: int, *, means_directory: bool = False) -> bool:
        """The kernel may cache a name in a directory: only it changes the name, or it is notified soon after.

        ``means_directory``: a name that means a directory, which no ring changes.
        """

    async def create(
        self, parent: int, name: bytes, mode: int, caller: Caller, flags: int
    ) -> tuple[Handle, Attributes]:
        """Create a regular file and open it with ``flags`` (O_*). Exists, if it does. Counted as looked up."""

    async def make_node(self, parent: int, name: bytes, mode: int, rdev: int, caller: Caller) -> Attributes:
        """mknod: a regular file, fifo, socket or device. Counted as looked up, as in the next three."""

    async def make_directory(self, parent: int, name: bytes, mode: int, caller: Caller) -> Attributes: ...
    async def make_symlink(self, parent: int, name: bytes, target: bytes, caller: Caller) -> Attributes: ...
    async def link(self, ino: int, parent: int, name: bytes) -> Attributes: ...
    async def unlink(self, parent: int, name: bytes) -> None: ...
    async def remove_directory(self, parent: int, name: bytes) -> None: ...
    async def rename(self, parent: int, name: bytes, new_parent: int, new_name: bytes, flags: int) -> None:
        """``flags``: 0, RENAME_NOREPLACE or RENAME_EXCHANGE; anything else InvalidArgument."""

    async def open_directory(self, ino: int) -> None:
        """Check a directory before it is listed. Stale: its path leads to another one by now."""

    async def list_directory(self, ino: int, after: int, limit: int, reader: int = 0) -> list[DirEntry]:
        """Up to ``limit`` entries after the cookie ``after`` (0: from the start), without "." and "..".

        Fewer mean the end. An entry that exists during a whole listing is shown exactly once; blocks that are stored
        again meanwhile, if ``reader`` says whose listing it is: any number of the caller's, up to `close_directory`.
        """

    def close_directory(self, reader: int) -> None:
        """A reader of `list_directory` is done."""


class FileApi(Protocol[H]):
    """Open files and their bytes."""

    async def open(self, ino: int, flags: int, caller: Caller) -> H:
        """O_TRUNC in ``flags`` truncates. IsADirectory for a directory."""

    def take_over(self, *, is_all: bool = False) -> Iterator[tuple[int, H]]:
        """(handle that the kernel has, what it is) of files that C answered about alone so far; see `KernelAnswers`.
        ``is_all``: all of them, and not just those of which somebody is about to ask."""

    async def read(self, handle: H, offset: int, size: int) -> bytes | bytearray | memoryview:
        """Bytes at ``offset``, short at the end of the file. A memoryview is to be consumed before any await."""

    async def read_into(self, handle: H, offset: int, target: memoryview) -> int:
        """Fill ``target`` (of bytes) from ``offset`` on. Returns the number of bytes, fewer at the end of the file."""

    async def read_once(self, handle: H, offset: int, length: int, target: memoryview) -> memoryview | None:
        """``length`` bytes at ``offset``, before the end of the file, past the page cache of the disk: in ``target``.

        ``target``: whole pages with room for two granules more. None: another way has to read them.
        """

    def content_map(self, handle: H) -> ContentMap:
        """Places of the file's bytes, for threads other than the event loop's; valid while the handle is open."""

    async def show(self, handle: H, first: int, last: int) -> None:
        """Show the chunks ``first``..``last`` in the content map, as far as possible; for the rest, `read_into`."""

    async def verify_ahead(self, handle: H, offset: int, end: int) -> None:
        """Before `show`: have what a large read needs next in the page cache, and verified, by threads."""

    async def write(self, handle: H, offset: int, data: bytes | memoryview, *, by_kernel: bool = False) -> int:
        """Take ``data`` (kept, not copied, where possible: it must never change). Returns how much of it had room.

        NoSpace, FileTooLarge. ``by_kernel``: short only where the file grows, and by a handle that is not direct.
        """

    async def write_in_slots(self, handle: H, offsets: Numbers, lengths: Numbers, source: SlotSource) -> Numbers:
        """Write many ranges at once, of bytes whose slots change in place and that need nothing else.

        ``source``: the bytes of each; or a function that writes them while their places are kept, not called if there
        are none, or the engine lets nobody else write. Returns the numbers of those done; the others are `write`'s.
        """

    def is_close_awaited(self, handle: H) -> bool:
        """`flush` may have work to do, or an error to report, as far as an open can tell."""

    async def flush(self, handle: H) -> None:
        """A descriptor was closed: with strict publishing, returns after the commit."""

    async def fsync(self, handle: H, *, data_only: bool = False) -> None:
        """Bytes, attributes and names of the file survive the loss of power once this returned.

        ``data_only``: but for the access time, if nothing else has changed.
        """

    async def release(self, handle: H) -> None: ...
    def release_at_once(self, handle: H) -> bool:
        """As `release`, of an ordinary file. False: nothing was done."""


class InodeApi(Protocol):
    """Inodes, whatever their names."""

    async def attributes(self, ino: int) -> Attributes: ...
    def attributes_at_once(self, ino: int) -> Attributes | None:
        """Those that the kernel may cache. None: ask `attributes`."""

    def may_keep_attributes(self, ino: int) -> bool:
        """The kernel may cache attributes of an inode. False: it asks again before it shows them."""

    async def set_attributes(self, ino: int, changes: Changes, caller: Caller) -> Attributes:
        """Also clears setuid and setgid where POSIX asks for it; ``size`` truncates or extends."""

    async def read_symlink(self, ino: int) -> bytes: ...
    async def fsync_directory(self, ino: int) -> None: ...
    async def get_xattr(self, ino: int, name: bytes) -> bytes: ...
    async def set_xattr(self, ino: int, name: bytes, value: bytes, caller: Caller | None = None) -> None:
        """NotPermitted for a namespace's settings, unless its folder's owner calls, or this program itself: None."""

    async def list_xattrs(self, ino: int) -> list[bytes]: ...
    async def remove_xattr(self, ino: int, name: bytes, caller: Caller | None = None) -> None: ...
    async def describe(self, ino: int, descriptor: str, *, may_pin: bool) -> str:
        """Compare a client's description, in JSON, of its blocks in a directory. Returns the one that is kept.

        ``may_pin``: it may write there; then the first one, and a later version, which clears the cache, is pinned to
        the directory's namespace. Exists: another one is pinned. InvalidArgument.
        """

    async def gate(self, ino: int) -> Gate | None:
        """The gate of an inode's namespace; None: it has no token. Valid while `RingApi.gates` has its epoch."""

    def measures(self, ino: int) -> Measures:
        """The measures of an inode's namespace; threads of rings add to them."""

    async def seek(self, ino: int, offset: int, *, data: bool) -> int:
        """As lseek with SEEK_DATA, or else SEEK_HOLE. NoSuchOffset."""

    async def info(self, ino: int) -> dict[str, Any]:
        """Extents, size classes, slabs, sealed granules of one file, JSON-able."""


class RestoredFilesApi(Protocol):
    """Files that are open by handles of a former daemon, see `views.handover`."""

    ring_files: dict[str, KeptFile]
    """files of clients of rings, by their kept names; the door that takes one over removes it"""
    movers: set[Callable[[int, int, bytes], None]]
    """called with (inode, directory, name) when a file that may be open gets another name"""

    async def load(self, ino: int) -> None:
        """Load an inode into memory. Stale: the store has nothing of it."""

    def take_over(self, ino: int, flags: int, caller: Caller) -> Handle:
        """Make one of the handles again, with no await since `load` returned."""

    def give_up(self, ino: int, *, writable: bool) -> None:
        """Note that one of the handles will never be made."""

    async def close_unknown(self, ino: int) -> None:
        """The kernel has closed a handle of an inode, and this daemon never made it again. The errors of a release."""


class VolumeApi(Protocol):
    """A volume, for the FUSE door. Ask for each part anew after an await: another membership brings others."""

    @property
    def tree(self) -> TreeApi: ...
    @property
    def inodes(self) -> InodeApi: ...
    @property
    def files(self) -> FileApi[Any]: ...
    @property
    def left_open(self) -> RestoredFilesApi: ...
    @property
    def seal(self) -> Callable[[], None] | None:
        """Called before a change is answered, so that the next daemon has it. None: the next daemon never has it."""

    def space(self) -> Statfs: ...


class RingApi(VolumeApi, Protocol):
    """The volume for the rings' door, with state that threads of rings share."""

    tier: SharedTier
    """any thread may use it"""
    reading_threads: set[ReadingThread]
    """threads that may read by content maps now; the door updates it"""
    sections: dict[str, Callable[[], object]]
    """counters and gauges that the door adds to the volume's, by name"""
    user_sections: dict[str, Callable[[int], object]]
    """the same for one user, a uid"""
    listings: dict[str, Callable[[int | None], object]]
    """longer lists, each a file of its own in MNT/.kvfuse, by name; of one user, a uid, or of all (None)"""
    gates: Gates
    """those of the present membership; any thread may read them"""

    @property
    def kernel(self) -> KernelCache | None:
        """The kernel's cache of the mount, in which a door invalidates what it changes; None: there is no mount."""

    @property
    def blocks(self) -> BlockApi: ...
    @property
    def rows(self) -> RowApi | None:
        """Blocks that are rows; None: this volume has none."""

    def path_of(self, ino: int) -> str:
        """The path below the root, for people; "#NUMBER" where it is not in memory."""

    @property
    def search(self) -> SearchApi: ...
    @property
    def near(self) -> NearApi: ...


class SearchApi(Protocol):
    """Directories above a directory."""

    async def ancestors(self, directory: int) -> tuple[Ancestors, Sequence[Attributes]]:
        """The counter of changes of a directory and those above, and these; valid until the next await. Stale."""


class BlockApi(Protocol):
    """Whole files by (directory, name). One block is one file, made by any door."""

    async def find(self, directory: int, name: bytes) -> Attributes | None:
        """The inode of a name, None where there is none. Waits for the store."""

    async def bind(self, directory: int, name: bytes) -> Binding | None:
        """The binding of a name, valid until the next await; None: it means no regular file. Waits for the store."""

    def waits(self, directory: int) -> bool:
        """A put there waits for its commit; or it is not known whether it does."""

    def watching(self, directory: int) -> AbstractContextManager[Watch]:
        """Reports this host's changes of the blocks of a directory in a cache."""

    async def block_namespace(self, directory: int) -> int | None:
        """The namespace of a directory, if blocks in it are rows; None: they are files. Stale."""

    async def has_files(self, directory: int) -> bool:
        """A name in it may mean an ordinary file, or too many mean directories. Waits for the store."""

    async def listing(self, directory: int, after: int, limit: int) -> tuple[list[bytes], int]:
        """(names of up to ``limit`` blocks, ``after`` of the next or 0 at the end). ``after`` 0: from the start."""

    async def put(self, directory: int, name: bytes, data: memoryview | TierBlock, caller: Caller, mode: int) -> int:
        """Let ``name`` mean a new file that has ``data``, instead of the file it means, in one step.

        Returns the inode that had the name, 0 if none. ``data`` is kept, it may never change again; a block of the
        tier stays there as the file's copy where its readers are the file's. ``mode``: permission bits. Waits for
        staging memory, for room on a full volume, and in strict folders for the commit; until then a cancellation
        leaves everything as it was. NotAdmitted (by a full cache), NoSpace, IsADirectory, NotFound, InvalidArgument,
        NameTooLong, ReadOnly.
        """

    async def delete(self, directory: int, names: Sequence[bytes], found: Callable[[int], None] = ...) -> list[int]:
        """Remove files. Returns the inode of each removed one, 0 for an absent name or a directory.

        Waits for the store where a name is not known, and in strict folders for the commit. After an error, which is
        raised, some of them may be removed. ReadOnly, NotFound. ``found``: called with the number of each before that.
        """

    async def exists(self, directory: int, names: list[bytes]) -> list[bool]:
        """Whether each name exists, all seen at the same time; their inodes are not read. Stale, NotADirectory.

        Waits for the store until all names of the directory are known. Where the namespace says how fast its blocks
        are computed, the names are a chain, of which only so many first blocks exist as are read sooner than computed.
        """

    async def costs(self, directory: int, names: list[bytes]) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.float32]]:
        """As `exists`, but (`speeds.Tier`, seconds) of each: when it, and all before it, are expected to be read.

        Waits for the store, which is asked for the sizes of blocks that are not in memory.
        """

    async def prefetch(
        self, directory: int, names: Sequence[bytes], may_read: Callable[[Binding], bool] = lambda binding: True
    ) -> list[bool]:
        """Read blocks into the shared-memory tier. Returns which of them are resident now.

        Others are absent or empty, forbidden by ``may_read``, ever had two names (their readers are not those of one
        directory), are being written, cannot be read, or lack room.
        """


class RowReaders(NamedTuple):
    """Blocks with the same owner and mode in one directory."""

    directory: int
    uid: int
    gid: int
    mode: int
    """permission bits"""


class RowTable(Protocol):
    """A table of the block store. Any thread."""

    readers: RowReaders
    namespace: int

    @property
    def has_ended(self) -> bool: ...
    @property
    def size(self) -> int: ...
    def descriptor(self) -> int:
        """A new one, which can only be read."""

    @property
    def rows(self) -> npt.NDArray[np.void]:
        """All rows that were ever in use, as they are now: `kvfuse.native.blockforms.ROW`."""

    def find(self, names: Sequence[bytes], now: int) -> tuple[Numbers, npt.NDArray[np.uint64]]:
        """(row, sequence) of each; a row below 0: there is no such block."""


class RowTerms(NamedTuple):
    """Of the blocks of one put."""

    expires: int = 0
    """second since the epoch, at the latest: the namespace's ttl may end it before; 0: as that says"""
    priority: int = 128
    is_strict: bool = False
    """it returns when the block survives a loss of power"""
    shown_us: int = 0
    """time that files show, in microseconds since the epoch; 0: now"""


ROW_TERMS = RowTerms()
DIRECTORIES_MAX = 1024
"""in a directory of blocks: where there are more, each name of a put is looked up"""
FindAncestors: TypeAlias = Callable[[int], Awaitable[tuple[Ancestors, Sequence[Any]]]]
"""`SearchApi.ancestors`"""


class ShownRows(Protocol):
    """Tables and arenas of rows that clients map, for reading. Event loop only."""

    def open(self, table: Any, ancestors: object, *, is_unlimited: bool) -> Any:
        """Show a table to one connection more: its page for touches, with a ``descriptor``, until `leave`."""

    def leave(self, touches: Any) -> None:
        """A connection has it no more."""

    def table_of(self, arena: int) -> RowTable | None:
        """Whose blocks an arena has."""

    def arena_descriptor(self, arena: int, ancestors: object, *, is_unlimited: bool) -> int:
        """A new descriptor of an arena, which can only be read. NotFound."""

    def begin_look(self, directory: int) -> None:
        """Somebody is about to look whether a name of a directory means a file."""

    def end_look(self, directory: int, *, has_files: bool, knows_all: bool) -> bool:
        """What was found; tables say what is absent from here on, as far as that is known.

        Whether no name of the directory means a file, and none came to mean one meanwhile.
        """

    def tell_of_neighbours(self, are_there: bool) -> None:
        """Other hosts can be asked for blocks now, or none can."""


NameColumns: TypeAlias = tuple[Any, npt.NDArray[np.uint64], npt.NDArray[np.uint32]]


class RowApi(Protocol):
    """Blocks that are rows, by directory and name. Event loop only, but where it says otherwise."""

    @property
    def shown(self) -> ShownRows: ...

    with_files: set[int]
    """directories of which a name may mean an ordinary file; any thread may look"""

    directories: dict[int, frozenset[bytes]]
    """directory -> names in it that may mean directories; any thread may look"""
    has_ended: bool
    """its membership is over: the volume has another one"""

    @property
    def knows_all(self) -> bool:
        """Heads of all slabs were read, of other hosts a moment ago: a block that is not found is none. Any thread."""

    @property
    def is_shared(self) -> bool:
        """Other hosts store blocks, too: strict answers wait for `renew`."""

    async def renew(self, *, is_strict: bool, directory: int = 0, names: Sequence[bytes] = ()) -> None:
        """Know what other hosts have on the medium: as of now, or (relaxed) a second ago. EngineTimeout: strict.

        ``names``: those of a directory that it is about: hosts are asked for them that answer others.
        """

    def now(self, namespace: int) -> int:
        """Seconds since the epoch by the clock of a namespace. Any thread."""

    def table(self, directory: int, namespace: int, uid: int, gid: int, mode: int) -> RowTable:
        """The table for new blocks. NoSpace: there are too many."""

    def tables_of(self, directory: int) -> tuple[RowTable, ...]:
        """The same object until there is another table. Any thread."""

    def find(self, directory: int, name: bytes) -> tuple[RowTable, int, int] | None:
        """(table, row, sequence) of a block. Any thread."""

    def try_put(
        self, table: Any, names: NameColumns, sources: npt.NDArray[np.uint64], sizes: Numbers, terms: RowTerms,
        *, plain_only: bool = False,
    ) -> tuple[Numbers, npt.NDArray[np.uint64]]:  # fmt: skip
        """Store what has room now. (0, or a code of `kvfuse.native.blockforms`, for each; sequences). Any thread.

        ``sources``: addresses of memory that is there, and stays.
        """

    def wait_for_room(self, why: int, table: Any, size: int) -> bool:
        """Have room made for a block of ``size`` bytes, refused for ``why``: return when it has a chance again.

        False: it has none, or not soon. Threads of rings only.
        """

    def get_columns(
        self, table: Any, names: NameColumns, targets: npt.NDArray[np.uint64], rooms: Numbers,
        *, plain_only: bool = False,
    ) -> Numbers:  # fmt: skip
        """Copy what is in memory: lengths, or codes of `kvfuse.native.blockforms`. Any thread."""

    def note_chain(self, directory: int, names: NameColumns, *, is_read: bool = False) -> npt.NDArray[np.bool_]:
        """Somebody asks for a chain of blocks, root first; ``is_read``: for bytes. Which there are. Any thread."""

    def look_up(
        self, directory: int, namespace: int, names: NameColumns, *, is_timed: bool
    ) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.float32] | None]:
        """Somebody looks for a chain of blocks: (`speeds.Tier`, seconds until it and all before it are there) of each.

        Where the times were not wanted there are none, and every present block may have tier 1. NONE: it is absent, or
        computed sooner than read. Event loop only.
        """

    def try_look_up(self, directory: int, namespace: int, names: NameColumns) -> npt.NDArray[np.bool_] | None:
        """As `look_up` without times: which there are. None: the event loop has to look. Any thread."""

    def find_cold(self, directory: int, names: NameColumns) -> npt.NDArray[np.bool_] | None:
        """Which names the cold tier has blocks of; None: it has none of the directory. Any thread."""

    async def warm(self, directory: int, names: Sequence[bytes]) -> None:
        """Bring blocks of the cold tier into the volume: return when they are there, or cannot come in time."""

    def copy(self, table: Any, name: bytes, room: int) -> memoryview | int:
        """A copy of a block that is in memory; its length, if above ``room``; below 0: it is not. Any thread."""

    async def put(
        self, table: Any, names: Sequence[bytes], buffers: Sequence[memoryview], terms: RowTerms
    ) -> list[int]:  # fmt: skip
        """Store blocks, and wait for room. Their sequences.

        NoSpace, QuotaExceeded, FileTooLarge, Stale, EngineError.
        """

    async def fetch(
        self, table: Any, names: Sequence[bytes], rows: Numbers, sequences: npt.NDArray[np.uint64],
        *, is_ahead: bool = False,
    ) -> Numbers:  # fmt: skip
        """Bring blocks into memory: 1 for each that is there then. ``is_ahead``: nobody reads them now. EngineError."""

    async def read(self, table: Any, name: bytes) -> bytearray | None:
        """A copy of a block; None: there is none any more. EngineError."""

    def hold(self, directory: int, name: bytes) -> Any:
        """A block that is in memory, which stays there as long as somebody has what is returned: it has ``home``,
        ``arena``, ``offset`` and ``size``, as a `TierBlock`. None: it is not in memory. Any thread."""

    def hold_row(self, table: Any, row: int, sequence: int) -> Any:
        """As `hold`, of the block that `find` found; None also if it is another one by now. Any thread."""

    def drop(self, directory: int, names: Sequence[bytes]) -> list[bool]:
        """Remove blocks. Which there were. Any thread."""

    async def remove(self, directory: int, names: Sequence[bytes], *, is_strict: bool = False) -> list[bool]:
        """Remove blocks, those of other hosts, too. Which there were. NoSpace, QuotaExceeded, EngineError."""


class NearApi(Protocol):
    """Brings requested blocks into the shared-memory tier. OperationError: one cannot be read."""

    async def from_neighbours(self, binding: Binding) -> bool:
        """Bring a block that another host may have. Returns whether it is resident now."""

    async def all_of(self, directory: int, names: Sequence[bytes], may_read: Callable[[Binding], bool]) -> list[bool]:
        """As `from_neighbours`, for many blocks at once. Returns which of them are resident now."""

    async def if_wanted(self, binding: Binding) -> bool:
        """Bring a block that was requested lately. Returns whether it is resident now."""
