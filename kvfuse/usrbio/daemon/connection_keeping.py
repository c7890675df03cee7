"""What outlives the daemon of one connection: its socket, and what is registered through it, under ``ring/NAME/...``.

A client notices nothing of a daemon that was killed: its socket stays connected, as the holder has it, too, and so have
the memory, the bells and the journals of its rings. `restored_connection.py` makes a connection of it again.

Each thing is kept before the client hears of it, and dropped before the client hears of that. A *page* of the
connection, shared memory that the client does not see, has what changes often: the last handle, the pins, and the
request that is being answered. A request is taken out of the socket after its reply; so the next daemon
finds it there and answers it. Only one that carries a descriptor is taken before: the page says of it whether it was
done. If it was, the next daemon replies; if not, it answers EINTR, and the client asks again. What was registered for
a request that nobody was told of is dropped, as that is done anew. Once the reply is on its way it stays: the client
may have it, and throws a second reply away; or it has not, and then nobody uses it until the connection ends.

Of a connection that was accepted and not yet greeted the socket alone is kept: the next daemon accepts it once more.

A daemon of a version with another `FORM`, or another protocol of rings, ends the connection: nothing of it is read.
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

from kvfuse.kept.keeper import Keeper, Kept
from kvfuse.usrbio.daemon.client_process import ClientProcess, Powers
from kvfuse.usrbio.protocol.wire import PAGE, VERSION
from kvfuse.volume.tier.shared_tier import SharedTier, TierBlock
from kvfuse.volume.views.ring_files import PREFIX, KeptFile

log = logging.getLogger(__name__)

FORM = 1
"""format of all that is kept of a connection: its page, journals of rings, and what is said of each thing"""
_SOCKET, _SAID = "socket", "said"
PINS_MAX = 65536
ARRIVALS_MAX = 500
"""connections of one second that are kept before they are greeted"""
_PIN_WORDS = 4
"""pin, arena, offset, size; a pin of 0: the row is free"""
PAGE_SIZE = PAGE + PINS_MAX * _PIN_WORDS * 8
_LAST_HANDLE, _LAST_PIN, _REQUEST, _ADDED, _DROPPED = range(5)
"""words of the page"""


class ConnectionOwner(msgspec.Struct):
    """Whose a connection is."""

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
        """ValueError where what is kept is of another version."""
        if (self.form, self.protocol) != (FORM, VERSION):
            raise ValueError(f"form {self.form} and protocol {self.protocol} are of another version")
        uids, gids = (tuple(range(*ids) for ids in mapped) for mapped in (self.uids, self.gids))
        powers = Powers(self.capabilities, self.is_ours, uids, gids)
        return ClientProcess(self.pid, self.uid, self.gid, frozenset(self.groups), powers)


class KeptWords(msgspec.Struct):
    """What a client has said beside what it registered."""

    tokens: list[str] = msgspec.field(default_factory=list)
    follows: int = 0
    """directory; the connection is for news of its blocks"""
    failed: bool = False
    """a daemon raised what nobody foresaw when it took the connection over"""
    by_path: bool = False
    """as `registered_things.NamespaceHandle` has it, of that directory"""


class KeptConnection(NamedTuple):
    """A connection that a daemon before this one left."""

    name: str
    peer: ClientProcess
    said: KeptWords
    socket: int
    page: Page
    names: dict[str, None]
    """of all that is kept of it; `ConnectionKeeping` takes out what it drops"""
    files: list[str]
    """those of registered files that the volume counts as open"""
    pins: dict[int, TierBlock]
    """blocks that the client holds"""


class Arrival(NamedTuple):
    """A connection that a daemon before this one accepted, and did not greet."""

    name: str
    socket: int


class Arrivals:
    """Keeps connections that were accepted. Not all of them where very many come: the holder is for others, too."""

    def __init__(self, keeper: Keeper) -> None:
        self._keeper = keeper
        self._second, self._count = 0, 0

    def keep(self, stream: socket.socket, name: str = "") -> str:
        """Until it is greeted, or dropped. Returns its name; "": it is not kept. ``name``: under which it is kept."""
        second = int(time.monotonic())
        self._second, self._count = second, self._count + 1 if second == self._second else 1
        if not name and (not self._keeper.outlives or self._count > ARRIVALS_MAX):
            return ""
        name = name or os.urandom(8).hex()
        self._keeper.keep(f"{PREFIX}{name}/{_SOCKET}", b"", [stream.fileno()])
        return name

    def drop(self, name: str) -> None:
        """It has ended, greeted or not."""
        if name:
            self._keeper.drop(f"{PREFIX}{name}/{_SOCKET}")


class KeptFiles:
    """Where the registered files of all connections are. Event loop only."""

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
        """A file has another name, and perhaps is still stored under the former one."""
        for keeping, handle in self._rows.get(ino, ()):
            keeping.move_file(handle, (parent, name))


class Page:
    """The page of one connection. ``descriptor`` stays the caller's."""

    def __init__(self, descriptor: int) -> None:
        self._mapping = mmap.mmap(descriptor, PAGE_SIZE)
        self.words = memoryview(self._mapping)[:PAGE].cast("Q")
        self._rows = memoryview(self._mapping)[PAGE:].cast("Q")
        self._kept_end = _find_data_end(descriptor) - PAGE
        """bytes of rows that a daemon before this one may have used"""
        self._places: dict[int, int] = {}
        """pin -> first word of its row"""
        self._free: list[int] = []
        self._end = 0
        """rows from this word on were never used"""
        self.is_closed = False

    def close(self) -> None:
        """Nobody uses it any more: unmap it now, not when Python finds the connection among its garbage."""
        self.words.release()
        self._rows.release()
        self._mapping.close()
        self.is_closed = True

    @property
    def last_pin(self) -> int:
        return self.words[_LAST_PIN]

    def add_pin(self, pin: int, block: TierBlock) -> None:
        """The client has this pin. Under the lock of `Pins`, as the next one."""
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

    def adopt_pins(self, tier: SharedTier) -> dict[int, TierBlock]:
        """Blocks that the client of the daemon before this one holds, by pin."""
        # A look at what was never used would make memory of it: 2 MiB for each connection.
        table = np.frombuffer(self._rows[: self._kept_end // 8], np.uint64).reshape(-1, _PIN_WORDS)
        found: dict[int, TierBlock] = {}
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
    """Where the memory behind the page's words ends that exists: rows are used from the first one on."""
    try:
        if os.lseek(descriptor, PAGE, os.SEEK_DATA) == PAGE:
            return os.lseek(descriptor, PAGE, os.SEEK_HOLE)
    except OSError as error:
        if error.errno != errno.ENXIO:
            raise
    return PAGE


class ConnectionKeeping:
    """Of one connection. For the event loop, but for what its page says of pins.

    Nothing is kept before `greet`, nor where nobody keeps things.
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
        """From here on the connection outlives the daemon. ``stream``: its socket. OSError."""
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
        """Its socket is kept under this name since it was accepted."""
        self._name = name

    def keep_words(self, *, token: str = "", follows: int = 0, by_path: bool = False) -> None:
        """The client has shown a token, or follows a directory."""
        if self.page is None:
            return
        if token and token not in self._said.tokens:
            self._said.tokens.append(token)
        if follows:
            self._said.follows, self._said.by_path = follows, by_path
        self._keep(_SAID, self._said, [])

    def note_failure(self) -> bool:
        """A mistake of ours kept the connection from being taken over. False: for the first time."""
        before, self._said.failed = self._said.failed, True
        self._keep(_SAID, self._said, [])
        return before

    def close(self) -> None:
        """The connection has ended: nothing of it is kept any more."""
        names = [name for name in self._names if not name.endswith(_SOCKET)]
        for name in [*names, *self._names]:
            self._keeper.drop(name)
        self._names.clear()
        self.forget_files()
        if self.page is not None:
            self.page.close()
            self.page = None

    def forget_files(self) -> None:
        """All stays as it is, for the next daemon."""
        for handle, row in self._files.items():
            self._all_files.remove(row.ino, self, handle)
        self._files.clear()

    # -- things --------------------------------------------------------------------------------------

    def add(self, kind: str, handle: int, content: object, descriptors: list[int]) -> None:
        """Something was registered. The descriptors stay the caller's."""
        if self.page is not None:
            self.page.words[_ADDED] = handle
            if isinstance(content, KeptFile):
                self.add_file(handle, content)
            self._keep(f"{kind}/{handle}", content, descriptors)

    def add_file(self, handle: int, row: KeptFile) -> None:
        """A file is registered, and kept, here or by the daemon before this one."""
        self._files[handle] = row
        self._all_files.add(row.ino, self, handle)

    def move_file(self, handle: int, place: tuple[int, bytes]) -> None:
        """A registered file has this name now."""
        row = self._files[handle]
        if row.places[:1] != [place]:
            row.places = [place, *row.places][:2]
            self._keep(f"file/{handle}", row, [])

    def clear_cut(self, handle: int) -> None:
        """The client knows that bytes of a file may be lost."""
        row = self._files.get(handle)
        if row is not None:
            row.is_cut = False
            self._keep(f"file/{handle}", row, [])

    def change(self, kind: str, handle: int, content: object) -> None:
        """Something without descriptors is different now."""
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
        """The daemon before this one began to drop it, and did not answer."""
        return self.page is not None and handle != 0 and self.page.words[_DROPPED] == handle

    def take(self, name: str) -> Kept | None:
        """What the daemon before this one kept under one of `left_names`."""
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
        """A request is about to be taken out of the socket, before it is answered."""
        if self.page is not None:
            words = self.page.words
            words[_ADDED] = 0
            words[_REQUEST] = request << 32 | number

    def begin_reply(self) -> None:
        """The reply is about to be sent: from here on the client may know of what was registered."""
        if self.page is not None:
            self.page.words[_ADDED] = 0

    def end_reply(self) -> None:
        """The reply was sent."""
        if self.page is not None:
            words = self.page.words
            words[_REQUEST] = words[_ADDED] = words[_DROPPED] = 0

    def read_unanswered(self) -> tuple[int, int, int]:
        """(request, number, handle) of the one that the daemon before this one took and did not answer; 0: none.

        ``handle``: of what it registered, perhaps also for a request that is still in the socket.
        """
        if self.page is None:
            return 0, 0, 0
        taken, added = self.page.words[_REQUEST], self.page.words[_ADDED]
        return taken >> 32, taken & 0xFFFFFFFF, added


def _client_of(name: str) -> str:
    return name.split("/", 2)[1]


def find_kept(keeper: Keeper, tier: SharedTier, files: Iterable[str]) -> tuple[list[KeptConnection], list[Arrival]]:
    """The connections that a daemon before this one left. What they hold of the tier is held when this returns.

    ``files``: names of registered files that the volume counts as open.
    """
    found, arrivals = list[KeptConnection](), list[Arrival]()
    things, own_files = defaultdict[str, dict[str, None]](dict), defaultdict[str, list[str]](list)
    for name in [*keeper.names(PREFIX), *files]:
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
            log.warning("a client of the daemon before this one is lost: %s", error)
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
