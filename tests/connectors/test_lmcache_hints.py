"""What requests and tenants say of their chunks, and what LMCache asks about them: hints, usage and lists by salt."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from engine_host import Engine, EngineHost
from engine_mounts import facts_of
from mounting import KvfuseMount, wait_until

pytestmark = pytest.mark.needs("lmcache")

NORMAL = 128
"""the priority of blocks of which nobody says anything, as rows have it"""
NAMES = [f"chunk {number}" for number in range(5)]
CHUNK_SIZE = 2 * 2 * 16 * 64 * 2


@pytest.fixture(scope="module")
def host() -> Iterator[EngineHost]:
    with EngineHost("lmcache", "lmcache_driver.py") as host:
        yield host


def server(host: EngineHost, mount: KvfuseMount, namespace: str, **options: object) -> Engine:
    engine = host.engine()
    engine.start_server(str(mount.point), namespace, **options)
    return engine


def in_process(host: EngineHost, mount: KvfuseMount, namespace: str) -> Engine:
    engine = host.engine()
    engine.start_engine(str(mount.point), namespace)
    return engine


def store(engine: Engine, mount: KvfuseMount, namespace: str, names: list[str], salt: str = "") -> None:
    """By a server, until it is in the volume."""
    engine.store(names, salt=salt)
    folder = mount.point / namespace
    paths = [folder / os.fsdecode(name) for name in engine.names(names, salt=salt)]
    wait_until(lambda: all(path.exists() for path in paths), "the controller to store chunks")


def test_chunks_have_the_time_and_priority_of_their_request(host: EngineHost, mount: KvfuseMount) -> None:
    with in_process(host, mount, "hints") as engine:
        engine.put(NAMES, configs={"lmcache.kvfuse.ttl": 600, "lmcache.kvfuse.priority": -5, "other": 1})
        for name in engine.engine_names(NAMES):
            facts = facts_of(mount, "hints", name)
            assert facts["priority"] == NORMAL - 5
            assert facts["expires"] > 0
        assert engine.contains(NAMES) == len(NAMES)  # hints are no part of the key
        engine.put(["plain"])
        assert facts_of(mount, "hints", engine.engine_names(["plain"])[0])["priority"] == NORMAL
        engine.close_engine()


def test_chunks_of_a_request_are_brought_into_memory(host: EngineHost, own_mount: KvfuseMount) -> None:
    mount = own_mount
    with in_process(host, mount, "ahead") as engine:
        engine.put(NAMES)
        mount.unmount()
        assert engine.contains(NAMES) == 0  # it notices
        mount.mount()
        wait_until(engine.is_up, "the engine to connect again")

        def in_memory() -> list[bool]:
            return [facts_of(mount, "ahead", name)["in_memory"] for name in engine.engine_names(NAMES)]

        assert engine.contains(NAMES) == len(NAMES)
        assert not any(in_memory())
        assert engine.contains(NAMES, {"lmcache.kvfuse.prefetch": True}) == len(NAMES)
        wait_until(lambda: all(in_memory()), "the chunks in memory")
        engine.close_engine()


def test_chunks_of_a_salt_have_its_hints(host: EngineHost, mount: KvfuseMount) -> None:
    salts = {"gold": {"pin": True}, "guest": {"ttl": 600, "demote": True}}
    with server(host, mount, "salts", salts=salts) as engine:
        for salt, priority in (("gold", 127), ("guest", -128), ("", 0)):
            store(engine, mount, "salts", NAMES, salt)
            facts = [facts_of(mount, "salts", name) for name in engine.names(NAMES, salt=salt)]
            assert [one["priority"] for one in facts] == [NORMAL + priority] * len(NAMES)
            assert all((one["expires"] > 0) is (salt == "guest") for one in facts)
        engine.close_server()


def test_usage_and_lists_are_of_the_namespace_by_salt(host: EngineHost, mount: KvfuseMount) -> None:
    with server(host, mount, "usage") as first:
        assert first.usage() == (0, {})
        assert first.listed(3) == []
        store(first, mount, "usage", NAMES, "alice")
        store(first, mount, "usage", NAMES[:2], "bob")
        store(first, mount, "usage", NAMES[:1])
        with server(host, mount, "usage") as second:  # which has stored nothing itself
            salts = {"alice": 5 * CHUNK_SIZE, "bob": 2 * CHUNK_SIZE, "": CHUNK_SIZE}
            wait_until(lambda: bool(second.usage() == (8 * CHUNK_SIZE, salts)), "the notes of what there is")
            for page_size in (1, 3, 8, 100):
                listed = second.listed(page_size)
                assert sorted(salt for _, salt, _ in listed) == ["", *["alice"] * 5, *["bob"] * 2]
                assert {size for _, _, size in listed} == {CHUNK_SIZE}
                assert len(set(listed)) == 8
            assert second.listed(10, "another/model") == []
            second.delete(NAMES[:3], "alice")
            os.remove(mount.point / "usage" / os.fsdecode(second.names(NAMES[:1], salt="bob")[0]))  # as an eviction
            second.delete(["absent", NAMES[0]])
            assert second.usage() == (3 * CHUNK_SIZE, {"alice": 2 * CHUNK_SIZE, "bob": CHUNK_SIZE})
            assert "ask for 1 or more" in second.refused_page(0, None)
            assert "is no cursor" in second.refused_page(3, "nonsense")
            second.close_server()
        first.close_server()


def test_quotas_of_salts_hold(host: EngineHost, mount: KvfuseMount) -> None:
    policy = {"eviction_policy": "IsolatedLRU", "trigger_watermark": 1.0, "eviction_ratio": 0.5}
    with server(host, mount, "quotas", eviction=policy) as engine:
        engine.limit("alice", 4 * CHUNK_SIZE)
        engine.limit("bob", 100 * CHUNK_SIZE)
        store(engine, mount, "quotas", NAMES, "bob")
        engine.store(NAMES, salt="alice")

        def has(salt: str) -> int:
            return [salt for _, salt, _ in engine.listed(100, None, False)].count(salt)

        wait_until(lambda: 0 < has("alice") < 4, "LMCache to delete what is beyond the quota")
        assert has("bob") == len(NAMES)
        engine.close_server()


def test_without_a_daemon_nothing_is_used_or_listed(host: EngineHost, own_mount: KvfuseMount) -> None:
    mount = own_mount
    with server(host, mount, "away") as engine:
        store(engine, mount, "away", NAMES, "alice")
        wait_until(lambda: bool(engine.usage()[1] == {"alice": 5 * CHUNK_SIZE}), "a note of what there is")
        mount.unmount()
        with server(host, mount, "away") as other:
            assert other.usage() == (0, {})
            assert other.listed(3) == []
            mount.mount()
            wait_until(other.is_up, "the server to connect")
            wait_until(lambda: bool(other.usage()[1] == {"alice": 5 * CHUNK_SIZE}), "the server to read the note")
            other.close_server()
        engine.close_server()
