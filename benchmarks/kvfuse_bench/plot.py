"""Figures as pictures. matplotlib is an extra: it is imported when a plot is asked for."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from kvfuse.errors import ConfigError
from kvfuse.sizes import format_size
from kvfuse_bench.hosts import HostsReplay
from kvfuse_bench.outlive import GOAL_SECONDS, GOAL_SIZE, Fit, Outlived
from kvfuse_bench.peers.hot import Spread
from kvfuse_bench.scale.run import Scale

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def require_matplotlib() -> None:
    """ConfigError that says how to install it, before hours are simulated for nothing."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ConfigError("plots need matplotlib: pip install 'matplotlib>=3.8'") from error


def plot_hosts(result: HostsReplay, path: Path) -> None:
    """A PNG: blocks that each host found over time, and how many requests had their first token by when."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(15, 5), layout="constrained")
    *hits, times = figure.subplots(1, 3)
    for number, axes in enumerate(hits):
        served = result.of(number)
        minutes = [one.arrival_ms / 60_000 for one in served]
        found = [list(accumulate(one.own for one in served)), list(accumulate(one.others for one in served))]
        axes.stackplot(minutes, found, labels=["written by itself", "written by the other host"])
        axes.plot(minutes, list(accumulate(one.alone for one in served)), "k--", label="a cache of this host alone")
        name = f"Host {'AB'[number]}: blocks found"
        axes.set(title=name, xlabel="minutes of traffic", ylabel="blocks", ylim=(0, None))
        axes.legend(loc="upper left")
    ways = {"all computed": result.computed, "a cache of each host": result.alone, "the shared volume": result.shared}
    for name, seconds in ways.items():
        ordered = sorted(map(seconds, result.served))
        times.plot(ordered, [(place + 1) / len(ordered) for place in range(len(ordered))], label=name)
    title = f"Time to first token, computing {result.prefill:,.0f} tokens/s"
    times.set(title=title, xlabel="seconds", ylabel="share of requests", xscale="log", ylim=(0, 1))
    times.grid(alpha=0.3)
    times.legend()
    _save(figure, path)


def plot_spreads(spreads: Sequence[Spread], path: Path) -> None:
    """A PNG of hot blocks: the writer's share of what was sent, and who sent how much to whom where most hosts read."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(15, 5), layout="constrained")
    shares, copies, served = figure.subplots(1, 3)
    counts = [one.readers for one in spreads]
    shares.plot(counts, [one.share(0) for one in spreads], marker="o", label="the writer")
    shares.plot(counts, [1 / (count + 1) for count in counts], "k--", label="if all sent alike")
    shares.set(title="Share of what was sent", xlabel="hosts that read", ylabel="of all bytes", ylim=(0, 1.05))
    shares.set_xticks(counts)
    largest = max(spreads, key=lambda one: one.readers)
    names = ["writer", *(f"{number}" for number in range(1, largest.readers + 1))]
    copies.bar(names, [largest.copies(host) for host in range(len(names))])
    copies.axhline(largest.readers, color="k", linestyle="--", label="the writer, if nobody helped")
    copies.set(title="Copies that each host sent of a block", xlabel="host", ylabel="copies, on the average")
    copies.set_ylim(0, 1.3 * largest.readers)
    for axes in (shares, copies):
        axes.legend()
        axes.grid(alpha=0.3)
    picture = served.imshow([[size / largest.size for size in row] for row in largest.served], cmap="Blues", vmin=0)
    served.set(title="Who sent to whom", xlabel="host that reads", ylabel="host that sends")
    served.set_xticks(range(largest.readers), names[1:])
    served.set_yticks(range(len(names)), names)
    figure.colorbar(picture, ax=served, label="of the blocks")
    _save(figure, path)


