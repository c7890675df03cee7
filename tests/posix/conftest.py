"""POSIX tests leave nothing behind in their mount, so all of their modules share one for each pair of engines.

With ``--killer`` these mounts outlive their daemon, which is killed again and again while the tests run.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest
from engine_pairs import BLOCKS, TEST_WORDS, Engines
from killer import Killer
from kinds_daemon import answering
from mounting import FOREGROUND, KvfuseMount

MOUNTS = pytest.StashKey[dict[tuple[str, ...], KvfuseMount]]()
OUTLIVE = ("outlive", "standby")
"""-o words beside the killer: where the next daemon waits in memory there is time for more kills"""
PAUSE = (0.1, 0.8)
"""seconds between kills"""
DIFFERENT = "moves_the_times_of_the_file -chown", "reading_moves_an_access_time -file"
"""tests, and words of their parameters, of what is meant to be different in a folder of blocks (docs/blocks.md)"""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if BLOCKS in item.nodeid and any(all(word in item.nodeid for word in text.split()) for text in DIFFERENT):
            item.add_marker(pytest.mark.xfail(reason="docs/blocks.md says so", strict=True))


@pytest.fixture(scope="module")
def ground(request: pytest.FixtureRequest, engines: Engines, elsewhere: Path | None) -> KvfuseMount | Path:
    """The mount of all modules, whose volume must be clean at the end; or a part of --folder."""
    if elsewhere is not None:
        return elsewhere
    mounts = request.config.stash.setdefault(MOUNTS, {})
    if engines.words not in mounts:
        mounting = beside_killer(engines) if request.config.getoption("--killer") else plain_mount(engines, request)
        mounts[engines.words] = mounting.__enter__()
        # The session ends what began last first, so the servers of the volume are still there.
        request.session.addfinalizer(lambda: mounting.__exit__(None, None, None))
    return mounts[engines.words]


def plain_mount(engines: Engines, request: pytest.FixtureRequest) -> AbstractContextManager[KvfuseMount]:
    kinds: str | None = request.config.getoption("--kinds")
    command, words = (FOREGROUND, ()) if kinds is None else (answering(kinds.split(",")), ("readers=2",))
    return engines.mounted((*TEST_WORDS, *words), command)


@contextmanager
def beside_killer(engines: Engines) -> Iterator[KvfuseMount]:
    with engines.mounted((*TEST_WORDS, *OUTLIVE)) as mount:
        with Killer([mount], int(os.environ["KVFUSE_TEST_SEED"]), PAUSE) as killer:
            yield mount
        print(killer)
