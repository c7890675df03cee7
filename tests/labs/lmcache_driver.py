"""LMCache, driven by a test through `engine_host`: its server's storage manager, and an engine's backends."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import inspect
import io
import json
import os
import random
import select
import sys
import threading
from types import SimpleNamespace
from typing import Any

import torch
from engine_host import DEADLINE_S, serve
from lmcache.cli.commands.server import ServerCommand
from lmcache.utils import CacheEngineKey
from lmcache.v1 import basic_check
from lmcache.v1.check import registry
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.distributed import api
from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
from lmcache.v1.distributed.config import parse_args_to_config
from lmcache.v1.distributed.l2_adapters import create_l2_adapter
from lmcache.v1.distributed.storage_manager import StorageManager
from lmcache.v1.memory_management import MemoryFormat, MemoryObjMetadata, TensorMemoryObj
from lmcache.v1.metadata import LMCacheMetadata
from lmcache.v1.multiprocess.config import parse_args_to_mp_server_config
from lmcache.v1.platform import consume_fd
from lmcache.v1.storage_backend import RemoteBackend
from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend

MODEL = "meta-llama/Llama-3.1-8B"
LAYERS, CHUNK, HEADS, HEAD_SIZE = 2, 16, 2, 32
SHAPE = (2, LAYERS, CHUNK, HEADS * HEAD_SIZE)
L1_GB = "0.0625"
PATIENCE_S = 60

registry.load_modes()


def parsed(arguments: list[str]) -> argparse.Namespace:
    """By the parser of ``lmcache server``."""
    parser = argparse.ArgumentParser()
    ServerCommand().add_arguments(parser)
    return parser.parse_args(arguments)


def chunk_bytes(name: str, size: int) -> torch.Tensor:
    """The bytes of a chunk, as its name says."""
    digest = hashlib.sha256(name.encode()).digest()
    return torch.frombuffer(bytearray(random.Random(digest).randbytes(size)), dtype=torch.uint8)


def _unlink_pools() -> None:
    """Of this process, so that nothing is left of them however it ends."""
    for name in os.listdir("/dev/shm"):
        if name.startswith("lmcache_") and name.endswith(f"_{os.getpid()}"):
            os.unlink(f"/dev/shm/{name}")


class Engine:
    """One process: LMCache's server, or an engine with LMCache in it."""

    # -- the server ----------------------------------------------------------------------------------

    def start_server(
        self, mount: str, namespace: str, *, fault: dict[str, Any] | None = None,
        serde: dict[str, Any] | None = None, dtype: str = "bfloat16", is_fs: bool = False,
        eviction: dict[str, Any] | None = None, **params: Any,
    ) -> None:  # fmt: skip
        """``fault``: what LMCache's fault-injecting adapter does; ``serde``: what changes chunks on their way;
        ``eviction``: LMCache's own, of L2; ``is_fs``: LMCache's own adapter of files, in a folder of that name."""
        from kvfuse.connectors.lmcache.config import l2_adapter

        spec: Any = l2_adapter(mount, namespace)
        spec["adapter_params"] |= {"deadline": DEADLINE_S} | params
        if is_fs:
            spec = {"type": "fs", "base_path": os.path.join(mount, namespace)}
        if fault is not None:
            spec = {"type": "fault_inject", "inner": spec, **fault}
        if serde is not None:
            spec["serde"] = serde
        if eviction is not None:
            spec["eviction"] = eviction
        arguments = ["--l1-size-gb", L1_GB, "--eviction-policy", "LRU", "--no-l1-use-lazy"]
        arguments += ["--shm-name", f"kvfuse_test_{os.getpid()}", "--l2-adapter", json.dumps(spec)]
        sys.argv[1:] = ["server", *arguments]
        self.manager = StorageManager(parse_args_to_config(parsed(arguments)))
        _unlink_pools()
        adapter: Any = self.manager.l2_adapters()[0][1]
        self.adapter = getattr(adapter, "_inner", adapter)  # of a fault or a serde
        self.dtype = getattr(torch, dtype)
        self.layout = MemoryLayoutDesc([torch.Size(SHAPE)], [self.dtype])

    def store(self, names: list[str], rank: int = 0, ranks: int = 1, salt: str = "") -> None:
        """In L1; LMCache's controller brings it to L2."""
        keys = self._object_keys(names, rank, ranks, salt)
        has_mode = "mode" in inspect.signature(self.manager.reserve_write).parameters  # before 0.5.6
        objects = self.manager.reserve_write(keys, self.layout, *(["new"] if has_mode else []))
        for name, key in zip(names, keys, strict=True):
            target = objects[key].raw_tensor
            target[: objects[key].get_size()] = chunk_bytes(f"{name} {rank}", objects[key].get_size())
        self.manager.finish_write(keys)

    def prefetch(self, names: list[str], rank: int = 0, ranks: int = 1) -> tuple[int, int]:
        """(chunks that L2 brought, chunks of the prefix that are in L1 now), which have the bytes of `store`."""
        keys = self._object_keys(names, rank, ranks)
        brought, cells = self._prefetched(keys)
        count = next((row for row in range(len(keys)) if not cells.test(row)), len(keys))
        if count:
            with self.manager.read_prefetched_results(keys[:count]) as objects:
                for name, one in zip(names, objects, strict=False):
                    assert torch.equal(one.raw_tensor[: one.get_size()], chunk_bytes(f"{name} {rank}", one.get_size()))
            self.manager.finish_read_prefetched(keys[:count])
        return brought, count

    def _prefetched(self, keys: list[ObjectKey]) -> tuple[int, Any]:
        """(chunks that L2 brought, bitmap of all that are there)."""
        if hasattr(api, "PrefetchTaskSpec"):
            spec = api.PrefetchTaskSpec([api.GroupedObjectKeys(keys, 0, self.layout)])
        else:  # before 0.5.6
            spec = api.PrefetchRequestSpec(keys, {0: self.layout})
        handle = self.manager.submit_prefetch_task(spec)
        assert self.manager.wait_prefetch_status(handle, PATIENCE_S)
        result = self.manager.query_prefetch_status(handle)
        if hasattr(result, "hit_cells"):
            (cells,) = result.hit_cells
            return result.l2_hit_count, cells
        return result.popcount() - len(handle.l1_found_indices), result

    def forget(self) -> None:
        """What is in L1."""
        self.manager.clear(force=True)

    def look_up(self, names: list[str], rank: int = 0, ranks: int = 1) -> list[bool]:
        """By the adapter itself, whose descriptors tell when it has ended."""
        adapter, keys = self.adapter, self._object_keys(names, rank, ranks)
        number = adapter.submit_lookup_and_lock_task(keys, {0: self.layout})
        while (bitmap := adapter.query_lookup_and_lock_result(number)) is None:
            select.select([adapter.get_lookup_and_lock_event_fd()], [], [], 0.05)
        adapter.submit_unlock(keys)
        return [bool(bitmap.test(row)) for row in range(len(keys))]

    def load(self, names: list[str]) -> list[bool]:
        """As `look_up`, into memory that is in no pool."""
        adapter, keys = self.adapter, self._object_keys(names, 0, 1)
        objects = self._objects_elsewhere(len(names))
        number = adapter.submit_load_task(keys, objects)
        while (bitmap := adapter.query_load_result(number)) is None:
            select.select([adapter.get_load_event_fd()], [], [], 0.05)
        return [bool(bitmap.test(row)) for row in range(len(keys))]

    def load_and_free(self, names: list[str]) -> tuple[int, int]:
        """(chunks that were loaded, bytes of L1 that are in use after their memory was given back)."""
        manager = self._l1_manager()
        _, objects = manager._memory_manager.allocate(self.layout, len(names))
        number = self.adapter.submit_load_task(self._object_keys(names, 0, 1), objects)
        while (bitmap := self.adapter.query_load_result(number)) is None:
            select.select([self.adapter.get_load_event_fd()], [], [], 0.05)
        manager._memory_manager.free(objects)
        return bitmap.popcount(), self.used()

    def stores_under_way(self) -> int:
        found = self.manager.report_status()
        (status,) = found["store_controllers"].values() if "store_controllers" in found else [found["store_controller"]]
        return int(status["in_flight_task_count"])

    def _l1_manager(self) -> Any:
        managers = getattr(self.manager, "_l1_managers_by_id", None)  # since 0.5.6
        return next(iter(managers.values())) if managers else self.manager._l1_manager

    def used(self) -> int:
        """Bytes of L1."""
        manager = self._l1_manager()
        return int(manager._memory_manager.get_memory_usage()[0])

    def _objects_elsewhere(self, count: int) -> list[TensorMemoryObj]:
        shape = torch.Size(SHAPE)
        size = shape.numel() * self.dtype.itemsize
        made = []
        for _ in range(count):
            memory = torch.zeros(size, dtype=torch.uint8)
            meta = MemoryObjMetadata(shape, self.dtype, memory.data_ptr(), size, 1, fmt=MemoryFormat.KV_2LTD)
            made.append(TensorMemoryObj(memory, meta, parent_allocator=None))
        return made

    def names(self, names: list[str], rank: int = 0, ranks: int = 1, salt: str = "") -> list[bytes]:
        from kvfuse.connectors.lmcache.identity import object_key

        return [object_key(key) for key in self._object_keys(names, rank, ranks, salt)]

    def delete(self, names: list[str], salt: str = "") -> None:
        self.adapter.delete(self._object_keys(names, 0, 1, salt))

    def usage(self) -> tuple[int, dict[str, int]]:
        """(bytes in all, of each salt), as LMCache's quotas see it."""
        return self.adapter.get_usage().total_bytes_used, self.manager.get_usage_bytes_by_cache_salt()

    def limit(self, salt: str, size: int) -> None:
        """Bytes of a salt."""
        self.manager.quota_manager.set_quota(salt, size)

    def listed(self, page_size: int, model: str | None = None, is_quiet: bool = True) -> list[tuple[str, str, int]]:
        """(digits of the hash, salt, bytes) of each object, a page at a time. ``is_quiet``: nothing is deleted."""
        from kvfuse.connectors.lmcache.identity import object_key

        found, cursor = [], None
        while True:
            page = self.adapter.list_l2_keys(model, page_size, cursor)
            assert len(page.entries) <= page_size
            found += page.entries
            if (cursor := page.next_page_token) is None:
                break
        names = [object_key(entry.key.to_object_key()) for entry in found]
        assert not is_quiet or self.adapter.store.exists(names).all()
        return [(entry.key.chunk_hash_hex, entry.key.cache_salt, entry.size_bytes) for entry in found]

    def refused_page(self, size: int, cursor: str | None) -> str:
        try:
            self.adapter.list_l2_keys(None, size, cursor)
        except ValueError as error:
            return str(error)
        return ""

    def status(self) -> dict[str, Any]:
        status: dict[str, Any] = self.adapter.report_status()
        return status

    def close_server(self) -> None:
        with contextlib.suppress(FileNotFoundError):  # its pool has no name any more
            self.manager.close()
        assert not self.adapter.store.is_up

    def _object_keys(self, names: list[str], rank: int, ranks: int, salt: str = "") -> list[ObjectKey]:
        kv_rank = ObjectKey.ComputeKVRank(ranks, rank, ranks, rank)
        return [
            ObjectKey(hashlib.sha256(name.encode()).digest(), MODEL, kv_rank, cache_salt=salt) for name in names
        ]  # fmt: skip

    def check_adapter(self, mount: str, namespace: str) -> str:
        """What LMCache's basic_check prints."""
        from kvfuse.connectors.lmcache.config import l2_adapter

        spec: Any = l2_adapter(mount, namespace)
        spec["adapter_params"] |= {"deadline": DEADLINE_S}
        return self._basic_check(["--mode", "test_l2_adapter", "--l2-adapter", json.dumps(spec)])

    def events(self, mount: str, namespace: str) -> list[int]:
        """The three descriptors of an adapter without a pool, after a task of each kind without keys."""
        from kvfuse.connectors.lmcache.config import l2_adapter

        arguments = ["--l1-size-gb", L1_GB, "--eviction-policy", "LRU", "--l2-adapter"]
        config = parse_args_to_config(parsed([*arguments, json.dumps(l2_adapter(mount, namespace))]))
        adapter = create_l2_adapter(config.l2_adapter_config.adapters[0])
        adapter.submit_store_task([], [])
        adapter.submit_lookup_and_lock_task([], {})
        adapter.submit_load_task([], [])
        descriptors = [
            adapter.get_store_event_fd(), adapter.get_lookup_and_lock_event_fd(), adapter.get_load_event_fd()
        ]  # fmt: skip
        for descriptor in descriptors:
            assert select.select([descriptor], [], [], PATIENCE_S)[0]
            consume_fd(descriptor)
        adapter.close()
        return descriptors

    # -- an engine's own process ---------------------------------------------------------------------

    def start_engine(
        self, mount: str, namespace: str, *, rank: int = 0, ranks: int = 1, dtype: str = "bfloat16",
        extra: dict[str, Any] | None = None, settings: dict[str, Any] | None = None, is_plugin: bool = True,
        model: str = MODEL,
    ) -> None:  # fmt: skip
        """``extra``: in extra_config, ``settings``: beside it. ``is_plugin``: else by its URL."""
        from kvfuse.connectors.lmcache.config import PLUGIN, engine_config

        values: Any = engine_config(mount, namespace) | {"chunk_size": CHUNK, "max_local_cpu_size": 0.0625}
        values["extra_config"] |= {"shm_name": f"lmcache_kvfuse_{os.getpid()}"}
        values["extra_config"] |= {f"{PLUGIN}.deadline": DEADLINE_S} | (extra or {})
        if not is_plugin:
            values["remote_url"] = f"kvfuse://{mount}?namespace={namespace}"
        self.config = LMCacheEngineConfig.from_defaults(**values, **(settings or {}))
        self.dtype = getattr(torch, dtype)
        self.rank, self.ranks, self.model = rank, ranks, model
        metadata = LMCacheMetadata(
            model, ranks, ranks, rank, rank, self.dtype, (LAYERS, 2, CHUNK, HEADS, HEAD_SIZE), chunk_size=CHUNK
        )
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()
        self.local = LocalCPUBackend(self.config, metadata, dst_device="cpu")
        self.remote = RemoteBackend(
            self.config, metadata, self.loop, self.local, "cpu", plugin_name="kvfuse" if is_plugin else None
        )
        self.connector = self.remote.connection.getWrappedConnector()
        _unlink_pools()

    def put(self, names: list[str], tokens: int = CHUNK, configs: Any = None) -> None:
        """``configs``: what the request says, as LMCache's integration takes it of vLLM's request."""
        keys, objects = self._engine_keys(names, configs), []
        for name in names:
            one = self.local.allocate(torch.Size((2, LAYERS, tokens, HEADS * HEAD_SIZE)), self.dtype)
            one.raw_tensor[: one.get_size()] = chunk_bytes(f"{name} {self.rank}", one.get_size())
            objects.append(one)
        done = threading.Semaphore(0)
        self.remote.batched_submit_put_task(keys, objects, on_complete_callback=lambda key: done.release())
        for _ in keys:
            assert done.acquire(timeout=PATIENCE_S)
        for one in objects:
            one.ref_count_down()

    def contains(self, names: list[str], configs: Any = None) -> int:
        """The prefix, asked in each way."""
        keys = self._engine_keys(names, configs)
        count: int = self.remote.batched_contains(keys)
        lookup = self.remote.batched_async_contains("1", keys, pin=True)
        assert asyncio.run_coroutine_threadsafe(lookup, self.loop).result(PATIENCE_S) == count
        assert [self.remote.contains(key) for key in keys][:count] == [True] * count
        return count

    def get(self, names: list[str], tokens: int = CHUNK) -> list[bool]:
        """Which were got, with the bytes of `put`."""
        got = self.remote.batched_get_blocking(self._engine_keys(names))
        for name, one in zip(names, got, strict=True):
            if one is not None:
                assert tuple(one.get_shape()) == (2, LAYERS, tokens, HEADS * HEAD_SIZE), one.get_shape()
                assert torch.equal(one.raw_tensor[: one.get_size()], chunk_bytes(f"{name} {self.rank}", one.get_size()))
                one.ref_count_down()
        return [one is not None for one in got]

    def get_prefix(self, names: list[str]) -> int:
        """As asynchronous loading does it; the rest is given back."""
        load = self.remote.batched_get_non_blocking("1", self._engine_keys(names))
        got = asyncio.run_coroutine_threadsafe(load, self.loop).result(PATIENCE_S)
        for one in got:
            one.ref_count_down()
        return len(got)

    def leaks(self) -> int:
        """Bytes of the pool that are in use."""
        manager = self.local.memory_allocator.pin_allocator.address_manager
        return int(manager.get_heap_size() - manager.get_free_size())

    def engine_names(self, names: list[str]) -> list[bytes]:
        from kvfuse.connectors.lmcache.identity import engine_key

        return [engine_key(key) for key in self._engine_keys(names)]

    def different_keys(self) -> int:
        """Of how many of these keys LMCache's own text is the same, or nearly."""
        from kvfuse.connectors.lmcache.identity import engine_key

        tags: list[dict[str, str]] = [{}, {"lmcache.tag.a": "1@b%2"}, {"lmcache.tag.a": "1", "lmcache.tag.b": "2"}]
        keys = [CacheEngineKey("m", 2, rank, 7, torch.float16, one) for rank in range(2) for one in tags]
        layers = [layer for key in keys for layer in key.split_layers(2)]
        names = {engine_key(key) for key in [*keys, *layers]}
        assert len({len(name) for name in names}) == 1
        return len(names)

    def remove(self, name: str) -> bool:
        return bool(self.remote.remove(self._engine_keys([name])[0]))

    def is_up(self) -> bool:
        store = self.adapter.store if hasattr(self, "adapter") else self.connector.store
        return bool(store.is_up)

    def stored(self) -> int:
        store = self.adapter.store if hasattr(self, "adapter") else self.connector.store
        return int(store.counters.stored)

    def is_in_place(self) -> bool:
        owner = self.adapter if hasattr(self, "adapter") else self.connector
        return bool(owner._pool.is_shared)

    def close_engine(self) -> None:
        self.remote.close()
        with contextlib.suppress(FileNotFoundError):
            self.local.close()
        assert not self.connector.store.is_up

    def check_remote(self, path: str) -> str:
        """What LMCache's basic_check prints, with a configuration file."""
        os.environ["LMCACHE_CONFIG_FILE"] = path
        return self._basic_check(["--mode", "test_remote"])

    def _engine_keys(self, names: list[str], params: Any = None) -> list[CacheEngineKey]:
        from lmcache.integration.vllm import utils

        configs_of = getattr(utils, "extract_request_configs_from_sampling_params", None)
        said = {name: value for name, value in (params or {}).items() if name.startswith("lmcache.")} or None
        if configs_of is not None:  # since 0.5.5; before, it is where vLLM has to be installed
            said = configs_of(SimpleNamespace(extra_args={"kv_transfer_params": params or {}}))
        hashes = [int(hashlib.sha256(name.encode()).hexdigest(), 16) for name in names]
        return [CacheEngineKey(self.model, self.ranks, self.rank, value, self.dtype, said) for value in hashes]

    # -- both ----------------------------------------------------------------------------------------

    def parse_server(self, arguments: list[str]) -> dict[str, Any]:
        """What LMCache makes of the flags of ``lmcache server``."""
        arguments = [word for word in arguments if word != "server"]
        found = parsed(arguments)
        parse_args_to_mp_server_config(found)
        config = parse_args_to_config(found)
        (adapter,) = config.l2_adapter_config.adapters
        return {
            "module_path": adapter.module_path, "class_name": adapter.class_name, "params": adapter.adapter_params,
            "shm_name": config.l1_manager_config.memory_config.shm_name,
            "lazy": config.l1_manager_config.memory_config.use_lazy,
        }  # fmt: skip

    def parse_engine(self, path: str) -> dict[str, Any]:
        config = LMCacheEngineConfig.from_file(path)
        config.validate()
        return {"plugins": config.remote_storage_plugins, "extra": config.extra_config}

    def _basic_check(self, arguments: list[str]) -> str:
        sys.argv[1:] = arguments
        said = io.StringIO()
        with contextlib.redirect_stdout(said):
            asyncio.run(basic_check.main())
        return said.getvalue()


if __name__ == "__main__":
    serve(Engine)
