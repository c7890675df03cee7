"""A file that is unlinked while it is open, after chunks with records of their own changed."""

from __future__ import annotations

import os

import inside
from volume_lab import CALLER, MIB, Disk, check, lab_options, opened

from kvfuse.volume.api import ROOT_INODE

CHUNK = 16 << 10


async def test_records_of_its_chunks_name_only_slots_that_it_has() -> None:
    options = lab_options(capacity=16 * MIB, chunk=CHUNK)
    disk = Disk.format(options)
    async with opened(disk, options) as volume:
        handle, _ = await volume.tree.create(ROOT_INODE, b"file", 0o644, CALLER, os.O_RDWR)
        await volume.files.write(handle, 0, b"a" * (20 * CHUNK))
        await volume.sync()
        await volume.files.write(handle, 12 * CHUNK, b"b" * CHUNK)
        await inside.journal(volume).flusher.write_out(handle.node)
        await volume.tree.unlink(ROOT_INODE, b"file")
        await volume.sync()
        report = await check(disk.copy())
        assert report.clean, report
        assert await volume.files.read(handle, 11 * CHUNK, 3 * CHUNK) == b"a" * CHUNK + b"b" * CHUNK + b"a" * CHUNK
        await volume.files.release(handle)
    report = await check(disk)
    assert report.clean, report
