"""What tests of all engines' adapters have: the engine of the module (``test_ENGINE.py``), and mounts."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from engine_host import EngineHost
from engine_mounts import WORDS
from mounting import KvfuseMount, temporary_mount


@pytest.fixture(scope="module")
def host(request: pytest.FixtureRequest) -> Iterator[EngineHost]:
    engine = request.module.__name__.removeprefix("test_")
    with EngineHost(engine, f"{engine}_driver.py") as host:
        yield host


@pytest.fixture(scope="module")
def mount() -> Iterator[KvfuseMount]:
    with temporary_mount(WORDS) as mount:
        yield mount


@pytest.fixture
def own_mount() -> Iterator[KvfuseMount]:
    """For tests that unmount it, or kill its daemon."""
    with temporary_mount(WORDS) as mount:
        yield mount
