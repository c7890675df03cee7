"""What an engine's adapter does: batches of blocks straight between the engine's own memory and the volume."""

from __future__ import annotations

from contextlib import closing
from functools import partial
from hashlib import blake2b
from pathlib import Path

from kvfuse.connectors.steady_store import Region, SteadyStore
from kvfuse.errors import KvfuseError
from kvfuse_bench.engines.files import EXISTS_COUNT, READS, whole
from kvfuse_bench.engines.measuring import Memory, Meter
from kvfuse_bench.mountpoint import mount_of

NAMESPACE = "blocks"
KEY_SIZE = 32
DEADLINE_S = 60.0
"""nothing here is to be a miss"""


def adapter(folder: Path, meter: Meter, memory: Memory, *, batch: int) -> None:
    """Put and get ``batch`` blocks a call. 96 names asked for in one call, before and after.

    All rounds have one namespace, as an engine has: the tier's memory, which belongs to it, is warm from the second on.
    """
    mount = mount_of(folder)
    namespace = str((folder.parent / NAMESPACE).relative_to(mount))
    keys, absent = _keys("block", memory.count), _keys("absent", EXISTS_COUNT)
    with closing(SteadyStore(mount, namespace, descriptor={"made by": "bench engines"}, deadline=DEADLINE_S)) as store:
        source, target = store.register(memory.source), store.register(memory.target)
        batches = [range(memory.count)[start : start + batch] for start in range(0, memory.count, batch)]
        _ask(store, meter, f"{EXISTS_COUNT} absent", absent, 0)
        with meter.phase("write") as phase:
            for blocks in batches:
                phase.run(partial(_put, store, keys, source, blocks, memory.block_size), len(blocks))
        asked = [keys[index % memory.count] for index in range(EXISTS_COUNT)]
        _ask(store, meter, f"{EXISTS_COUNT} exist", asked, EXISTS_COUNT)
        for name in READS:
            with meter.phase(name) as phase:
                for blocks in batches:
                    phase.run(partial(_get, store, keys, target, blocks, memory.block_size), len(blocks))
        store.delete(keys)


def _keys(kind: str, count: int) -> list[bytes]:
    """Of one length, as hashes are."""
    return [blake2b(f"{kind} {index}".encode(), digest_size=KEY_SIZE).digest() for index in range(count)]


def _ask(store: SteadyStore, meter: Meter, name: str, keys: list[bytes], expected: int) -> None:
    def ask() -> int:
        if (found := int(store.exists(keys).sum())) != expected:
            raise KvfuseError(f"{found} of {len(keys)} blocks are there instead of {expected}")
        return 0

    with meter.phase(name) as phase:
        phase.run(ask, len(keys))


def _put(store: SteadyStore, keys: list[bytes], region: Region, blocks: range, size: int) -> int:
    offsets = [index * size for index in blocks]
    stored = store.put(keys[blocks.start : blocks.stop], region, offsets, [size] * len(blocks))
    return whole(int(stored.sum()) * size, len(blocks) * size)


def _get(store: SteadyStore, keys: list[bytes], region: Region, blocks: range, size: int) -> int:
    offsets = [index * size for index in blocks]
    sizes = store.get(keys[blocks.start : blocks.stop], region, offsets, [size] * len(blocks))
    return whole(int(sizes.sum()), len(blocks) * size)
