"""Loads a model by each loader from each side, cold and warm: the work of ``kvfuse bench model-load``."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from kvfuse.errors import KvfuseError
from kvfuse.sizes import GIB
from kvfuse_bench.daemons import cpu_seconds_of_all, kvfuse_mount
from kvfuse_bench.loading import loaders
from kvfuse_bench.loading.checkpoint import Checkpoint, write_checkpoint
from kvfuse_bench.loading.loaders import LOADERS, ON_RINGS
from kvfuse_bench.rounds import Conditions, Figure, alternate_rows

KVFUSE, DISK, TMPFS, MEMORY = "kvfuse", "disk", "tmpfs", "memory"
SIDES = KVFUSE, DISK, TMPFS, MEMORY
COLD, WARM = "cold", "warm"
PROCESSOR = "CPU s/GB"
"""of the loader and the daemon"""
TREE = Path(loaders.__file__).resolve().parents[3]


@dataclass(frozen=True)
class LoadSetting(Conditions):
    """And what is loaded, and who loads it."""

    python: Path = Path()
    """interpreter of the loaders' environment"""
    size: int = GIB
    shards: int = 4
    words: Sequence[str] = ()
    """mount options of the volume"""


class Place(NamedTuple):
    """A side: where the model is, and whose volume it is."""

    folder: Path
    checkpoint: Checkpoint
    volume: Path | None = None
    point: Path | None = None


def missing_modules(python: Path, name: str) -> str:
    """Why a loader cannot run in the environment of ``python``; "": it can."""
    modules = getattr(LOADERS[name], "modules", ())
    code = f"import {', '.join(('numpy', *modules))}"
    done = subprocess.run([python, "-c", code], env=_environment(), capture_output=True, text=True, check=False)
    return done.stderr.strip().splitlines()[-1] if done.returncode else ""


def versions(python: Path) -> str:
    """Of the loaders' packages in that environment, and of torch."""
    names = "torch", "safetensors", "runai-model-streamer", "fastsafetensors"
    code = (
        "import importlib.metadata as m\n"
        f"for n in {names!r}:\n"
        "    try: print(n, m.version(n))\n"
        "    except m.PackageNotFoundError: pass"
    )
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True)
    return ", ".join(done.stdout.split("\n")).strip(", ")


def load_once(python: Path, name: str, place: Place, logs: Path) -> dict[str, Any]:
    """Load the model once: ``seconds``, and ``checks`` of the files as they came. KvfuseError: the loader failed."""
    with _loader(python, name, place, logs) as process:
        return _ask(name, process)


def bench_loads(name: str, setting: LoadSetting) -> list[Figure]:
    """Rates of one loader, cold and warm, and processor seconds for each GB."""
    with ExitStack() as stack:
        places = _places(name, setting, stack)
        sides = {side: partial(_load, name, side, place, setting) for side, place in places.items()}
        rows = alternate_rows(sides, setting.round_count)
    figures = []
    for (state, unit), measured in rows.items():
        ours, *others = measured
        reference = others[0] if others else None
        is_time = unit == PROCESSOR
        figures.append(
            Figure(f"{name}, {state}", unit, ours, reference, less_is_better=is_time, others=tuple(others[1:]))
        )
    return figures


def _places(name: str, setting: LoadSetting, stack: ExitStack) -> dict[str, Place]:
    """Models on the sides that the loader can use, ours first."""
    size = int(setting.size * setting.scale)
    if name == "memcpy":
        return {MEMORY: _model_in(setting.memory / "model", size, setting)}
    volume, point = setting.volumes / "volume", setting.volumes / "kvfuse"
    words = (f"capacity={2 * size + GIB}", *setting.words)
    with kvfuse_mount(volume, point, *words):
        on_volume = _model_in(point / "model", size, setting)
    places = {KVFUSE: on_volume._replace(volume=volume, point=point)}
    if name not in ON_RINGS:
        places[DISK] = _model_in(setting.volumes / "model", size, setting)
        places[TMPFS] = _model_in(setting.memory / "model", size, setting)
    return places


def _model_in(folder: Path, size: int, setting: LoadSetting) -> Place:
    setting.progress(f"writing a model in {folder}")
    folder.mkdir()
    return Place(folder, write_checkpoint(folder, size, setting.shards))


def _load(name: str, side: str, place: Place, setting: LoadSetting, number: int) -> dict[tuple[str, str], float]:
    """Once with nothing in the page cache, then again: in a process of its own, from a mount of its own."""
    setting.progress(f"{name} from {side}, round {number} of {setting.round_count}")
    gigabytes = place.checkpoint.size / 1e9
    found: dict[tuple[str, str], float] = {}
    with _served(place, setting) as daemon, _loader(setting.python, name, place, setting.memory) as process:
        for state in (COLD, WARM):
            before = cpu_seconds_of_all(daemon) if daemon is not None else 0.0
            answer = _ask(name, process)
            used = cpu_seconds_of_all(daemon) - before if daemon is not None else 0.0
            if answer["checks"] != place.checkpoint.checks:
                raise KvfuseError(f"{name} loaded other bytes from {side} than were written")
            if side not in (TMPFS, MEMORY) or state == WARM:  # memory is never cold
                found[state, "GB/s"] = gigabytes / answer["seconds"]
                found[state, PROCESSOR] = (answer["processor"] + used) / gigabytes
    return found


@contextmanager
def _served(place: Place, setting: LoadSetting) -> Iterator[int | None]:
    """The folder with nothing in the page cache; the process of its daemon, where there is one."""
    _drop_cached(place.volume or place.folder)
    if place.volume is None or place.point is None:
        yield None
        return
    with kvfuse_mount(place.volume, place.point, *setting.words) as daemon:
        yield daemon.pid


def _drop_cached(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


@contextmanager
def _loader(python: Path, name: str, place: Place, logs: Path) -> Iterator[subprocess.Popen[str]]:
    """The loader's process, ready to load; a folder for what it says."""
    paths = [str(place.folder / path.name) for path in place.checkpoint.paths]
    command = [str(python), loaders.__file__, name, *paths]
    with (
        open(logs / "loader.log", "w") as log,
        subprocess.Popen(
            command, env=_environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True
        ) as process,
    ):
        try:
            _answer(name, process, Path(log.name))
            yield process
        finally:
            assert process.stdin is not None
            process.stdin.close()


def _ask(name: str, process: subprocess.Popen[str]) -> dict[str, Any]:
    assert process.stdin is not None
    process.stdin.write("load\n")
    process.stdin.flush()
    return dict(json.loads(_answer(name, process, None)))


def _answer(name: str, process: subprocess.Popen[str], log: Path | None) -> str:
    """Its next line that is an answer; loaders print, too. KvfuseError: it ended."""
    assert process.stdout is not None
    for line in process.stdout:
        if line == "ready\n" or line.startswith("{"):
            return line
    said = log.read_text().strip().splitlines() if log is not None else []
    raise KvfuseError(f"the loader {name} ended: {said[-1] if said else 'it said nothing'}")


def _environment() -> dict[str, str]:
    """kvfuse and its module for fastsafetensors, for interpreters of other environments."""
    paths = [str(TREE), str(TREE / "compat" / "fastsafetensor-3fs-reader"), os.environ.get("PYTHONPATH", "")]
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "RUNAI_STREAMER_LOG_LEVEL": "ERROR"}
