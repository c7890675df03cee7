"""Temporary name + write + rename over an existing name: readers get one whole block, the old or the new."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from mounting import PATIENCE_S

WRITER = """
import os, sys
folder, size, stop = sys.argv[1], int(sys.argv[2]), sys.argv[3]
number = 0
while not os.path.exists(stop):
    number += 1
    temporary = f"{folder}/block.{os.getpid()}"
    fd = os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
    os.write(fd, bytes([number % 256]) * size)
    os.close(fd)
    os.rename(temporary, f"{folder}/block")
"""


@pytest.mark.parametrize("size", [4096, 70_000, 1 << 20])
def test_readers_get_whole_blocks(folder: Path, size: int) -> None:
    block, stop = folder / "block", folder / "stop"
    block.write_bytes(bytes(size))
    command = [sys.executable, "-c", WRITER, str(folder), str(size), str(stop)]
    writers = [subprocess.Popen(command) for _ in range(2)]
    kinds: set[int] = set()
    reads = 0
    try:
        while reads < 300 or len(kinds) < 5:
            reads += 1
            content = block.read_bytes()
            assert len(content) == size
            assert content == content[:1] * size
            kinds.add(content[0])
    finally:
        stop.touch()
        assert [writer.wait(30) for writer in writers] == [0, 0]
    assert sorted(os.listdir(folder)) == ["block", "stop"]


def test_only_one_of_many_creates_a_name(folder: Path) -> None:
    code = """
import os, sys
won = 0
for number in range(200):
    try:
        os.close(os.open(f"{sys.argv[1]}/{number}", os.O_CREAT | os.O_EXCL | os.O_WRONLY))
        won += 1
    except FileExistsError:
        pass
print(won)
"""
    command = [sys.executable, "-c", code, str(folder)]
    with ExitStack() as stack:
        racers = [stack.enter_context(racing(command)) for _ in range(3)]
        assert sum(int(racer.communicate(timeout=PATIENCE_S)[0]) for racer in racers) == 200


@contextmanager
def racing(command: list[str]) -> Iterator[subprocess.Popen[str]]:
    """A process that is not left behind."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()
