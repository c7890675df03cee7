"""fsck: clean volumes are clean, each kind of damage is found and mended, whatever it is."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from fsck_damage import DAMAGE, directory
from fsck_tree import Records, Tree, can_be_used, flip

from kvfuse.errors import VolumeBusy
from kvfuse.volume.api import ROOT_INODE
from kvfuse.volume.check.rebuild import rebuild
from kvfuse.volume.store import schema


async def test_a_clean_volume_is_clean(tree: Tree) -> None:
    report = await tree.check()
    assert report.clean
    assert not report.notes
    assert report.files == len(tree.files)
    assert report.used_bytes == sum(map(len, tree.files.values()))
    assert report.verified_bytes == report.used_bytes
    assert await tree.read() == tree.files


@pytest.mark.parametrize("damage", DAMAGE, ids=lambda damage: damage.__name__)
async def test_damaged_records(tree: Tree, damage: Callable[[Records], set[bytes]]) -> None:
    """Found, named, mended; what was not damaged keeps every byte, and the volume can be used."""
    lost: set[bytes] = set()
    await tree.change(lambda records: lost.update(damage(records)))
    report = await tree.check()
    assert report.problems, "not found"
    assert (await tree.check()).problems, "a check alone changes nothing"
    report = await tree.check(repair=True)
    assert report.clean, [problem.text for problem in report.problems]
    assert report.repaired > 0
    found = await tree.read()
    for path, data in tree.files.items():
        if path in found:
            assert found[path] == data, path
        else:
            assert path in lost or path.rpartition(b"/")[2] in lost, f"{path!r} went too"
    await can_be_used(tree)


async def test_files_of_a_lost_directory_keep_their_bytes(tree: Tree) -> None:
    await tree.change(lambda records: records.pop(schema.inode_key(directory(records, b"c"))))
    await tree.check(repair=True)
    assert tree.files[b"a/b/c/far"] in (await tree.read()).values()


@pytest.mark.parametrize("round_number", range(10))
async def test_random_damage(tree: Tree, rng: random.Random, round_number: int) -> None:
    """Bytes flipped, records dropped and invented, anywhere: the check ends, repair makes the volume clean."""

    def damage(records: Records) -> None:
        keys = sorted(records)
        for key in rng.sample(keys, rng.randint(1, 6)):
            value = bytearray(records[key])
            action = rng.choice(["flip", "drop", "cut", "invent", "move"])
            if action == "flip" and value:
                value[rng.randrange(len(value))] ^= 1 << rng.randrange(8)
                records[key] = bytes(value)
            elif action == "drop":
                del records[key]
            elif action == "cut":
                records[key] = bytes(value[: rng.randrange(len(value) + 1)])
            elif action == "invent":
                records[key[:1] + rng.randbytes(rng.randrange(30))] = rng.randbytes(rng.randrange(60))
            elif action == "move":
                records[rng.choice(keys)] = bytes(value)

    await tree.change(damage)
    report = await tree.check(repair=True)
    if schema.inode_key(ROOT_INODE) in await keys_of(tree):
        assert report.clean, [problem.text for problem in report.problems]
        found = await tree.read()
        wrong = [path for path, data in tree.files.items() if path in found and found[path] != data]
        assert len(wrong) <= 6, wrong  # a flipped bit in a size or an owner is no damage that anybody can see
        await can_be_used(tree)


async def keys_of(tree: Tree) -> set[bytes]:
    async with tree.records() as records:
        return {row.key for row in await records.scan(b"", limit=100_000)}


# -- data -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [b"page", b"a/b/granules", b"a/b/c/far"])
async def test_verify_finds_a_flipped_bit(tree: Tree, path: bytes) -> None:
    await flip(tree, path, len(tree.files[path]) - 3)
    assert (await tree.check(verify=False)).clean, "the records are right"
    report = await tree.check()
    assert len(report.problems) == 1
    assert "wrong" in report.problems[0].text
    report = await tree.check(repair=True)
    assert report.clean
    found = await tree.read()
    assert {name: data for name, data in tree.files.items() if name != path} == found
    await can_be_used(tree)


async def test_a_mounted_volume_is_refused(tree: Tree) -> None:
    async with tree.volume():
        with pytest.raises(VolumeBusy):
            await tree.check()
        with pytest.raises(VolumeBusy):
            await rebuild(tree.options)
