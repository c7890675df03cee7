"""What C answers, with modules that end at the first byte outside of their memory, and at what C does not define."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest
import sanitized
from file_calls import SIZES, Calls, made_side
from mounting import KvfuseMount, temporary_mount
from places import LABS
from test_answers_compared import STEPS, WORDS, door
from test_outlive_load import loaded

from kvfuse.usrbio.client import BlockStore
from kvfuse.volume.blocks.kernel_answers import KINDS

pytestmark = [pytest.mark.ring(3), pytest.mark.root]

LOAD = "stores", "stores", "names", "pages", "appends", "rings"
ANSWERS = 50
"""of each kind"""
THREADS, ROUNDS = 4, 60


@pytest.fixture(scope="module")
def modules(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sanitized")
    if reason := sanitized.reason_against() or sanitized.build(folder):
        pytest.skip(reason)
    return folder


@contextmanager
def sanitized_mount(modules: Path) -> Iterator[KvfuseMount]:
    """Of a daemon with these modules; nothing was found in the end."""
    command = sanitized.command(modules, LABS / "kinds_daemon.py", ",".join(KINDS))
    try:
        with temporary_mount((*WORDS, "readers=2"), command) as mount:
            yield mount
    finally:
        assert sanitized.reports(modules) == ""


def test_the_same_calls(modules: Path, seed: int) -> None:
    with sanitized_mount(modules) as mount, temporary_mount((*WORDS, "readers=0")) as other, ExitStack() as stack:
        calls = Calls([stack.enter_context(made_side(each.point)) for each in (mount, other)], seed)
        for _ in range(STEPS):
            calls.step()
        calls.end()


@pytest.mark.timeout(300)
def test_many_at_a_time(modules: Path, seed: int) -> None:
    with sanitized_mount(modules) as mount:
        folder = mount.point / "kv"
        folder.mkdir()
        os.setxattr(folder, "user.kvfuse.namespace", b"kind=blocks")
        with loaded([mount], LOAD, seed, "kv") as workers:
            with BlockStore(mount.point, "kv") as store, ThreadPoolExecutor(THREADS) as pool:
                list(pool.map(lambda number: store_and_read(store, folder, seed + number), range(THREADS)))
            reports = [worker.report() for worker in workers]
        assert [error for report in reports for error in report.errors] == []
        assert all(report.calls for report in reports)
        assert min(answers(mount).values()) > ANSWERS


def store_and_read(store: BlockStore, folder: Path, seed: int) -> None:
    """Blocks of one thread, which the others open, too: whole, or not there. C answers about those of rings."""
    rng = random.Random(seed)
    for _ in range(ROUNDS):
        path, data = folder / f"block-{rng.randrange(8)}", rng.randbytes(1) * rng.choice(SIZES[1:])
        if rng.random() < 0.7:
            store.put(path.name, data)
        else:
            temporary = folder / f"{seed}.tmp"
            temporary.write_bytes(data)
            temporary.rename(path)
        for number in range(8):
            with suppress(FileNotFoundError):
                found = (folder / f"block-{number}").read_bytes()
                assert len(found) in SIZES
                assert found == found[:1] * len(found)
        if rng.random() < 0.2:
            path.unlink(missing_ok=True)


def answers(mount: KvfuseMount) -> dict[str, int]:
    """How many C gave of each kind."""
    found: dict[str, int] = door(mount)["answered_in_c"]
    return {kind: found[kind] for kind in KINDS}
