"""How long the kernel keeps calls to NVMe devices of other machines, as sysfs says.

Its defaults keep a call for ten minutes after the connection is lost. What a host has to set:

* ``fast_io_fail_tmo``: seconds after which calls fail while the kernel connects again ("off": they wait for
  ``ctrl_loss_tmo``);
* ``ctrl_loss_tmo``: seconds for which it connects again ("off": for ever); then the device is removed for good;
* ``kato``, the keep-alive: seconds after which a silent network is a lost connection (0: never).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

CONTROLLERS = Path("/sys/class/nvme")
FABRICS = frozenset({"tcp", "rdma", "fc"})
FAST_IO_FAIL_SECONDS = 3
CTRL_LOSS_SECONDS_MIN = 60
CTRL_LOSS_SECONDS = 3600


class Controller(NamedTuple):
    """A connection to NVMe devices of another machine."""

    name: str
    transport: str
    problems: tuple[str, ...]
    """in words"""
    remedies: tuple[str, ...]
    """commands"""


def controllers(deadline: float, folder: Path = CONTROLLERS) -> Iterator[Controller]:
    """All of this machine. ``deadline``: seconds after which a volume's call is over anyway."""
    for path in sorted(folder.iterdir()) if folder.is_dir() else []:
        transport = _text(path / "transport")
        if transport in FABRICS:
            rows = list(_problems(path, deadline))
            yield Controller(path.name, transport, tuple(row[0] for row in rows), tuple(row[1] for row in rows))


def _problems(path: Path, deadline: float) -> Iterator[tuple[str, str]]:
    """(problem, remedy)"""
    fail, loss, alive = [_seconds(path / name) for name in ("fast_io_fail_tmo", "ctrl_loss_tmo", "kato")]
    if fail is None:
        set_it = f"echo {FAST_IO_FAIL_SECONDS} > {path}/fast_io_fail_tmo"
        yield "fast_io_fail_tmo is not set: a lost connection holds up calls", set_it
    elif alive and fail + alive > deadline:
        yield (
            f"fast_io_fail_tmo and keep-alive, {fail:g} and {alive:g} s, are longer than segments.deadline",
            f"set segments.deadline to {fail + alive:g} or more",
        )
    if loss is not None and loss < CTRL_LOSS_SECONDS_MIN:
        set_it = f"echo {CTRL_LOSS_SECONDS} > {path}/ctrl_loss_tmo"
        yield f"ctrl_loss_tmo is {loss:g} s: then the device is gone, and somebody has to connect it again", set_it
    if alive == 0:
        yield "keep_alive_tmo is not set: nobody notices that a network is silent", "nvme connect --keep-alive-tmo=3"


def _text(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:
        return ""


def _seconds(file: Path) -> float | None:
    """None: it is off, or not there."""
    try:
        value = float(_text(file))
    except ValueError:
        return None
    return None if value < 0 else value
