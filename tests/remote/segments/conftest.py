"""A RADOS store for each test. A module whose tests stop OSDs has a ``ceph`` of its own."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from cluster_lab import rados_place
from rados_lab import PATIENCE_S, SIZE, opened

from kvfuse.remote.segments.rados.librados import PoolPlace
from kvfuse.remote.segments.rados.store import RadosSegments
from kvfuse_cluster.ceph import CephServers


@pytest.fixture
def place(ceph: CephServers, request: pytest.FixtureRequest) -> PoolPlace:
    """A namespace of the test's own, and a patience that a busy machine does not try."""
    return rados_place(ceph, request.node.name, deadline=PATIENCE_S)


@pytest.fixture
async def store(place: PoolPlace) -> AsyncIterator[RadosSegments]:
    """With segment 1 of SIZE bytes."""
    async with opened(place) as store:
        await store.create(1, SIZE)
        yield store
