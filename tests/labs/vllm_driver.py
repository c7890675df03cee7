"""vLLM's own tiering manager over its own shared region, driven by a test through `engine_host`."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import shlex
import threading
import uuid
from types import SimpleNamespace as Some
from typing import Any

import numpy as np
from engine_host import DEADLINE_S, serve
from vllm.v1.kv_offload.base import LookupResult, ReqContext, ScheduleEndContext, make_offload_key
from vllm.v1.kv_offload.tiering import base as tiering
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from kvfuse.connectors.vllm import register

try:
    from vllm.v1.kv_offload import config as vllm_config
except ImportError:  # before 0.26
    vllm_config = None
TransferJob = getattr(tiering, "TransferJob", None) or tiering.JobMetadata  # before 0.29
register()

ROW = 64 << 10
CHUNKS = 48
"""of the host pool"""


def keys_of(seed: int, count: int, group: int = 0) -> list[Any]:
    return [make_offload_key(hashlib.sha256(f"{seed} {number}".encode()).digest(), group) for number in range(count)]


def known(cls: Any, **fields: Any) -> Any:
    """What this version of vLLM has of these fields."""
    return cls(**{name: value for name, value in fields.items() if name in cls.__dataclass_fields__})


def new_spec(extra: Any, model: str, dtype: str, own: int, ranks: int, groups: int, events: bool) -> Any:
    """Of the configuration that a scheduler makes of vLLM's own."""
    of = vllm_config
    parallel = known(
        of.OffloadingParallelConfig, rank=own, world_size=ranks, tp_size=ranks, pp_size=1, pcp_size=1, dcp_size=1,
        data_parallel_index=0, data_parallel_size=1, data_parallel_rank_local=None, is_parallelism_agnostic=False,
    )  # fmt: skip
    all_groups = tuple(
        known(of.OffloadingGroupConfig, tokens_per_block=16, layer_names=(f"layer.{group}",), group_id=group)
        for group in range(groups)
    )
    config = known(
        of.OffloadingConfig, groups=all_groups, worker_kv_bytes_per_block=ROW // ranks, extra_config=extra,
        enable_kv_cache_events=events, engine_id=uuid.uuid4().hex, parallel=parallel, kv_cache_layout="NHD",
        model=known(of.OffloadingModelConfig, name=model, dtype=dtype),
        cache=of.OffloadingCacheConfig(tokens_per_hash=16, blocks_per_chunk=1),
    )  # fmt: skip
    return TieringOffloadingSpec(config)


