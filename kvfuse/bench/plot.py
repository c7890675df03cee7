"""Simulations as a picture. matplotlib is an extra: it is imported when a plot is asked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kvfuse.bench.simulate import Simulation
from kvfuse.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def require_matplotlib() -> None:
    """ConfigError that says how to install it, before hours are simulated for nothing."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ConfigError("plots need matplotlib: pip install 'kvfuse[plot]'") from error


def plot(results: Sequence[Simulation], path: Path) -> None:
    """A PNG: hit ratio over capacity, blocks written over capacity, hit ratio over time at the middle capacity."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(15, 5), layout="constrained")
    by_capacity, written, by_time = figure.subplots(1, 3)
    _over_capacity(by_capacity, results, lambda result: result.hit_ratio)
    by_capacity.set(title="Hit ratio over capacity", ylabel="hit ratio", ylim=(0, None))
    _over_capacity(written, results, lambda result: result.written / 1000)
    written.set(title="Written over capacity", ylabel="thousand blocks written", ylim=(0, None))
    _over_time(by_time, results)
    by_capacity.legend()
    try:
        figure.savefig(path, format="png", dpi=100)
    except OSError as error:
        raise ConfigError(f"{path}: the plot cannot be written: {error.strerror}") from error


def _over_capacity(axes: Axes, results: Sequence[Simulation], figure_of: Callable[[Simulation], float]) -> None:
    for name in dict.fromkeys(result.setup.name for result in results):
        line = sorted((result.setup.capacity, figure_of(result)) for result in results if result.setup.name == name)
        axes.plot(*zip(*line, strict=True), marker="o", label=name)
    axes.set(xlabel="capacity (blocks)", xscale="log")
    axes.grid(alpha=0.3)


def _over_time(axes: Axes, results: Sequence[Simulation]) -> None:
    capacities = sorted({result.setup.capacity for result in results})
    capacity = capacities[len(capacities) // 2]
    for result in results:
        if result.setup.capacity == capacity:
            minutes_and_ratios = [(seconds / 60, ratio) for seconds, ratio in result.hit_ratios()]
            axes.plot(*zip(*minutes_and_ratios, strict=True), label=result.setup.name)
    axes.set(title=f"Hit ratio over time, {capacity:,} blocks", xlabel="minutes", ylabel="hit ratio", ylim=(0, None))
    axes.grid(alpha=0.3)
