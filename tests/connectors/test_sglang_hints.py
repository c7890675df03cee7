"""What SGLang says beside the pages: what a prompt begins with, and what the interface has room for."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from engine_host import Engine, EngineHost
from engine_mounts import facts_of, make_namespace, started
from mounting import KvfuseMount, wait_until

pytestmark = pytest.mark.needs("sglang")

NORMAL = 128
"""the priority of blocks of which nobody says anything, as rows have it"""
BATCH = 12
"""pages in a call; SGLang's have up to 128"""


@pytest.fixture(scope="module")
def host() -> Iterator[EngineHost]:
    with EngineHost("sglang", "sglang_driver.py") as host:
        yield host


def page_hashes(seed: str, count: int) -> list[str]:
    return [hashlib.sha256(f"{seed} {number}".encode()).hexdigest() for number in range(count)]


def test_pages_have_the_time_and_priority_of_their_request(host: EngineHost, mount: KvfuseMount) -> None:
    with started(host, mount, "hints") as engine:
        engine.add_side_pool("swa")
        for number, (store, pool) in enumerate(((engine.store, "kv"), (side(engine), "swa"))):
            pages = page_hashes(f"page {number}", 3)
            assert all(store(pages, hints={"pin": True, "ttl": 600}))
            for name in engine.names(pages, pool):
                facts = facts_of(mount, "hints", name)
                assert facts["priority"] == NORMAL + 127
                assert facts["expires"] > 0
        plain = page_hashes("plain", 3)
        assert all(engine.store(plain))
        assert {facts_of(mount, "hints", name)["priority"] for name in engine.names(plain)} == {NORMAL}


def side(engine: Engine):  # type: ignore[no-untyped-def]
    return lambda pages, hints: engine.store_v2("swa", pages, hints=hints)


@pytest.mark.parametrize("is_told", [True, False], ids=["told", "not told"])
def test_a_prompt_is_evicted_from_its_end(host: EngineHost, mount: KvfuseMount, is_told: bool) -> None:
    """One that is looked up and stored in several calls. Without the pages ahead of each it goes from its beginning."""
    folder = f"chain-{is_told}"
    make_namespace(mount, folder, f"blocks={6 * BATCH}")
    prompt = page_hashes("prompt", 2 * BATCH)
    with started(host, mount, folder) as engine:
        for start in (0, BATCH):
            batch, before = prompt[start : start + BATCH], prompt[:start] if is_told else None
            assert all(engine.store(batch, before=before))
            paths = [mount.point / folder / os.fsdecode(name) for name in engine.names(batch)]
            wait_until(
                partial(is_told_of, engine, batch, before, paths), "the daemon to know that pages were asked for"
            )
        os.setxattr(mount.point / folder, "user.kvfuse.namespace", f"blocks={2 * BATCH}".encode())
        wait_until(lambda: len(os.listdir(mount.point / folder)) <= 2 * BATCH, "blocks to be evicted")
        there = [all(exists(mount, folder, name) for name in engine.names([page])) for page in prompt]
        assert sum(there) >= BATCH - 2
        assert there[: BATCH - 2] == [is_told] * (BATCH - 2)
        assert there[BATCH : 2 * BATCH - 2] == [not is_told] * (BATCH - 2)


def is_told_of(engine: Engine, batch: list[str], before: list[str] | None, paths: list[Path]) -> bool:
    """Ask again; the daemon says when blocks were used in whole seconds."""
    assert engine.exists(batch, before) == len(batch)
    return all(path.stat().st_atime_ns > path.stat().st_mtime_ns for path in paths)


def exists(mount: KvfuseMount, folder: str, name: bytes) -> bool:
    return (mount.point / folder / os.fsdecode(name)).exists()


def test_a_look_up_ends_where_the_pages_ahead_end(host: EngineHost, mount: KvfuseMount) -> None:
    pages = page_hashes("gap", 6)
    with started(host, mount, "gap") as engine:
        assert all(engine.store(pages))
        assert engine.exists(pages[2:], pages[:2]) == 4
        os.remove(mount.point / "gap" / os.fsdecode(engine.names(pages)[0]))
        assert engine.exists(pages[2:], pages[:2]) == 0
        assert engine.exists(pages[2:]) == 4


def test_pages_of_a_request_are_brought_into_memory(host: EngineHost, own_mount: KvfuseMount) -> None:
    mount, pages = own_mount, page_hashes("ahead", 3)
    with started(host, mount, "ahead") as engine:
        assert all(engine.store(pages))
        mount.unmount()
        assert engine.exists(pages) == 0  # it notices
        mount.mount()
        wait_until(engine.is_up, "the engine to connect again")

        def in_memory() -> list[bool]:
            return [facts_of(mount, "ahead", name)["in_memory"] for name in engine.names(pages)]

        assert engine.exists(pages) == 3
        assert not any(in_memory())
        assert engine.exists(pages, None, {"prefetch": True}) == 3
        wait_until(lambda: all(in_memory()), "the pages in memory")
