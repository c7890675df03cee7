"""Pins of a client in the page of its connection, which the next daemon reads."""

from __future__ import annotations

import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from kvfuse.usrbio.daemon.connection_keeping import PAGE_SIZE, Page
from kvfuse.volume.tier.shared_tier import TierBlock


@pytest.fixture
def descriptor() -> Iterator[int]:
    memory = os.memfd_create("page")
    os.ftruncate(memory, PAGE_SIZE)
    yield memory
    os.close(memory)


def test_the_next_daemon_finds_what_is_held_and_makes_no_memory_of_the_rest(descriptor: int) -> None:
    tier: Any = SimpleNamespace(adopt_pin=lambda *where: where)
    page = Page(descriptor)
    for pin in range(1, 1001):
        block: Any = SimpleNamespace(arena=pin % 7, offset=4096 * pin, size=pin)
        page.add_pin(pin, block)
    for pin in range(2, 1001, 2):
        page.remove_pin(pin)
    before = os.fstat(descriptor).st_blocks
    for _ in range(2):
        found: dict[int, TierBlock] = Page(descriptor).adopt_pins(tier)
        assert found == {pin: (pin % 7, 4096 * pin, pin) for pin in range(1, 1001, 2)}
    assert os.fstat(descriptor).st_blocks == before


def test_a_connection_without_pins_has_no_memory_for_them(descriptor: int) -> None:
    Page(descriptor).words[0] = 5
    assert Page(descriptor).adopt_pins(SimpleNamespace()) == {}  # type: ignore[arg-type]
    assert os.fstat(descriptor).st_blocks * 512 == os.sysconf("SC_PAGESIZE")
