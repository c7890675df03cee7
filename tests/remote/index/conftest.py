"""The servers of the engines, and an index of each engine for tests of what all of them promise."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest
from index_engines import ENGINES, Opener, opener
from redis_lab import RedisServer, redis_server

from kvfuse.remote.index.api import BlockIndex


@pytest.fixture(scope="session")
def redis() -> Iterator[RedisServer]:
    """Only this process uses it. A test that stops it has it go on."""
    with redis_server() as server:
        yield server


@pytest.fixture(params=ENGINES)
def open_index(request: pytest.FixtureRequest) -> Opener:
    """Opens the index of a volume of the test's again and again."""
    return opener(request.param, request)


@pytest.fixture
async def index(open_index: Opener) -> AsyncIterator[BlockIndex]:
    index = await open_index("kv")
    yield index
    await index.aclose()


@pytest.fixture
async def other(open_index: Opener) -> AsyncIterator[BlockIndex]:
    """The same index, of another host."""
    index = await open_index("kv")
    yield index
    await index.aclose()
