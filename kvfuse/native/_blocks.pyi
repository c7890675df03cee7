"""The block store (blocks.c); `kvfuse.native.blockforms` has the forms and results. Buffers are contiguous arrays.

Columns of a batch: ``text``, ``offsets`` (u64) and ``lengths`` (u32) are names, as `name_columns` makes them; they may
be memory that a client changes meanwhile. All other columns have 8 bytes an item, unless it is said. ``now`` is in
seconds, ``now_us`` in microseconds; ``expires`` is 0 for never.
"""

from typing import Any

ROW: int
"""bytes of a row"""

class Core:
    def __init__(
        self, states: int, slab_count: int, slab_size: int, head_size: int, sizes: Any, slab_room: int = 0
    ) -> None:
        """``states``: address of 16 bytes a slab, zeros or as the last daemon left them; ``sizes``: u32, sorted.

        ``slab_room``: as many slabs as there may be later, of which there are states, too.
        """
    def set_slab_count(self, slab_count: int) -> None:
        """There are more slabs from now on, or fewer. ValueError: no room for them, or blocks are in others."""
    def keep_to(self, slab_count: int) -> None:
        """No block gets a slot in slabs from this one on."""
    def hold(self, address: int, memory: Any | None) -> None:
        """Hold memory that begins there, states, a table or an arena, as long as the core or a batch; None: no more."""
    def put_space(self, place: int, number: int, above: int, epoch: int, bytes_max: int, blocks_max: int) -> None: ...
    def set_packing(self, place: int, packs: bool) -> None:
        """Whether blocks of a space may be compressed: `Batch.blocks` tells of them then."""
    def space_use(self, place: int) -> tuple[int, int]: ...
    def add_table(self, place: int, space: int, address: int, size: int) -> None: ...
    def renew_table(self, number: int, address: int, size: int) -> int:
        """Have a table go on in other memory, begun with the same limits, not live. Its number from now on:
        with the former one it has ended, and who has the former memory mapped sees no byte that comes from now on."""
    def end_table(self, place: int) -> None: ...
    def sweep_table(self, place: int, rows_max: int) -> bool:
        """Whether there are more rows."""
    def remove_table(self, place: int) -> bool:
        """Whether it could go: it is swept, no arena is its, and no other call uses it."""
    def add_arena(self, place: int, number: int, address: int, size: int, table: int) -> None:
        """``table``: the one whose blocks are in it; -1: it is new."""
    def remove_arena(self, place: int) -> bool: ...
    def arena_facts(self, place: int) -> tuple[int, int, int, int, int, int, int]:
        """State, table, pins, dirty blocks, live blocks, bytes in use, stamp."""
    def pin_arena(self, number: int, by: int) -> bool: ...
    def add_slabs(self, numbers: Any, token: int) -> None:
        """u32: slabs without blocks; ``token``: of their loan."""
    def take_slabs(self, count: int, first: int = 0) -> list[int]:
        """Free slabs, from ``first`` on, whose heads on the medium say so: they are the core's no more."""
    def load_slab(self, number: int, token: int, heads: Any) -> int:
        """Take over a slab by its heads, at a mount. How many blocks it has. Tables and spaces are there before."""
    def load_foreign(self, number: int, token: int, heads: Any) -> int:
        """Know the blocks of another host's slab as its heads say it now, no others. How many count; -1: it is ours."""
    def forget_foreign(self, number: int) -> None:
        """Know nothing of a slab of another host any more."""
    def tell(self, low: int, high: int) -> bytes | None:
        """What another host has to know of the newest block here with a fingerprint: `TOLD`; None: there is none."""
    def hear(self, told: Any) -> bool:
        """Another host told of a block. Whether it counts: it may be anything. Its table is there before."""
    def row_at(self, slab: int, slot: int, sequence: int) -> tuple[int, int] | None:
        """(table, row) of the block in a slot of any host's slab; None: it is not that one."""
    def settle_shadows(self, sequence: int) -> None:
        """`load_foreign` was called for all slabs of others since this sequence was the last one: blocks up to it that
        none of them met shadow nothing any more."""
    def set_loading(self, loading: bool) -> None:
        """While slabs are loaded, names that are dropped are remembered: older blocks of theirs do not come."""
    def restore(self) -> None:
        """Go on with states, tables and arenas of the former daemon: all of them were added."""
    def put(
        self,
        table: int,
        directory: int,
        text: Any,
        offsets: Any,
        lengths: Any,
        plain_only: bool,
        sources: Any,
        sizes: Any,
        now_us: int,
        now: int,
        expires: int,
        priority: int,
        results: Any,
        sequences: Any,
        shown_us: int = 0,
        only_absent: bool = False,
    ) -> int:
        """How many have a place: blocks are tried in order, up to the first that has none.

        ``shown_us``: time that files show, in microseconds since the epoch; 0: now. ``only_absent``: a block that has a
        name stays, and the result is PRESENT.
        """
    def rename_row(self, table: int, row: int, sequence: int, name: Any, now_us: int) -> tuple[int, int]:
        """Give a block that is in memory another name in its table. (Its row, or why not; its sequence)."""
    def get(
        self,
        table: int,
        directory: int,
        text: Any,
        offsets: Any,
        lengths: Any,
        plain_only: bool,
        targets: Any,
        rooms: Any,
        now: int,
        rows: Any,
        results: Any,
    ) -> None: ...
    def find(
        self,
        table: int,
        directory: int,
        text: Any,
        offsets: Any,
        lengths: Any,
        plain_only: bool,
        now: int,
        rows: Any,
        sequences: Any,
    ) -> None: ...
    def drop(
        self,
        table: int,
        directory: int,
        text: Any,
        offsets: Any,
        lengths: Any,
        plain_only: bool,
        now: int,
        rows: Any,
        sequences: Any,
    ) -> None: ...
    def drop_rows(self, table: int, rows: Any, sequences: Any, sizes: Any) -> None: ...
    def slab_rows(self, slab: int) -> bytes:
        """u64: table, row, sequence of each block."""
    def list_rows(
        self, table: int, directory: int, after: int, limit: int, now: int
    ) -> tuple[list[tuple[int, int, int, int, bytes | None, int, int, int]], int]:
        """[(row, sequence, length, stored, name, slab, slot, length of the name)]; the next ``after``, or -1.

        It may be fewer than there are, even none, before the last call.
        """
    def slot_places(self, slab: int, slot: int) -> tuple[int, int]:
        """Offset of its name among heads and names, and of its bytes in the slab."""
    def take_dirty(self, bytes_max: int, rows_max: int) -> Batch | int:
        """The queue position, where nothing is to be written. It counts blocks and heads, as ``rows_max`` does."""
    def reserve(
        self,
        table: int,
        text: Any,
        offsets: Any,
        lengths: Any,
        rows: Any,
        sequences: Any,
        places: Any,
        sizes: Any,
        slabs: Any,
        slot_offsets: Any,
        packed: Any,
    ) -> Landing:
        """``slabs``: u32. Where ``places`` is not 0, ``sizes`` bytes from the slab belong there.

        Where ``packed`` is not 0, the slab has so many bytes, which become those.

        A name that is not the row's is ABSENT, so names may come from the medium.
        """
    def lender(self, arenas_max: int) -> object:
        """What `_peers` sends blocks from, as long as this is held. So many arenas may be pinned by that for long."""
    def set_dirty_max(self, bytes: int) -> None: ...
    def doubt_unsynced(self) -> None:
        """A sync failed: what was written since `note_synced` is written again, or dropped."""
    def note_synced(self, sequence: int, written_heads: int) -> None:
        """Blocks up to this sequence, and so many heads, are written, and survive a loss of power."""
    def follow_gone(self) -> None:
        """From now on `take_gone` has the blocks that are dropped or replaced, the last 65,536 of them."""
    def take_gone(self, count: int) -> bytes:
        """`GONE`, up to so many; they are forgotten."""
    def statistics(self) -> dict[str, int]: ...

