"""fsck --verify: slot heads that would fail a rebuild are found and written anew; heads of free slots are reset."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from fsck_tree import Tree, can_be_used

from kvfuse.slab import layout
from kvfuse.volume.check.rebuild import rebuild
from kvfuse.volume.opening import formatting


def tables(tree: Tree) -> list[tuple[Path, int, int]]:
    """(segment file, offset, length) of the head table of every slab."""
    geometry = formatting.read_superblock(tree.options.volume_path).geometry
    files = sorted(tree.options.segments_path.iterdir())
    return [
        (file, geometry.locate_head(slab)[1], geometry.head_size)
        for segment, file in enumerate(files)
        for slab in geometry.slabs_of(segment)
    ]


def change_tables(tree: Tree, change: Callable[[bytearray], None]) -> None:
    for file, offset, length in tables(tree):
        with file.open("r+b") as opened:
            opened.seek(offset)
            table = bytearray(opened.read(length))
            if any(table):
                change(table)
                opened.seek(offset)
                opened.write(table)


def heads_in(table: bytearray) -> list[int]:
    rows, valid = layout.parse_headers(table, 64, len(table) // 64)
    return [64 * index for index in np.flatnonzero(valid & (rows["state"] != layout.STATE_FREE)).tolist()]


def zeros(table: bytearray) -> None:
    table[:] = bytes(len(table))


def garbage(table: bytearray) -> None:
    table[:] = random.Random(len(table)).randbytes(len(table))


def says_free(table: bytearray) -> None:
    for place in heads_in(table):
        table[place : place + 64] = bytes(64)


def sealed_anew(change: Callable[[np.ndarray], None]) -> Callable[[bytearray], None]:
    """Intact heads that say something else: whoever writes them knows how."""

    def forge(table: bytearray) -> None:
        for place in heads_in(table):
            row = np.frombuffer(bytes(table[place : place + 64]), layout.SLOT_HEADER).copy()
            change(row)
            row["header_checksum"] = layout.crc32c(row.tobytes()[:60])
            table[place : place + 64] = row.tobytes()

    return forge


def other_inode(row: np.ndarray) -> None:
    row["inode"] += 1000


def other_checksum(row: np.ndarray) -> None:
    row["checksum"] ^= 1


def other_generation(row: np.ndarray) -> None:
    row["generation"] += 7


DAMAGE = {
    "zeros": zeros,
    "garbage": garbage,
    "free": says_free,
    "inode": sealed_anew(other_inode),
    "generation": sealed_anew(other_generation),
}


@pytest.mark.parametrize("what", DAMAGE)
async def test_overwritten_heads_are_found_and_written_anew(tree: Tree, what: str) -> None:
    """All of them; then a rebuild recovers every file, as it does of an undamaged volume."""
    assert (await tree.check()).clean
    change_tables(tree, DAMAGE[what])
    assert (await tree.check(verify=False)).clean, "the records are right"
    report = await tree.check()
    assert len(report.problems) == report.extents
    assert all("the head of its slot in segment" in problem.text for problem in report.problems)
    report = await tree.check(repair=True)
    assert report.clean, [problem.text for problem in report.problems]
    assert not (await tree.check()).notes
    shutil.rmtree(tree.options.records_path)
    rebuilt = await rebuild(tree.options)
    assert not rebuilt.dropped
    assert rebuilt.files == len(tree.files)
    assert await tree.read() == tree.files
    await can_be_used(tree)


async def test_heads_of_another_checksum_are_mended(tree: Tree) -> None:
    """As a crash in the middle of a change in place leaves them: a note, but a rebuild would lose the files."""
    change_tables(tree, sealed_anew(other_checksum))
    report = await tree.check()
    assert report.clean
    assert any(note.startswith(f"{report.extents} heads do not know") for note in report.notes), report.notes
    await tree.check(repair=True)
    assert not (await tree.check()).notes
    shutil.rmtree(tree.options.records_path)
    assert not (await rebuild(tree.options)).dropped
    assert await tree.read() == tree.files


async def test_a_free_slot_that_claims_to_be_a_file_is_reset(tree: Tree) -> None:
    """As a head is whose slot was freed just before a crash, or a forged one: a rebuild would bring the file back."""
    before: list[tuple[Path, int, bytes]] = []
    for file, offset, length in tables(tree):
        with file.open("rb") as opened:
            opened.seek(offset)
            before.append((file, offset, opened.read(length)))
    async with tree.volume() as volume:
        for path in (b"small", b"a/b/granules"):
            await volume.tree.unlink(*await tree.place(volume, path))
    for file, offset, table in before:
        with file.open("r+b") as opened:
            opened.seek(offset)
            opened.write(table)
    report = await tree.check()
    assert report.clean
    assert "3 heads of free slots claim to be a file's: '--verify --repair' mends them" in report.notes
    report = await tree.check(repair=True)
    assert "3 heads of free slots claim to be a file's: were mended" in report.notes
    assert not (await tree.check()).notes
    shutil.rmtree(tree.options.records_path)
    await rebuild(tree.options)
    assert (await tree.read()).keys() == tree.files.keys() - {b"small", b"a/b/granules"}


async def test_descriptions_of_files_below_a_renamed_directory_are_brought_up_to_date(tree: Tree) -> None:
    async with tree.volume() as volume:
        await volume.tree.rename(*await tree.place(volume, b"a"), *await tree.place(volume, b"z"), 0)
    moved = {
        path.replace(b"a/", b"z/", 1) if path.startswith(b"a/") else path: data for path, data in tree.files.items()
    }
    report = await tree.check()
    assert report.clean
    assert any("describe a file as it was before" in note for note in report.notes)
    await tree.check(repair=True)
    assert not (await tree.check()).notes
    shutil.rmtree(tree.options.records_path)
    await rebuild(tree.options)
    assert await tree.read() == moved


async def test_a_segments_copy_of_the_superblock_is_written_anew(tree: Tree) -> None:
    file = sorted(tree.options.segments_path.iterdir())[0]
    sound = file.read_bytes()[:4096]
    with file.open("r+b") as opened:
        opened.write(bytes(4096))
    report = await tree.check(verify=False)
    assert "segment 0: this is no kvfuse volume" in report.problems[0].text
    assert (await tree.check(repair=True, verify=False)).clean
    assert file.read_bytes()[:4096] == sound
    assert await tree.read() == tree.files
