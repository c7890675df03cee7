"""Thousands of guessed keys of a namespace that one may not use: they answer alike whether they are there or not."""

from __future__ import annotations

import errno
import os
import statistics
from typing import Any

import pytest
from hostile_lab import ATTACKER, attacker
from mounting import temporary_mount

from kvfuse.usrbio.client import BlockStore

pytestmark = [pytest.mark.root, pytest.mark.ring(3)]  # it measures time

COUNT = 4000
TOKENS = "correct-horse-battery-staple", "another-horse-battery-staple"
NOISE = 1.15
"""how much longer the median of one kind of keys may take than that of another: that much two runs of one kind do"""


def quantiles(times: list[float]) -> tuple[float, float]:
    """(median, 90th percentile)"""
    return statistics.median(times), statistics.quantiles(times, n=10)[-1]


def check_alike(name: str, kinds: dict[str, Any]) -> None:
    figures = {kind: quantiles(times) for kind, (_, times) in kinds.items()}
    print(name, {kind: [round(figure, 1) for figure in pair] for kind, pair in figures.items()}, "us: median, 90 %")
    for least, most in ((min(column), max(column)) for column in zip(*figures.values(), strict=True)):
        assert most <= least * NOISE, (name, figures)


def test_guessed_keys_answer_alike_in_value_and_in_time() -> None:
    with temporary_mount(["capacity=192MiB,cache,admission=all,allow_other"]) as mount:
        tenant, own = mount.point / "tenant", mount.point / "own"
        for folder in (tenant, own):
            folder.mkdir()
            os.setxattr(folder, "user.kvfuse.namespace", b"kind=cache")
        os.chown(own, ATTACKER, ATTACKER)
        os.setxattr(tenant, "user.kvfuse.namespace.token", TOKENS[0].encode())
        with BlockStore(mount.point, tenant) as store:
            for start in range(0, COUNT, 1000):
                keys = [f"key-{number:06}" for number in range(start, start + 1000)]
                assert store.put_many(keys, [b"secret"] * len(keys)).all()
        with attacker("attack_guesses.py", mount, tenant, own, COUNT, TOKENS[0]) as attack:
            assert attack.hear() == {"exists": [1, 1], "got": [6, 7]}, "with the token it sees a key"
            os.setxattr(tenant, "user.kvfuse.namespace.token", TOKENS[1].encode())
            attack.tell("guess")
            said = attack.hear(300)
        answers = {name: [kinds[kind][0] for kind in sorted(kinds)] for name, kinds in said.items()}
        assert answers["exists"] == [[[0, 0]]] * 3
        assert answers["get"] == [[[-errno.ENOENT, 7]]] * 3
        assert answers["stat"] == [[[-errno.EACCES, 0]]] * 2
        for name in answers:
            check_alike(name, said[name])
