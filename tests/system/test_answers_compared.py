"""Whether C answers the kernel or Python makes no difference: the same calls get the same answers, errno by errno."""

from __future__ import annotations

import json
import random
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
from file_calls import Calls, made_side
from kinds_daemon import answering
from mounting import FOREGROUND, KvfuseMount, temporary_mount, wait_until

from kvfuse.volume.blocks.kernel_answers import KINDS

WORDS = (
    "volume.capacity=256MiB",
    "volume.segment_size=64MiB",
    "entry_timeout=0",
    "attr_timeout=0",
    "negative_timeout=0",
)
"""what the kernel keeps depends on when it asked"""
STEPS = 1000


def door(mount: KvfuseMount) -> dict[str, Any]:
    return dict(json.loads((mount.point / ".kvfuse/stats").read_text())["fs"])


@contextmanager
def mounts_of(choices: Sequence[Collection[str] | None]) -> Iterator[list[KvfuseMount]]:
    """A mount for each choice of kinds that C answers; None: no thread reads requests for it."""
    with ExitStack() as stack:
        mounts = []
        for kinds in choices:
            command = FOREGROUND if kinds is None or kinds == KINDS else answering(kinds)
            words = (*WORDS, f"readers={0 if kinds is None else 2}")
            mounts.append(stack.enter_context(temporary_mount(words, command)))
        yield mounts


def compare(choices: Sequence[Collection[str] | None], seed: int, steps: int) -> None:
    """Nothing differs; C answered of each kind that it may, and no handle is left."""
    with mounts_of(choices) as mounts:
        with ExitStack() as stack:
            sides = [stack.enter_context(made_side(mount.point)) for mount in mounts]
            calls = Calls(sides, seed)
            for _ in range(steps):
                calls.step()
            calls.end()
        for kinds, mount in zip(choices, mounts, strict=True):
            wait_until(lambda mount=mount: door(mount)["open_handle_count"] == 0, "closes")
            found = door(mount)
            # Where some are Python's, others of the same file may be, too.
            answered = {kind for kind in KINDS if found["answered_in_c"][kind]}
            assert answered == KINDS if kinds == KINDS else answered <= set(kinds or ())
            print(found["answered_in_c"])


@pytest.mark.root
def test_c_python_and_both_say_the_same(seed: int) -> None:
    rng = random.Random(seed)
    some = {kind for kind in sorted(KINDS) if rng.random() < 0.5}
    print("C answers", some)
    compare([None, KINDS, some], seed, STEPS)