def old_spec(extra: Any, model: str, dtype: str, own: int, ranks: int, groups: int, events: bool) -> Any:
    """Of 0.25: a spec has vLLM's own configurations, of which it uses this."""
    parallel = dict.fromkeys(
        ("decode_context_parallel_size", "prefill_context_parallel_size", "pipeline_parallel_size"), 1
    )
    engine = Some(
        kv_transfer_config=Some(kv_connector_extra_config=extra), kv_events_config=Some(enable_kv_cache_events=events),
        parallel_config=Some(rank=own, world_size=ranks, tensor_parallel_size=ranks, **parallel),
        model_config=Some(model=model, dtype=dtype, revision=None), instance_id=uuid.uuid4().hex,
        cache_config=Some(
            cache_dtype="auto", block_size=16, hash_block_size=16, enable_prefix_caching=True,
            prefix_caching_hash_algo="sha256",
        ),
    )  # fmt: skip
    caches = Some(
        kv_cache_groups=[
            Some(kv_cache_spec=Some(block_size=16), layer_names=[f"layer.{group}"]) for group in range(groups)
        ],
        num_blocks=1, kv_cache_tensors=[Some(size=ROW // ranks, block_stride=0)],
    )  # fmt: skip
    return TieringOffloadingSpec(engine, caches)


class Engine:
    """One scheduler process. Chunks are made of their keys and a ``salt``, and compared when they come back."""

    def start(self, mount: str, namespace: str, **change: Any) -> None:
        """``change``: ``model``, ``dtype``, ``ranks`` (own, all), ``groups``, ``events``, ``is_fs`` for vLLM's own tier
        in a folder of that name; else options of the tier."""
        own, ranks = change.pop("ranks", (0, 1))
        groups, events = change.pop("groups", 1), change.pop("events", False)
        is_fs = change.pop("is_fs", False)
        model, dtype = change.pop("model", "meta/Llama 3"), change.pop("dtype", "bfloat16")
        tier = {
            "type": "KvfuseTier", "module_path": "kvfuse.connectors.vllm", "mount": mount, "namespace": namespace,
            "enable_kv_events": events, "deadline": DEADLINE_S, **change,
        }  # fmt: skip
        if is_fs:
            tier = {"type": "fs", "root_dir": os.path.join(mount, namespace), "n_read_threads": 2, "n_write_threads": 2}
        self.extra = {"cpu_bytes_to_use": CHUNKS * ROW, "secondary_tiers": [tier]}
        make = old_spec if vllm_config is None else new_spec
        self.spec = make(self.extra, model, dtype, own, ranks, groups, events)
        self.manager: Any = self.spec.get_manager()
        os.unlink(self.spec._scheduler_mmap.mmap_path)  # vLLM's file would outlive a process that is killed
        (self.tier,) = self.manager.secondary_tiers
        self.view = np.asarray(self.manager.primary_tier.get_kv_memoryview()).view(np.uint8)
        self.requests = 0
        self.events: list[Any] = []

    # -- as the scheduler calls ----------------------------------------------------------------------

    def store(
        self, seed: int, count: int, salt: str = "", group: int = 0, params: Any = None, actions: Any = ()
    ) -> None:
        """As if the processor had computed the chunks. They go on to the tier. ``params``, ``actions``: what the
        request says, as its ``kv_transfer_params``, and in its ``kv_hints``: (type, payload)."""
        keys, context = keys_of(seed, count, group), self._new_request(params, actions)
        prepared = self.manager.prepare_store(keys, context)
        slots = dict(zip(prepared.keys_to_store, self._slots(prepared.store_spec), strict=True))
        for key, slot in slots.items():
            self.view[slot] = self._bytes(key, salt)
        if slots:
            self.manager.complete_store(list(slots), context)
        self._end(context)

    def load(self, seed: int, count: int, salt: str = "", group: int = 0) -> int:
        """Chunks of the longest prefix that the engine found and has, byte for byte; it steps until it knows."""
        keys, context = keys_of(seed, count, group), self._new_request()
        found = self._prefix(keys, context)
        while found is None:
            self._step()
            found = self._prefix(keys, context)
        slots = self._slots(self.manager.prepare_load(keys[:found], context)) if found else []
        for key, slot in zip(keys, slots, strict=False):
            assert bytes(self.view[slot]) == bytes(self._bytes(key, salt)), "another chunk's bytes"
        if found:
            self.manager.complete_load(keys[:found], context)
        self._end(context)
        return found

    def touch(self, seed: int, count: int) -> None:
        """As when the processor has the chunks itself. Returns when the tier has told it."""
        context = self._new_request()
        self.manager.touch(keys_of(seed, count), context)
        told = threading.Event()
        self.tier.lookups.run(told.set)
        told.wait()
        self._end(context)

    def find(self, seed: int, count: int, params: Any) -> int:
        """How many chunks the tier alone finds for a request that says ``params``; nothing is loaded."""
        context = self._new_request(params)
        answers = [LookupResult.RETRY]
        while LookupResult.RETRY in answers:
            answers = [self.tier.lookup(key, context) for key in keys_of(seed, count)]
            self._step()
        self._end(context)
        return answers.count(LookupResult.HIT)

    def lookup(self, seed: int, count: int) -> list[str]:
        """What the first look at each chunk says."""
        context = self._new_request()
        answers = [self.manager.lookup(key, context).name for key in keys_of(seed, count)]
        self._end(context)
        return answers

    def forget(self) -> None:
        """All chunks of the host pool."""
        self.manager.reset_cache()
        getattr(self.manager, "on_reset_flushed", lambda: None)()

    def begin_stores(self, jobs: int, count: int) -> None:
        """Of more than fits, without a pause."""
        for number in range(jobs):
            job = known(
                TransferJob, job_id=number, keys=keys_of(1000 + number, count), is_promotion=False,
                req_context=ReqContext("shed"), chunk_ids=np.arange(count), block_ids=np.arange(count),
            )  # fmt: skip
            self.tier.submit_store(job)

    def end_stores(self) -> list[bool]:
        """Success of each, once all are over."""
        self.tier.drain_jobs()
        return [result.success for result in sorted(self.tier.get_finished_jobs(), key=lambda result: result.job_id)]

    def begin_load(self, seed: int, count: int) -> None:
        """A job of the tier alone."""
        job = known(
            TransferJob, job_id=-1, keys=keys_of(seed, count), is_promotion=True, req_context=ReqContext("alone"),
            chunk_ids=np.arange(count), block_ids=np.arange(count),
        )  # fmt: skip
        self.tier.submit_load(job)

    def finished(self) -> list[tuple[bool, int]]:
        """(success, chunks that were loaded of one that was none) of jobs that are over since."""
        return [
            (result.success, len(getattr(result, "successful_keys", None) or ()))
            for result in self.tier.get_finished_jobs()
        ]

    # -- what a test looks at ------------------------------------------------------------------------

    def has_hints(self) -> bool:
        """This version of vLLM has ``kv_hints``."""
        return importlib.util.find_spec("vllm.v1.kv_hints") is not None

    def is_up(self) -> bool:
        return bool(self.tier.store.is_up)

    def in_place(self) -> bool:
        """The daemon maps the region."""
        (region,) = self.tier.store._link._regions
        return region.iov is not None and region.iov.in_place

    def stats(self) -> dict[str, int]:
        """Since the last call, by name without its prefix."""
        stats = self.manager.get_stats()
        reduced = {} if stats is None else stats.reduce()
        prefix = "vllm:kvfuse_"
        return {name.removeprefix(prefix): value for name, value in reduced.items() if name.startswith(prefix)}

    def definitions(self) -> list[str]:
        return sorted(type(self.spec).build_metric_definitions(self.extra))

    def news(self) -> list[tuple[bool, str, str, int]]:
        """Events of the tier so far: removed, medium, locality, chunks."""
        takes = hasattr(tiering.SecondaryTierManager, "take_events")  # since 0.26
        for event in self.manager.take_events() if takes else self.tier.take_events():
            medium, locality = (getattr(part, "value", part) for part in (event.medium, getattr(event, "locality", "")))
            if medium == "STORAGE":
                self.events.append((event.removed, medium, locality or "REMOTE", len(event.keys)))
        return self.events

    def name(self, seed: int, number: int) -> str:
        """Of the file of a chunk."""
        from kvfuse.usrbio.client import file_name

        return file_name(self.tier._name(keys_of(seed, number + 1)[number])).decode()

    def parse(self, flags: str) -> dict[str, Any]:
        """By vLLM's own parser: what is in its configuration of KV transfer."""
        import vllm.platforms
        from vllm.platforms.cpu import CpuPlatform

        vllm.platforms._current_platform = CpuPlatform()  # there is no other here
        from vllm.config import KVTransferConfig
        from vllm.engine.arg_utils import EngineArgs
        from vllm.utils.argparse_utils import FlexibleArgumentParser

        parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
        config = parser.parse_args(shlex.split(flags)).kv_transfer_config
        assert isinstance(config, KVTransferConfig)
        extra = dict(config.kv_connector_extra_config)
        factory = importlib.import_module("vllm.v1.kv_offload.tiering.factory").SecondaryTierFactory
        (tier,) = extra["secondary_tiers"]
        found = {"connector": config.kv_connector, "role": config.kv_role, "spec": extra["spec_name"]}
        return found | {
            "mount": tier["mount"], "namespace": tier["namespace"], "class": factory.get_tier_class(tier).__name__,
        }  # fmt: skip

    def advice(self) -> list[str]:
        from kvfuse.connectors.vllm.config import check_engine

        return check_engine()

    def close(self) -> None:
        self.view = None  # type: ignore[assignment]
        with contextlib.suppress(BufferError):
            self.manager.shutdown()

    # -- how -----------------------------------------------------------------------------------------

    def _new_request(self, params: Any = None, actions: Any = ()) -> Any:
        self.requests += 1
        hints = None
        if actions:
            from vllm.v1.kv_hints import KvHintAction, KvHintsEnvelope

            hints = KvHintsEnvelope("1", "a message", [KvHintAction("1", kind, "1", words) for kind, words in actions])
        context = known(
            ReqContext, req_id=f"request {self.requests}", kv_transfer_params=params, kv_hints=hints
        )  # fmt: skip
        self.manager.on_new_request(context)
        return context

    def _prefix(self, keys: list[Any], context: Any) -> int | None:
        """As vLLM's scheduler looks for it."""
        hits, is_deferred = 0, False
        for key in keys:
            result = self.manager.lookup(key, context)
            if result is LookupResult.MISS:
                break
            is_deferred |= result is not LookupResult.HIT
            hits += 1
        return None if is_deferred else hits

    def _step(self) -> None:
        self.manager.on_schedule_end(ScheduleEndContext(new_req_ids=[], preempted_req_ids=[]))

    def _end(self, context: Any) -> None:
        """Until what it stored is stored."""
        self.manager.on_request_finished(context)
        self._step()
        while self.manager._transfer_jobs:
            self.tier.drain_jobs()
            self._step()

    def _slots(self, spec: Any) -> list[int]:
        return [int(slot) for slot in (spec.chunk_ids if hasattr(spec, "chunk_ids") else spec.block_ids)]

    def _bytes(self, key: bytes, salt: str) -> Any:
        return np.frombuffer(hashlib.shake_128(key + salt.encode()).digest(ROW), np.uint8)


if __name__ == "__main__":
    serve(Engine)
