"""kvfuse top"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import click

from kvfuse.cli import Failure, holders
from kvfuse.cli.console import fill_lines, live, make_table, page_of, page_size, print_page, shorten, styled
from kvfuse.cli.keyboard import keyboard
from kvfuse.cli.mounts import kvfuse_mount_at, read_virtual
from kvfuse.cli.peers import PeerRow, peers_of, totals_of
from kvfuse.mounttable import Mounted
from kvfuse.sizes import format_size

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.text import Text

Stats = Mapping[str, Any]
T = TypeVar("T")

BAR_CELLS = 20
SMALL_BAR_CELLS = 4
MAP_CELLS = 60
LEGEND_ROWS = 8
"""size classes that are described, those with the most slabs"""
COLOURS = "cyan", "green", "yellow", "magenta", "blue", "bright_cyan", "bright_green", "bright_yellow"
LEVELS = " ▁▂▃▄▅▆▇█"
WIDE = 1000
TABLE_LINES = 3
"""of a table beside its rows"""
NAME_MIN = 8
"""characters of a name"""
COLUMNS = {
    "namespace": (0, 0),
    "kind": (122, 6),
    "hits": (0, 6),
    "req/s": (48, 6),
    "read/s": (60, 7),
    "write/s": (70, 7),
    "evict/s": (96, 7),
    "p50": (130, 6),
    "p99": (80, 6),
    "blocks": (108, 11),
    "use": (36, 9),
}
"""column -> (width of a terminal from which on it is shown, its own width). The first one has what is left"""
PEER_COLUMNS = {
    "host": (0, 0),
    "state": (44, 22),
    "by": (100, 9),
    "received/s": (60, 10),
    "served/s": (76, 8),
    "to send": (110, 7),
    "1 MiB takes": (92, 11),
}
HEAD_WIDTH = 120
"""of the lines above the tables, at most"""
BAR_WIDTH = 140
"""of a terminal from which on bars are long and say of how much"""
LONG_BAR = 29
"""characters that such a bar has more"""


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
    it reads from, and its slabs. q ends it; a wider terminal shows more columns.

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
    width, _ = page_size()
    print_page(page(Look({}, stats, max(stats["uptime"], 0.001)), str(row.point), width))


def _watch(row: Mounted, interval: float) -> None:
    before, looked_at = _read(row), time.monotonic()
    look, title = Look({}, before, max(before["uptime"], 0.001)), str(row.point)
    first = page(look, title, *page_size())
    with suppress(KeyboardInterrupt), keyboard() as keys, live(first, screen=True) as show:
        while not keys.wait_quit(interval):
            stats, now = _read(row), time.monotonic()
            show(page(Look(before, stats, now - looked_at), title, *page_size()))
            before, looked_at = stats, now


# -- the page -----------------------------------------------------------------------------------------


def page(look: Look, title: str, width: int = WIDE, height: int | None = None) -> RenderableType:
    """What is shown of one look, in so many columns and lines; None: as many lines as it takes.

    Where lines are short, the largest size classes, the busiest namespaces and hosts that have most to do are shown.
    """
    head = _head(look, title, width)
    left = WIDE if height is None else max(0, height - len(head) - TABLE_LINES - 2)
    slabs = _slabs(look.now["slabs"], look.now["slab_size"], width, min(LEGEND_ROWS, max(1, left // 3)))
    left -= slabs.plain.count("\n") + 1
    peers = list(_peers(look, width, max(1, left // 3)))
    if peers and height is not None:
        left -= TABLE_LINES + max(1, left // 3) + len(peers) - 1
    return page_of([*head, *_namespaces(look, width, max(1, left)), *peers, slabs])


def _shown(columns: Mapping[str, tuple[int, int]], width: int) -> tuple[list[str], int]:
    """The columns that a terminal of this width has room for, and the width of the first one."""
    names = [name for name, (least, _) in columns.items() if width >= least]
    taken = 2 + sum(columns[name][1] + 3 for name in names[1:]) + (LONG_BAR if width >= BAR_WIDTH else 0)
    return names, max(NAME_MIN, width - taken)


def _busiest(rows: Sequence[T], count: int, how_busy: Callable[[T], Any]) -> list[T]:
    """At most ``count`` of them, the first one among them, in their order."""
    if len(rows) <= count:
        return list(rows)
    places = sorted(range(1, len(rows)), key=lambda place: how_busy(rows[place]), reverse=True)
    return [rows[place] for place in sorted([0, *places[: max(0, count - 1)]])]


def _head(look: Look, title: str, width: int) -> list[Text]:
    now = look.now
    space, memory, tier = now["space"], now["memory"], now["tier"]
    facts = [
        f"up {_seconds(now['uptime'])}",
        f"{format_size(space['size'] - space['free'])} of {format_size(space['size'])}",
        f"{space['files'] - space['files_free']:,} files",
        f"segments {_bytes(look.rate('segments', 'read_bytes'))}/s read,"
        f" {_bytes(look.rate('segments', 'written_bytes'))}/s written",
        f"commits {look.rate('journal', 'commits'):.1f}/s",
        f"record store {look.rate('records', 'round_trips'):.1f}/s",
        f"staged {_bytes(memory['staged_bytes'])}",
        f"tier {_bytes(tier['kept_bytes'])} of {_bytes(tier['capacity'])}, {look.rate('tier', 'hits'):.0f} hits/s",
        f"failed checksums {now['counters']['checksum_failures']}",
    ]
    if "disk" in now:
        facts.append(_disk(look, now["disk"]))
    if now.get("store") and now["store"].get("cold"):
        facts.append(_cold(look, now["store"]["cold"]))
    lines = fill_lines([shorten(title, max(NAME_MIN, width)), *facts], min(width, HEAD_WIDTH))
    if now.get("holder"):
        lines += fill_lines(holders.described(now["holder"]).split("; "), min(width, HEAD_WIDTH))
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


def _cold(look: Look, cold: Stats) -> str:
    """The line of the cold tier."""
    if cold["failure"] is not None:
        return "cold tier: its bucket does not answer, see the log"
    if not cold["is_loaded"]:
        return "cold tier: its objects are being looked at"
    out, back = (look.rate("store", "cold", f"{way}_bytes") for way in ("demoted", "promoted"))
    return (
        f"cold tier {_bytes(cold['used_bytes'])} of {_bytes(cold['capacity'])},"
        f" {_bytes(out)}/s out, {_bytes(back)}/s back"
    )


def _namespaces(look: Look, width: int, count: int) -> Iterator[RenderableType]:
    former = {row["number"]: row for row in look.before.get("namespaces", ())}
    looks = [Look(former.get(row["number"], {}), row, look.seconds) for row in look.now["namespaces"]]
    shown = _busiest(looks, count if len(looks) <= count else count - 1, _how_busy)
    names, name_width = _shown(COLUMNS, width)
    rows = []
    for one in shown:
        cells = dict(zip(COLUMNS, _cells(one, name_width, is_wide=width >= BAR_WIDTH), strict=True))
        rows.append([cells[name] for name in names])
    yield make_table(names, rows, left=("namespace", "kind", "use"))
    if more := len(looks) - len(shown):
        yield styled(f"and {more} other namespaces", "dim")


def _how_busy(look: Look) -> tuple[float, float]:
    moved = look.rate("measures", "read_bytes") + look.rate("measures", "written_bytes")
    return moved + look.rate("cache", "asked"), _at(look.now, ("used", "bytes"))


def _peers(look: Look, width: int, count: int) -> Iterator[RenderableType]:
    """Other hosts, if there are any."""
    if not (peers := list(peers_of(look.now))):
        return
    former = {peer.client: peer for peer in peers_of(look.before)}
    shown = _busiest(peers, count, lambda peer: peer.load + peer.received + peer.served)
    names, name_width = _shown(PEER_COLUMNS, width)
    rows = []
    for peer in shown:
        before = former.get(peer.client, peer._replace(received=0, served=0))
        cells = dict(zip(PEER_COLUMNS, _peer_cells(before, peer, look.seconds, name_width, width), strict=True))
        rows.append([cells[name] for name in names])
    yield make_table(names, rows, left=("host", "state", "by"))
    more = [f"and {len(peers) - len(shown)} other hosts"] if len(peers) > len(shown) else []
    for line in (*more, *totals_of(look.now), ""):
        yield from map(styled, fill_lines(line.split("; "), width))


def _peer_cells(before: PeerRow, now: PeerRow, seconds: float, name_width: int, width: int) -> Iterator[str]:
    yield shorten(now.name, name_width)
    yield now.state if width >= BAR_WIDTH else shorten(now.state, PEER_COLUMNS["state"][1])
    yield now.transport
    for count in (now.received - before.received, now.served - before.served):
        yield f"{_bytes(max(0, count) / seconds)}"
    yield _bytes(now.load)
    yield "-" if now.expected_ms is None else _latency(now.expected_ms / 1e3)


def _cells(look: Look, name_width: int, *, is_wide: bool) -> Iterator[str | Text]:
    """The cells of one namespace."""
    row, cache = look.now, look.now["cache"]
    yield shorten(row["path"], name_width)
    yield row["settings"]["kind"]
    yield _share(look.rate("cache", "present"), look.rate("cache", "asked")) if cache else "-"
    yield _count(look.rate("cache", "asked")) if cache else "-"
    yield _bytes(look.rate("measures", "read_bytes"))
    yield _bytes(look.rate("measures", "written_bytes"))
    yield _count(sum(look.rate("cache", reason) for reason in ("room", "expired", "cleared"))) if cache else "-"
    bounds, counts = _latencies(look)
    yield from (_latency(quantile(bounds, counts, share)) for share in (0.5, 0.99))
    yield f"{cache['blocks']:,}" if cache else "-"
    yield _bar(_at(row, ("used", "bytes")), _at(row, ("capacity",)), is_wide=is_wide)


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


def _slabs(slabs: Stats, slab_size: int, width: int, legend_rows: int) -> Text:
    """A map of all slabs by size class, a cell for equal parts of them: its height says how full the class is."""
    total = slabs["slabs_free"] + slabs["slabs_partial"] + slabs["slabs_full"]
    text = styled(f"{total:,} slabs of {format_size(slab_size)}  ")
    cell_count = max(10, min(MAP_CELLS, width - len(text) - len(slabs["classes"])))
    legend = styled("")
    shown = 0
    reached = 0.0
    described = sorted(range(len(slabs["classes"])), key=lambda place: -slabs["classes"][place]["slabs"])[:legend_rows]
    for number, row in enumerate(slabs["classes"]):
        colour = COLOURS[number % len(COLOURS)]
        slots = row["slots_used"] + row["slots_free"]
        full = row["slots_used"] / slots if slots else 0.0
        reached += row["slabs"] / total * cell_count
        cells = max(1, round(reached) - shown)
        shown += cells
        text.append(LEVELS[max(1, round(full * (len(LEVELS) - 1)))] * cells, style=colour)
        if number in described:
            legend.append(f"\n{format_size(row['slot_size']):>10}", style=colour)
            legend.append(f"  {row['slabs']:,} slabs, {row['slots_used']:,} of {slots:,} slots, {full:.0%}")
    text.append("·" * max(0, cell_count - shown), style="dim")
    return text.append(legend)


# -- one cell -----------------------------------------------------------------------------------------


def _bar(used: float, capacity: float, *, is_wide: bool) -> Text:
    if not capacity:
        return styled(_bytes(used))
    share = min(1.0, used / capacity)
    bar_cells = BAR_CELLS if is_wide else SMALL_BAR_CELLS
    cells = round(share * bar_cells)
    bar = styled("█" * cells, "red" if share > 0.98 else "green")
    bar.append("░" * (bar_cells - cells), style="dim")
    return bar.append(f" {share:.0%} of {_bytes(capacity)}" if is_wide else f" {share:.0%}", style="default")


def _count(rate: float) -> str:
    """A number of at most six characters."""
    for unit in ("", "k", "M"):
        if rate < 10_000:
            return f"{rate:,.0f}{unit}"
        rate /= 1000
    return f"{rate:,.0f}G"


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.1%}" if whole else "-"


def _bytes(count: float) -> str:
    """At most seven characters."""
    for unit in ("B", "KB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" or count >= 100 else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def _latency(seconds: float | None) -> str:
    """At most six characters, of less than a quarter of an hour."""
    if seconds is None:
        return "-"
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f} µs"
    if seconds < 1:
        return f"{seconds * 1e3:.0f} ms" if seconds >= 0.01 else f"{seconds * 1e3:.1f} ms"
    return f"{seconds:.1f} s"


def _seconds(count: float) -> str:
    minutes, seconds = divmod(int(count), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}"