def plot_outlived(results: Sequence[Outlived], adoption: Fit, path: Path) -> None:
    """A PNG of daemons that were killed: the adoption of the tier and the wait of callers over its size, and the share
    of reads from memory before and after."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(15, 5), layout="constrained")
    adoptions, waits, ratios = figure.subplots(1, 3)
    plain = [one for one in results if not one.cell.standby]
    for block_size in dict.fromkeys(one.cell.block_size for one in plain):
        rows = sorted((one for one in plain if one.cell.block_size == block_size), key=lambda one: one.arena_bytes)
        sizes, name = [one.arena_bytes / 1e9 for one in rows], f"blocks of {format_size(block_size)}"
        (line,) = adoptions.plot(sizes, [median(one.adoption) for one in rows], "o", label=name)
        far = [sizes[0] * (GOAL_SIZE / 1e9 / sizes[0]) ** (step / 20) for step in range(21)]
        fitted = [adoption.seconds(round(1e9 * size), block_size) for size in far]
        adoptions.plot(far, fitted, ":", color=line.get_color())
        waits.plot(sizes, [median(one.stalls) for one in rows], marker="o", label=f"a kill, {name}")
        ratios.plot(sizes, [one.ratio_before for one in rows], "--", color=line.get_color())
        ratios.plot(sizes, [one.ratio_after for one in rows], "o", color=line.get_color(), label=name)
    standby = sorted((one for one in results if one.cell.standby), key=lambda one: one.arena_bytes)
    for label, some, times in (
        ("a kill, with a stand-by", standby, [median(one.stalls) for one in standby]),
        ("an upgrade", plain, [median(one.upgrades) for one in plain]),
    ):
        waits.plot([one.arena_bytes / 1e9 for one in some], times, "x", label=label)
    adoptions.axhline(GOAL_SECONDS, color="red", linestyle="--", label="the goal")
    adoptions.set(title="Adoption, and a fit to 100 GB", ylabel="seconds", xscale="log", yscale="log")
    waits.set(title="Calls wait", ylabel="seconds", xscale="log", ylim=(0, None))
    ratios.set(title="Reads from memory: after a kill, before (line)", ylabel="share", xscale="log", ylim=(0, 1.05))
    for axes in (adoptions, waits, ratios):
        axes.set_xlabel("GB of arenas")
        axes.grid(alpha=0.3)
        axes.legend()
    _save(figure, path)


def plot_scales(results: Sequence[Scale], path: Path) -> None:
    """A PNG over the number of hosts: what an idle host takes, what servers and busy hosts take, times of calls."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(15, 5), layout="constrained")
    idle, busy, times = figure.subplots(1, 3)
    counts = [one.hosts for one in results]
    for name in ("quiet", "blocks", "files"):
        points = [(one.hosts, one.phase(name).costs["idle"]) for one in results if "idle" in one.phase(name).costs]
        idle.plot([hosts for hosts, _ in points], [cost.microseconds for _, cost in points], marker="o", label=name)
    for role in ("writers", "readers"):
        busy.plot(counts, [one.phase("blocks").costs[role].microseconds for one in results], marker="o", label=role)
    busy.plot(counts, [1e6 * one.phase("blocks").etcd_processor / one.phase("blocks").seconds for one in results],
              marker="s", label="etcd")  # fmt: skip
    for kind in ("present", "absent"):
        times.plot(counts, [one.look_up_ms.get(kind) for one in results], marker="o", label=f"1,000 {kind} names")
    idle.set(title="An idle host", ylabel="us of the processor a second")
    busy.set(title="While blocks are stored", ylabel="us of the processor a second", yscale="log")
    times.set(title="A look-up", ylabel="ms")
    for axes in (idle, busy, times):
        axes.set(xlabel="hosts", xscale="log")
        axes.legend()
        axes.grid(alpha=0.3)
    idle.set_ylim(0, None)
    times.set_ylim(0, None)
    _save(figure, path)


def _save(figure: Figure, path: Path) -> None:
    try:
        figure.savefig(path, format="png", dpi=100)
    except OSError as error:
        raise ConfigError(f"{path}: the plot cannot be written: {error.strerror}") from error
