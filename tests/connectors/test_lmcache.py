"""LMCache's own classes over a mount: its server's storage manager, an engine's backends, its checks."""

from __future__ import annotations

import json
import os
import random
import subprocess
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest
from engine_host import DEADLINE_S, Engine, EngineError, EngineHost
from engine_mounts import WORDS, EngineWork, Known, damage, outliving_mount, run_beside_all
from mounting import KvfuseMount, stopped, wait_until

from kvfuse.connectors.lmcache.config import PLUGIN, configuration, engine_config, server_flags

pytestmark = pytest.mark.needs("lmcache")

NAMES = [f"chunk {number}" for number in range(8)]


def server(host: EngineHost, mount: KvfuseMount, namespace: str, **options: object) -> Engine:
    engine = host.engine()
    engine.start_server(str(mount.point), namespace, **options)
    return engine


def in_process(host: EngineHost, mount: KvfuseMount, namespace: str, **options: object) -> Engine:
    engine = host.engine()
    engine.start_engine(str(mount.point), namespace, **options)
    return engine


def store(engine: Engine, names: list[str], rank: int = 0, ranks: int = 1) -> None:
    """By a server, until it is in the volume."""
    wanted = engine.stored() + len(names)
    engine.store(names, rank, ranks)
    wait_until(lambda: bool(engine.stored() == wanted), "the controller to store chunks")


# -- the server --------------------------------------------------------------------------------------


def test_chunks_go_from_one_server_to_another(host: EngineHost, mount: KvfuseMount) -> None:
    with server(host, mount, "go") as first, server(host, mount, "go") as second:
        assert first.is_in_place()
        assert second.prefetch(NAMES) == (0, 0)
        store(first, NAMES)
        assert second.prefetch([*NAMES, "another"]) == (8, 8)
        status = second.status()
        assert (status["connected"], status["got"], status["failures"]) == (True, 8, {})
        first.delete(NAMES[6:])
        assert second.look_up(NAMES) == [True] * 6 + [False] * 2
        for engine in (first, second):
            engine.close_server()


def test_an_evicted_chunk_ends_the_prefix_and_a_damaged_one_fails_its_load(
    host: EngineHost, own_mount: KvfuseMount
) -> None:
    mount = own_mount
    with server(host, mount, "gap") as first, server(host, mount, "gap") as second:
        store(first, NAMES)
        names = first.names(NAMES)
        os.remove(mount.point / "gap" / os.fsdecode(names[5]))  # as an eviction
        assert second.prefetch(NAMES) == (5, 5)
        second.forget()
        damage(mount, "gap", names[2])
        mount.mount()
        wait_until(lambda: bool(second.look_up(NAMES[:1]) == [True]), "the server to connect again")
        assert second.look_up(NAMES) == [True] * 5 + [False] + [True] * 2
        assert second.prefetch(NAMES)[1] == 2
        second.forget()
        store(second, [NAMES[2], NAMES[5]])
        assert second.stored() == 2
        second.forget()
        assert second.prefetch(NAMES)[1] == 8


def test_ranks_of_a_server_have_chunks_of_their_own(host: EngineHost, mount: KvfuseMount) -> None:
    with server(host, mount, "ranks") as first, server(host, mount, "ranks") as second:
        store(first, NAMES, 0, 2)
        assert second.prefetch(NAMES, 1, 2) == (0, 0)
        store(first, NAMES, 1, 2)
        assert second.prefetch(NAMES, 0, 2) == second.prefetch(NAMES, 1, 2) == (8, 8)
        assert second.prefetch(NAMES, 0, 1) == (0, 0)


def test_a_server_goes_on_without_a_daemon_and_finds_its_chunks_after_it(
    host: EngineHost, own_mount: KvfuseMount
) -> None:
    mount = own_mount
    with server(host, mount, "kept") as engine:
        store(engine, NAMES)
        for end in (mount.unmount, mount.kill):
            end()
            engine.forget()
            assert engine.prefetch(NAMES) == (0, 0)
            engine.store([f"lost {end.__name__}"])
            mount.mount()
            wait_until(engine.is_up, "the server to connect again")
            assert engine.prefetch(NAMES) == (8, 8)
            store(engine, [f"new {end.__name__}"])
        assert engine.status()["failures"]["away"] > 0


