"""What happens to daemons of mounts that outlive them, over and over beside a load: kills, or upgrades."""

from __future__ import annotations

import random
import subprocess
import threading
from collections.abc import Sequence
from typing import Protocol

from killer import Killer, percentiles
from mounting import KVFUSE, PATIENCE_S, KvfuseMount, wait_until

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


KINDS = ("upgraded",)


def interruptions(kind: str, mounts: Sequence[KvfuseMount], seed: int) -> Killer | Upgrader:
    """``kind``: one of ``KINDS``."""
    return Killer(mounts, seed, PAUSE) if kind == "killed" else Upgrader(mounts, seed)


def wait_for(under_way: Interruptions, count: int) -> None:
    """Until there were so many more."""
    most = len(under_way.stalls) + count
    wait_until(lambda: len(under_way.stalls) >= most or under_way.failure is not None, "kills or upgrades")
