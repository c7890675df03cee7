"""The block store (blocks.c); `kvfuse.native.blocks` has the forms and results. Buffers are numpy arrays, contiguous.

Columns of a batch: ``text``, ``offsets`` (u64) and ``lengths`` (u32) are names, as `name_columns` makes them; they may
be memory that a client changes meanwhile. All other columns have 8 bytes an item, unless it is said. ``now`` is in
seconds, ``now_us`` in microseconds; ``expires`` is 0 for never.
"""

from typing import Any

ROW: int
"""bytes of a row"""

class Core:
    def __init__(self, states: int, slab_count: int, slab_size: int, head_size: int, sizes: Any) -> None:
        """``states``: address of 16 bytes a slab, zeros or as the last daemon left them; ``sizes``: u32, sorted."""
    def put_space(self, place: int, number: int, above: int, epoch: int, bytes_max: int, blocks_max: int) -> None: ...
    def space_use(self, place: int) -> tuple[int, int]: ...
    def add_table(self, place: int, space: int, address: int, size: int) -> None: ...
    def end_table(self, place: int) -> None: ...
    def sweep_table(self, place: int, rows_max: int) -> bool:
        """Whether there are more rows."""
    def remove_table(self, place: int) -> bool:
        """Whether it could go: it is swept, and no arena is its."""
    def add_arena(self, place: int, number: int, address: int, size: int, table: int) -> None:
        """``table``: the one whose blocks are in it; -1: it is new."""
    def remove_arena(self, place: int) -> bool: ...
    def arena_facts(self, place: int) -> tuple[int, int, int, int, int, int, int]:
        """State, table, pins, dirty blocks, live blocks, bytes in use, stamp."""
    def pin_arena(self, number: int, by: int) -> bool: ...
    def add_slabs(self, numbers: Any, token: int) -> None:
        """u32: slabs without blocks, and the token of their loan."""
    def take_slabs(self, count: int) -> list[int]: ...
    def load_slab(self, number: int, token: int, heads: Any) -> int:
        """Take over a slab by its heads, at a mount. How many blocks it has."""
    def set_loading(self, loading: bool) -> None: ...
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
    ) -> int:
        """How many have a place: blocks are tried in order, up to the first that has none."""
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
        """[(row, sequence, length, stored, name, slab, slot, length of the name)]; the next ``after``, or -1."""
    def slot_places(self, slab: int, slot: int) -> tuple[int, int]:
        """Offset of its name among heads and names, and of its bytes in the slab."""
    def take_dirty(self, bytes_max: int, rows_max: int) -> Batch | tuple[int, int]:
        """Positions in the queues of blocks and of stale heads, where nothing is to be written."""
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
    ) -> Landing:
        """``slabs``: u32. Where ``places`` is not 0, ``sizes`` bytes from the slab belong there."""
    def set_dirty_max(self, bytes: int) -> None: ...
    def doubt_unsynced(self) -> None:
        """A sync failed: what was written since `note_synced` is written again, or dropped."""
    def note_synced(self, sequence: int, marked_stale: int) -> None:
        """Blocks up to this sequence, and so many marks of stale heads, are written, and survive a loss of power."""
    def statistics(self) -> dict[str, int]: ...

class Batch:
    def end(self) -> None:
        """All of it is written. A batch that is thrown away ends, too."""
    def runs(self) -> tuple[bytes, bytes]:
        """`RUN`, of data and of heads and names: these may be written after the data is on the medium."""
    def facts(self) -> tuple[int, int, int, int]:
        """Blocks, bytes, and positions in the queues of blocks and of stale heads."""

class Landing:
    def land(self, came: Any, results: Any) -> None:
        """``came``: a byte each, whether its bytes are there. Results: 1, or 0 where they are not the block's."""

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