def test_memory_that_a_hung_daemon_may_still_write_is_not_used_for_something_else(
    host: EngineHost, own_mount: KvfuseMount
) -> None:
    mount = own_mount
    with server(host, mount, "hung", deadline=4.0) as engine:
        store(engine, NAMES)
        engine.forget()
        assert engine.load_and_free(NAMES) == (8, 0)
        mount.unmount()  # so that nothing is in memory afterwards, and the daemon is asked
        assert engine.look_up(NAMES) == [False] * 8
        mount.mount()
        wait_until(engine.is_up, "the server to connect again")
        with stopped(mount.pid):
            loaded, used = engine.load_and_free(NAMES)
            assert loaded == 0
            assert used > 0
            assert engine.load_and_free(NAMES) == (0, used)  # nobody was asked
        wait_until(lambda: bool(engine.used() == 0), "the memory to be given back")
        wait_until(engine.is_up, "the server to connect again")
        assert engine.prefetch(NAMES) == (8, 8)
        engine.close_server()


def test_a_store_that_a_hung_daemon_may_still_read_has_not_ended(host: EngineHost, own_mount: KvfuseMount) -> None:
    mount = own_mount
    with server(host, mount, "late", deadline=4.0) as engine:
        store(engine, NAMES)
        with stopped(mount.pid):
            engine.store(["late"])
            wait_until(lambda: not engine.is_up(), "the deadline")
            assert engine.stores_under_way() == 1
        wait_until(lambda: bool(engine.stores_under_way() == 0), "the end of the store")
        wait_until(engine.is_up, "the server to connect again")
        store(engine, ["next"])


def test_a_mount_that_comes_after_the_server(host: EngineHost, tmp_path: Path) -> None:
    mount = KvfuseMount(tmp_path, WORDS)
    try:
        with server(host, mount, "later") as engine:
            assert engine.prefetch(NAMES) == (0, 0)
            assert engine.status()["reason"]
            mount.mount()
            wait_until(engine.is_up, "the server to connect")
            store(engine, NAMES)
            assert engine.is_in_place()
            engine.forget()
            assert engine.prefetch(NAMES) == (8, 8)
            engine.close_server()
        mount.unmount()
        mount.fsck()
    finally:
        mount.remove()


def test_the_fault_injecting_adapter(host: EngineHost, mount: KvfuseMount) -> None:
    with server(host, mount, "faults", fault={"gap_indices": [3]}) as engine, server(host, mount, "faults") as other:
        store(engine, NAMES)
        engine.forget()
        assert engine.look_up(NAMES) == [True] * 8
        assert engine.prefetch(NAMES)[1] == 3
        assert other.prefetch(NAMES) == (8, 8)


def test_encrypted_chunks(host: EngineHost, mount: KvfuseMount, tmp_path: Path) -> None:
    (tmp_path / "key").write_bytes(bytes(range(32)))
    serde = {"type": "aesgcm", "master_key_path": str(tmp_path / "key")}
    with (
        server(host, mount, "secret", serde=serde) as first,
        server(host, mount, "secret", serde=serde) as second,
        server(host, mount, "secret") as plain,
    ):
        assert plain.prefetch(NAMES) == (0, 0)
        store(first, NAMES)
        assert second.prefetch(NAMES) == (8, 8)
        assert plain.prefetch(NAMES)[1] == 0


def test_chunks_in_another_form_are_neither_found_nor_stored(host: EngineHost, mount: KvfuseMount) -> None:
    """The server learns of a model's dtype when an engine comes, not before."""
    with server(host, mount, "form") as first, server(host, mount, "form", dtype="float16") as other:
        assert first.prefetch(NAMES) == (0, 0)
        store(first, NAMES)
        assert other.look_up(NAMES) == [False] * 8
        assert other.load(NAMES) == [False] * 8
        assert other.prefetch(NAMES) == (0, 0)
        assert first.prefetch(NAMES)[1] == 8


def test_what_a_server_is_told_must_match(host: EngineHost, mount: KvfuseMount) -> None:
    with server(host, mount, "told", weights="v1"), host.engine() as other:
        for change, words in (
            ({"weights": "v2"}, "weights is 'v1', not 'v2'"),
            ({"weights": "v1", "chunk_size": 512}, "chunk_tokens is 256, not 512"),
            ({"weights": "v1", "hash": "builtin"}, "hash is 'blake3', not 'builtin'"),
            ({"weigths": "v1"}, "adapter_params of kvfuse have weigths"),
        ):
            with pytest.raises(EngineError) as refused:
                other.start_server(str(mount.point), "told", **change)
            assert words in str(refused.value)
        with pytest.raises(EngineError, match="lack mount and namespace"):
            other.start_server("", "")


def test_the_three_descriptors_and_the_basic_check_of_the_adapter(host: EngineHost, mount: KvfuseMount) -> None:
    with host.engine() as engine:
        assert len(set(engine.events(str(mount.point), "events"))) == 3
        said = engine.check_adapter(str(mount.point), "check")
        assert said.count(" 100.0% |") == 4, said


