"""Disks of this machine are waited for: a busy one is late too often for tests that count what engines are asked."""

import pytest
from disk_lab import PATIENCE_S

from kvfuse.volume.disk import disk_tier


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_tier, "PATIENCE_MIN", PATIENCE_S)
    monkeypatch.setattr(disk_tier, "PATIENCE_MAX", PATIENCE_S)
