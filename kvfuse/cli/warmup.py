"""kvfuse warmup"""

from __future__ import annotations

from pathlib import Path
from typing import IO, TYPE_CHECKING

import click

from kvfuse.cli import Failure
from kvfuse.cli.console import Bars, bars, note, print_table
from kvfuse.cli.mounts import mount_of
from kvfuse.sizes import format_size, parse_size

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvfuse.cli.warming import Tally, WarmBatch

INTERRUPTED = 130
"""exit status, as of what a shell runs"""
KEY_SIZE_MAX = 255


@click.command()
@click.argument("paths", nargs=-1, required=True, type=Path, metavar="PATH...")
@click.option(
    "--keys", type=click.File("rb"), metavar="FILE", help="Keys of blocks of the folder PATH, one a line; -: stdin."
)
@click.option("--rate", metavar="SIZE", help="Bytes a second, at most, such as 500MiB/s [any number].")
@click.option(
    "--parallel", type=click.IntRange(1, 64), default=4, show_default=True, help="Batches that are read at once."
)
@click.pass_context
def warmup(
    ctx: click.Context, paths: tuple[Path, ...], keys: IO[bytes] | None, rate: str | None, parallel: int
) -> None:
    """Read blocks and files into the tiers of this host, before an engine asks for them.

    PATHS are files and folders of one mount; all files below a folder are read. With --keys, PATH is a folder of
    blocks. They come into the shared-memory tier (cache.tier_size) as far as it and the namespace's 'tiers' allow, and
    onto the disk near this host (cache.disk_path), if there is one. Files of more than 64MiB are read through the
    mount, so the kernel has them, too.

    A block that is not there is a miss, and no error. Ctrl-C ends it after the batches that are under way.

    \b
    Exit status: 0 done, 1 something could not be read, 130 interrupted; others as for every command.

    \b
    Examples:
      kvfuse warmup /mnt/kv/llama --rate 500MiB/s
      kvfuse warmup /mnt/kv/llama/system-prompt /mnt/kv/weights.bin --parallel 8
      kvfuse warmup /mnt/kv/llama --keys hot-keys.txt
    """
    from kvfuse.cli.rate_pace import RatePace
    from kvfuse.cli.warming import BATCH_KEYS, PACED_KEYS, Warmer

    points = {mount_of(path).point for path in paths}
    if len(points) > 1:
        raise click.UsageError(f"PATHS are in several mounts: {', '.join(sorted(map(str, points)))}")
    pace = RatePace(_bytes_a_second(rate))
    batches, expected = _work(paths, keys, PACED_KEYS if rate else BATCH_KEYS)
    warmer = Warmer(points.pop(), pace, parallel)
    with bars(transient=True) as shown:
        tally = warmer.warm(batches, expected, lambda tally: _show(shown, tally))
    _sum_up(tally)
    if tally.interrupted:
        note("interrupted: what was read stays in the tiers")
        ctx.exit(INTERRUPTED)
    ctx.exit(1 if tally.failed else 0)


def _work(paths: tuple[Path, ...], keys: IO[bytes] | None, keys_max: int) -> tuple[Iterator[WarmBatch], int | None]:
    """(batches, how many blocks there are in them, if that is known)"""
    from kvfuse.cli.warming import batches_of_keys, batches_of_paths

    if keys is None:
        for path in paths:
            path.lstat()  # an OSError that names it, before anything is read
        return batches_of_paths([path.absolute() for path in paths], keys_max), None
    if len(paths) > 1 or not paths[0].is_dir():
        raise click.UsageError("with --keys there is one PATH, the folder of the blocks")
    names = [line for line in keys.read().splitlines() if line]
    for number, name in enumerate(names, 1):
        if len(name) > KEY_SIZE_MAX or b"/" in name:
            raise Failure(f"{keys.name}: key {number} is longer than {KEY_SIZE_MAX} bytes, or has a slash")
    return batches_of_keys(paths[0].absolute(), names, keys_max), len(names)


def _bytes_a_second(rate: str | None) -> int:
    """0: any number."""
    if rate is None:
        return 0
    try:
        return parse_size(rate.removesuffix("/s"))
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--rate") from None


def _show(shown: Bars, tally: Tally) -> None:
    done = tally.hits + tally.misses + tally.failed
    speed = tally.size / tally.seconds if tally.seconds else 0.0
    text = f"{format_size(tally.size)}, {format_size(int(speed))}/s"
    if tally.expected and done:
        left = tally.seconds * (tally.expected - done) / done
        text += f", {int(left) // 60}:{int(left) % 60:02d} left"
    shown.show("warmup", done, tally.expected, text)


def _sum_up(tally: Tally) -> None:
    speed = tally.size / tally.seconds if tally.seconds else 0.0
    print_table(
        ["", ""],
        [
            ("hits", f"{tally.hits:,}"),
            ("misses", f"{tally.misses:,}"),
            ("failed", f"{tally.failed:,}"),
            ("read", format_size(tally.size)),
            ("seconds", f"{tally.seconds:.1f}"),
            ("rate", f"{format_size(int(speed))}/s"),
        ],
    )
    for text in tally.failures:
        note(f"not read: {text}")
    if tally.failed > len(tally.failures):
        note(f"and {tally.failed - len(tally.failures):,} more")