# -- an engine's own process -------------------------------------------------------------------------

FORMS = [
    pytest.param({"save_chunk_meta": False}, True, id="raw"),
    pytest.param({"save_chunk_meta": True}, True, id="header"),
    pytest.param({"save_chunk_meta": False, "shm_name": None}, False, id="private"),
]


@pytest.mark.parametrize(("extra", "in_place"), FORMS)
def test_chunks_go_from_one_engine_to_another(
    host: EngineHost, mount: KvfuseMount, extra: dict[str, object], in_place: bool, request: pytest.FixtureRequest
) -> None:
    namespace = f"engines/{request.node.callspec.id}"
    with (
        in_process(host, mount, namespace, extra=extra) as first,
        in_process(host, mount, namespace, extra=extra, is_plugin=False) as second,
    ):
        assert first.is_in_place() == in_place
        assert second.contains(NAMES) == 0
        first.put(NAMES)
        first.put(["a part"], tokens=5)
        assert second.contains([*NAMES, "another"]) == 8
        assert second.get(["another", *NAMES]) == [False] + [True] * 8
        assert second.get(["a part"], tokens=5) == [True]
        assert second.get_prefix([*NAMES[:3], "another", *NAMES[3:]]) == 3
        assert second.remove(NAMES[4])
        assert not second.remove(NAMES[4])
        assert second.contains(NAMES) == 4
        assert first.leaks() == second.leaks() == 0
        for engine in (first, second):
            engine.close_engine()


def test_a_damaged_chunk_is_a_miss_until_it_is_stored_again(host: EngineHost, own_mount: KvfuseMount) -> None:
    mount = own_mount
    with in_process(host, mount, "damage") as engine:
        engine.put(NAMES)
        damage(mount, "damage", engine.engine_names(NAMES)[2])
        mount.mount()
        wait_until(lambda: bool(engine.get(NAMES[:1]) == [True]), "the engine to connect again")
        assert engine.get_prefix(NAMES) == 2
        assert engine.get(NAMES) == [True] * 2 + [False] + [True] * 5
        stored = engine.stored()
        engine.put(NAMES)
        assert engine.stored() == stored + 1  # the others are there
        assert engine.get(NAMES) == [True] * 8
        assert engine.leaks() == 0


def test_two_ranks_and_a_restart_and_a_killed_daemon(host: EngineHost, own_mount: KvfuseMount) -> None:
    mount = own_mount
    with (
        in_process(host, mount, "two", rank=0, ranks=2) as first,
        in_process(host, mount, "two", rank=1, ranks=2) as second,
    ):
        first.put(NAMES)
        assert second.contains(NAMES) == 0
        second.put(NAMES)
        assert first.get(NAMES) == second.get(NAMES) == [True] * 8
        for end in (mount.unmount, mount.kill):
            end()
            assert first.contains(NAMES) == 0
            assert first.get(NAMES) == [False] * 8
            first.put([f"lost {end.__name__}"])
            mount.mount()
            wait_until(first.is_up, "the engine to connect again")
            wait_until(lambda: bool(second.get(NAMES[:1]) == [True]), "the engine to connect again")
            assert first.get(NAMES) == second.get(NAMES) == [True] * 8
        assert first.leaks() == second.leaks() == 0


@pytest.mark.timeout(600)
def test_kills_and_upgrades_are_not_noticed(host: EngineHost, seed: int) -> None:
    """By a server with this adapter, one with LMCache's own adapter of files, and an engine with LMCache in it."""
    with outliving_mount() as mount, ExitStack() as stack:

        def work(name: str, put: Callable[[list[str]], object], get: Callable[[list[str]], bool]) -> EngineWork:
            known = Known(is_lossy=name != "files")

            def put_and_get(chance: random.Random, may_miss: bool) -> None:
                number = chance.randrange(1 << 32)
                put(chunks(number))
                known.store_and_load(number, lambda one: get(chunks(one)), chance, may_miss)

            return put_and_get

        def serve(name: str) -> EngineWork:
            one = stack.enter_context(server(host, mount, name, is_fs=name == "files"))

            def put(names: list[str]) -> None:
                if name == "server":
                    store(one, names)
                else:
                    one.store(names)
                    wait_until(
                        lambda: bool(one.look_up(names) == [True] * len(names)), "the controller to store chunks"
                    )

            def get(names: list[str]) -> bool:
                one.forget()
                return bool(one.prefetch(names)[1] == len(names))

            return work(name, put, get)

        settings = {"blocking_timeout_secs": int(DEADLINE_S)}
        engine = stack.enter_context(in_process(host, mount, "engine", settings=settings))
        works = {
            "server": serve("server"),
            "files": serve("files"),
            "engine": work("engine", engine.put, lambda names: all(engine.get(names))),
        }
        run_beside_all(mount, seed, works)


