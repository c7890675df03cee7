"""kvfuse top"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from kvfuse.cli import Failure, holders
from kvfuse.cli.console import live, make_table, page_of, print_page, styled
from kvfuse.cli.mounts import kvfuse_mount_at, read_virtual
from kvfuse.cli.peers import PeerRow, peers_of, totals_of
from kvfuse.mounttable import Mounted
from kvfuse.sizes import format_size

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table
    from rich.text import Text

Stats = Mapping[str, Any]

BAR_CELLS = 20
MAP_CELLS = 60
LEGEND_ROWS = 8
"""size classes that are described, those with the most slabs"""
COLOURS = "cyan", "green", "yellow", "magenta", "blue", "bright_cyan", "bright_green", "bright_yellow"
LEVELS = " ▁▂▃▄▅▆▇█"
PEER_COLUMNS = "host", "state", "by", "received/s", "served/s", "to send", "1 MiB takes"
COLUMNS = "namespace", "kind", "hits", "requests/s", "read/s", "written/s", "evictions/s", "p50", "p99", "blocks", "use"


class Look(NamedTuple):
    """What changed from one look at the statistics of a mount to the next."""

    before: Stats
    now: Stats
    seconds: float

    def rate(self, *path: str) -> float:
        """Change per second of a number of the volume."""
        return max(0.0, _at(self.now, path) - _at(self.before, path)) / self.seconds


def _at(stats: Stats, path: Sequence[str]) -> float:
    """A number below these names; 0 where there is none yet."""
    value: Any = stats
    for name in path:
        value = (value or {}).get(name)
    return float(value or 0)


@click.command()
@click.argument("mountpoint", type=Path)
@click.option("--once", is_flag=True, help="Print one page, with means since the mount.")
@click.option(
    "--interval",
    type=click.FloatRange(0.1, 3600),
    default=1.0,
    show_default=True,
    help="Seconds between two looks.",
)
def top(mountpoint: Path, once: bool, interval: float) -> None:
    """A live page of the mount at MOUNTPOINT: its namespaces, how often they hit, how full they are, other hosts that
    it reads from, and its slabs.

    \b
    Examples:
      kvfuse top /mnt/kv
      kvfuse top /mnt/kv --once
    """
    row = kvfuse_mount_at(mountpoint)
    if once:
        _print_page(row)
    else:
        _watch(row, interval)


def _read(row: Mounted) -> Stats:
    stats = read_virtual(row.point, "stats")
    if "namespaces" not in stats:
        raise Failure(f"{row.point}: only root and the user who mounted it see its figures")
    return {**stats, "holder": holders.look_at(row)}


def _print_page(row: Mounted) -> None:
    stats = _read(row)
    print_page(page(Look({}, stats, max(stats["uptime"], 0.001)), str(row.point)))


def _watch(row: Mounted, interval: float) -> None:
    before, looked_at = _read(row), time.monotonic()
    look = Look({}, before, max(before["uptime"], 0.001))
    with suppress(KeyboardInterrupt), live(page(look, str(row.point)), screen=True) as show:
        while True:
            time.sleep(interval)
            stats, now = _read(row), time.monotonic()
            show(page(Look(before, stats, now - looked_at), str(row.point)))
            before, looked_at = stats, now


# -- the page -----------------------------------------------------------------------------------------


def page(look: Look, title: str) -> RenderableType:
    """Everything that is shown of one look."""
    slabs = _slabs(look.now["slabs"], look.now["slab_size"])
    return page_of([*_head(look, title), _namespaces(look), *_peers(look), slabs])


def _head(look: Look, title: str) -> list[Text]:
    now = look.now
    space, memory, tier = now["space"], now["memory"], now["tier"]
    lines = [
        f"{title}  up {_seconds(now['uptime'])}  {format_size(space['size'] - space['free'])} of"
        f" {format_size(space['size'])}  {space['files'] - space['files_free']:,} files",
        f"segments {_bytes(look.rate('segments', 'read_bytes'))}/s read,"
        f" {_bytes(look.rate('segments', 'written_bytes'))}/s written"
        f"  commits {look.rate('journal', 'commits'):.1f}/s  record store {look.rate('records', 'round_trips'):.1f}/s"
        f"  staged {_bytes(memory['staged_bytes'])}",
        f"tier {_bytes(tier['kept_bytes'])} of {_bytes(tier['capacity'])},"
        f" {look.rate('tier', 'hits'):.0f} hits/s  failed checksums {now['counters']['checksum_failures']}",
    ]
    if "disk" in now:
        lines.append(_disk(look, now["disk"]))
    if now.get("holder"):
        lines.append(holders.described(now["holder"]))
    return [styled(line) for line in lines]


def _disk(look: Look, disk: Stats) -> str:
    """The line of the disk tier."""
    if not disk["is_on"]:
        return "disk tier off: its disk failed, see the log"
    local, remote = look.rate("disk", "hit_bytes"), look.rate("disk", "engine_bytes")
    return (
        f"disk tier {_bytes(disk['used_bytes'])} of {_bytes(disk['capacity_bytes'])},"
        f" {_bytes(local)}/s local, {_bytes(remote)}/s remote ({_share(local, local + remote)} local)"
    )


def _namespaces(look: Look) -> Table:
    former = {row["number"]: row for row in look.before.get("namespaces", ())}
    rows = [list(_cells(Look(former.get(row["number"], {}), row, look.seconds))) for row in look.now["namespaces"]]
    return make_table(COLUMNS, rows, left=("namespace", "kind", "use"))


def _peers(look: Look) -> Iterator[RenderableType]:
    """Other hosts, if there are any."""
    if not (peers := list(peers_of(look.now))):
        return
    former = {peer.client: peer for peer in peers_of(look.before)}
    before = [former.get(peer.client, peer._replace(received=0, served=0)) for peer in peers]
    rows = [list(_peer_cells(*pair, look.seconds)) for pair in zip(before, peers, strict=True)]
    yield make_table(PEER_COLUMNS, rows, left=("host", "state", "by"))
    yield from map(styled, (*totals_of(look.now), ""))


def _peer_cells(before: PeerRow, now: PeerRow, seconds: float) -> Iterator[str]:
    yield from (now.name, now.state, now.transport)
    for count in (now.received - before.received, now.served - before.served):
        yield f"{_bytes(max(0, count) / seconds)}"
    yield _bytes(now.load)
    yield "-" if now.expected_ms is None else _latency(now.expected_ms / 1e3)


def _cells(look: Look) -> Iterator[str | Text]:
    """The cells of one namespace."""
    row, cache = look.now, look.now["cache"]
    yield row["path"]
    yield row["settings"]["kind"]
    yield _share(look.rate("cache", "present"), look.rate("cache", "asked")) if cache else "-"
    yield f"{look.rate('cache', 'asked'):,.0f}" if cache else "-"
    yield _bytes(look.rate("measures", "read_bytes"))
    yield _bytes(look.rate("measures", "written_bytes"))
    yield f"{sum(look.rate('cache', reason) for reason in ('room', 'expired', 'cleared')):,.0f}" if cache else "-"
    bounds, counts = _latencies(look)
    yield from (_latency(quantile(bounds, counts, share)) for share in (0.5, 0.99))
    yield f"{cache['blocks']:,}" if cache else "-"
    yield _bar(_at(row, ("used", "bytes")), _at(row, ("capacity",)))


def _latencies(look: Look) -> tuple[list[float], list[int]]:
    """(bounds, how many requests took at most each of them since the look before), of all operations together."""
    now = _at_each(look.now)
    before = _at_each(look.before) or {name: {"counts": [0] * len(row["counts"])} for name, row in now.items()}
    changes = [
        [new - old for new, old in zip(row["counts"], before[name]["counts"], strict=True)] for name, row in now.items()
    ]
    bounds: list[float] = next((row["bounds"] for row in now.values()), [])
    return bounds, [sum(column) for column in zip(*changes, strict=True)]


def _at_each(row: Stats) -> Mapping[str, Any]:
    found: Mapping[str, Any] = row.get("measures", {}).get("seconds", {})
    return found


def quantile(bounds: Sequence[float], counts: Sequence[int], share: float) -> float | None:
    """The value below which a share of all lies: exact to its bucket, and linear within. None where there are none."""
    left = share * sum(counts)
    if not left:
        return None
    low = 0.0
    for bound, count in zip(bounds, counts, strict=False):
        if left <= count:
            return low + (bound - low) * left / count
        left -= count
        low = bound
    return low


def _slabs(slabs: Stats, slab_size: int) -> RenderableType:
    """A map of all slabs by size class, a cell for equal parts of them: its height says how full the class is."""
    total = slabs["slabs_free"] + slabs["slabs_partial"] + slabs["slabs_full"]
    text = styled(f"{total:,} slabs of {format_size(slab_size)}  ")
    legend = styled("")
    shown = 0
    reached = 0.0
    least = min(sorted((row["slabs"] for row in slabs["classes"]), reverse=True)[:LEGEND_ROWS], default=0)
    for number, row in enumerate(slabs["classes"]):
        colour = COLOURS[number % len(COLOURS)]
        slots = row["slots_used"] + row["slots_free"]
        full = row["slots_used"] / slots if slots else 0.0
        reached += row["slabs"] / total * MAP_CELLS
        cells = max(1, round(reached) - shown)
        shown += cells
        text.append(LEVELS[max(1, round(full * (len(LEVELS) - 1)))] * cells, style=colour)
        if row["slabs"] >= least:
            legend.append(f"\n{format_size(row['slot_size']):>10}", style=colour)
            legend.append(f"  {row['slabs']:,} slabs, {row['slots_used']:,} of {slots:,} slots, {full:.0%}")
    text.append("·" * max(0, MAP_CELLS - shown), style="dim")
    return text.append(legend)


# -- one cell -----------------------------------------------------------------------------------------


def _bar(used: float, capacity: float) -> Text:
    if not capacity:
        return styled(_bytes(used))
    share = min(1.0, used / capacity)
    cells = round(share * BAR_CELLS)
    bar = styled("█" * cells, "red" if share > 0.98 else "green")
    bar.append("░" * (BAR_CELLS - cells), style="dim")
    return bar.append(f" {share:.0%} of {_bytes(capacity)}", style="default")


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.1%}" if whole else "-"


def _bytes(count: float) -> str:
    for unit in ("B", "KB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def _latency(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return f"{seconds * 1e6:.0f} µs" if seconds < 1e-3 else f"{seconds * 1e3:.1f} ms"


def _seconds(count: float) -> str:
    minutes, seconds = divmod(int(count), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}"
