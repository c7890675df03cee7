"""The records that only shared volumes have, checked: clients, slabs' holders, freed slots.

A slab whose holder is gone is no error, nor are counts or an orphan of such a client: whoever opens the volume next
takes them over. An f record is one only where it does not name a durable slot that no file has: whoever holds the slab
would free somebody's bytes, now or in the slot's next life.
"""

from __future__ import annotations

from contextlib import suppress

from kvfuse.volume.check.reading import RecordReader
from kvfuse.volume.store import schema


async def read_shared(reader: RecordReader) -> None:
    """The records of these kinds; after those that name extents."""
    clients = await _read_clients(reader)
    await _read_holders(reader)
    await _read_freed(reader)
    await _read_open(reader, clients)
    await _read_counts(reader)


async def _read_clients(reader: RecordReader) -> set[int]:
    rows = reader.decoded(
        b"m", "clients", schema.decode_member, lambda row: f"the record of client {row.key[1:].hex()}"
    )
    return {schema.key_client(row.key) async for row, _ in rows}


async def _read_holders(reader: RecordReader) -> None:
    check = reader.found
    rows = reader.decoded(
        b"l", "holders", schema.decode_holder, lambda row: f"who holds slab {schema.key_slab(row.key)}"
    )
    async for row, holder in rows:
        slab = schema.key_slab(row.key)
        if slab >= check.geometry.slab_count and holder.client != schema.NOBODY:  # it had been larger
            check.problem(f"slab {slab} is held, but the volume has {check.geometry.slab_count}", deletes=[row.key])


async def _read_freed(reader: RecordReader) -> None:
    check = reader.found
    async for row in reader.rows(b"f", "freed slots"):
        freed = schema.split_freed_key(row.key)
        what = f"slot {freed.addr} of slab {freed.slab} is to be freed"
        is_there = freed.addr < check.geometry.data_size and check.geometry.slab_of(freed.addr) == freed.slab
        if not is_there or not check.slabs.is_durable(freed.addr):
            check.problem(f"{what}, but it is not allocated", deletes=[row.key])
        elif freed.addr in check.owners:
            check.problem(f"{what}, but inode {check.owners[freed.addr]} has it", deletes=[row.key])
        elif freed.addr in check.freed:
            check.problem(f"{what} twice", deletes=[row.key])
        else:
            check.freed.add(freed.addr)
            with suppress(schema.Malformed):
                _, namespace = schema.decode_freed(row.value)
                check.namespaces.count(namespace, 0, check.slabs.slot_size(freed.addr))
            check.generation_max = max(check.generation_max, freed.generation)
    if check.freed:
        check.report.notes.append(f"{len(check.freed)} slots are free when somebody takes their slabs")


async def _read_open(reader: RecordReader, clients: set[int]) -> None:
    """One of a client that is gone would keep a removed file's bytes for ever."""
    check = reader.found
    async for row in reader.rows(b"h", "open files"):
        ino, client = schema.split_open_key(row.key)
        if client not in clients:
            check.problem(f"removed inode {ino} is open by client {client:x}, which is gone", deletes=[row.key])


async def _read_counts(reader: RecordReader) -> None:
    rows = reader.decoded(b"q", "counts", schema.decode_counts, lambda row: f"the counts of client {row.key[1:].hex()}")
    async for row, counts in rows:
        reader.found.counted[row.key] = counts
