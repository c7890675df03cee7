"""kvfuse fsck"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click
import trio

from kvfuse.cli.console import bars, print_json, say
from kvfuse.options import config
from kvfuse.options.config import Options
from kvfuse.sizes import format_size

if TYPE_CHECKING:
    from kvfuse.volume.check.evidence import Progress

SHOWN_PROBLEMS = 100


@click.command("fsck")
@click.argument("source", type=click.Path(path_type=Path))
@click.option("--verify", is_flag=True, help="Read every sealed byte, all blocks, and slot heads, and compare.")
@click.option("--repair", is_flag=True, help="Mend what is wrong. What cannot be trusted is removed.")
@click.option("--rebuild", is_flag=True, help="Make the records anew from the segments' heads alone.")
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
@click.pass_context
def fsck(ctx: click.Context, source: Path, verify: bool, repair: bool, rebuild: bool, as_json: bool) -> None:
    """Check the volume in the folder SOURCE (or of the mount.conf SOURCE) while it is not mounted.

    \b
    Exit status: 0 clean (or everything was mended), 1 problems are left, others as for every command.

    \b
    Examples:
      kvfuse fsck /srv/kv                 # records against slabs: seconds for a million files
      kvfuse fsck /srv/kv --verify        # and every byte, and the slot heads that a rebuild needs
      kvfuse fsck /srv/kv --rebuild       # the record store is lost or damaged
      kvfuse fsck /etc/kvfuse/mount.conf  # a volume that hosts share, while none of them has it mounted
    """
    if rebuild and repair:
        raise click.UsageError("--rebuild makes everything anew: it does not go with --repair")
    options = config.load(source).options
    ctx.exit(_rebuild(options, as_json) if rebuild else _check(options, verify, repair, as_json))


def _check(options: Options, verify: bool, repair: bool, as_json: bool) -> int:
    from kvfuse.volume.check.volume_check import fsck as check

    with check_progress() as progress:
        report = trio.run(functools.partial(check, options, repair=repair, verify=verify, progress=progress))
    if as_json:
        problems = [problem.text for problem in report.problems]
        print_json({**vars(report), "problems": problems, "clean": report.clean})
        return 0 if report.clean else 1
    for problem in report.problems[:SHOWN_PROBLEMS]:
        say(problem.text)
    if len(report.problems) > SHOWN_PROBLEMS:
        say(f"... and {len(report.problems) - SHOWN_PROBLEMS:,} more")
    for note in report.notes:
        say(f"note: {note}")
    verified = f", {format_size(report.verified_bytes)} verified" if verify else ""
    if report.cold_objects:
        say(f"{report.cold_objects:,} objects of the cold tier, with {report.cold_blocks:,} blocks")
    say(
        f"{report.files:,} files, {report.directories:,} directories, {report.extents:,} extents,"
        f" {format_size(report.used_bytes)} stored,"
        f" {report.blocks:,} blocks with {format_size(report.block_bytes)}{verified}"
    )
    if report.repaired:
        say(f"{report.repaired:,} problems were mended")
    if report.problems:
        remedy = "not all could be mended" if repair else "'--repair' mends what can be mended"
        say(f"{len(report.problems):,} problems: {remedy}")
    else:
        say("the volume is clean")
    return 0 if report.clean else 1


def _rebuild(options: Options, as_json: bool) -> int:
    from kvfuse.volume.check.rebuild import rebuild

    with check_progress() as progress:
        report = trio.run(functools.partial(rebuild, options, progress=progress))
    if as_json:
        print_json(vars(report))
    else:
        for line in report.dropped[:SHOWN_PROBLEMS]:
            say(f"not recovered: {line}")
        if report.records_kept:
            say(f"the old records are kept in {report.records_kept}")
        say(
            f"{report.files:,} files recovered with {format_size(report.bytes)},"
            f" {report.nameless:,} of them in lost+found; {len(report.dropped):,} were not whole"
        )
        say("no namespace of files was recovered: all files are the root's, none is evicted")
        if report.namespaces:
            say(
                f"{report.blocks:,} blocks recovered with {format_size(report.block_bytes)}, in folders that are root's"
                f" alone: {', '.join(report.namespaces)}: give them their names, owners and settings again"
            )
    return 0


@contextmanager
def check_progress() -> Iterator[Progress]:
    """Progress bars on stderr, where that is a terminal."""
    with bars(counts=True, transient=True) as progress:
        yield lambda what, done, total: progress.show(what, done, total or None)
