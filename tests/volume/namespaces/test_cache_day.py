"""24 hours of nested caches, with quotas, times to live and clears that change, and with power cuts."""

from __future__ import annotations

import dataclasses
import os
import random
from dataclasses import dataclass, field

import pytest
import trio.testing
from cache_day import Crew, Day, pass_time, remove_all, simulate_clock, watch_quotas
from cache_play import check_books, check_space, make_cache, make_namespaces
from namespace_lab import UseAudit, count_uses, recorded_uses
from volume_lab import MIB, Chaos, Disk, check, lab_options, opened
from volume_play import CHUNK

from kvfuse.options.config import Options
from kvfuse.remote.records.lmdb.store import LIMITS
from kvfuse.volume.api import ROOT_INODE
from kvfuse.volume.content import writer

HOURS = 24
ROUNDS = range(int(os.environ.get("KVFUSE_MODEL_ROUNDS", "1")))
STEPS = int(os.environ.get("KVFUSE_DAY_STEPS", "5"))
"""of each who works, in an hour"""


@dataclass
class Host:
    """A volume that is mounted, dies, and is mounted again."""

    rng: random.Random
    time: trio.testing.MockClock
    options: Options
    disk: Disk
    faults: float
    audits: list[UseAudit]
    day: Day = field(default_factory=Day)
    folders: list[int] = field(default_factory=list)
    """of caches, the root's first"""
    home: int = 0
    """folder of files"""
    lives: int = 0

    async def set_up(self) -> None:
        self.audit()
        async with opened(self.disk, self.options) as volume:
            self.folders, self.home = await make_namespaces(self.disk, volume, self.rng)

    def audit(self) -> None:
        """Look at some commits: the audit reads all records."""
        audit = UseAudit(self.disk)
        audit.begin()
        self.disk.audit = lambda puts, deletes: audit.look(puts, deletes) if self.rng.random() < 0.1 else None
        self.audits.append(audit)

    async def live(self, hours: int) -> None:
        """Mount the volume, work for hours, and then leave it or die."""
        self.lives += 1
        operations = self.rng.choice([LIMITS.commit_operations_max, 40])
        limits = dataclasses.replace(LIMITS, commit_operations_max=operations)
        chaos = Chaos(random.Random(self.rng.random()), delay=self.rng.choice([0.0, 0.3]))
        image: tuple[Disk, Day] | None = None
        async with opened(self.disk, self.options, chaos, limits) as volume:
            crew = Crew.on(volume, self.day, self.rng, self.folders, self.home, self.audits[-1])
            await crew.look(1000)
            while hours and image is None:
                hours -= 1
                chaos.commit_error = chaos.write_error = self.faults
                if not hours and self.rng.random() < 0.7:
                    image = await crew.work_until_power_fails(STEPS, self.disk)
                else:
                    await crew.work(STEPS)
                chaos.commit_error = chaos.write_error = 0.0
                await volume.sync()
                await pass_time(self.time, 3600)
                check_space(volume)
                if image is None:
                    await crew.look(40)
            await crew.holder.release_all()
            await crew.operator.sync(0)
            print(", ".join(crew.operator.done))
            await trio.sleep(3)
            if image is None:  # calls that were cut off leave files open
                await check_books(self.disk, volume)
        await self.begin_anew(image)

    async def begin_anew(self, image: tuple[Disk, Day] | None) -> None:
        if image is not None:
            self.disk, self.day = image
            self.audit()
        report = await check(self.disk.copy())
        assert report.clean, [problem.text for problem in report.problems]

    async def remove_everything(self, free: int) -> None:
        async with opened(self.disk, self.options) as volume:
            await Crew.on(volume, self.day, self.rng, self.folders, self.home, self.audits[-1]).look(1000)
            await remove_all(volume, ROOT_INODE, [*self.folders, self.home])
            await volume.sync()
            await trio.sleep(3)
            assert volume.space().free == free
        assert count_uses(self.disk) == recorded_uses(self.disk) == {}
        report = await check(self.disk)
        assert report.clean, [problem.text for problem in report.problems]


@pytest.mark.parametrize("faults", [0.0, 0.02], ids=["reliable", "failing"])
@pytest.mark.parametrize("round_number", ROUNDS)
async def test_a_day_of_one_host(
    seed: int,
    monkeypatch: pytest.MonkeyPatch,
    autojump_clock: trio.testing.MockClock,
    faults: float,
    round_number: int,
) -> None:
    """Use is never above a quota, room returns, no look finds what is no more, and open files stay."""
    monkeypatch.setattr(writer, "REWRITE_SIZE_MAX", 8192)
    simulate_clock(monkeypatch)
    rng, audits = random.Random(seed), list[UseAudit]()
    watch_quotas(monkeypatch, audits)
    options = lab_options(capacity=24 * MIB, strict=rng.random() < 0.3, nodes=rng.choice([1000, 8]), chunk=CHUNK)
    disk = Disk.format(options)
    make_cache(disk, rng)
    async with opened(disk.copy(), options) as volume:
        free = volume.space().free
    host = Host(rng, autojump_clock, options, disk, faults, audits)
    await host.set_up()
    began, hour = trio.current_time(), 0
    while hour < HOURS:
        hours = min(rng.choice([1, 4, 8]), HOURS - hour)
        await host.live(hours)
        hour += hours
    await host.remove_everything(free)
    assert trio.current_time() - began >= HOURS * 3600
    print(f"{host.lives} lives, {host.day.refused} refusals by small quotas")
