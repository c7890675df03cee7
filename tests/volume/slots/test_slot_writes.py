"""Many small writes in one call of the engine: only where nothing else has to be done for them."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from itertools import pairwise

import inside
import numpy as np
import pytest
from volume_lab import CALLER, MIB, Chaos, Disk, check, lab_options, opened

from kvfuse.remote.segments.api import Transfer
from kvfuse.slab.allocator import Slot
from kvfuse.volume.api import ROOT_INODE
from kvfuse.volume.slots.heads import HeaderWriter


async def test_batches_of_writes_do_what_single_writes_do(rng: random.Random) -> None:
    """Against a bytearray, with seals, truncations and commits between; what a crash leaves is clean."""
    options = lab_options(capacity=32 * MIB)
    disk = Disk.format(options)
    taken = 0
    async with opened(disk, options, Chaos(rng, delay=0.2)) as volume:
        content = bytearray(rng.randbytes(3 * MIB + 777))
        handle, node = await volume.tree.create(ROOT_INODE, b"file", 0o644, CALLER, os.O_RDWR)
        await volume.files.write(handle, 0, bytes(content))
        for _ in range(40):
            writes = []
            for _ in range(rng.randrange(1, 20)):
                length = rng.choice([1, 100, 4096, 70_000])
                offset = rng.randrange(max(1, len(content) - length // 2))
                writes.append((offset, memoryview(rng.randbytes(length))))
            offsets, sources = [offset for offset, _ in writes], [data for _, data in writes]
            where = np.array(offsets), np.array([len(data) for data in sources])
            numbers = await volume.files.write_in_slots(handle, *where, sources)
            done = np.isin(np.arange(len(writes)), numbers).tolist()
            for number, (offset, data) in enumerate(writes):
                if done[number]:
                    content[offset : offset + len(data)] = data
            spans = sorted((offset, offset + len(data)) for number, (offset, data) in enumerate(writes) if done[number])
            assert all(end <= start for (_, end), (start, _) in pairwise(spans)), "they overlap"
            for number, (offset, data) in enumerate(writes):
                if not done[number]:
                    assert await volume.files.write(handle, offset, data) == len(data)
                    content[offset : offset + len(data)] = data  # also behind the end
            taken += sum(done)
            assert bytes(await volume.files.read(handle, 0, 8 * MIB)) == content
            match rng.randrange(6):
                case 0:
                    await volume.files.fsync(handle)
                case 1:
                    await volume.files.release(handle)  # it is sealed now
                    handle = await volume.files.open(node.ino, os.O_RDWR, CALLER)
                case 2:
                    await volume.sync()
                    assert (await check(disk.copy(), verify=False)).clean
        await volume.files.release(handle)
    assert taken > 40, "nothing was written in slots"
    assert (await check(disk)).clean


async def test_heads_of_neighbours_that_are_freed_become_one_write(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each ends where the next begins, so the engine of files needs one system call for an eviction of thousands."""
    options = lab_options(capacity=32 * MIB)
    disk = Disk.format(options)
    async with opened(disk, options, Chaos(random.Random(0))) as volume:
        core, written = inside.core(volume), list[Transfer]()

        async def write(batch: Sequence[Transfer]) -> None:
            written.extend(batch)

        monkeypatch.setattr(core.segments, "write", write)
        for size in (4096, 65536, MIB):
            written.clear()
            await HeaderWriter(core).mark_free([Slot(number * size, size) for number in range(MIB // size)])
            assert not any(any(transfer.buffer) for transfer in written)
            for before, after in pairwise(written):
                assert (before.segment, before.offset + len(before.buffer)) == (after.segment, after.offset)
        monkeypatch.undo()
