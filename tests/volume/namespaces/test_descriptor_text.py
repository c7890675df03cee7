"""What may be a descriptor, how it is kept, and how two compare."""

from __future__ import annotations

import pytest

from kvfuse.errors import InvalidArgument
from kvfuse.volume.namespaces.descriptors import SIZE_MAX, difference, is_newer, parse_descriptor

BAD = [
    "[]",
    "{}",
    "no",
    '{"a": 1.5}',
    '{"a": null}',
    '{"a": true}',
    '{"a": {"b": 1}}',
    '{"version": "1"}',
    "[" * 10_000,
]


def test_it_is_kept_in_one_way_without_spaces() -> None:
    kept = parse_descriptor('{ "model" : "Llama 3", "a": 1 }')
    assert kept == '{"a":1,"model":"Llama\\u00203"}'
    assert parse_descriptor(kept) == kept
    assert parse_descriptor("") == ""


@pytest.mark.parametrize("text", [*BAD, '{"a": "' + SIZE_MAX * "x" + '"}'])
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(InvalidArgument):
        parse_descriptor(text)


def test_a_later_version_has_the_same_fields() -> None:
    first, second, other = map(parse_descriptor, ('{"a":1}', '{"a":1,"version":2}', '{"a":2,"version":3}'))
    assert is_newer(second, first)
    assert not is_newer(first, second)
    assert not is_newer(second, second)
    assert not is_newer(other, second)
    assert difference(first, other) == "a is 1, not 2, version is absent, not 3"
