"""SGLang's own factory and host pools over a mount: blocks there and back, prefixes, ranks, side pools, faults."""

from __future__ import annotations

import json
import os
import random
import shlex
import subprocess
import sys
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest
from engine_host import Engine, EngineError, EngineHost
from engine_mounts import WORDS, EngineWork, Known, damage, outliving_mount, run_beside_all, started
from mounting import KvfuseMount, stopped, wait_until

from kvfuse.connectors.sglang.config import configuration, extra_config, flags

pytestmark = pytest.mark.needs("sglang")

PAGES = 12
NOTHING = [False] * PAGES


def hashes(count: int = PAGES, seed: int = 0) -> list[str]:
    rng = random.Random(seed)
    return [rng.randbytes(32).hex() for _ in range(count)]


@pytest.mark.parametrize("kind", ["mha", "mla"])
@pytest.mark.parametrize(
    ("layout", "allocator"),
    [("layer_first", "shm"), ("page_first", "shm"), ("page_first_direct", "shm"), ("page_first", "default")],
)
def test_pages_go_from_one_engine_to_another(
    host: EngineHost, mount: KvfuseMount, kind: str, layout: str, allocator: str
) -> None:
    options = {"kind": kind, "layout": layout, "allocator": allocator}
    namespace = f"go/{kind}-{layout}-{allocator}"
    with started(host, mount, namespace, **options) as first, started(host, mount, namespace, **options) as second:
        in_place = layout != "layer_first"
        assert first.form() == {
            "blocks": 2 if kind == "mha" and in_place else 1,
            "shared": in_place and allocator == "shm",
        }
        pages = hashes()
        assert first.exists(pages) == 0
        assert first.store(pages[:10]) == [True] * 10
        assert second.exists(pages) == 10
        assert second.load(pages) == [True] * 10 + [False] * 2
        assert first.store(pages) == [True] * PAGES
        assert second.load(pages) == [True] * PAGES
        assert (first.stats(), second.stats()) == ((0, 10 + PAGES), (10 + PAGES, 0))
        assert first.counters()["stored"] == PAGES * first.form()["blocks"]  # what was there is not stored again


def test_a_pool_that_shows_copies_of_its_pages(host: EngineHost, mount: KvfuseMount) -> None:
    options = {"layout": "layer_first", "copies": True}
    with started(host, mount, "copies", **options) as first, started(host, mount, "copies", **options) as second:
        pages = hashes()
        first.store(pages)
        assert second.load(pages) == [True] * PAGES


def test_a_gap_in_a_prefix_ends_it(host: EngineHost, mount: KvfuseMount) -> None:
    with started(host, mount, "gap") as engine:
        pages = hashes()
        engine.store(pages)
        os.remove(mount.point / "gap" / os.fsdecode(engine.names(pages)[2 * 5 + 1]))  # as an eviction of half a page
        assert engine.exists(pages) == 5
        assert engine.load(pages) == [True] * 5 + [False] + [True] * 6
        assert engine.store(pages) == [True] * PAGES
        assert engine.exists(pages) == PAGES


def test_a_damaged_block_is_a_miss_until_it_is_stored_again(host: EngineHost, own_mount: KvfuseMount) -> None:
    mount = own_mount
    pages = hashes()
    with started(host, mount, "damage") as engine:
        engine.store(pages)
        damage(mount, "damage", engine.names(pages)[2 * 4])
        assert engine.exists(pages) == 0
        mount.mount()
        wait_until(engine.is_up, "the engine to connect again")
        assert engine.exists(pages) == PAGES  # nobody has read it yet
        assert engine.load(pages) == [True] * 4 + [False] + [True] * 7
        assert engine.store(pages) == [True] * PAGES
        assert engine.load(pages) == [True] * PAGES


