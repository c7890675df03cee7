"""A record store of each engine, for tests of what all of them promise."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from cluster_lab import etcd_place
from record_engines import ENGINES, Reopen

from kvfuse.remote.records.api import RecordStore
from kvfuse.remote.records.etcd.store import EtcdRecords


@pytest.fixture(params=ENGINES)
def opener(request: pytest.FixtureRequest, tmp_path: Path) -> Reopen:
    """Opens the same store again and again."""
    open_store = ENGINES[request.param]
    if open_store is not None:
        return lambda: open_store(tmp_path / "records")
    # A slow machine is no fault here: what deadlines do is tested with the engine.
    options = etcd_place(request.getfixturevalue("etcd"), str(tmp_path), deadline=60.0)
    return lambda: EtcdRecords.open(options)


@pytest.fixture
async def store(opener: Reopen) -> AsyncIterator[RecordStore]:
    store = await opener()
    yield store
    await store.aclose()
