"""Keeps a connection for the next daemon: its socket, and what the client registered, under ``ring/NAME/...``.

A client does not notice that its daemon was killed: the holder has its socket, too, so it stays connected; it also has
the memory, the bells and the journals of the client's rings. `restored_connection.py` makes a connection of them again.

The daemon keeps each thing before it answers the client, and drops it before it answers that. A *page* of the
connection, shared memory that the client does not see, has what changes often: the last handle, the pins, and the
request in progress. The daemon takes a request out of the socket after its reply; so the next daemon finds it there and
answers it. It takes only a request with a descriptor before: the page says whether that was done. If it was, the next
daemon replies; if not, it answers EINTR, and the client retries. The next daemon drops what was registered for a
request without a reply, as the retry registers it anew. Once the reply is in flight the thing stays: the client may
have the reply, and ignores a second one; or it has not, and then nobody uses the thing until the connection ends.

Before HELLO the daemon keeps the socket alone: the next daemon accepts it once more.

A daemon of a version with another `FORM`, or another protocol of rings, ends the connection, and reads nothing of it.
"""

from __future__ import annotations

import errno
import logging
import mmap
import os
import socket
import time
from collections import defaultdict
from collections.abc import Iterable
from typing import Any, NamedTuple

import msgspec
import numpy as np

from kvfuse.access.client_process import ClientProcess, Powers
from kvfuse.kept.keeper import Keeper, Kept
from kvfuse.usrbio.daemon.held_blocks import HeldBlock
from kvfuse.usrbio.protocol.wire import PAGE, VERSION
from kvfuse.volume.tier.shared_tier import SharedTier
from kvfuse.volume.views.ring_files import PREFIX, KeptFile

log = logging.getLogger(__name__)

FORM = 1
"""format of all that is kept of a connection: its page, journals of rings, and records of things"""
_SOCKET, _SAID = "socket", "said"
PINS_MAX = 65536
ARRIVALS_MAX = 500
"""connections of one second that are kept before HELLO"""
_PIN_WORDS = 4
"""pin, arena, offset, size; a pin of 0: the row is free"""
PAGE_SIZE = PAGE + PINS_MAX * _PIN_WORDS * 8
_LAST_HANDLE, _LAST_PIN, _REQUEST, _ADDED, _DROPPED = range(5)
"""words of the page"""


class ConnectionOwner(msgspec.Struct):
    """The process that owns a connection."""

    pid: int
    uid: int
    gid: int
    groups: list[int]
    capabilities: int
    is_ours: bool
    uids: list[tuple[int, int]]
    gids: list[tuple[int, int]]
    form: int = 1
    protocol: int = 1

    @classmethod
    def from_process(cls, peer: ClientProcess) -> ConnectionOwner:
        powers = peer.powers
        uids, gids = ([(ids.start, ids.stop) for ids in mapped] for mapped in (powers.uids, powers.gids))
        groups = sorted(peer.groups)
        known = peer.pid, peer.uid, peer.gid, groups, powers.capabilities, powers.is_ours, uids, gids
        return cls(*known, FORM, VERSION)

    def to_process(self) -> ClientProcess:
        """The process again. ValueError: the record is of another version."""
        if (self.form, self.protocol) != (FORM, VERSION):
            raise ValueError(f"form {self.form} and protocol {self.protocol} are of another version")
        uids, gids = (tuple(range(*ids) for ids in mapped) for mapped in (self.uids, self.gids))
        powers = Powers(self.capabilities, self.is_ours, uids, gids)
        return ClientProcess(self.pid, self.uid, self.gid, frozenset(self.groups), powers)


class KeptWords(msgspec.Struct):
    """Tokens that a client showed, and the directory that it follows."""

    tokens: list[str] = msgspec.field(default_factory=list)
    follows: int = 0
    """directory, of whose blocks the connection carries news; 0: none"""
    failed: bool = False
    """a daemon raised an unexpected exception when it restored the connection"""
    by_path: bool = False
    """`NamespaceHandle.by_path` of that directory"""


class KeptConnection(NamedTuple):
    """A connection that a former daemon left."""

    name: str
    peer: ClientProcess
    said: KeptWords
    socket: int
    page: Page
    names: dict[str, None]
    """names of its kept entries; `ConnectionKeeping` takes out what it drops"""
    files: list[str]
    """those of registered files that the volume counts as open"""
    pins: dict[int, HeldBlock]
    """blocks that the client holds"""