def test_ranks_of_heads_have_pages_of_their_own(host: EngineHost, mount: KvfuseMount) -> None:
    pages = hashes()
    with (
        started(host, mount, "heads", tp=(0, 2)) as first,
        started(host, mount, "heads", tp=(1, 2)) as second,
        started(host, mount, "stages", pp=(0, 2)) as early,
        started(host, mount, "stages", pp=(1, 2)) as late,
    ):
        for own, other in ((first, second), (early, late)):
            own.store(pages, seed=1)
            assert other.exists(pages) == 0
            other.store(pages, seed=2)
            assert own.load(pages, seed=1) == other.load(pages, seed=2) == [True] * PAGES


def test_ranks_of_mla_share_what_one_of_them_stores(host: EngineHost, mount: KvfuseMount) -> None:
    pages = hashes()
    options = {"kind": "mla", "layout": "page_first_direct"}
    with (
        started(host, mount, "mla", tp=(0, 2), **options) as first,
        started(host, mount, "mla", tp=(1, 2), **options) as second,
        started(host, mount, "mla", tp=(5, 8), **options) as elsewhere,
    ):
        assert second.store(pages) == [True] * PAGES
        assert first.exists(pages) == 0
        first.store(pages)
        assert second.load(pages) == elsewhere.load(pages) == [True] * PAGES


def test_engines_with_several_numbers_of_ranks_share_heads(host: EngineHost, mount: KvfuseMount) -> None:
    pages = hashes()
    options = {"layout": "page_head", "tp_lcm": 2}
    with (
        started(host, mount, "lcm", **options) as whole,
        started(host, mount, "lcm", tp=(0, 2), **options) as first,
        started(host, mount, "lcm", tp=(1, 2), **options) as second,
    ):
        whole.store(pages)
        halves = zip(first.heads(pages), second.heads(pages), strict=True)
        assert [[*one, *other] for one, other in halves] == whole.heads(pages)
        more = hashes(seed=1)
        first.store(more, seed=1)
        assert whole.exists(more) == 0
        second.store(more, seed=2)
        assert whole.exists(more) == PAGES


def test_side_pools_of_an_anchor_without_bytes(host: EngineHost, mount: KvfuseMount) -> None:
    """As with DeepSeek V4: the pool of the KV pages has indices alone, side pools have all bytes."""
    pages = hashes(8)
    with started(host, mount, "anchor", kind="logical") as engine:
        engine.add_side_pool("swa")
        engine.add_side_pool("indexer", "mla")
        assert engine.exists(pages) == 8
        engine.store_v2("swa", pages[4:6])
        engine.store_v2("indexer", pages[:7])
        answer = engine.exists_v2(pages, {"swa": ("trailing_pages", 2), "indexer": ("all_pages", 8)})
        assert answer == (6, {"kv": 8, "swa": 6, "indexer": 7}, [6])


def test_states_of_mamba_belong_to_each_rank_even_with_mla(host: EngineHost, mount: KvfuseMount) -> None:
    pages = hashes()
    with (
        started(host, mount, "mamba", kind="mla", tp=(0, 2)) as first,
        started(host, mount, "mamba", kind="mla", tp=(1, 2)) as second,
    ):
        for engine in (first, second):
            engine.add_side_pool("mamba", "mamba")
            assert len(engine.names(pages[:1], "mamba")) == 3
        first.store(pages)
        assert first.store_v2("mamba", pages[3:5], seed=1) == [True] * 2
        policies = {"mamba": ("trailing_pages", 1)}
        assert first.exists_v2(pages, policies) == (5, {"kv": PAGES, "mamba": 5}, [4, 5])
        assert second.exists_v2(pages, policies) == (0, {"kv": PAGES}, [])
        assert second.store_v2("mamba", pages[3:5], seed=2) == [True] * 2
        assert first.load_v2("mamba", pages[4:6], seed=1) == [True, False]
        assert second.load_v2("mamba", pages[4:6], seed=2) == [True, False]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"dtype": "float16"}, "dtype is 'bfloat16', not 'float16'"),
        ({"layout": "page_first_direct"}, "layout is 'page_first', not 'page_first_direct'"),
        ({"model": "other"}, "model is 'meta/Llama 3', not 'other'"),
        ({"tp": (1, 2)}, "tp_size is 1, not 2"),
        ({"extra": {"weights": "v2"}}, "weights is 'default', not 'v2'"),
        ({"kind": "mla"}, "mla is 0, not 1"),
    ],
)
def test_blocks_of_others_are_refused_at_the_start(
    host: EngineHost, mount: KvfuseMount, change: dict[str, object], words: str
) -> None:
    with started(host, mount, "refused"), host.engine() as other:
        with pytest.raises(EngineError, match="DescriptorMismatch") as refused:
            other.start(str(mount.point), "refused", **change)
        assert words in str(refused.value)


