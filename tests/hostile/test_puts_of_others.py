"""While one user puts blocks as fast as they are taken, another one never waits long."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hostile_lab import attacker
from mounting import temporary_mount
from ring_lab import wait_for_rings

pytestmark = [pytest.mark.root, pytest.mark.alone]

WORDS = ("allow_other", "volume.capacity=4GiB", "publish=relaxed")
COUNT = 20_000
STALL_S = 0.1
"""the longest that a call of the victim may take on a machine without noise"""
SLEEPER = """
import select, sys, time
longest = 0.0
while not select.select([sys.stdin], [], [], 0)[0]:
    started = time.perf_counter()
    time.sleep(0.001)  # what it oversleeps is the machine's own noise
    longest = max(longest, time.perf_counter() - started)
print(longest)
"""


class Noise:
    """The longest that a process beside overslept which does nothing else: the machine, not the daemon, does that."""

    longest = 0.0


@contextmanager
def machine_noise() -> Iterator[Noise]:
    pipe = subprocess.PIPE
    noise = Noise()
    with subprocess.Popen([sys.executable, "-c", SLEEPER], stdin=pipe, stdout=pipe, text=True) as sleeper:
        try:
            yield noise
        finally:
            noise.longest = float(sleeper.communicate("\n")[0])


def use_files(folder: Path, is_over: Callable[[], bool]) -> dict[str, float]:
    """Ask for an absent name, make a file, read one, until it is over: the longest that each took, in seconds."""
    longest = dict.fromkeys(("absent", "create", "read"), 0.0)
    number = 0
    while not is_over():
        times = [time.perf_counter()]
        assert not (folder / f"absent-{number}").exists()
        times.append(time.perf_counter())
        (folder / f"{number}").write_bytes(b"%d" % number)
        times.append(time.perf_counter())
        old = max(0, number - 50)
        assert (folder / f"{old}").read_bytes() == b"%d" % old
        times.append(time.perf_counter())
        for kind, start, end in zip(longest, times, times[1:], strict=False):
            longest[kind] = max(longest[kind], end - start)
        number += 1
        time.sleep(0.001)  # as the sleeper beside it does
    return longest


def test_a_victim_never_waits_long_beside_many_puts() -> None:
    with temporary_mount(WORDS) as mount:
        wait_for_rings(mount)
        mine, theirs = mount.point / "mine", mount.point / "theirs"
        mine.mkdir()
        theirs.mkdir()
        os.chmod(theirs, 0o777)
        said: list[dict[str, Any]] = []
        with attacker("attack_puts.py", mount, theirs, COUNT, 64 << 10) as attack, machine_noise() as noise:
            attack.hear()
            attack.tell("begin")
            listener = threading.Thread(target=lambda: said.append(attack.hear(200)))
            listener.start()
            longest = use_files(mine, lambda: not listener.is_alive())
            listener.join()
        print(f"beside {said} a victim waited at most {longest} s, a sleeper {noise.longest:.3f} s")
        assert said[0]["refused"] == 0
        assert max(longest.values()) < STALL_S + 5 * noise.longest
