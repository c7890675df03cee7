"""What a request says of its blocks, in the same words for every engine. See `hints_of` and docs/engines-hints.md."""

from __future__ import annotations

import difflib
import logging
import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from time import monotonic
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvfuse.usrbio.client import NO_HINTS, TTL_MAX, PutHints

log = logging.getLogger(__name__)

WORD = "kvfuse"
"""under which engines' requests have them"""
PRIORITIES = {"pin": 127, "demote": -128}
WORDS = ("ttl", "priority", *PRIORITIES, "prefetch")
NOTED_MAX = 100_000
"""keys that are remembered"""
NOTED_S = 600.0


class RequestHints(NamedTuple):
    """Of one request."""

    put: PutHints = NO_HINTS
    """with which its blocks are stored"""
    is_prefetch: bool = False
    """blocks that its look-up finds are brought into shared memory"""


NOTHING = RequestHints()


def hints_of(words: object, engine: str) -> RequestHints:
    """From a request's own words. Never raises: what is wrong is logged, the first time, and left out."""
    if words is None:
        return NOTHING
    if not isinstance(words, Mapping):
        _warn(engine, f"'{WORD}' of a request is {words!r:.80}: write an object of {', '.join(WORDS)}")
        return NOTHING
    ttl, priority = 0, 0
    for word, value in words.items():
        if (wrong := _what_is_wrong(word, value)) is not None:
            _warn(engine, wrong)
        elif word == "ttl":
            ttl = math.ceil(value)
        elif word == "priority":
            priority = value
        elif word in PRIORITIES and value:
            priority = PRIORITIES[word]
    return RequestHints(PutHints(ttl, priority), words.get("prefetch") is True)


def _what_is_wrong(word: object, value: object) -> str | None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if word not in WORDS:
        near = difflib.get_close_matches(str(word), WORDS, 1, 0.5)
        return f"a request has the hint {str(word)!r:.40}: {f'do you mean {near[0]!r}?' if near else WORDS}"
    if word == "ttl":
        is_right, wanted = is_number and 0 <= value <= TTL_MAX, f"0 to {TTL_MAX} seconds"  # type: ignore[operator]
    elif word == "priority":
        is_right = isinstance(value, int) and is_number and -128 <= value <= 127
        wanted = "a whole number from -128 to 127"
    else:
        is_right, wanted = isinstance(value, bool), "true or false"
    return None if is_right else f"a request's hint {word!r} is {value!r:.40}, not {wanted}"


@lru_cache(1000)
def _warn(engine: str, wrong: str) -> None:
    log.warning("kvfuse leaves out a hint from %s: %s", engine, wrong)


class Hinted:
    """Keys that were put with hints lately: requests that say the same do not store them again."""

    def __init__(self) -> None:
        self._noted: dict[bytes, tuple[PutHints, float]] = {}
        """key -> hints, and until when on the monotonic clock they count"""

    def among(self, keys: Sequence[bytes], hints: PutHints) -> npt.NDArray[np.bool_]:
        now, noted = monotonic(), self._noted
        return np.fromiter(
            ((found := noted.get(key)) is not None and found[0] == hints and now < found[1] for key in keys),
            np.bool_, len(keys),
        )  # fmt: skip

    def add(self, keys: Sequence[bytes], hints: PutHints) -> None:
        if len(self._noted) + len(keys) > NOTED_MAX:
            self._noted.clear()
        until = monotonic() + (min(hints.ttl / 2, NOTED_S) if hints.ttl else NOTED_S)
        self._noted.update(dict.fromkeys(keys, (hints, until)))