def test_a_start_without_a_mount_in_the_configuration(host: EngineHost) -> None:
    with host.engine() as engine, pytest.raises(EngineError, match="lacks mount and namespace"):
        engine.start("", "")


def test_tensors_without_interface_v1(host: EngineHost, mount: KvfuseMount) -> None:
    pages = hashes()
    options = {"layout": "page_first", "extra": {"interface_v1": 0}}
    with started(host, mount, "tensors", **options) as first, started(host, mount, "tensors", **options) as second:
        assert first.store_tensors(pages[:7])
        assert second.exists(pages) == 7
        assert second.load_tensors(pages) == [True] * 7 + [False] * 5


def test_side_pools_answer_as_the_file_backend_does(host: EngineHost, mount: KvfuseMount, tmp_path: Path) -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    with started(host, mount, "sides", file=str(tmp_path)) as engine:
        engine.add_side_pool("swa")
        engine.add_side_pool("indexer", "mla", "layer_first")
        for turn in range(25):
            pages = hashes(8, seed + turn)
            for pool, missing in (("kv", 0.05), ("swa", 0.3), ("indexer", 0.1)):
                engine.store_v2(pool, [page for page in pages if rng.random() > missing])
            policies = {"swa": ("trailing_pages", rng.randrange(4)), "indexer": ("all_pages", 8)}
            engine.exists_v2(pages, dict(rng.sample(sorted(policies.items()), 2)))
        pages = hashes(8, seed - 1)
        assert engine.store_v2("swa", pages[:6]) == [True] * 6
        assert engine.load_v2("swa", pages) == [True] * 6 + [False] * 2


def test_groups_of_blocks_never_shorten_a_prefix(host: EngineHost, mount: KvfuseMount) -> None:
    pages = hashes(8)
    with started(host, mount, "groups") as engine:
        if "block_groups" not in engine.hit_policies():
            pytest.skip("this SGLang has no groups of blocks: they came with 0.5.22")
        engine.add_side_pool("swa")
        engine.store(pages)
        engine.store_v2("swa", pages[:5])
        answer = engine.exists_v2(pages, {"swa": ("block_groups", 8)}, groups=(2, 4))
        assert answer == (8, {"kv": 8, "swa": 8}, list(range(1, 9)))  # two groups of two keys, of four pages each


def test_clear_removes_all_pages(host: EngineHost, mount: KvfuseMount) -> None:
    pages = hashes()
    with started(host, mount, "cleared") as engine:
        engine.store(pages)
        engine.clear()
        assert engine.exists(pages) == 0
        assert engine.store(pages) == [True] * PAGES
        engine.close()
        assert engine.exists(pages) == 0


def test_no_call_raises_nor_waits_for_a_daemon_that_hangs(host: EngineHost, own_mount: KvfuseMount) -> None:
    pages = hashes()
    with started(host, own_mount, "hangs", extra={"deadline": 1.0}) as engine:
        wait_until(lambda: all(engine.store(pages)), "a store within the deadline")
        assert engine.misuse(pages) == [NOTHING, NOTHING, NOTHING, NOTHING, 0]
        with stopped(own_mount.pid):
            assert engine.load(pages) == NOTHING
            assert engine.store(hashes(seed=1)) == NOTHING
            assert engine.exists(pages) == 0
        wait_until(lambda: all(engine.load(pages)), "the engine to connect again")


