"""The store that UCM's factory makes. See `KvfuseStore`."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import dataclass
from time import monotonic
from typing import Any

import numpy as np
from ucm.store.ucmstore_v1 import Task, UcmKVStoreBaseV1

from kvfuse.connectors.staging import Doubtful, GatherMemory
from kvfuse.connectors.steady_store import DEADLINE_S, Region, SteadyStore
from kvfuse.connectors.ucm import identity
from kvfuse.connectors.ucm.copying import Copier, DeviceCopier, HostCopier
from kvfuse.errors import KvfuseError
from kvfuse.usrbio.client.iov import address_of

log = logging.getLogger(__name__)

Rows = Sequence[Sequence[int]]
"""for each block, the addresses of its tensors"""

THREADS = 4
NOTE_SIZE = 256


class LoadFailed(KvfuseError):
    """Blocks of a load are not there: UCM has them computed again."""


@dataclass(eq=False)
class KvfuseTask(Task):  # type: ignore[misc]
    """A load or dump under way."""

    blocks: int
    future: Future[int]
    """blocks that should have been loaded, and were not"""


class KvfuseStore(UcmKVStoreBaseV1):  # type: ignore[misc]
    """Blocks of UCM, each in one or more shards, as blocks of a namespace of a kvfuse mount.

    No call takes longer than the deadline, and none raises but `wait` for a load: that is how UCM learns that it must
    not use what it asked for. Without a daemon nothing is found and nothing stored, until it is back.
    """

    def __init__(self, config: dict[str, Any]) -> None:
        """``config``: ``mount``, ``namespace``, optionally ``deadline`` (seconds), ``token``, ``model``, ``weights``
        and ``host_memory`` (tensors are in the host's memory even if there is a device); and what UCM adds to that.

        ValueError: one is missing. DescriptorMismatch: the namespace has other blocks.
        """
        super().__init__(config)
        if missing := [name for name in ("mount", "namespace") if not config.get(name)]:
            raise ValueError(f"ucm_connector_config of kvfuse lacks {' and '.join(missing)}")
        self._deadline = float(config.get("deadline") or DEADLINE_S)
        self._group = identity.group_of(config)
        self._sizes = _tensor_sizes(config)
        self._shards = identity.shards_of(config) if self._sizes else 0
        self._layout = self._layout_check(config) if self._sizes else None
        self.store = self._connect(config["namespace"], identity.descriptor(config))
        self._staging, self._doubtful = GatherMemory(self.store), Doubtful()
        self._note = self.store.register(np.zeros(NOTE_SIZE, np.uint8))
        is_on_device = int(config.get("device_id", -1)) >= 0 and not config.get("host_memory")
        self._copier: Copier = DeviceCopier(int(config["device_id"])) if is_on_device else HostCopier()
        self._threads = ThreadPoolExecutor(THREADS, "kvfuse-ucm")
        state = "connected" if self.store.is_up else f"away: {self.store.reason}"
        log.info("kvfuse: blocks of %s shards in %s; %s", self._shards or "unknown", config["namespace"], state)

    def _connect(self, namespace: str, descriptor: Mapping[str, str | int]) -> SteadyStore:
        mount, token = self.config["mount"], self.config.get("token")
        return SteadyStore(mount, namespace, descriptor=descriptor, deadline=self._deadline, token=token)

    def _layout_check(self, config: Mapping[str, Any]) -> SteadyStore:
        """What only workers know is the descriptor of an empty namespace beside the blocks: the scheduler could not
        name it."""
        name = "-".join(filter(None, (f"{config['namespace']}.layout", self._group)))
        return self._connect(name, identity.layout_descriptor(config))

    @property
    def is_checked(self) -> bool:
        """The layout of the blocks is known to be that of this worker; not yet, where the mount came later."""
        layout = self._layout
        if layout is not None and layout.is_up:
            self._layout = None
            layout.close()
        return self._layout is None

    def cc_store(self) -> int:
        """There is no native store."""
        return 0

    # -- look-ups ------------------------------------------------------------------------------------

    def lookup(self, block_ids: list[bytes]) -> list[bool]:
        """Which blocks are there, with all of their shards."""
        shards = self._known_shards()
        found = self.store.exists(self._keys(block_ids, shards))
        there: list[bool] = np.all(found.reshape(-1, shards), axis=1).tolist()
        return there

    def lookup_on_prefix(self, block_ids: list[bytes]) -> int:
        """The index of the last block of those that are there without a gap; -1: the first one is not."""
        shards = self._known_shards()
        return self.store.longest_prefix(self._keys(block_ids, shards)) // shards - 1

    def prefetch(self, block_ids: list[bytes]) -> None:
        """Begin to bring blocks into shared memory."""
        run = copy_context().run
        self._threads.submit(run, lambda: self.store.prefetch(self._keys(block_ids, self._known_shards())))

    def _keys(self, block_ids: Sequence[bytes], shards: int) -> list[bytes]:
        return [identity.shard_key(one, self._group, shard) for one in block_ids for shard in range(shards)]

    def _known_shards(self) -> int:
        """Of a block. Workers know; the scheduler reads it in the note that they leave. Without one it asks for the
        first shard alone."""
        if not self._shards:
            (size,) = self.store.get([identity.shape_key(self._group)], self._note, [0], [NOTE_SIZE]).tolist()
            if size > 0:
                self._shards = int(json.loads(self._note.part(0, size).tobytes())["shards"])
        return self._shards or 1

    # -- loads and dumps -----------------------------------------------------------------------------

    def load(self, block_ids: list[bytes], shard_index: list[int], dst_tensor: list[list[Any]]) -> Task:
        return self._begin(self._load, block_ids, shard_index, *self._of_tensors(dst_tensor), keep=dst_tensor)

    def dump(self, block_ids: list[bytes], shard_index: list[int], src_tensor: list[list[Any]]) -> Task:
        return self._begin(self._dump, block_ids, shard_index, *self._of_tensors(src_tensor), keep=src_tensor)

    def load_data(self, block_ids: list[bytes], shard_index: list[int], dst_addr: Any) -> Task:
        return self._begin(self._load, block_ids, shard_index, _rows(dst_addr), self._sizes, self._copier)

    def dump_data(
        self, block_ids: list[bytes], shard_index: list[int], src_addr: Any, prerequisite_handle: int = 0
    ) -> Task:
        return self._begin(
            self._dump, block_ids, shard_index, _rows(src_addr), self._sizes, self._copier, event=prerequisite_handle
        )

    def wait(self, task: KvfuseTask) -> None:
        """For a load or dump to end. LoadFailed: blocks were not loaded; their tensors may have any bytes."""
        if failed := task.future.result():
            reason = "" if self.store.is_up else f": {self.store.reason}"
            raise LoadFailed(f"{failed} of {task.blocks} blocks were not loaded{reason}")

    def check(self, task: KvfuseTask) -> bool:
        """Whether it has ended."""
        return task.future.done()

    def close(self) -> None:
        """After the tasks under way."""
        self._threads.shutdown()
        for store in filter(None, (self.store, self._layout)):
            store.close()
        self._staging.close()

    # -- how -----------------------------------------------------------------------------------------

    def _of_tensors(self, tensors: Sequence[Sequence[Any]]) -> tuple[Rows, list[int], Copier]:
        """Addresses and sizes of tensors, and who copies them."""
        flat = [tensor for row in tensors for tensor in row]
        if not all(tensor.is_contiguous() for tensor in flat):
            return [], [], self._copier
        on_host = all(tensor.device.type == "cpu" for tensor in flat)
        sizes = [tensor.numel() * tensor.element_size() for tensor in tensors[0]] if tensors else []
        addresses = [[tensor.data_ptr() for tensor in row] for row in tensors]
        return addresses, sizes, HostCopier() if on_host else self._copier

    def _begin(
        self, move: Callable[..., int], block_ids: Sequence[bytes], shards: Sequence[int], rows: Rows,
        sizes: Sequence[int], copier: Copier, *, event: int = 0, keep: object = None,
    ) -> KvfuseTask:  # fmt: skip
        """``keep``: what must live until the end."""
        keys = [identity.shard_key(one, self._group, shard) for one, shard in zip(block_ids, shards, strict=False)]
        give_up = monotonic() + self._deadline

        def run() -> int:
            try:
                if len({len(keys), len(rows), len(block_ids)}) != 1 or any(len(row) != len(sizes) for row in rows):
                    raise ValueError(f"{len(block_ids)} blocks, {len(keys)} shards, {len(rows)} rows of tensors")
                if not self.is_checked:
                    return len(keys) if move == self._load else 0
                return move(keys, rows, sizes, copier, event, give_up) if keys else 0
            except Exception:  # whatever it is, the engine goes on: loads say that they failed
                log.exception("kvfuse: blocks are neither loaded nor stored")
                return len(keys) if move == self._load else 0
            finally:
                _ = keep

        future = self._threads.submit(copy_context().run, run)  # its span is the caller's
        return KvfuseTask(len(keys), future)

    def _load(
        self, keys: list[bytes], rows: Rows, sizes: Sequence[int], copier: Copier, event: int, give_up: float
    ) -> int:
        """How many were not loaded."""
        missed: list[bytes] = []
        size = sum(sizes)
        with self._staging.taken(size) as region:
            for numbers, offsets in _windows(len(keys), size, region):
                chosen = [keys[number] for number in numbers]
                left = max(give_up - monotonic(), 0)
                results = self.store.get(chosen, region, offsets, [size] * len(numbers), deadline=left)
                for number, offset, result in zip(numbers, offsets, results.tolist(), strict=True):
                    if result == size:
                        copier.scatter(address_of(region.array) + offset, rows[number], sizes)
                    else:
                        missed.append(keys[number])
        if self.store.is_up:
            self._doubtful.add(missed)
        return len(missed)

    def _dump(
        self, keys: list[bytes], rows: Rows, sizes: Sequence[int], copier: Copier, event: int, give_up: float
    ) -> int:
        copier.wait_for(event)
        self._leave_note()
        there = self.store.exists(keys) & ~self._doubtful.among(keys)
        absent = np.flatnonzero(~there).tolist()
        size = sum(sizes)
        with self._staging.taken(size) as region:
            for numbers, offsets in _windows(len(absent), size, region):
                if (left := give_up - monotonic()) <= 0:
                    break
                chosen = [absent[number] for number in numbers]
                for number, offset in zip(chosen, offsets, strict=True):
                    copier.gather(rows[number], sizes, address_of(region.array) + offset)
                new_keys = [keys[number] for number in chosen]
                self.store.put(new_keys, region, offsets, [size] * len(chosen), deadline=left)
                self._doubtful.forget(new_keys)
        return 0

    def _leave_note(self) -> None:
        """How many shards a block has, for the scheduler; again where it was evicted."""
        key = identity.shape_key(self._group)
        if self._shards and not self.store.exists([key])[0]:
            note = np.frombuffer(json.dumps({"shards": self._shards}).encode(), np.uint8)
            self._note.array[: len(note)] = note
            self.store.put([key], self._note, [0], [len(note)])


def _tensor_sizes(config: Mapping[str, Any]) -> list[int]:
    """Bytes of each tensor of a shard; [] for the scheduler."""
    if sizes := config.get("tensor_size_list"):
        return [int(size) for size in sizes]
    size = int(config.get("tensor_size") or 0)
    return [size] * (int(config.get("shard_size") or size) // size) if size else []


def _rows(addresses: Any) -> Rows:
    rows: list[list[int]] = (
        addresses.tolist() if isinstance(addresses, np.ndarray) else [list(row) for row in addresses]
    )
    return rows


def _windows(count: int, size: int, region: Region) -> Iterator[tuple[list[int], list[int]]]:
    """(numbers, offsets) of as many blocks at a time as the memory has room for."""
    step = max(len(region.array) // size, 1) if size else count
    for start in range(0, count, max(step, 1)):
        numbers = list(range(start, min(start + step, count)))
        yield numbers, [place * size for place in range(len(numbers))]
