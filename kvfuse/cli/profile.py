"""kvfuse profile"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from kvfuse.cli import Failure
from kvfuse.cli.console import live, make_table, page_of, page_size, print_json, print_page, styled
from kvfuse.cli.keyboard import keyboard
from kvfuse.cli.mounts import kvfuse_mount_at, read_virtual
from kvfuse.mounttable import Mounted
from kvfuse.sizes import format_size

if TYPE_CHECKING:
    from rich.console import RenderableType

SUMS = "calls", "misses", "failed", "bytes", "seconds"
SHOWN_ROWS = 30
COLUMNS = "process", "namespace", "operation", "calls/s", "bytes/s", "p50", "p99"
PROCESS_LENGTH = 13
ONCE_SECONDS = 5.0

CallKey = tuple[int, str, str]


class CallRate(NamedTuple):
    """What a process did in a namespace, by one operation, in some seconds."""

    pid: int
    command: str
    namespace: str
    operation: str
    calls_per_second: float
    bytes_per_second: float
    p50_seconds: float | None
    """None: times of these are not known"""
    p99_seconds: float | None
    misses: int
    failed: int


@click.command()
@click.argument("mountpoint", type=Path)
@click.option("--seconds", type=click.FloatRange(0.5, 86400), help="End after so long; with --json: 5.")
@click.option("--interval", type=click.FloatRange(0.5, 4), default=1.0, show_default=True, help="Seconds of each page.")
@click.option("--json", "as_json", is_flag=True, help="For programs: rates of --seconds, once.")
def profile(mountpoint: Path, seconds: float | None, interval: float, as_json: bool) -> None:
    """Who reads and writes what in the mount at MOUNTPOINT: by process, namespace and operation. 'q' ends it.

    Requests of the kernel are called as in FUSE (read, lookup, ...), operations of rings "ring get" and so on. "get in
    place" are blocks that a process read in shared memory by itself: each block once in 0.05 s, without times. Bytes of
    kernel reads are those asked for. Times are from when the daemon got a request to its answer; p50 and p99 are right
    to a fifth. What the kernel answers from its page cache no daemon sees.

    The daemon counts while somebody looks, and some seconds more. For root and the user who mounted it. Where the
    output is no terminal, one table is printed after --seconds.

    \b
    Examples:
      kvfuse profile /mnt/kv
      kvfuse profile /mnt/kv --seconds 60 --json > profile.json
    """
    mount = kvfuse_mount_at(mountpoint)
    if as_json or page_size()[1] is None:
        rates = _measure(mount, seconds or ONCE_SECONDS, interval)
        if as_json:
            print_json([rate._asdict() for rate in rates])
        else:
            print_page(_page(mount, rates, ""))
    else:
        _watch(mount, seconds, interval)


def _read(mount: Mounted) -> Mapping[str, Any]:
    """Sums since the profile began. Each look keeps it going."""
    content = read_virtual(mount.point, "profile").get("profile")
    if content is None:
        raise Failure(f"{mount.point}: only root and the user who mounted it see who does what")
    assert isinstance(content, Mapping)
    return content


def _measure(mount: Mounted, seconds: float, interval: float) -> list[CallRate]:
    before = _read(mount)
    deadline = time.monotonic() + seconds
    with suppress(KeyboardInterrupt):
        while (left := deadline - time.monotonic()) > 0:
            time.sleep(min(left, interval))
            now = _read(mount)
    return rates_between(before, now)


def _watch(mount: Mounted, seconds: float | None, interval: float) -> None:
    deadline = time.monotonic() + seconds if seconds is not None else float("inf")
    before = _read(mount)
    with suppress(KeyboardInterrupt), keyboard() as keys, live(_page(mount, []), screen=True) as show:
        while (left := deadline - time.monotonic()) > 0 and not keys.wait_quit(min(interval, left)):
            now = _read(mount)
            show(_page(mount, rates_between(before, now)))
            before = now


def rates_between(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[CallRate]:
    """Rates of what was called between two looks, the busiest first. After another daemon began: since then."""
    former: dict[CallKey, Mapping[str, Any]] = {}
    seconds = now["seconds"] - before["seconds"]
    if seconds > 0:
        former = {_key(row): row for row in before["rows"]}
    else:
        seconds = now["seconds"]
    rates = [_rate(former.get(_key(row)), row, max(seconds, 1e-3)) for row in now["rows"]]
    rates = [rate for rate in rates if rate.calls_per_second]
    return sorted(rates, key=lambda rate: (-rate.bytes_per_second, -rate.calls_per_second, rate[:4]))


def _key(row: Mapping[str, Any]) -> CallKey:
    return row["pid"], row["namespace"], row["operation"]


def _rate(before: Mapping[str, Any] | None, now: Mapping[str, Any], seconds: float) -> CallRate:
    change = {name: now[name] - (before[name] if before else 0) for name in SUMS}
    former = before["times"] if before else [0] * len(now["times"])
    times = [count - old for count, old in zip(now["times"], former, strict=True)]
    return CallRate(
        now["pid"],
        now["command"],
        now["namespace"],
        now["operation"],
        change["calls"] / seconds,
        change["bytes"] / seconds,
        quantile(times, 0.5),
        quantile(times, 0.99),
        change["misses"],
        change["failed"],
    )


def quantile(times: Sequence[int], share: float) -> float | None:
    """Seconds within which this share of calls was answered. ``times``: calls by class. None: there are none."""
    from kvfuse.volume.measures.profiling import class_bounds

    wanted = share * sum(times)
    for number, count in enumerate(times):
        if count and wanted <= count:
            low, high = class_bounds(number)
            return (low + (high - low) * wanted / count) / 1e9
        wanted -= count
    return None


# -- the page --------------------------------------------------------------------------------------------


def _page(mount: Mounted, rates: Sequence[CallRate], hint: str = "  q ends") -> RenderableType:
    calls, size = sum(rate.calls_per_second for rate in rates), sum(rate.bytes_per_second for rate in rates)
    head = styled(f"{mount.point}  {calls:,.0f} calls/s  {format_size(int(size))}/s{hint}")
    rows = [list(_cells(rate)) for rate in rates[:SHOWN_ROWS]]
    if not rows:
        return page_of([head, styled("nobody calls the daemon")])
    more = [styled(f"and {len(rates) - SHOWN_ROWS} more")] if len(rates) > SHOWN_ROWS else []
    return page_of([head, make_table(COLUMNS, rows, left=COLUMNS[:3]), *more])


def _cells(rate: CallRate) -> Iterator[str]:
    yield f"{rate.pid or '-'} {rate.command or '(ended)'}"[:PROCESS_LENGTH]
    yield rate.namespace or "-"
    yield rate.operation
    yield f"{rate.calls_per_second:,.0f}"
    yield format_size(int(rate.bytes_per_second)) if rate.bytes_per_second else ""
    yield from (_short(rate.p50_seconds), _short(rate.p99_seconds))


def _short(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f}us"
    return f"{seconds * 1e3:.1f}ms" if seconds < 1 else f"{seconds:.1f}s"
