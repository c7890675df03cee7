"""A model that is loaded, and blocks that are got at the same time: neither waits for the other to end."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from mounting import KvfuseMount, temporary_mount

from kvfuse.usrbio.client import BlockStore
from kvfuse_bench.loading.checkpoint import write_checkpoint
from kvfuse_bench.loading.loads import Place, load_once

pytestmark = [pytest.mark.alone, pytest.mark.engines("lmdb+file")]

MIB = 1 << 20
BLOCK, COUNT = 256 << 10, 64
SAMPLES = 300
ROUNDS_MAX = 6
GET_FACTOR, GET_SECONDS = 10.0, 0.02
"""the slowest hundredth of gets beside a load takes so many times what it takes alone, or so long, in some round"""
LOAD_FACTOR = 4.0
"""a load beside gets, likewise: one of two processors is theirs"""


@pytest.fixture
def mount() -> Iterator[KvfuseMount]:
    with temporary_mount(["capacity=1GiB"]) as mount:
        yield mount


class Gets:
    """Blocks that one client gets, one after the other."""

    def __init__(self, store: BlockStore) -> None:
        self.store = store
        self.keys = [b"block-%d" % number for number in range(COUNT)]
        self.target = np.zeros(BLOCK, np.uint8)

    def put(self) -> None:
        for number, key in enumerate(self.keys):
            self.store.put(key, np.full(BLOCK, number, np.uint8))

    def measure(self, until: threading.Event | None = None) -> float:
        """Seconds of the slowest hundredth: of SAMPLES gets, or of all until something ends."""
        seconds: list[float] = []
        while not until.is_set() if until is not None else len(seconds) < SAMPLES:
            number = len(seconds) % COUNT
            began = time.perf_counter()
            assert self.store.get_into(self.keys[number], self.target)
            seconds.append(time.perf_counter() - began)
            assert (self.target == number).all()
        return float(np.percentile(seconds, 99))


@pytest.mark.parametrize("loader", ["preads", "ring"])
def test_a_load_and_gets_go_on_beside_each_other(mount: KvfuseMount, loader: str, tmp_path: Path) -> None:
    folder = mount.point / "model"
    folder.mkdir()
    place = Place(folder, write_checkpoint(folder, 264 * MIB, 3))
    with BlockStore(mount.point, "blocks") as store:
        Gets(store).put()
    for _ in range(ROUNDS_MAX):
        alone, beside = _round(mount, loader, place, tmp_path)
        print(f"{loader}: 99 % of gets within {1e3 * alone[0]:.2f} ms alone, {1e3 * beside[0]:.2f} ms beside a load")
        print(f"{loader}: a load takes {alone[1]:.2f} s alone, {beside[1]:.2f} s beside gets")
        if beside[0] <= max(GET_FACTOR * alone[0], GET_SECONDS) and beside[1] <= LOAD_FACTOR * alone[1]:
            return
    pytest.fail("gets beside a load, or a load beside gets, took longer than they may in every round")


def _round(
    mount: KvfuseMount, loader: str, place: Place, logs: Path
) -> tuple[tuple[float, float], tuple[float, float]]:
    """(seconds of gets, seconds of the load): alone, and side by side. Each load is the first of a daemon."""
    found = []
    for is_beside in (False, True):
        mount.unmount()
        mount.mount()
        with BlockStore(mount.point, "blocks") as store:
            gets, ended, loads = Gets(store), threading.Event(), list[float]()
            gets.measure()  # then all blocks are in memory

            def load(loads: list[float] = loads, ended: threading.Event = ended) -> None:
                try:
                    answer = load_once(Path(sys.executable), loader, place, logs)
                    assert answer["checks"] == place.checkpoint.checks
                    loads.append(answer["seconds"])
                finally:
                    ended.set()

            alone = None if is_beside else gets.measure()
            thread = threading.Thread(target=load)
            thread.start()
            beside = gets.measure(ended) if is_beside else None
            thread.join()
            found.append((beside or alone or 0.0, *loads))
    return found[0], found[1]
