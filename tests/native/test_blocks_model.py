"""The core of the block store does what a plain model does, whatever is killed, loses power, or is garbage."""

from __future__ import annotations

import gc
import random
import subprocess
import sys
from pathlib import Path

import blocks_fuzz
import blocks_killed
import numpy as np
from blocks_lab import HEAD_TABLE, MULTIPLIERS, SIZES, SLAB, TOKEN, play, put, shared
from blocks_threads import Threads

from kvfuse.native import _blocks
from kvfuse.native import blockforms as blocks
from kvfuse.native.blockforms import HEAD, PAGE
from kvfuse.slab.layout import SLAB_COUNT_MAX


def test_as_the_model(seed: int) -> None:
    counts = play(seed, 1200)
    assert counts["kills"] > 5
    assert counts["cuts"] > 5
    assert counts["packed"] > 20


def test_daemons_that_are_killed_lose_nothing(seed: int) -> None:
    program = [sys.executable, str(Path(blocks_killed.__file__)), str(seed), "32"]
    ended = subprocess.run(program, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr


def test_threads_never_see_wrong_bytes(seed: int) -> None:
    seen = Threads(seed, 1500).run()
    assert all(seen.values())


def test_garbage_is_refused(seed: int) -> None:
    blocks_fuzz.main(seed, 10)


def test_memory_stays_as_long_as_a_batch() -> None:
    """Python's collector ends what refers to itself in any order."""
    states, table, arena = (shared(size) for size in (16, blocks.table_size(16, 100), 40 * PAGE))
    core = _blocks.Core(states.ctypes.data, 1, SLAB, HEAD_TABLE, np.array(SIZES, np.uint32))
    for memory in (states, table, arena):
        core.hold(memory.ctypes.data, memory)
    core.put_space(0, 70, -1, 1, 1 << 40, 1 << 40)
    _blocks.begin_table(table, MULTIPLIERS, 16, 100, 5, 70, 1, 2, 0o444, 9)
    core.add_table(0, 0, table.ctypes.data, len(table))
    core.add_arena(0, 1, arena.ctypes.data, len(arena), -1)
    core.add_slabs(np.zeros(1, np.uint32), TOKEN)
    assert put(core, 0, 5, [(b"name", b"value")])[0] == [0]
    circle: list[object] = [core.take_dirty(1 << 60, 1 << 60), core, states, table, arena]
    circle.append(circle)
    del states, table, arena, core, memory, circle
    gc.collect()


def test_slabs_that_there_are_not_yet_take_no_memory() -> None:
    """Whatever `malloc` has learned of sizes: it takes what is small to it from what it had before, and fills it."""
    program = f"""if True:
        import ctypes, gc, pathlib
        import numpy as np
        from kvfuse.native import _blocks
        assert ctypes.CDLL(None).mallopt(-3, 1 << 30)  # M_MMAP_THRESHOLD
        resident = lambda: int(pathlib.Path("/proc/self/statm").read_text().split()[1]) * {PAGE}
        states, sizes, before = np.zeros(16, np.uint8), np.array({SIZES}, np.uint32), resident()
        for _ in range(100):
            core = _blocks.Core(states.ctypes.data, 1, {SLAB}, {HEAD_TABLE}, sizes, {SLAB_COUNT_MAX})
            assert resident() - before < {1 << 20}
    """
    subprocess.run([sys.executable, "-c", program], check=True)


def test_a_table_has_room_for_its_rows(rng: random.Random) -> None:
    """Buckets grow one at a time, from 16 to as many as there may be, and are nearly full then."""
    slabs, buckets, rows = 2, 1024, 12000
    states = shared(blocks.SLAB_STATE_SIZE * slabs)
    sizes = np.array([PAGE], np.uint32)
    core = _blocks.Core(states.ctypes.data, slabs, 8192 * PAGE, 256 * PAGE, sizes)
    core.put_space(0, 70, -1, 1, 1 << 40, 1 << 40)
    table = shared(blocks.table_size(buckets, rows))
    _blocks.begin_table(table, MULTIPLIERS, buckets, rows, 5, 70, 1, 2, 0o444, 9)
    core.add_table(0, 0, table.ctypes.data, len(table))
    found = 0
    for number in range(slabs):
        slab = np.zeros((6001, HEAD.itemsize), np.uint8)
        heads = slab.view(HEAD)
        for name, value in (("magic", blocks.HEAD_MAGIC), ("version", 1), ("state", blocks.BLOCK_HEAD), ("length", 9)):
            heads[name] = value
        for name, value in (("slot_size", PAGE), ("sequence", 1), ("directory", 5), ("name_space", 70), ("epoch", 1)):
            heads[name] = value
        for name, value in (("uid", 1), ("gid", 2), ("mode", 0o444), ("name_length", 4)):
            heads[name] = value
        heads["state"][0], heads["token"][0] = blocks.SLAB_HEAD, TOKEN
        for half in ("low", "high"):
            heads[half] = np.frombuffer(rng.randbytes(8 * len(heads)), np.uint64).reshape(-1, 1)
        for head in slab:
            blocks_fuzz.seal(head)
        loaded = core.load_slab(number, TOKEN, slab.reshape(-1))
        assert loaded == 6000
        found += loaded
    assert core.statistics()["blocks"] == found > 0.97 * buckets * blocks.BUCKET_ENTRIES
