"""The L2 adapter of LMCache's server. See `KvfuseL2Adapter`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from time import monotonic
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt
from lmcache.lmcache_native import Bitmap
from lmcache.logging import init_logger
from lmcache.v1.distributed.api import ObjectKey
from lmcache.v1.distributed.internal_api import L2StoreResult
from lmcache.v1.distributed.l2_adapters.base import AdapterUsage, L2AdapterInterface
from lmcache.v1.platform import create_event_notifier

from kvfuse.connectors.lmcache import identity
from kvfuse.connectors.lmcache.layouts import Layouts
from kvfuse.connectors.lmcache.memory import ObjectPool, sizes_of
from kvfuse.connectors.lmcache.stored_objects import StoredObjects
from kvfuse.connectors.lmcache.tasks import Tasks
from kvfuse.connectors.request_hints import hints_of
from kvfuse.connectors.staging import Doubtful
from kvfuse.connectors.steady_store import DEADLINE_S, SteadyStore
from kvfuse.usrbio.client import NO_HINTS, PutHints

log = init_logger(__name__)

Found = npt.NDArray[np.bool_]

THREADS = 2
"""for stores, and as many for loads; look-ups have one"""


class KvfuseL2Adapter(L2AdapterInterface):  # type: ignore[misc]
    """Chunks of LMCache's server as blocks of a namespace of a kvfuse mount.

    No task raises or takes longer than the deadline from when it was submitted. Without a daemon nothing is found and
    nothing stored, at once, until it is back. Blocks are evicted by the volume, so nothing is locked: what was
    evicted between a look-up and its load is missing in the load's bitmap.
    """

    def __init__(self, params: Mapping[str, Any], l1_memory_desc: Any = None) -> None:
        """``params``: ``adapter_params``, see docs/engines-lmcache.md.

        ValueError: one is missing or unknown. DescriptorMismatch: the namespace has other blocks.
        """
        super().__init__(max_capacity_bytes=0)
        if missing := [name for name in ("mount", "namespace") if not params.get(name)]:
            raise ValueError(f"adapter_params of kvfuse lack {' and '.join(missing)}")
        if unknown := sorted(set(params) - set(identity.PARAMS)):
            raise ValueError(f"adapter_params of kvfuse have {', '.join(unknown)}; there are {identity.PARAMS}")
        mount, namespace, token = params["mount"], params["namespace"], params.get("token")
        self._deadline = float(params.get("deadline") or DEADLINE_S)
        descriptor = identity.server_descriptor(params)
        self.store = SteadyStore(mount, namespace, descriptor=descriptor, deadline=self._deadline, token=token)
        self._layouts = Layouts(mount, namespace, self._deadline, token)
        self._objects = StoredObjects(mount, namespace, self._deadline, token)
        self._hints = {salt: hints_of(words, "LMCache").put for salt, words in (params.get("salts") or {}).items()}
        """of the chunks of each salt"""
        has_pool = l1_memory_desc is not None
        self._pool = ObjectPool(self.store, *((l1_memory_desc.ptr, l1_memory_desc.size) if has_pool else (0, 0)))
        self._doubtful = Doubtful()
        self._stores: Tasks[L2StoreResult] = Tasks("store", THREADS, create_event_notifier(), self._pool.held.release)
        self._lookups: Tasks[Bitmap] = Tasks("lookup", 1, create_event_notifier())
        self._loads: Tasks[Bitmap] = Tasks("load", THREADS, create_event_notifier())
        state = "connected" if self.store.is_up else f"away: {self.store.reason}"
        place = "in place" if self._pool.is_shared else "copied once more (--no-l1-use-lazy --shm-name spares that)"
        log.info("kvfuse: chunks in %s, %s; %s", namespace, place, state)

    def get_store_event_fd(self) -> int:
        return self._stores.descriptor

    def get_lookup_and_lock_event_fd(self) -> int:
        return self._lookups.descriptor

    def get_load_event_fd(self) -> int:
        return self._loads.descriptor

    # -- stores --------------------------------------------------------------------------------------

    def submit_store_task(self, keys: list[ObjectKey], objects: list[Any]) -> int:
        give_up = monotonic() + self._deadline
        return self._stores.submit(lambda: self._store(keys, objects, give_up), L2StoreResult(False, 0))

    def pop_completed_store_tasks(self) -> dict[int, L2StoreResult]:
        """Those of which all chunks are there now are successful.

        As long as a daemon that hangs may still read their memory, they have not ended; nobody waits for stores.
        """
        return self._stores.take_all()

    def _store(self, keys: Sequence[ObjectKey], objects: Sequence[Any], give_up: float) -> L2StoreResult:
        if not keys:
            return L2StoreResult(True, 0)
        names = [identity.object_key(key) for key in keys]
        wanted = self._are_allowed(keys, objects)
        there = self.store.exists(names) & ~self._doubtful.among(names) & wanted
        new = np.flatnonzero(wanted & ~there).tolist()
        stored = np.zeros(len(keys), np.bool_)
        for hints, some in self._by_hints(keys, new).items():
            stored[some] = self._pool.put(
                [names[row] for row in some], [objects[row] for row in some], left(give_up), hints
            )
        rows = np.flatnonzero(stored).tolist()
        sizes = sizes_of([objects[row] for row in rows]).tolist()
        self._doubtful.forget([names[row] for row in rows])
        if rows:
            self._objects.note([keys[row] for row in rows], sizes)
            self._notify_keys_stored([keys[row] for row in rows], sizes)
        return L2StoreResult(bool(np.all(stored | there)), sum(sizes))

    def _by_hints(self, keys: Sequence[ObjectKey], rows: Sequence[int]) -> Mapping[PutHints, list[int]]:
        """Rows of chunks that are stored with the same hints."""
        found: defaultdict[PutHints, list[int]] = defaultdict(list)
        for row in rows:
            found[self._hints.get(keys[row].cache_salt, NO_HINTS)].append(row)
        return found

    # -- look-ups ------------------------------------------------------------------------------------

    def submit_lookup_and_lock_task(self, keys: list[ObjectKey], group_layout_descs: Mapping[int, Any]) -> int:
        return self._lookups.submit(lambda: self._look_up(keys, group_layout_descs or {}), Bitmap(len(keys)))

    def query_lookup_and_lock_result(self, task_id: int) -> Bitmap | None:
        return self._lookups.take(task_id)

    def submit_unlock(self, keys: list[ObjectKey]) -> None:
        """Nothing is locked."""

    def _look_up(self, keys: Sequence[ObjectKey], layouts: Mapping[int, Any]) -> Bitmap:
        found = self.store.exists([identity.object_key(key) for key in keys])
        if not self.store.is_up:
            return Bitmap(len(keys))
        allowed: dict[tuple[str, int, int], bool] = {}
        for row, key in enumerate(keys):
            group = (key.model_name, key.object_group_id, key.kv_rank >> 24)
            if group not in allowed:
                layout = layouts.get(key.object_group_id)
                allowed[group] = layout is None or self._layouts.allows(
                    "{}, group {}, {} ranks".format(*group), identity.form_of(layout.shapes, layout.dtypes)
                )
            found[row] &= allowed[group]
        return bitmap_of(found)

    # -- loads ---------------------------------------------------------------------------------------

    def submit_load_task(self, keys: list[ObjectKey], objects: list[Any]) -> int:
        give_up = monotonic() + self._deadline
        return self._loads.submit(lambda: self._load(keys, objects, give_up), Bitmap(len(keys)))

    def query_load_result(self, task_id: int) -> Bitmap | None:
        return self._loads.take(task_id)

    def _load(self, keys: Sequence[ObjectKey], objects: Sequence[Any], give_up: float) -> Bitmap:
        loaded = np.zeros(len(keys), np.bool_)
        rows = np.flatnonzero(self._are_allowed(keys, objects)).tolist()
        if rows:
            names, targets = [identity.object_key(keys[row]) for row in rows], [objects[row] for row in rows]
            loaded[rows] = self._pool.get(names, targets, left(give_up)) == sizes_of(targets)
            if not self.store.is_silent:
                self._keep([one for one, row in zip(targets, rows, strict=True) if not loaded[row]])
            elif self.store.is_up:
                self._doubtful.add([name for name, row in zip(names, rows, strict=True) if not loaded[row]])
        if loaded.any():
            self._notify_keys_accessed([keys[row] for row in np.flatnonzero(loaded).tolist()])
        return bitmap_of(loaded)

    def _keep(self, objects: Sequence[Any]) -> None:
        """Let LMCache not use memory for something else that a hung daemon may still write into.

        LMCache does not free objects that are not valid; so that is done here, when the daemon has ended.
        """
        for one in objects:
            one.invalidate()
            self._pool.held.release(partial(_free, one))

    def _are_allowed(self, keys: Sequence[ObjectKey], objects: Sequence[Any]) -> Found:
        """Which objects are in the form that the namespace's blocks of their model, group and rank have."""
        if not self.store.is_up:
            return np.zeros(len(keys), np.bool_)
        known: dict[tuple[str, int, int, str], bool] = {}
        allowed = np.zeros(len(keys), np.bool_)
        for row, (key, one) in enumerate(zip(keys, objects, strict=True)):
            kind = (key.model_name, key.object_group_id, key.kv_rank, identity.form_of_object(one))
            if kind not in known:
                known[kind] = self._layouts.allows("{}, group {}, rank {:08x}".format(*kind[:3]), kind[3])
            allowed[row] = known[kind]
        return allowed

    # -- the rest ------------------------------------------------------------------------------------

    def delete(self, keys: list[ObjectKey]) -> None:
        gone = self.store.delete([identity.object_key(key) for key in keys])
        deleted = [keys[row] for row in np.flatnonzero(gone).tolist()]
        if deleted:
            self._objects.changed()
            self._notify_keys_deleted(deleted, [0] * len(deleted))

    def get_usage(self) -> AdapterUsage:
        """Bytes of each salt in the namespace, of all servers together, also of before this one started.

        No capacity: the volume itself evicts blocks. Quotas of salts work all the same.
        """
        used = self._objects.bytes_by_salt()
        return AdapterUsage(sum(used.values()), 0, MappingProxyType(used))

    def list_l2_keys(self, model_name: str | None = None, page_size: int = 500, cursor: str | None = None) -> Any:
        """A page of what is in the namespace, each with its salt. ValueError: no page has this size or cursor."""
        return self._objects.page(model_name, page_size, cursor)

    def report_status(self) -> dict[str, Any]:
        """``is_healthy`` without a daemon, too: then everything is a miss."""
        counters = asdict(self.store.counters)
        return {
            "is_healthy": True, "type": type(self).__name__, "connected": self.store.is_up,
            "reason": "" if self.store.is_up else self.store.reason, "in_place": self._pool.is_shared,
            **counters, "failures": dict(self.store.counters.failures),
        }  # fmt: skip

    def close(self) -> None:
        for tasks in (self._lookups, self._loads, self._stores):
            tasks.close()
        self._objects.close()
        self._pool.close()
        self._layouts.close()
        self.store.close()
        log.info("kvfuse: %s", self.store.counters)


def _free(one: Any) -> None:
    if one.parent_allocator is not None:
        one.valid = True
        one.parent_allocator.free(one)


def bitmap_of(found: Found) -> Bitmap:
    """LMCache's own."""
    bitmap = Bitmap(len(found))
    for row in np.flatnonzero(found).tolist():
        bitmap.set(row)
    return bitmap


def left(give_up: float) -> float:
    """Seconds."""
    return max(give_up - monotonic(), 0)
