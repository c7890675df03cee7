"""The secondary tier itself: vLLM's interface over `Lookups`, `Transfers` and `BlockNews`. See `KvfuseTier`.

vLLM's modules are found by name, and what differs from version to version by looking: names of fields were changed in
0.26, 0.28 and 0.29, and fields added in most others.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import partial
from importlib import import_module
from itertools import compress
from typing import Any

import numpy as np

from kvfuse.connectors.request_hints import NOTHING, WORD, RequestHints, hints_of
from kvfuse.connectors.steady_store import SteadyStore
from kvfuse.connectors.vllm import metrics
from kvfuse.connectors.vllm.block_news import BlockNews
from kvfuse.connectors.vllm.identity import identify
from kvfuse.connectors.vllm.lookups import Lookups
from kvfuse.connectors.vllm.transfers import Transfers
from kvfuse.sizes import parse_size
from kvfuse.usrbio.client import NO_HINTS

log = logging.getLogger("vllm.kvfuse")  # vLLM shows what its own loggers and those below say

_base: Any = import_module("vllm.v1.kv_offload.base")
_tiering: Any = import_module("vllm.v1.kv_offload.tiering.base")
_STORAGE = getattr(getattr(_base, "Medium", None), "STORAGE", "STORAGE")
_HIT, _MISS, _RETRY = _base.LookupResult.HIT, _base.LookupResult.MISS, _base.LookupResult.RETRY

RANK_SIZE = 2
DEADLINE_S = 5.0
BACKLOG_SHARE = 0.25
"""of the host pool may wait to be stored"""

EVENT_KEYS = 2000
"""chunks told in one step: vLLM makes an event of each"""


class KvfuseTier(_tiering.SecondaryTierManager):  # type: ignore[misc]
    """Chunks of a namespace of a kvfuse mount. Copied between it and vLLM's own shared memory, without a stop.

    No call waits, but `drain_jobs` and `shutdown`, and none raises on account of the mount: without a daemon all is a
    miss. What vLLM wants of each method stands in its SecondaryTierManager.
    """

    medium = _STORAGE

    def __init__(
        self, offloading_spec: Any, primary_kv_view: memoryview, tier_type: str, *, mount: str, namespace: str = "vllm",
        deadline: float = DEADLINE_S, token: str | None = None, threads: int = 2, store_backlog: str | None = None,
        prefill_tokens_per_second: float | None = None, enable_kv_events: bool = False, locality: str | None = "LOCAL",
        revision: str | None = None, hash: str | None = None, hash_seed: str | None = None,
        backpressure_detector: Any = None, module_path: str | None = None,
    ) -> None:  # fmt: skip
        """``deadline``: seconds, of each look-up and job. ``store_backlog``: bytes that may wait to be stored, beyond
        that stores are shed (None: a quarter of vLLM's pool). ``prefill_tokens_per_second``: chunks that are expected
        later than computing them would take are misses. ``revision``, ``hash`` and ``hash_seed``: what vLLM does not
        say of itself, for the namespace's descriptor.

        DescriptorMismatch where the namespace has blocks of another model or layout."""
        known = {} if backpressure_detector is None else {"backpressure_detector": backpressure_detector}
        super().__init__(offloading_spec, primary_kv_view, tier_type, **known)
        memory = np.asarray(primary_kv_view).view(np.uint8)
        self._row_size = memory.strides[0]
        given = {"revision": revision, "hash": hash, "hash_seed": hash_seed}
        self._identity = identify(offloading_spec, self._row_size, given)
        self._suffix = self._identity.rank.to_bytes(RANK_SIZE, "big")
        self.store = SteadyStore(mount, namespace, descriptor=self._identity.descriptor, deadline=deadline, token=token)
        region = self.store.register(memory.reshape(-1))
        backlog = int(parse_size(store_backlog)) if store_backlog else int(memory.nbytes * BACKLOG_SHARE)
        self.transfers = Transfers(
            self.store, region, self._row_size, deadline=deadline, backlog=backlog, threads=threads, name=self._name
        )
        self._seconds_per_chunk = self._identity.chunk_tokens / (prefill_tokens_per_second or float("inf"))
        self.lookups = Lookups(self._find, deadline)
        self._jobs: dict[int, Sequence[bytes]] = {}
        self._hints: dict[str, RequestHints] = {}
        """of requests that have any"""
        self._stats = metrics.Stats()
        locality_of = getattr(_base, "Locality", str)
        self.locality = locality_of(locality) if locality is not None else None
        self._news = BlockNews(mount, namespace, token) if self._wants_events(enable_kv_events) else None
        log.info("kvfuse: blocks of %s/%s, %s", mount, namespace, dict(self._identity.descriptor))

    # -- look-ups ------------------------------------------------------------------------------------

    def on_new_request(self, req_context: Any) -> Any:
        """A request whose blocks are to be kept longer or shorter has all of them stored, not only new ones."""
        hints = request_hints(req_context)
        if hints != NOTHING:
            self._hints[req_context.req_id] = hints
        if hints.put == NO_HINTS or not hasattr(_base, "OffloadPolicy"):
            return _base.RequestOffloadingContext()
        return _base.RequestOffloadingContext(policy=_base.OffloadPolicy.REQUEST_LEVEL)

    def lookup(self, key: bytes, req_context: Any) -> Any:
        found = self.lookups.lookup(key, req_context.req_id)
        return _RETRY if found is None else _HIT if found else _MISS

    def on_schedule_end(self, context: Any = None) -> None:
        self.lookups.flush()

    def on_request_finished(self, req_context: Any) -> None:
        self.lookups.forget(req_context.req_id)
        self._hints.pop(req_context.req_id, None)

    def touch(self, keys: Collection[bytes], req_context: Any) -> None:
        """Chunks were used that vLLM has itself."""
        self.lookups.run(partial(self._touch, list(keys)))

    def _touch(self, keys: Sequence[bytes]) -> None:
        self.store.touch([self._name(key) for key in keys])

    def _find(self, keys: list[bytes], request: str) -> Sequence[bool]:
        """In the thread of look-ups: which are there, and in time if they are loaded in this order."""
        names = [self._name(key) for key in keys]
        found = self._found(names)
        if self._hints.get(request, NOTHING).is_prefetch and any(found):
            self.lookups.run(partial(self.store.prefetch, list(compress(names, found))))
        return found

    def _found(self, names: Sequence[bytes]) -> Sequence[bool]:
        if self._seconds_per_chunk == 0:
            return self.store.exists(names).tolist()  # type: ignore[no-any-return]
        costs = self.store.costs(names)
        if costs is None:
            return [False] * len(names)
        found = costs.tiers != 0
        computed = np.cumsum(found) * (self._seconds_per_chunk * 1000)
        is_worth = found & (costs.milliseconds <= computed)
        # Up to the last chunk at which loading is ahead of computing: what is before it is loaded on the way.
        end = int(np.flatnonzero(is_worth)[-1]) + 1 if is_worth.any() else 0
        self._stats.count("lookup_too_slow", int(found[end:].sum()))
        found[end:] = False
        return found.tolist()  # type: ignore[no-any-return]

    # -- jobs ----------------------------------------------------------------------------------------

    def submit_store(self, job_metadata: Any) -> None:
        self._submit(job_metadata, is_load=False)

    def submit_load(self, job_metadata: Any) -> None:
        self._submit(job_metadata, is_load=True)

    def get_finished_jobs(self) -> Iterable[Any]:
        return [self._result(outcome) for outcome in self.transfers.take_outcomes()]

    def has_pending_work(self) -> bool:
        """vLLM looks for jobs by itself; events are news for the next step."""
        return False

    def drain_jobs(self) -> None:
        self.transfers.drain()

    def shutdown(self) -> None:
        self.lookups.close()
        self.transfers.close()
        if self._news is not None:
            self._news.close()
        self.store.close()

    def _submit(self, job: Any, *, is_load: bool) -> None:
        keys = list(job.keys)
        slots = getattr(job, "chunk_ids", None)
        slots = [int(slot) for slot in (job.block_ids if slots is None else slots)]
        self._jobs[job.job_id] = keys
        hints = NOTHING if is_load else self._hints.get(job.req_context.req_id, NOTHING)
        self.transfers.submit(job.job_id, keys, slots, is_load=is_load, hints=hints.put)

    def _result(self, outcome: Any) -> Any:
        """As this version of vLLM has it; a failed load marks what it missed, so that it is not tried again."""
        keys = self._jobs.pop(outcome.number)
        moved = [key for key, is_moved in zip(keys, outcome.moved.tolist(), strict=True) if is_moved]
        success = len(moved) == len(keys)
        if outcome.is_load:
            if not success:
                self.lookups.miss(set(keys) - set(moved))
        elif not outcome.is_shed and self.store.is_up:
            success = True  # a cache need not admit a block
        details = {
            "successful_keys": tuple(moved) if moved and outcome.is_load and not success else None,
            "transfer_time": outcome.seconds,
            "transfer_bytes": len(moved) * self._row_size,
        }
        names = _tiering.JobResult.__dataclass_fields__
        known = {name: value for name, value in details.items() if name in names}
        return _tiering.JobResult(job_id=outcome.number, success=success, **known)

    def _name(self, key: bytes) -> bytes:
        """In the store: of the same hash every rank has other bytes."""
        return key + self._suffix

    def _key(self, name: bytes) -> bytes | None:
        """None: of another rank."""
        return name[:-RANK_SIZE] if name.endswith(self._suffix) and len(name) > RANK_SIZE else None

    # -- events --------------------------------------------------------------------------------------

    def take_events(self) -> Iterator[Any]:
        """What was stored and removed in the namespace, by whomever; at first all that is there."""
        for removed, names in self._news.take(EVENT_KEYS) if self._news is not None else ():
            if keys := [key for name in names if (key := self._key(name)) is not None]:
                yield self._event(keys, removed)

    def _event(self, keys: Collection[bytes], removed: bool) -> Any:
        fields = {"locality": self.locality, "ownership": "kvfuse", "removal_expected": True}
        names = _base.OffloadingEvent.__dataclass_fields__
        known = {name: value for name, value in fields.items() if name in names}
        return _base.OffloadingEvent(keys=list(keys), medium=_STORAGE, removed=removed, **known)

    def _wants_events(self, enable_kv_events: bool) -> bool:
        config = getattr(self._offloading_spec, "kv_events_config", None)
        is_on = bool(getattr(config, "enable_kv_cache_events", False))
        if enable_kv_events and not is_on:
            log.warning("enable_kv_events of the tier has no effect: vLLM's own kv_events_config is off")
        return enable_kv_events and is_on

    # -- counters ------------------------------------------------------------------------------------

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, Any]:
        return metrics.definitions()

    def get_stats(self) -> Any:
        self._stats.count("lookup_late", self.lookups.late - self._stats.seen["lookup_late"])
        return self._stats.take(self.transfers, self.store)


def request_hints(req_context: Any) -> RequestHints:
    """From ``kv_transfer_params`` of a request, or an action of its ``kv_hints`` (vLLM 0.31 has them), which wins."""
    words = (getattr(req_context, "kv_transfer_params", None) or {}).get(WORD)
    for action in getattr(getattr(req_context, "kv_hints", None), "actions", ()):
        if action.action_type == WORD:
            words = action.payload
    return hints_of(words, "vLLM")
