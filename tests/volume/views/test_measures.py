"""What is measured of a namespace."""

from __future__ import annotations

import pytest

from kvfuse import errors
from kvfuse.volume.views.measures import UNREAD, Measures


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (TimeoutError(), "deadline"),
        (errors.EngineTimeout(""), "deadline"),
        (errors.Corrupt(""), "corrupt"),
        (errors.MediumError(""), "engine"),
        (errors.PermissionDenied(""), "refused"),
        (errors.QuotaExceeded(""), "no_room"),
        (errors.NotAdmitted(""), None),
        (errors.NotFound(""), None),
    ],
)
def test_each_failure_has_one_reason(error: Exception, reason: str | None) -> None:
    measures = Measures()
    measures.failed(error, is_read=False)
    assert {name for name, count in measures.failures.items() if count} == ({reason} if reason else set())
    assert not any(measures.unread.values())
    measures.failed(error, is_read=True)
    assert {name for name, count in measures.unread.items() if count} == ({reason} & {*UNREAD})
