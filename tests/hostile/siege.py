"""By hand: eight attackers of different users, and a victim whose every byte is checked.

    .venv/bin/python tests/hostile/siege.py --minutes 60

Prints what the victim waited (p50, p99, the longest) beside what it waited while nobody attacked. Exit status 1 where a
byte was wrong, the daemon met an error that nobody foresaw, or the volume is not clean afterwards.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import IO, Any

import click
import numpy as np

sys.path[:0] = [str(Path(__file__).parents[1] / "labs"), str(Path(__file__).parent)]

from attack_siege import KINDS  # noqa: E402
from hostile_lab import HERE  # noqa: E402
from mounting import KvfuseMount, temporary_mount, wait_until  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.progress import track  # noqa: E402
from rich.table import Table  # noqa: E402

WORDS = ("allow_other", "volume.capacity=4GiB", "volume.segment_size=256MiB", "cache.tier_size=256MiB")
VICTIM = 65000
ATTACKERS = 65001


def start(
    mount: KvfuseMount, program: str, uid: int, *arguments: object, output: IO[str] | int = subprocess.PIPE
) -> subprocess.Popen[str]:
    folder = mount.point / f"{'victim' if uid == VICTIM else 'attacker'}-{uid}"
    folder.mkdir(mode=0o700)
    subprocess.run(["chown", str(uid), folder], check=True)
    command = [sys.executable, str(HERE / program), str(uid), str(mount.point), *map(str, arguments)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=output, text=True, start_new_session=True)


def ask(victim: subprocess.Popen[str]) -> dict[str, Any]:
    assert victim.stdin
    assert victim.stdout
    victim.stdin.write("report\n")
    victim.stdin.flush()
    line = victim.stdout.readline()
    assert line, "the victim gave up: the daemon did not serve it"
    return dict(json.loads(line))


def wait(seconds: float, what: str) -> None:
    for _ in track(range(int(seconds)), what, console=Console(stderr=True)):
        time.sleep(1)  # the attack is a matter of time, which the bar shows


def print_table(idle: dict[str, list[float]], besieged: dict[str, list[float]]) -> None:
    table = Table(
        "call", "calls", "p50 idle", "p50", "p99 idle", "p99", "longest idle", "longest", title="milliseconds"
    )
    for kind, values in besieged.items():
        alone = idle.get(kind, [0.0])
        pairs = [(np.percentile(alone, share), np.percentile(values, share)) for share in (50, 99, 100)]
        table.add_row(kind, str(len(values)), *[f"{1000 * value:.2f}" for pair in pairs for value in pair])
    Console(width=140).print(table)


def _is_there(group: int) -> bool:
    """A process of this group is left."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def _line_count(file: IO[str]) -> int:
    file.seek(0)
    return sum(1 for _ in file)


@click.command()
@click.option(
    "--minutes", type=click.FloatRange(0.1), default=60.0, show_default=True, help="How long the attack lasts."
)
@click.option(
    "--idle-seconds", type=click.IntRange(1), default=60, show_default=True, help="How long nobody attacks first."
)
@click.option("--seed", type=int, default=None, help="Of attackers and victim; drawn and printed by default.")
@click.option("-o", "words", multiple=True, help="Mount options, beside those of the siege.")
def siege(minutes: float, idle_seconds: int, seed: int | None, words: tuple[str, ...]) -> None:
    """Besiege a mount of its own."""
    seed = random.SystemRandom().randrange(1 << 32) if seed is None else seed
    print(f"seed {seed}")
    with temporary_mount((*WORDS, *words)) as mount, contextlib.ExitStack() as files:
        victim = start(mount, "siege_victim.py", VICTIM, seed)
        attackers: list[subprocess.Popen[str]] = []
        said = [files.enter_context(tempfile.TemporaryFile("w+")) for _ in KINDS]  # a pipe would be full in minutes
        try:
            wait(idle_seconds, "nobody attacks")
            idle = ask(victim)
            for number, kind in enumerate(KINDS):
                arguments = ATTACKERS + number, kind, seed + number
                attackers.append(start(mount, "attack_siege.py", *arguments, output=said[number]))
            wait(60 * minutes, f"{len(KINDS)} attackers")
            report = ask(victim)
            ended = [kind for kind, attack in zip(KINDS, attackers, strict=True) if attack.poll() is not None]
        finally:
            for process in (*attackers, victim):
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                wait_until(lambda group=process.pid: not _is_there(group), "the end of an attacker's children")
        rounds = {kind: _line_count(output) for kind, output in zip(KINDS, said, strict=True)}
    print_table(idle["seconds"], report["seconds"])
    print(
        f"rounds of the attackers: {rounds}; ended by themselves: {ended or 'none'}; "
        f"wrong: {report['wrong'] or 'nothing'}"
    )
    raise SystemExit(bool(report["wrong"] or ended))


if __name__ == "__main__":
    siege()
