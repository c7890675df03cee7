"""What the C library keeps of memory that was freed goes back to the machine."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import re, sys
from pathlib import Path
from kvfuse.cli.heap import Heap

MIB = 1 << 20

def resident():
    return int(re.search(r"RssAnon:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) >> 10

heap = Heap()
assert not heap.is_due
before = resident()
del [bytearray(30 * MIB)][:]  # from now on pieces of up to 30 MiB are parts of the heap
for _ in range(2):
    pieces, between = [], []
    for _ in range(200):
        pieces.append(bytearray(b"x") * MIB)
        between.append(bytearray(b"x") * 600)
    assert not heap.is_due, "all of it is used"
    pieces.clear()
    assert resident() > before + 150, "the library keeps it: this test has something to find"
    assert heap.is_due
    heap.give_back()
    assert not heap.is_due
    assert resident() < before + 20
print("given back")
"""


def test_what_is_free_in_the_heap_is_given_back_more_than_once() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False)
    assert done.stdout == "given back\n", done.stderr