def chunks(number: int) -> list[str]:
    return [f"{name} {number}" for name in NAMES]


def test_a_mount_that_comes_after_the_engine(host: EngineHost, tmp_path: Path) -> None:
    mount = KvfuseMount(tmp_path, WORDS)
    try:
        with in_process(host, mount, "later") as engine:
            engine.put(NAMES)
            assert engine.get(NAMES) == [False] * 8
            mount.mount()
            wait_until(engine.is_up, "the engine to connect")
            engine.put(NAMES)
            assert engine.get(NAMES) == [True] * 8
        mount.unmount()
        mount.fsck()
    finally:
        mount.remove()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model": "other"}, "model is 'meta-llama/Llama-3.1-8B', not 'other'"),
        ({"dtype": "float16"}, "dtype is 'bfloat16', not 'float16'"),
        ({"ranks": 2}, "world_size is 1, not 2"),
        ({"extra": {f"{PLUGIN}.weights": "v2"}}, "weights is '', not 'v2'"),
        ({"extra": {"save_chunk_meta": True}}, "form is"),
        ({"settings": {"pre_caching_hash_algorithm": "sha256_cbor"}}, "hash is 'builtin', not 'sha256_cbor'"),
        ({"extra": {f"{PLUGIN}.mount": ""}}, f"extra_config lacks {PLUGIN}.mount"),
    ],
)
def test_chunks_of_others_are_refused_at_the_start(
    host: EngineHost, mount: KvfuseMount, change: dict[str, object], words: str
) -> None:
    with in_process(host, mount, "refused"), host.engine() as other:
        with pytest.raises(EngineError, match="IrrecoverableException") as refused:
            other.start_engine(str(mount.point), "refused", **change)
        assert words in str(refused.value)


def test_the_basic_check_of_an_engine(host: EngineHost, mount: KvfuseMount, tmp_path: Path) -> None:
    path = tmp_path / "lmcache.yaml"
    config = engine_config(str(mount.point), "basic")
    config |= {"remote_url": f"kvfuse://{mount.point}?namespace=basic", "max_local_cpu_size": 0.0625}
    config["extra_config"] |= {"shm_name": None, f"{PLUGIN}.deadline": DEADLINE_S}
    path.write_text(json.dumps(config))  # which is YAML, too
    with host.engine() as engine:
        said = engine.check_remote(str(path))
    assert said.count(" 100.0% |") == 4, said


def test_keys_are_not_mistaken_for_each_other(host: EngineHost) -> None:
    with host.engine() as engine:
        assert engine.different_keys() == 6 + 12


# -- configuration -----------------------------------------------------------------------------------


def test_the_configuration_and_the_example_are_as_lmcache_reads_them(host: EngineHost, tmp_path: Path) -> None:
    example = Path(__file__).parents[2] / "examples" / "lmcache" / "start.sh"
    written = tmp_path / "lmcache.yaml"
    environment = os.environ | {
        "MOUNT": "/mnt/kv",
        "NAMESPACE": "here",
        "LMCACHE": r"printf %s\n",
        "CONFIG": str(written),
    }
    with host.engine() as engine:
        sized = ["--l1-size-gb", "20", "--eviction-policy", "LRU"]
        wanted = engine.parse_server([*sized, *server_flags("/mnt/kv", "here")])
        assert wanted["params"] == {"mount": "/mnt/kv", "namespace": "here"}
        assert (wanted["shm_name"], wanted["lazy"]) == ("kvfuse", False)
        words = subprocess.check_output([example], env=environment, text=True)
        assert engine.parse_server(words.splitlines()) == wanted

        subprocess.check_call([example, "engine", "true"], env=environment)
        shown = engine.parse_engine(str(written))
        printed = tmp_path / "printed.yaml"
        text = configuration("/mnt/kv", "here")
        printed.write_text(text[text.index("chunk_size:") :])
        assert shown == engine.parse_engine(str(printed))
        assert shown == {"plugins": ["kvfuse"], "extra": engine_config("/mnt/kv", "here-engine")["extra_config"]}
        flags = text[text.index("lmcache server") : text.index("\n\n")].replace("\\\n", " ")
        words = subprocess.check_output(["bash", "-c", f"printf '%s\\n' {flags}"], text=True)
        assert engine.parse_server(words.splitlines()[1:]) == wanted
