"""What requests say of their blocks, through vLLM's own tiering manager: how long, how much, and what is used."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from engine_host import Engine, EngineHost
from engine_mounts import facts_of, make_namespace, started
from mounting import KvfuseMount, wait_until

pytestmark = pytest.mark.needs("vllm")

COUNT = 4
SEED = 11
NORMAL = 128
"""the priority of blocks of which nobody says anything, as rows have it"""


@pytest.fixture(scope="module")
def host() -> Iterator[EngineHost]:
    with EngineHost("vllm", "vllm_driver.py") as host:
        yield host


def priorities(engine: Engine, mount: KvfuseMount, namespace: str, seed: int = SEED) -> list[int]:
    return [
        facts_of(mount, namespace, engine.name(seed, number))["priority"] - NORMAL for number in range(COUNT)
    ]  # fmt: skip


def test_chunks_have_the_time_and_priority_of_their_request(host: EngineHost, mount: KvfuseMount) -> None:
    with started(host, mount, "hints") as engine:
        engine.store(SEED, COUNT, params={"kvfuse": {"ttl": 600, "priority": 20}, "max_load_tokens": 0})
        assert priorities(engine, mount, "hints") == [20] * COUNT
        expires = facts_of(mount, "hints", engine.name(SEED, 0))["expires"]
        assert 500 < expires - time.time() <= 601
        engine.store(SEED + 1, COUNT)
        assert priorities(engine, mount, "hints", SEED + 1) == [0] * COUNT
        assert facts_of(mount, "hints", engine.name(SEED + 1, 0))["expires"] == 0
        engine.store(SEED + 2, COUNT, params={"kvfuse": {"demote": True}})
        assert priorities(engine, mount, "hints", SEED + 2) == [-128] * COUNT


def test_chunks_that_are_there_are_stored_again_with_hints_and_only_once(host: EngineHost, mount: KvfuseMount) -> None:
    with started(host, mount, "again") as engine:
        engine.store(SEED, COUNT)
        assert engine.stats() == {"stored": COUNT}
        pin = {"kvfuse": {"pin": True}}
        engine.store(SEED, COUNT, params=pin)
        assert priorities(engine, mount, "again") == [127] * COUNT
        assert engine.stats() == {"stored": COUNT}
        engine.store(SEED, COUNT, params=pin)  # a prompt that all users share
        assert engine.stats() == {"store_known": COUNT}
        engine.forget()
        assert engine.load(SEED, COUNT) == COUNT


def test_a_time_passes(host: EngineHost, mount: KvfuseMount) -> None:
    with started(host, mount, "time") as engine:
        engine.store(SEED, COUNT, params={"kvfuse": {"ttl": 1}})
        path = mount.point / "time" / engine.name(SEED, 0)
        wait_until(lambda: not path.exists(), "the chunk to expire")
        engine.forget()
        assert engine.load(SEED, COUNT) == 0


def test_hints_of_a_router(host: EngineHost, mount: KvfuseMount) -> None:
    with started(host, mount, "router") as engine:
        if not engine.has_hints():
            pytest.skip("this vLLM has no kv_hints")
        others = ("prefetch_blocks", {"blocks": [1, 2]})
        engine.store(SEED, COUNT, params={"kvfuse": {"priority": 1}}, actions=[others, ("kvfuse", {"priority": 5})])
        assert priorities(engine, mount, "router") == [5] * COUNT


def test_hints_that_are_wrong_are_logged_and_left_out(host: EngineHost, mount: KvfuseMount) -> None:
    with started(host, mount, "wrong") as engine:
        engine.store(SEED, COUNT, params={"kvfuse": {"priorty": 9, "ttl": "long", "priority": 3}})
        assert priorities(engine, mount, "wrong") == [3] * COUNT
        engine.store(SEED + 1, COUNT, params={"kvfuse": "pin"})
        assert priorities(engine, mount, "wrong", SEED + 1) == [0] * COUNT
        said = host.log()
        assert "a request has the hint 'priorty': do you mean 'priority'?" in said
        assert "a request's hint 'ttl' is 'long', not 0 to" in said
        assert "write an object of ttl, priority, pin" in said


def test_chunks_that_vllm_used_itself_go_later(host: EngineHost, mount: KvfuseMount) -> None:
    make_namespace(mount, "touched", "eviction=lru blocks=10")
    with started(host, mount, "touched") as engine:
        paths = {
            seed: [mount.point / "touched" / engine.name(seed, number) for number in range(COUNT)]
            for seed in (SEED, SEED + 1)
        }
        engine.store(SEED, COUNT)
        engine.store(SEED + 1, COUNT)

        def is_told() -> bool:
            """The daemon says when a block was used in whole seconds."""
            engine.touch(SEED, COUNT)
            return all(path.stat().st_atime_ns > path.stat().st_mtime_ns for path in paths[SEED])

        wait_until(is_told, "the daemon to know that chunks were used")
        engine.store(SEED + 2, COUNT)
        assert all(path.exists() for path in paths[SEED])
        assert not all(path.exists() for path in paths[SEED + 1])


def test_chunks_of_a_request_are_brought_into_memory(host: EngineHost, own_mount: KvfuseMount) -> None:
    mount = own_mount
    with started(host, mount, "ahead") as engine:
        for seed in (SEED, SEED + 1):
            engine.store(seed, COUNT)
        mount.unmount()
        assert engine.find(SEED, COUNT, None) == 0  # it notices
        mount.mount()
        wait_until(engine.is_up, "the engine to connect again")
        assert engine.find(SEED, COUNT, None) == COUNT
        assert engine.find(SEED + 1, COUNT, {"kvfuse": {"prefetch": True}}) == COUNT

        def is_in_memory(seed: int) -> list[bool]:
            names = [engine.name(seed, number) for number in range(COUNT)]
            return [facts_of(mount, "ahead", one)["in_memory"] for one in names]

        wait_until(lambda: is_in_memory(SEED + 1) == [True] * COUNT, "the chunks in memory")
        assert is_in_memory(SEED) == [False] * COUNT