class Batch:
    """Batches may be written side by side, but heads of one only after those of all batches that were taken before it.
    What a batch has is synced when it, and all before it, are written and the medium is synced."""

    def end(self) -> None:
        """All of it is written."""
    def fail(self) -> None:
        """It is not: blocks and heads wait again, behind all others. So it is for a batch that is thrown away."""
    def runs(self) -> tuple[bytes, bytes]:
        """`RUN`, of data and of heads and names. Heads may be written before the data: checksums tell."""
    def blocks(self, to_pack: bool) -> bytes:
        """`STORED`, of each block that is written, or may be compressed, until the batch has ended."""
    def told(self) -> bytes:
        """`TOLD`, of each block that is written and not gone: once `runs` were asked for, until the batch has ended."""
    def pack(self, packed: Any, buffer: Any, saved: Any) -> None:
        """Before `runs`: blocks that are compressed move to smaller slots, where there are some.

        ``packed``: `PACKED`; ``buffer``: with their bytes, which stay. ``saved``: i64, bytes of slots.
        """
    def facts(self) -> tuple[int, int, int]:
        """Blocks, bytes, queue position."""

class Landing:
    def land(self, came: Any, results: Any) -> None:
        """``came``: a byte each, whether its bytes are there.

        Results: 1: it is in memory, perhaps by another landing; 0: its bytes are others, or there was no place;
        ABSENT: the block was dropped or replaced meanwhile. What `way` has shown is left as it is.
        """
    def way(self) -> object:
        """By which `_peers` shows what it receives, as long as this lives."""

