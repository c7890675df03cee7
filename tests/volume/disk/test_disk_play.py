"""Two hosts with disk tiers store, replace, remove and read at random, restart, and have their copies damaged."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path

import pytest
import trio
import volume_lab
from disk_lab import segment_files, tier_of, tier_options, with_tier
from shared_lab import check_disk, get, put
from volume_lab import MIB, Disk

from kvfuse.options.config import Options
from kvfuse.volume.api import ROOT_INODE
from kvfuse.volume.opening import loading
from kvfuse.volume.volume import Volume

STEPS = 250
GRACE = 0.05
"""seconds after which slots are used again"""
SETTLING = 0.005
"""seconds in which the other host hears of a change"""
LENGTHS = 1, 5000, 65_536, 200_000, 262_144, 900_000


class Host:
    """One client, and the folder of its tier; it comes and goes, in a task of its own each time."""

    def __init__(self, disk: Disk, options: Options, number: int, nursery: trio.Nursery) -> None:
        self.disk, self.options, self.number, self.nursery = disk, options, number, nursery
        self.hits = 0
        self.volume: Volume

    async def start(self) -> None:
        self.number += 10
        self._leave, self._left = trio.Event(), trio.Event()
        await self.nursery.start(self._live)

    async def _live(self, task_status: trio.TaskStatus[None]) -> None:
        async with with_tier(self.disk, self.options, self.number) as self.volume:
            task_status.started()
            await self._leave.wait()
            self.hits += tier_of(self.volume).counters.hits
        self._left.set()

    async def stop(self) -> None:
        self._leave.set()
        await self._left.wait()


def damage(host: Host, rng: random.Random) -> None:
    """Somewhere in a slot that has a copy, or in its head, or anywhere."""
    tier = tier_of(host.volume)
    path = Path(segment_files(host.volume)[0])
    offsets = [rng.randrange(path.stat().st_size)]
    if tier.index.copies:
        copy = rng.choice(list(tier.index.copies.values()))
        offsets.append(tier.folder.geometry.locate(copy.place)[1] + rng.randrange(copy.stored))
        offsets.append(tier.folder.geometry.locate_header(copy.place, tier.index.slabs.slot_size(copy.place))[1])
    with path.open("r+b") as file:
        file.seek(rng.choice(offsets))
        file.write(rng.randbytes(8))


@pytest.mark.parametrize("keep", ["reads", "all"])
async def test_what_is_read_is_what_was_stored_last(
    tmp_path: Path, rng: random.Random, keep: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the real clock, as the tier has threads; slots rest for a moment only."""
    monkeypatch.setattr(volume_lab, "SHARED_LIMITS", dataclasses.replace(volume_lab.SHARED_LIMITS, deadline=GRACE / 2))
    monkeypatch.setattr(loading, "REUSE_SECONDS_MIN", GRACE)
    all_options = [tier_options(tmp_path / name, 16 * MIB, keep=keep, compression="zstd") for name in "ab"]
    disk = Disk.format(all_options[0], shared=True)
    async with trio.open_nursery() as nursery:
        hosts = [Host(disk, options, number, nursery) for number, options in enumerate(all_options, 1)]
        for host in hosts:
            await host.start()
        await play(hosts, rng)
        for host in hosts:
            await host.stop()
    await check_disk(disk)
    assert sum(host.hits for host in hosts) > 0


async def play(hosts: list[Host], rng: random.Random) -> None:
    model: dict[bytes, bytes] = {}
    for _ in range(STEPS):
        host, name, action = rng.choice(hosts), b"%d" % rng.randrange(25), rng.random()
        if action < 0.3:
            if name in model:
                await host.volume.tree.unlink(ROOT_INODE, name)
            model[name] = rng.randbytes(rng.choice(LENGTHS)) if rng.random() < 0.5 else bytes(rng.choice(LENGTHS))
            await put(host.volume, name, model[name])
        elif action < 0.35 and name in model:
            await host.volume.tree.unlink(ROOT_INODE, name)
            del model[name]
        elif action < 0.9:
            await check_read(host, name, model.get(name))
        elif action < 0.95:
            damage(host, rng)
        elif action < 0.98:
            await trio.sleep(2 * GRACE)
        else:
            await host.stop()
            await host.start()
        await host.volume.sync()
        await trio.sleep(SETTLING)
    for host in hosts:
        for name in sorted(model):
            await check_read(host, name, model[name])


async def check_read(host: Host, name: bytes, expected: bytes | None) -> None:
    """In time: before, the host may have heard of an earlier change alone. Bytes that nobody stored would be EIO."""
    with trio.fail_after(30):
        while True:
            if await get(host.volume, name) == expected:
                return
            await trio.sleep(SETTLING)
