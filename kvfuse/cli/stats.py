"""kvfuse stats"""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import click

from kvfuse.cli.console import flatten, live, make_table, page_of, print_json, print_object, styled
from kvfuse.cli.keyboard import keyboard
from kvfuse.cli.mounts import kvfuse_mount_at, read_virtual


def rate_rows(before: dict[str, Any], now: dict[str, Any], seconds: float) -> list[tuple[str, Any, float | None]]:
    """(name, value, change per second), for numbers that moved."""
    rows: list[tuple[str, Any, float | None]] = []
    for name, value in now.items():
        old = before.get(name)
        numbers = type(value) in (int, float) and type(old) in (int, float)
        moved = numbers and value != old and seconds > 0
        rows.append((name, value, round((value - old) / seconds, 1) if moved else None))
    return rows


@click.command()
@click.argument("mountpoint", type=Path)
@click.option("--json", "as_json", is_flag=True, help="For programs: one object.")
@click.option("--watch", is_flag=True, help="Show it live, with changes per second, until q.")
@click.option(
    "--interval",
    type=click.FloatRange(0.1, 3600),
    default=1.0,
    show_default=True,
    help="Seconds between two looks of --watch.",
)
def stats(mountpoint: Path, as_json: bool, watch: bool, interval: float) -> None:
    """Counters and gauges of the mount at MOUNTPOINT, as in MOUNTPOINT/.kvfuse/stats.

    \b
    Examples:
      kvfuse stats /mnt/kv --watch
      kvfuse stats /mnt/kv --json | jq .space
    """
    point = kvfuse_mount_at(mountpoint).point
    if watch:
        _watch(point, interval)
        return
    content = read_virtual(point, "stats")
    if as_json:
        print_json(content)
    else:
        print_object(content, str(point))


def _watch(point: Path, interval: float) -> None:
    before: dict[str, Any] = {}
    looked_at = time.monotonic()
    with suppress(KeyboardInterrupt), keyboard() as keys, live(styled(point)) as show:
        is_over = False
        while not is_over:
            content = {
                name: value for name, value in flatten(read_virtual(point, "stats")) if not isinstance(value, list)
            }
            now = time.monotonic()
            rows = rate_rows(before, content, now - looked_at)
            show(page_of([styled(point, "italic"), make_table(["name", "value", "per second"], rows)]))
            before, looked_at = content, now
            is_over = keys.wait_quit(interval)
