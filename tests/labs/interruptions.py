"""What happens to daemons of mounts that outlive them, over and over beside a load: kills, or upgrades."""

from __future__ import annotations

import random
import subprocess
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from killer import Killer, percentiles
from mounting import KVFUSE, PATIENCE_S, KvfuseMount

PAUSE = (0.1, 1.0)
"""seconds between the end of one and the next, at random"""


class Interruptions(Protocol):
    """Context manager: they go on until its end, which raises what went wrong with them."""

    stalls: list[float]
    """seconds for which calls waited, of each so far"""
    failure: BaseException | None

    def __enter__(self) -> Interruptions: ...

    def __exit__(self, *_: object) -> None: ...


class Upgrader:
    """`kvfuse upgrade` of some mounts in turn, each by the same version."""

    def __init__(self, mounts: Sequence[KvfuseMount], seed: int, pause: tuple[float, float] = PAUSE) -> None:
        self._mounts = list(mounts)
        self._rng = random.Random(seed)
        self._pause = pause
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.stalls: list[float] = []
        self.failure: BaseException | None = None

    def _run(self) -> None:
        try:
            while not self._stop.wait(self._rng.uniform(*self._pause)):
                self._upgrade(self._rng.choice(self._mounts))
        except BaseException as failure:
            self.failure = failure

    def _upgrade(self, mount: KvfuseMount) -> None:
        command = [*KVFUSE, "upgrade", str(mount.point)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=4 * PATIENCE_S, check=False)
        assert done.returncode == 0, done.stderr + mount.log.read_text()
        self.stalls.append(float(done.stdout.rpartition("calls waited ")[2].split()[0]))

    def __enter__(self) -> Upgrader:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        if kind is None and self.failure is not None:
            raise self.failure

    def __str__(self) -> str:
        return f"{len(self.stalls)} upgrades: {percentiles(self.stalls)}"


KINDS = ("killed", "upgraded")


def interruptions(kind: str, mounts: Sequence[KvfuseMount], seed: int) -> Killer | Upgrader:
    """``kind``: one of ``KINDS``."""
    return Killer(mounts, seed, PAUSE) if kind == "killed" else Upgrader(mounts, seed)


Work = Callable[[random.Random], object]
"""something that takes seconds, and may be done again: raises where something is wrong"""


def run_beside(kind: str, mounts: Sequence[KvfuseMount], seed: int, works: Mapping[str, Work], rounds: int) -> None:
    """Do all of ``works`` side by side, each again and again until there were so many kills or upgrades.

    What became of it is printed. AssertionError, with all that they raised.
    """
    with interruptions(kind, mounts, seed) as under_way:
        workers = [_Worker(name, work, under_way, rounds, seed) for name, work in works.items()]
        for worker in workers:
            worker.join()
    print(f"{under_way}; {', '.join(f'{worker.name} {worker.count} times' for worker in workers)}")
    failed = [f"{worker.name}:\n{worker.failure}" for worker in workers if worker.failure]
    assert not failed, "\n".join(failed)
    assert len(under_way.stalls) >= rounds


class _Worker:
    """A thread with one work."""

    def __init__(self, name: str, work: Work, under_way: Interruptions, rounds: int, seed: int) -> None:
        self.name = name
        self.count = 0
        self.failure = ""
        self._work = work
        self._under_way = under_way
        self._rounds = rounds
        self._chance = random.Random(f"{seed} {name} {type(under_way).__name__}")
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        under_way = self._under_way
        try:
            while not self.count or not (len(under_way.stalls) >= self._rounds or under_way.failure):
                self._work(self._chance)
                self.count += 1
        except BaseException:
            self.failure = traceback.format_exc()

    def join(self) -> None:
        self._thread.join()
