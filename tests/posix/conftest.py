"""POSIX tests leave nothing behind in their mount, so all of their modules share one for each pair of engines."""

from __future__ import annotations

from pathlib import Path

import pytest
from engine_pairs import TEST_WORDS, Engines
from mounting import KvfuseMount

MOUNTS = pytest.StashKey[dict[tuple[str, ...], KvfuseMount]]()


@pytest.fixture(scope="module")
def ground(request: pytest.FixtureRequest, engines: Engines, elsewhere: Path | None) -> KvfuseMount | Path:
    """The mount of all modules, whose volume must be clean at the end; or a part of --folder."""
    if elsewhere is not None:
        return elsewhere
    mounts = request.config.stash.setdefault(MOUNTS, {})
    if engines.words not in mounts:
        mounting = engines.mounted(TEST_WORDS)
        mounts[engines.words] = mounting.__enter__()
        # The session ends what began last first, so the servers of the volume are still there.
        request.session.addfinalizer(lambda: mounting.__exit__(None, None, None))
    return mounts[engines.words]