def begin_table(
    memory: Any,
    multipliers: Any,
    buckets_max: int,
    rows_max: int,
    directory: int,
    name_space: int,
    uid: int,
    gid: int,
    mode: int,
    serial: int,
) -> None: ...
def buffer_spans(buffers: list[Any], writes: bool, addresses: Any, sizes: Any) -> int:
    """Address and size of each buffer. How many of the first ones have the buffer protocol, and are contiguous; with
    ``writes``: and may be written."""

def plain_names(keys: list[bytes | str]) -> tuple[bytes, bytes, bytes] | None:
    """Columns of names, as `name_columns` makes them; None: not all keys are names as they are (`keys.file_name`)."""

def entry_columns(
    entries: Any, aux_size: int, address: int, iov_size: int, length_max: int, waited_us: int, columns: Any
) -> int:
    """What entries of a ring (`wire.SQE`) name, which have one operation, handle and iov, and one key each.

    ``columns``: four for as many: offsets of names, addresses, sizes, and lengths of names, which are u32 at the start
    of the last one. Their bytes together; -1: not all ranges lie in the iov and the aux area, or one
    has no byte, more than ``length_max``, reserved bits, or a timeout that has passed. ``address``: of the iov.
    """

def fingerprints(multipliers: Any, directory: int, text: Any, offsets: Any, lengths: Any, halves: Any) -> None:
    """``halves``: u64, two for each name; 0 for an odd name."""

def name_keys(table: Any, directory: int, text: Any, offsets: Any, lengths: Any, keys: Any) -> None:
    """The first half of each name's fingerprint; 0 for an odd name."""

def table_get(
    table: Any,
    directory: int,
    text: Any,
    offsets: Any,
    lengths: Any,
    now: int,
    arenas: Any,
    targets: Any,
    rooms: Any,
    rows: Any,
    results: Any,
    copies: bool,
) -> None:
    """``arenas``: `ARENA`, those that are mapped. Without ``copies``, results are rows."""

