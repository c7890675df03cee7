"""Two mounts that read from each other, for tests of what becomes of readers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from peer_load import Pair, pairs

from kvfuse_cluster.etcd import EtcdServers


@pytest.fixture(scope="module")
def shared_pair(etcd: EtcdServers) -> Iterator[Pair]:
    with pairs(etcd) as pair:
        yield pair


@pytest.fixture
def pair(shared_pair: Pair) -> Iterator[Pair]:
    """Both are well at the beginning of each test."""
    with shared_pair.well():
        yield shared_pair
