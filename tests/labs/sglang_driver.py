"""SGLang's own host pools and storage factory, driven by a test through `engine_host`."""

from __future__ import annotations

import hashlib
import json
import sys
import types
from importlib.machinery import ModuleSpec
from typing import Any

from engine_host import DEADLINE_S, serve


class _Anything(type):
    """Stands for any class of torchvision, which has no build for this torch, and is only named by models' code."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything(name, (), {})


class _Absent(types.ModuleType):
    __path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything(name, (), {})


class _Torchvision:
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name.split(".")[0] == "torchvision" else None  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> types.ModuleType:
        return _Absent(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


from transformers.utils import is_torchvision_available  # noqa: E402

is_torchvision_available()
sys.meta_path.append(_Torchvision())  # type: ignore[arg-type]

import torch  # noqa: E402
from sglang.srt.mem_cache.hicache_storage import (  # noqa: E402
    HiCacheFile,
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
)
from sglang.srt.mem_cache.memory_pool_host import LogicalHostPool  # noqa: E402
from sglang.srt.mem_cache.pool_host.base import host_memory_budget_scope  # noqa: E402
from sglang.srt.mem_cache.pool_host.mamba import MambaPoolHost  # noqa: E402
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost  # noqa: E402
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost  # noqa: E402
from sglang.srt.mem_cache.storage import StorageBackendFactory  # noqa: E402

try:
    from sglang.srt.mem_cache import device_pool_info as info
except ImportError:  # before 0.5.22
    info = None

LAYERS, HEADS, WIDTH, PAGE = 8, 2, 64, 16
"""a page of keys and values has 64 KiB"""
TOKENS = 40 * PAGE
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


def new_pool(kind: str, layout: str, allocator: str = "default", dtype: str = "bfloat16", heads: int = HEADS) -> Any:
    """A host pool as HiCache makes it. ``kind``: mha, mla, mamba, or logical (indices alone)."""
    if kind == "logical":
        return LogicalHostPool(TOKENS, PAGE, layout)
    if kind == "mamba":
        temporal, conv = torch.zeros(LAYERS, 2, 4, 16), torch.zeros(LAYERS, 2, 3, 32, dtype=torch.bfloat16)
        options: dict[str, Any] = {"pin_memory": False, "allocator_type": allocator, "layout": layout}
        cache = types.SimpleNamespace(temporal=temporal, conv=(conv, conv.clone()))
        states: Any = types.SimpleNamespace(num_mamba_layers=LAYERS, mamba_cache=cache, size=2, device="cpu")
        if info is not None:
            states, options["device_capacity"] = info.MambaStateBufferInfo(**vars(cache)), 2
        with host_memory_budget_scope(1 << 30):
            return MambaPoolHost(states, 20, 0, **options)
    shape = (PAGE, heads, WIDTH) if kind == "mha" else (PAGE, 1, 2 * HEADS * WIDTH)
    layers = [tuple(torch.zeros(shape, dtype=DTYPES[dtype]) for _ in range(LAYERS)) for _ in range(2)]
    pointers = [torch.tensor([layer.data_ptr() for layer in some], dtype=torch.uint64) for some in layers]
    common: dict[str, Any] = {"page_size": PAGE, "dtype": DTYPES[dtype], "device": torch.device("cpu")}
    options = {
        "pin_memory": False, "allocator_type": allocator, "device_capacity_tokens": PAGE,
        "start_layer": 0, "end_layer": LAYERS,
    }  # fmt: skip
    if not hasattr(info, "KVBuffers"):
        return old_pool(kind, layout, allocator, layers, pointers, heads)
    with host_memory_budget_scope(1 << 30):
        if kind == "mha":
            buffers = info.KVBuffers(
                k=layers[0], v=layers[1], k_data_ptrs=pointers[0], v_data_ptrs=pointers[1],
                layout=info.KVBufferLayout.NHD,
            )  # fmt: skip
            device = info.MHABufferInfo(buffers=buffers, head_num=heads, head_dim=WIDTH, v_head_dim=WIDTH, **common)
            return MHATokenToKVPoolHost(device, TOKENS / PAGE, 0, PAGE, layout, **options)
        width = 2 * HEADS * WIDTH
        mla = info.MLABufferInfo(
            buffers=layers[0], data_ptrs=pointers[0], layer_indices=tuple(range(LAYERS)), device_layer_num=LAYERS,
            kv_lora_rank=width - 8, qk_rope_head_dim=8, kv_cache_dim=width, **common,
        )  # fmt: skip
        return MLATokenToKVPoolHost(mla, TOKENS / PAGE, 0, PAGE, layout, target_layer_num=LAYERS, **options)


def old_pool(kind: str, layout: str, allocator: str, layers: Any, pointers: Any, heads: int) -> Any:
    """Before 0.5.23 host pools take what they need from device pools: this is what they take."""
    width = 2 * HEADS * WIDTH
    device = types.SimpleNamespace(
        layer_num=LAYERS, device="cpu", store_dtype=layers[0][0].dtype, size=PAGE, start_layer=0, end_layer=LAYERS,
        head_num=heads, head_dim=WIDTH, v_head_dim=WIDTH, row_dim=heads * WIDTH, k_buffer=layers[0], v_buffer=layers[1],
        kv_buffer=layers[0], k_data_ptrs=pointers[0], v_data_ptrs=pointers[1], data_ptrs=pointers[0],
        kv_lora_rank=width - 8, qk_rope_head_dim=8, kv_cache_dim=width, layer_shard_enabled=False,
    )  # fmt: skip
    make = MHATokenToKVPoolHost if kind == "mha" else MLATokenToKVPoolHost
    with host_memory_budget_scope(1 << 30):
        return make(device, TOKENS / PAGE, 0, PAGE, layout, pin_memory=False, allocator_type=allocator)


def page_hashes(count: int, seed: str = "") -> list[str]:
    """A chain, as SGLang makes it of tokens."""
    found, last = [], seed
    for number in range(count):
        last = hashlib.sha256(f"{last}{number}".encode()).hexdigest()
        found.append(last)
    return found


def prepare_hf3fs(folder: str) -> None:
    """Where SGLang's hf3fs storage finds what it wants: its configuration, the ring API, and its own copies in C++."""
    import os
    import tempfile
    from pathlib import Path

    from sglang.srt.mem_cache.storage.hf3fs.storage_hf3fs import HiCacheHF3FS
    from sglang.srt.utils import cpp_extension_loader

    def copy(shared: torch.Tensor, tensors: list[torch.Tensor], *, is_read: bool) -> None:
        start = 0
        for tensor in tensors:
            there = shared[start : start + tensor.numel() * tensor.itemsize]
            here = tensor.contiguous().view(torch.uint8).flatten()
            (here if is_read else there).copy_(there if is_read else here)
            start += len(there)

    copies = types.SimpleNamespace(
        read_shm=lambda shared, tensors: copy(shared, tensors, is_read=True),
        write_shm=lambda tensors, shared: copy(shared, tensors, is_read=False),
    )
    cpp_extension_loader.load_extension_with_recovery = lambda **_: copies
    sys.path.append(str(Path(__file__).parents[2] / "compat" / "hf3fs-fuse"))
    config = {"file_path_prefix": f"{folder}/hicache", "file_size": 16 << 20, "numjobs": 4, "entries": 8}
    with tempfile.NamedTemporaryFile("w", delete=False) as file:
        json.dump(config | {"client_timeout": DEADLINE_S}, file)
    os.environ[HiCacheHF3FS.default_env_var] = file.name


