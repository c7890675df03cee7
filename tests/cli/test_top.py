"""kvfuse top: what a page says, and the figures in it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from cli_lab import Place, assert_fails, kvfuse
from mounting import wait_until
from rich.console import Console

from kvfuse.cli.mounts import read_virtual
from kvfuse.cli.top import Look, page, quantile

CELLS = " ▁▂▃▄▅▆▇█·"


@pytest.fixture
def stats(place: Place) -> dict[str, Any]:
    """Of a mount with some files of two size classes."""
    place.mount()
    for number in range(20):
        (place.point / f"file{number}").write_bytes(bytes(10_000))
    (place.point / "large").write_bytes(bytes(1 << 20))
    wait_until(lambda: len(read_virtual(place.point, "stats")["slabs"]["classes"]) >= 2, "two size classes")
    return read_virtual(place.point, "stats")


def shown(look: Look) -> str:
    console = Console(width=200, highlight=False)
    with console.capture() as capture:
        console.print(page(look, "/mnt/kv"))
    return capture.get()


def row_of(text: str, path: str) -> str:
    (row,) = [line for line in text.splitlines() if line.split()[:1] == [path] and "mnt" not in line]
    return row


def test_once_prints_a_page(place: Place) -> None:
    place.mount()
    (place.point / "file").write_bytes(bytes(100_000))
    done = kvfuse("top", place.point, "--once")
    assert done.returncode == 0, done.stderr
    assert str(place.point) in done.stdout
    assert row_of(done.stdout, "/").split()[1] == "files"
    assert "slabs of" in done.stdout


def test_what_is_no_mount_is_refused(place: Place) -> None:
    assert_fails(kvfuse("top", place.point, "--once"), 5, "not a mount point")


def test_a_cache_shows_its_rates_and_its_use(stats: dict[str, Any]) -> None:
    row = stats["namespaces"][0]
    row["settings"]["kind"] = "cache"
    row["cache"] = {"asked": 100, "present": 90, "room": 0, "expired": 0, "cleared": 0, "blocks": 1234}
    row["used"], row["capacity"] = {"bytes": 15 * 10**9, "files": 1234}, 20 * 10**9
    before = copy.deepcopy(stats)
    row["cache"] |= {"asked": 300, "present": 140, "room": 20, "expired": 10}
    row["measures"]["read_bytes"] += 5_000_000_000
    row["measures"]["seconds"]["get"]["counts"][4] += 1000
    text = row_of(shown(Look(before, stats, 2.0)), "/")
    for cell in ("25.0%", " 100 ", "2.5 GB", " 15 ", " 650 µs", "993 µs", "1,234", "75% of 20.0 GB"):
        assert cell in text, (cell, text)


def test_the_slab_map_is_whole(stats: dict[str, Any]) -> None:
    text = shown(Look({}, stats, 1.0))
    (line,) = [line for line in text.splitlines() if "slabs of" in line]
    assert 60 <= sum(letter in CELLS.strip() for letter in line) <= 60 + len(stats["slabs"]["classes"])
    for row in stats["slabs"]["classes"]:
        slots = row["slots_used"] + row["slots_free"]
        assert f"{row['slabs']} slabs, {row['slots_used']} of {slots} slots" in text


def test_names_that_no_terminal_can_show(stats: dict[str, Any]) -> None:
    stats["namespaces"][0]["path"] = "/\udcff[bold]"
    assert r"/\xff[bold]" in shown(Look({}, stats, 1.0))


@pytest.mark.parametrize(
    ("counts", "share", "value"),
    [
        ([0, 0, 0], 0.5, None),
        ([10, 0, 0], 0.5, 0.5),
        ([10, 10, 0], 0.5, 1.0),
        ([10, 10, 0], 0.75, 2.0),
        ([0, 0, 5], 0.99, 3.0),
    ],
)
def test_quantiles(counts: list[int], share: float, value: float | None) -> None:
    assert quantile([1.0, 3.0], counts, share) == value
