"""What is measured of a namespace."""

from __future__ import annotations

from time import perf_counter

import pytest

from kvfuse import errors
from kvfuse.volume.measures.measures import LATELY_SECONDS, UNREAD, Measures


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


def test_work_is_done_in_small_pieces_beside_readers_of_other_namespaces_alone() -> None:
    readers: dict[Measures, float] = {}
    one, other = Measures(readers), Measures(readers)
    assert not one.is_beside_readers()
    readers[one] = perf_counter()
    assert not one.is_beside_readers()
    assert other.is_beside_readers()
    readers[one] -= 2 * LATELY_SECONDS
    assert not other.is_beside_readers()