class Engine:
    """One rank: its host pools and its backend."""

    def start(
        self, mount: str, namespace: str, *, kind: str = "mha", layout: str = "page_first", allocator: str = "shm",
        dtype: str = "bfloat16", model: str = "meta/Llama 3", tp: tuple[int, int] = (0, 1),
        pp: tuple[int, int] = (0, 1), tp_lcm: int | None = None, copies: bool = False,
        extra: dict[str, Any] | None = None, file: str = "",
    ) -> None:  # fmt: skip
        """``tp``, ``pp``: (rank, size). ``copies``: the pool shows copies of its pages alone.
        ``file``: the folder of SGLang's own file backend, to be asked the same."""
        from kvfuse.connectors.sglang.config import extra_config

        self.pool = new_pool(kind, layout, allocator, dtype, HEADS // tp[1] if tp_lcm else HEADS)
        if copies:
            show = self.pool.get_data_page
            self.pool.get_data_page = lambda index, flat=True: show(index, flat).clone()
        self.sides: dict[str, Any] = {}
        config = HiCacheStorageConfig(
            tp_rank=tp[0], tp_size=tp[1], pp_rank=pp[0], pp_size=pp[1], attn_cp_rank=0, attn_cp_size=1,
            is_mla_model=kind == "mla", enable_storage_metrics=True, is_page_first_layout=layout == "page_first",
            model_name=model, tp_lcm_size=tp_lcm, should_split_heads=(tp_lcm or 0) > tp[1],
            extra_config=extra_config(mount, namespace) | {"deadline": DEADLINE_S} | (extra or {}),
        )  # fmt: skip
        self.backend = StorageBackendFactory.create_backend("dynamic", config, self.pool)
        self.backend.register_mem_pool_host(self.pool)
        self.file = HiCacheFile(config, file) if file else None
        if self.file:
            self.file.register_mem_pool_host(self.pool)
            self.file.register_mem_host_pool_v2(self.pool, PoolName.KV)

    def start_own(self, storage: str, folder: str) -> None:
        """With a storage of SGLang itself in a folder: "file", or "hf3fs", which has a file for life and rings, or
        "hf3fs without rings"."""
        self.pool = new_pool("mha", "page_first", "shm")
        extra = {"file_storage_path": folder} if storage == "file" else {}
        if storage != "file":
            prepare_hf3fs(folder)
            extra["use_mock_hf3fs_client"] = storage != "hf3fs"
        config = HiCacheStorageConfig(
            tp_rank=0, tp_size=1, pp_rank=0, pp_size=1, attn_cp_rank=0, attn_cp_size=1, is_mla_model=False,
            enable_storage_metrics=True, is_page_first_layout=True, model_name="model", extra_config=extra,
        )  # fmt: skip
        self.backend = StorageBackendFactory.create_backend(storage.split()[0], config, self.pool)
        self.backend.register_mem_pool_host(self.pool)

    def add_side_pool(self, name: str, kind: str = "mha", layout: str = "page_first") -> None:
        self.sides[name] = new_pool(kind, layout, "shm")
        for backend in filter(None, (self.backend, self.file)):
            backend.register_mem_host_pool_v2(self.sides[name], PoolName(name))

    def form(self) -> dict[str, Any]:
        pages = self.backend._pools["kv"]
        regions = getattr(pages, "_regions", ())
        return {"blocks": len(pages.tags), "shared": bool(regions) and all(region.iov for region in regions)}

    def names(self, hashes: list[str], pool: str = "kv") -> list[bytes]:
        """The keys of pages' blocks: names of files, too."""
        return self.backend._pools[pool].keys(hashes)

    # -- v1 ------------------------------------------------------------------------------------------

    def store(self, hashes: list[str], seed: int = 0, before: list[str] | None = None, hints: Any = None) -> list[bool]:
        """``before``: pages of the prompt ahead of these. ``hints``: what the request says of its blocks."""
        indices = self._filled(self.pool, hashes, seed)
        stored = self.backend.batch_set_v1(hashes, indices, _said(before, hints))
        self.pool.free(indices)
        return stored

    def exists(self, hashes: list[str], before: list[str] | None = None, hints: Any = None) -> int:
        return self.backend.batch_exists(hashes, _said(before, hints))

    def load(self, hashes: list[str], seed: int = 0) -> list[bool]:
        """Which pages were loaded; each of those with the bytes that `store` gave it."""
        indices = self.pool.alloc(len(hashes) * PAGE)
        for start in indices[::PAGE].tolist():
            self.pool.set_from_flat_data_page(start, torch.zeros_like(self.pool.get_dummy_flat_data_page()))
        loaded = self.backend.batch_get_v1(hashes, indices)
        self._compare(self.pool, hashes, indices, loaded, seed)
        self.pool.free(indices)
        return loaded

    def misuse(self, hashes: list[str]) -> list[Any]:
        """Answers to calls that are wrong themselves."""
        indices = torch.arange(3)
        unknown = [PoolTransfer(PoolName.MAMBA, host_indices=indices, keys=hashes)]
        return [
            self.backend.batch_get_v1(hashes, indices), self.backend.batch_set_v1(hashes, indices),
            self.backend.batch_get_v2(unknown)["mamba"], self.backend.batch_set_v2(unknown)["mamba"],
            self.backend.batch_exists_v2(hashes, unknown).kv_hit_pages,
        ]  # fmt: skip

    def heads(self, hashes: list[str]) -> list[list[bytes]]:
        """Of each page in the layout page_head that is loaded now: the bytes of each head."""
        indices = self.pool.alloc(len(hashes) * PAGE)
        assert all(self.backend.batch_get_v1(hashes, indices))
        pages = [self.pool.get_data_page(start, flat=False).view(torch.uint8) for start in indices[::PAGE].tolist()]
        self.pool.free(indices)
        return [[page[:, :, head].numpy().tobytes() for head in range(page.shape[2])] for page in pages]

    # -- v2 ------------------------------------------------------------------------------------------

    def store_v2(self, pool: str, hashes: list[str], seed: int = 0, hints: Any = None) -> list[bool]:
        """To the file backend, too, if there is one."""
        host = self.sides.get(pool, self.pool)
        indices = self._filled(host, hashes, seed)
        transfer = PoolTransfer(PoolName(pool), host_indices=indices, keys=hashes)
        stored = self.backend.batch_set_v2([transfer], _said(None, hints))[pool] if hashes else []
        if self.file and hashes:
            assert self.file.batch_set_v2([transfer])[pool] == stored
        host.free(indices)
        return stored

    def load_v2(self, pool: str, hashes: list[str], seed: int = 0) -> list[bool]:
        host = self.sides[pool]
        indices = host.alloc(len(hashes) * host.page_size)
        transfer = PoolTransfer(PoolName(pool), host_indices=indices, keys=hashes)
        loaded = self.backend.batch_get_v2([transfer])[pool]
        self._compare(host, hashes, indices, loaded, seed)
        host.free(indices)
        return loaded

    def hit_policies(self) -> list[str]:
        """Which the engine has."""
        return [one.value for one in PoolHitPolicy]

    def exists_v2(
        self, hashes: list[str], policies: dict[str, tuple[str, int]], groups: tuple[int, int] = (0, 0)
    ) -> Any:
        """(pages, hits, lengths); ``policies``: pool -> (policy, pages at the end). The same as the file backend's,
        which leaves out the hits of pools once it knows that no prefix is left."""
        transfers = [
            PoolTransfer(
                PoolName(pool), keys=hashes[len(hashes) - count :], hit_policy=PoolHitPolicy(policy),
                **({"group_pages": groups[0], "block_pages": groups[1]} if any(groups) else {}),
            )
            for pool, (policy, count) in policies.items()
        ]  # fmt: skip
        results = [one.batch_exists_v2(hashes, transfers) for one in (self.backend, self.file) if one]
        answers = [
            (
                result.kv_hit_pages,
                {str(name): count for name, count in result.extra_pool_hit_pages.items()},
                result.restorable_prefix_pages,
            )
            for result in results
        ]
        own, *others = answers
        for pages, hits, lengths in others:
            if lengths is None:  # before 0.5.23: the least of all pools' hits, at which a pool may lack pages
                assert pages >= own[0], answers
            else:
                assert (pages, lengths) == (own[0], own[2]), answers
            assert hits.items() <= own[1].items() if not lengths else hits == own[1], answers
        return own

    # -- without interface_v1 ------------------------------------------------------------------------

    def store_tensors(self, hashes: list[str], seed: int = 0) -> bool:
        return self.backend.batch_set(hashes, [self._page(self.pool, one, seed) for one in hashes])

    def load_tensors(self, hashes: list[str], seed: int = 0) -> list[bool]:
        targets = [self.pool.get_dummy_flat_data_page() for _ in hashes]
        found = self.backend.batch_get(hashes, targets)
        for one, page in zip(hashes, found, strict=True):
            assert page is None or torch.equal(
                page.view(torch.uint8), self._page(self.pool, one, seed).view(torch.uint8)
            )
        return [page is not None for page in found]

    # -- the rest ------------------------------------------------------------------------------------

    def is_up(self) -> bool:
        return self.backend.store.is_up

    def counters(self) -> dict[str, int]:
        found = vars(self.backend.store.counters)
        return {name: value for name, value in found.items() if isinstance(value, int)}

    def stats(self) -> tuple[int, int]:
        """Pages that the metrics say were (prefetched, backed up)."""
        stats = self.backend.get_stats()
        return sum(stats.prefetch_pgs), sum(stats.backup_pgs)

    def clear(self) -> None:
        self.backend.clear()

    def close(self) -> None:
        self.backend.close()

    def parse(self, arguments: list[str]) -> dict[str, Any]:
        """What SGLang's own parser makes of flags."""
        import argparse

        from sglang.srt.server_args import ServerArgs

        parser = argparse.ArgumentParser()
        ServerArgs.add_cli_args(parser)
        parsed = parser.parse_args(arguments)
        extra = parsed.hicache_storage_backend_extra_config
        return {
            "backend": parsed.hicache_storage_backend, "layout": parsed.hicache_mem_layout,
            "on": parsed.enable_hierarchical_cache, "extra": json.loads(extra), "model": parsed.model_path,
        }  # fmt: skip

    def _page(self, pool: Any, page_hash: str, seed: int) -> torch.Tensor:
        """The bytes of a page, as its name and a seed say."""
        generator = torch.Generator().manual_seed(int(page_hash[:12], 16) + seed)
        like = pool.get_dummy_flat_data_page()
        return torch.randint(
            0, 256, (like.numel() * like.element_size(),), dtype=torch.uint8, generator=generator
        ).view(like.dtype)

    def _filled(self, pool: Any, hashes: list[str], seed: int) -> torch.Tensor:
        indices = pool.alloc(len(hashes) * pool.page_size)
        for page_hash, start in zip(hashes, indices[:: pool.page_size].tolist(), strict=True):
            pool.set_from_flat_data_page(start, self._page(pool, page_hash, seed))
        return indices

    def _compare(self, pool: Any, hashes: list[str], indices: torch.Tensor, loaded: list[bool], seed: int) -> None:
        for page_hash, start, is_loaded in zip(hashes, indices[:: pool.page_size].tolist(), loaded, strict=True):
            page = pool.get_data_page(start).view(torch.uint8)
            assert not is_loaded or torch.equal(page, self._page(pool, page_hash, seed).view(torch.uint8)), page_hash


def _said(before: list[str] | None, hints: Any) -> HiCacheStorageExtraInfo:
    return HiCacheStorageExtraInfo(prefix_keys=before, extra_info=None if hints is None else {"kvfuse": hints})


if __name__ == "__main__":
    serve(Engine)