ANSWERS: tuple[tuple[str, int, bool, str], ...]
"""What `Door` answers: (kind of requests, opcode, whether C may answer it, why that is right)."""

KEPT_NUMBERS_SIZE: int
KEPT_DRAFTS_SIZE: int
"""See `Door.keep_rows`."""

class Door:
    """What the file door shows of a core's blocks without the interpreter (blockdoor.h)."""

    def __init__(self, core: Core, multipliers: Any, attr_timeout: float, tick_max_ns: int, lag_ns: int, /) -> None: ...
    def set_limits(self, attr_timeout: float, arenas_max: int, /) -> None:
        """Seconds for which the kernel keeps attributes; arenas that open blocks may pin."""
    def offer(self, folder: int, tables: Any, is_bare: bool, is_writable: bool, seconds: float, /) -> bool:
        """``tables``: u16, places. ``is_bare``: names mean their blocks, or nothing. ``is_writable``: files may be
        made. False: it was not, as changes of another folder are to be told first."""
    def take_back(self, folder: int, /) -> None:
        """0: all folders."""
    def hold_name(self, folder: int, name: bytes, by: int, /) -> None: ...
    def hold_inode(self, ino: int, by: int, /) -> None: ...
    def set_kinds(self, kinds: int, /) -> None:
        """A bit for each opcode that may be answered. Any thread."""
    def take_handles(self, ino: int, /) -> list[tuple[int, int, int, int, int, int, int, int, int, int]]:
        """(fh, place of the table, row, number of the arena, start in it, size, mode, uid, gid, mtime in ns) of each
        handle of a block that was given here and not taken yet. From here on Python answers by them."""
    def name_of(self, ino: int, /) -> bytes | None:
        """The name by which a block was looked up here, if that was a moment ago."""
    def take_notes(
        self,
    ) -> tuple[list[tuple[int, int]], list[tuple[int, bool, bytes]], list[tuple[int, int, int]], list[tuple[int, int]]]:
        """As `kernel_answers.Notes`."""
    def begin_drafts(self, block_max: int, decisions: Any, kept: Any, /) -> int:
        """Bytes that a block may have; rows of three u64, twice. A descriptor: readable once there are notes."""
    def next_taken(
        self,
    ) -> tuple[int, int, int, int, int, int, int, int, int, int, bytes, bytes, int, int] | None:
        """As `kernel_answers.TakenFile`. Once for each; the door has it until `drop_taken`."""
    def drop_taken(self, fh: int, /) -> None:
        """Forget a file that was taken over: the next daemon finds it with whoever did that."""
    def keep_rows(self, numbers: Any, drafts: Any, /) -> None:
        """Memory of `KEPT_NUMBERS_SIZE` and `KEPT_DRAFTS_SIZE` bytes that the next daemon finds: restores what the
        former one left there. Once, when all tables and arenas are restored. ValueError."""
    def take_all(self) -> None:
        """All drafts are to be taken over."""
    def take_over(self, request: Any, /) -> bool:
        """Mark what is to be taken over before Python handles a request. Whether there is any, or there are notes."""
    def has_drafts(self, folder: int, /) -> bool: ...
    def give_numbers(self, first: int, count: int, /) -> int:
        """Of inodes that may be made, in the place of those that are left; 0: none. How many are left."""
    def note_written(self, ino: int, table: int, row: int, sequence: int, /) -> None: ...
    def forget_written(self, ino: int, /) -> None: ...
    def find_written(self, ino: int, /) -> tuple[int, int, int] | None: ...
    def number_of(self, table: int, row: int, sequence: int, /) -> int:
        """The inode by which the kernel knows a block."""
    def statistics(self) -> dict[str, int]: ...
    def answer(self, descriptor: int, request: Any, /) -> bool:
        """Answer a request of the kernel's protocol there. False: Python has to."""
    def way(self) -> object:
        """A capsule for `_fusewire`; the door has to outlive its use."""