class Arrival(NamedTuple):
    """A connection that a former daemon accepted, before HELLO."""

    name: str
    socket: int


class Arrivals:
    """Keeps accepted connections. Where very many connect it keeps only some: the holder serves others, too."""

    def __init__(self, keeper: Keeper) -> None:
        self._keeper = keeper
        self._second, self._count = 0, 0

    def keep(self, stream: socket.socket, name: str = "") -> str:
        """Keep a connection until HELLO, or `drop`. Returns its name; "": not kept. ``name``: of one that is kept
        already."""
        second = int(time.monotonic())
        self._second, self._count = second, self._count + 1 if second == self._second else 1
        if not name and (not self._keeper.outlives or self._count > ARRIVALS_MAX):
            return ""
        name = name or os.urandom(8).hex()
        self._keeper.keep(f"{PREFIX}{name}/{_SOCKET}", b"", [stream.fileno()])
        return name

    def drop(self, name: str) -> None:
        """Drop a connection that ended."""
        if name:
            self._keeper.drop(f"{PREFIX}{name}/{_SOCKET}")


class KeptFiles:
    """Keeps the names of registered files of all connections current. Event loop only."""

    def __init__(self) -> None:
        self._rows = defaultdict[int, dict[tuple[ConnectionKeeping, int], None]](dict)
        """inode -> whose they are, and their handles"""

    def add(self, ino: int, keeping: ConnectionKeeping, handle: int) -> None:
        self._rows[ino][keeping, handle] = None

    def remove(self, ino: int, keeping: ConnectionKeeping, handle: int) -> None:
        del self._rows[ino][keeping, handle]
        if not self._rows[ino]:
            del self._rows[ino]

    def note_move(self, ino: int, parent: int, name: bytes) -> None:
        """Note a file's new name; the store may still have the former one."""
        for keeping, handle in self._rows.get(ino, ()):
            keeping.move_file(handle, (parent, name))


