"""How many requests of the kernel a block takes that is stored as a file. The figures here may only fall."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from mounting import temporary_mount
from posix_calls import opened

BLOCKS = 8
"""more than the few requests that reading the figures may take or save"""
LONG = ("entry_timeout=3600", "attr_timeout=3600", "negative_timeout=3600")
WORDS = ("volume.capacity=64MiB", "volume.segment_size=16MiB", *LONG)
BACKGROUND = {"forget"}
"""sent when the kernel likes"""


@pytest.fixture(scope="module")
def point() -> Iterator[Path]:
    with temporary_mount(WORDS) as mount:
        yield mount.point


def requests(point: Path) -> Counter[str]:
    counts = json.loads((point / ".kvfuse/stats").read_text())["fs"]["requests"]
    return Counter({kind: count for kind, count in counts.items() if kind not in BACKGROUND})


def store(folder: Path, number: int) -> None:
    """As engines do: a temporary name, one write, and its name at last."""
    temporary = folder / f"{number}.tmp"
    with opened(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY) as fd:
        os.write(fd, bytes(65_536))
    os.rename(temporary, folder / f"{number}")


def test_a_block_stored_by_way_of_a_temporary_name(point: Path) -> None:
    folder = point / "blocks"
    folder.mkdir()
    requests(point)
    first = requests(point)
    second = requests(point)
    for number in range(BLOCKS):
        store(folder, number)
    third = requests(point)
    sent = third - second - (second - first)
    print(sent)
    assert sent.total() <= 6 * BLOCKS, sent
    assert sent["write"] == sent["create"] == sent["rename"] == BLOCKS, sent