def test_a_restart_keeps_pages_and_a_killed_daemon_comes_back(host: EngineHost, own_mount: KvfuseMount) -> None:
    mount = own_mount
    pages = hashes()
    with started(host, mount, "kept") as engine:
        engine.store(pages)
        mount.unmount()
        assert engine.exists(pages) == 0
        mount.mount()
        wait_until(engine.is_up, "the engine to connect again")
        assert engine.load(pages) == [True] * PAGES

        mount.kill()
        assert engine.exists(pages) == 0
        assert engine.load(pages) == NOTHING
        assert engine.store(hashes(seed=1)) == NOTHING
        mount.mount()
        wait_until(engine.is_up, "the engine to connect again")
        assert engine.store(hashes(seed=1)) == [True] * PAGES
        with started(host, mount, "kept") as other:
            assert other.load(hashes(seed=1)) == [True] * PAGES


def test_a_mount_that_comes_after_the_engine(host: EngineHost, tmp_path: Path) -> None:
    mount = KvfuseMount(tmp_path, WORDS)
    pages = hashes()
    try:
        with started(host, mount, "later", layout="layer_first") as engine:
            assert engine.store(pages) == NOTHING
            mount.mount()
            wait_until(engine.is_up, "the engine to connect")
            assert engine.store(pages) == [True] * PAGES
            assert engine.load(pages) == [True] * PAGES
        mount.unmount()
        mount.fsck()
    finally:
        mount.remove()


@pytest.mark.timeout(600)
def test_kills_and_upgrades_are_not_noticed(host: EngineHost, seed: int) -> None:
    """By this adapter, and by storages of SGLang: files of pages, and one file that is opened once, with rings or not.

    A page that is loaded is right.
    """
    with outliving_mount() as mount, ExitStack() as stack:

        def work(storage: str) -> EngineWork:
            engine, folder = stack.enter_context(host.engine()), mount.point / storage
            if storage == "adapter":
                engine.start(str(mount.point), storage)
            else:
                folder.mkdir(exist_ok=True)
                engine.start_own(storage, str(folder))
            return partial(store_and_load, engine, storage, Known(is_lossy=storage == "adapter"))

        storages = ("adapter", "file", "hf3fs", "hf3fs without rings")
        run_beside_all(mount, seed, {storage: work(storage) for storage in storages})


def store_and_load(engine: Engine, storage: str, known: Known, chance: random.Random, may_miss: bool) -> None:
    number = chance.randrange(1 << 32)
    in_tensors = storage == "file"
    stored = (engine.store_tensors if in_tensors else engine.store)(hashes(seed=number))
    assert stored is True or all(stored)  # hf3fs says it of keys and values
    load = engine.load_tensors if in_tensors else engine.load
    known.store_and_load(number, lambda seed: all(load(hashes(seed=seed))), chance, may_miss)


def test_flags_and_the_example_are_as_sglang_reads_them(host: EngineHost, tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(f"#!{sys.executable}\nimport json, sys\nprint(json.dumps(sys.argv[3:]))\n")
    python.chmod(0o755)
    environment = os.environ | {"PYTHON": str(python), "MODEL": "llama", "MOUNT": "/mnt/kv", "NAMESPACE": "here"}
    example = Path(__file__).parents[2] / "examples" / "sglang" / "start.sh"
    shown = json.loads(subprocess.check_output([example, "--tp", "2"], env=environment))
    printed = shlex.split(configuration("/mnt/kv", "here").replace("MODEL", "llama").replace("\\\n", ""))
    with host.engine() as engine:
        first, second, third = (
            engine.parse(words) for words in (shown, printed[3:], ["--model-path", "llama", *flags("/mnt/kv", "here")])
        )
    assert first == second == third
    assert (first["backend"], first["layout"], first["on"]) == ("dynamic", "page_first", True)
    assert first["extra"] == extra_config("/mnt/kv", "here")