class Page:
    """The page of one connection. ``descriptor`` stays the caller's."""

    def __init__(self, descriptor: int) -> None:
        self._mapping = mmap.mmap(descriptor, PAGE_SIZE)
        self.words = memoryview(self._mapping)[:PAGE].cast("Q")
        self._rows = memoryview(self._mapping)[PAGE:].cast("Q")
        self._kept_end = _find_data_end(descriptor) - PAGE
        """bytes of rows that a former daemon may have used"""
        self._places: dict[int, int] = {}
        """pin -> first word of its row"""
        self._free: list[int] = []
        self._end = 0
        """rows from this word on were never used"""
        self.is_closed = False

    def close(self) -> None:
        """Unmap it now, not when Python collects the connection. Nobody uses it any more."""
        self.words.release()
        self._rows.release()
        self._mapping.close()
        self.is_closed = True

    @property
    def last_pin(self) -> int:
        return self.words[_LAST_PIN]

    def add_pin(self, pin: int, block: HeldBlock) -> None:
        """Note a pin of the client. The caller holds the lock of `Pins`, as for `remove_pin`."""
        if self._free:
            place = self._free.pop()
        else:
            place, self._end = self._end, self._end + _PIN_WORDS
        rows = self._rows
        rows[place + 1], rows[place + 2], rows[place + 3] = block.arena, block.offset, block.size
        self.words[_LAST_PIN] = pin
        rows[place] = pin
        self._places[pin] = place

    def remove_pin(self, pin: int) -> None:
        place = self._places.pop(pin)
        self._rows[place] = 0
        self._free.append(place)

    def adopt_pins(self, tier: SharedTier) -> dict[int, HeldBlock]:
        """Hold again what the client held with the former daemon: pin -> block."""
        # To read rows that were never used would allocate them: 2 MiB for each connection.
        table = np.frombuffer(self._rows[: self._kept_end // 8], np.uint64).reshape(-1, _PIN_WORDS)
        found: dict[int, HeldBlock] = {}
        used = np.flatnonzero(table[:, 0])
        self._end = int(used[-1] + 1) * _PIN_WORDS if len(used) else 0
        self._free = (np.flatnonzero(table[: self._end // _PIN_WORDS, 0] == 0) * _PIN_WORDS).tolist()
        for row in used.tolist():
            pin, *where = table[row].tolist()
            self._places[pin] = row * _PIN_WORDS
            block = tier.adopt_pin(*where)
            if block is None:  # nobody writes there; the client's mapping keeps its bytes
                self.remove_pin(pin)
            else:
                found[pin] = block
        return found


def _find_data_end(descriptor: int) -> int:
    """End of the allocated memory behind the page's words: rows are used from the first one on."""
    try:
        if os.lseek(descriptor, PAGE, os.SEEK_DATA) == PAGE:
            return os.lseek(descriptor, PAGE, os.SEEK_HOLE)
    except OSError as error:
        if error.errno != errno.ENXIO:
            raise
    return PAGE


class ConnectionKeeping:
    """Keeps one connection. Event loop only, except for pins in its page.

    Keeps nothing before `keep_connection`, nor without a keeper that outlives the daemon.
    """

    def __init__(self, keeper: Keeper, left: KeptConnection | None = None, all_files: KeptFiles | None = None) -> None:
        self._keeper = keeper
        self._all_files = all_files or KeptFiles()
        self._files: dict[int, KeptFile] = {}
        self.page: Page | None = None
        self._name, self._said = "", KeptWords()
        self._handle = 0
        self._names: dict[str, None] = {}
        if left is not None:
            self._name, self._said, self.page = left.name, left.said, left.page
            self._handle = left.page.words[_LAST_HANDLE]
            self._names = left.names

    def __iter__(self) -> ConnectionKeeping:
        return self

    def __next__(self) -> int:
        """A handle that no other thing of the connection ever had."""
        self._handle += 1
        if self.page is not None:
            self.page.words[_LAST_HANDLE] = self._handle
        return self._handle

    # -- the connection ------------------------------------------------------------------------------

    def keep_connection(self, stream: Any, peer: ClientProcess) -> None:
        """Keep the connection from now on. ``stream``: its socket. OSError."""
        if not self._keeper.outlives or self.page is not None:
            return
        descriptor = os.memfd_create("kvfuse-connection", os.MFD_CLOEXEC)
        try:
            os.ftruncate(descriptor, PAGE_SIZE)
            page = Page(descriptor)
            self._name = self._name or os.urandom(8).hex()
            page.words[_LAST_HANDLE] = self._handle
            self._keep(_SOCKET, ConnectionOwner.from_process(peer), [stream.fileno(), descriptor])
            self.page = page
        finally:
            os.close(descriptor)

    def set_name(self, name: str) -> None:
        """Set the name under which `Arrivals` keeps its socket."""
        self._name = name

    def keep_words(self, *, token: str = "", follows: int = 0, by_path: bool = False) -> None:
        """Keep a token that the client showed, or the directory that it follows."""
        if self.page is None:
            return
        if token and token not in self._said.tokens:
            self._said.tokens.append(token)
        if follows:
            self._said.follows, self._said.by_path = follows, by_path
        self._keep(_SAID, self._said, [])

    def note_failure(self) -> bool:
        """Note that an unexpected exception stopped the restore. False: for the first time."""
        before, self._said.failed = self._said.failed, True
        self._keep(_SAID, self._said, [])
        return before

    def close(self) -> None:
        """Drop all that is kept of the connection, which has ended."""
        names = [name for name in self._names if not name.endswith(_SOCKET)]
        for name in [*names, *self._names]:
            self._keeper.drop(name)
        self._names.clear()
        self.forget_files()
        if self.page is not None:
            self.page.close()
            self.page = None

    def forget_files(self) -> None:
        """Keep the names of files current no more; kept entries stay, for the next daemon."""
        for handle, row in self._files.items():
            self._all_files.remove(row.ino, self, handle)
        self._files.clear()

    # -- things --------------------------------------------------------------------------------------

    def add(self, kind: str, handle: int, content: object, descriptors: list[int]) -> None:
        """Keep a registered thing. The descriptors stay the caller's."""
        if self.page is not None:
            self.page.words[_ADDED] = handle
            if isinstance(content, KeptFile):
                self.add_file(handle, content)
            self._keep(f"{kind}/{handle}", content, descriptors)

    def add_file(self, handle: int, row: KeptFile) -> None:
        """Keep the name of a kept file current; this daemon or the former one kept it."""
        self._files[handle] = row
        self._all_files.add(row.ino, self, handle)

    def move_file(self, handle: int, place: tuple[int, bytes]) -> None:
        """Keep the new name of a registered file."""
        row = self._files[handle]
        if row.places[:1] != [place]:
            row.places = [place, *row.places][:2]
            self._keep(f"file/{handle}", row, [])

    def clear_cut(self, handle: int) -> None:
        """Note that the client knows that bytes of a file may be lost."""
        row = self._files.get(handle)
        if row is not None:
            row.is_cut = False
            self._keep(f"file/{handle}", row, [])

    def change(self, kind: str, handle: int, content: object) -> None:
        """Keep new content of a thing without descriptors."""
        if self.page is not None:
            self._keep(f"{kind}/{handle}", content, [])

    def drop(self, kind: str, handle: int) -> None:
        if self.page is not None:
            self.page.words[_DROPPED] = handle
            name = f"{PREFIX}{self._name}/{kind}/{handle}"
            self._keeper.drop(name)
            self._names.pop(name, None)
            if kind == "file" and (row := self._files.pop(handle, None)) is not None:
                self._all_files.remove(row.ino, self, handle)

    def was_dropped(self, handle: int) -> bool:
        """Whether the former daemon began to drop it, and did not answer."""
        return self.page is not None and handle != 0 and self.page.words[_DROPPED] == handle

    def take(self, name: str) -> Kept | None:
        """Take what the former daemon kept under a name of `list_kept`."""
        return self._keeper.take(name)

    def list_kept(self) -> list[tuple[str, str, int]]:
        """(name, kind, handle) of all that was registered, in that order."""
        rows = [(name, *name.split("/")[2:]) for name in self._names if not name.endswith((_SOCKET, _SAID))]
        return sorted([(row[0], row[1], int(row[2])) for row in rows], key=lambda row: row[2])

    def _keep(self, name: str, content: object, descriptors: list[int]) -> None:
        name = f"{PREFIX}{self._name}/{name}"
        self._keeper.keep(name, msgspec.json.encode(content), descriptors)
        self._names[name] = None

    # -- requests ------------------------------------------------------------------------------------

    def begin_request(self, request: int, number: int) -> None:
        """Note a request that the daemon is about to take out of the socket, before it answers."""
        if self.page is not None:
            words = self.page.words
            words[_ADDED] = 0
            words[_REQUEST] = request << 32 | number

    def begin_reply(self) -> None:
        """Note that the reply is about to be sent: from now on the client may know what was registered."""
        if self.page is not None:
            self.page.words[_ADDED] = 0

    def end_reply(self) -> None:
        """Note that the reply was sent."""
        if self.page is not None:
            words = self.page.words
            words[_REQUEST] = words[_ADDED] = words[_DROPPED] = 0

    def read_unanswered(self) -> tuple[int, int, int]:
        """(request, number, handle) of the one that the former daemon took and did not answer; 0: none.

        ``handle``: of what it registered, perhaps also for a request that is still in the socket.
        """
        if self.page is None:
            return 0, 0, 0
        taken, added = self.page.words[_REQUEST], self.page.words[_ADDED]
        return taken >> 32, taken & 0xFFFFFFFF, added


def _client_of(name: str) -> str:
    return name.split("/", 2)[1]


def find_kept(keeper: Keeper, tier: SharedTier, files: Iterable[str]) -> tuple[list[KeptConnection], list[Arrival]]:
    """Find the connections that a former daemon left, and hold again what they hold of the tier.

    ``files``: names of registered files that the volume counts as open.
    """
    found, arrivals = list[KeptConnection](), list[Arrival]()
    things, own_files = defaultdict[str, dict[str, None]](dict), defaultdict[str, list[str]](list)
    for name in [*keeper.list_names(PREFIX), *files]:
        things[_client_of(name)][name] = None
    for name in files:
        own_files[_client_of(name)].append(name)
    for client, names in things.items():
        name = f"{PREFIX}{client}/{_SOCKET}"
        if (kept := keeper.take(name)) is None:
            continue
        stream, *pages = kept.descriptors
        if not pages:
            arrivals.append(Arrival(client, stream))
            continue
        (page_descriptor,) = pages
        try:
            peer, page = msgspec.json.decode(kept.content, type=ConnectionOwner).to_process(), Page(page_descriptor)
            words = keeper.take(f"{PREFIX}{client}/{_SAID}")
            said = KeptWords() if words is None else msgspec.json.decode(words.content, type=KeptWords)
        except (OSError, ValueError, msgspec.MsgspecError) as error:
            log.warning("a client of the former daemon is lost: %s", error)
            os.close(stream)
            for thing in names:
                keeper.drop(thing)
        else:
            found.append(
                KeptConnection(client, peer, said, stream, page, names, own_files[client], page.adopt_pins(tier))
            )
        finally:
            os.close(page_descriptor)
    tier.pins_are_known()
    return found, arrivals
