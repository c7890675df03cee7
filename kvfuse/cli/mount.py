"""kvfuse mount"""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

import click

from kvfuse.cli import daemon
from kvfuse.cli.checks import check_machine, check_mountpoint, outlives
from kvfuse.cli.console import note
from kvfuse.cli.volumes import check_shape
from kvfuse.holder.child import VARIABLE
from kvfuse.holder.daemon_side import Holding
from kvfuse.options import config
from kvfuse.options.words import with_whole_paths


@click.command()
@click.argument("source", type=Path)
@click.argument("mountpoint", type=Path)
@click.option("-c", "--config", "file", type=Path, help="A mount.conf, beside the volume SOURCE.")
@click.option("-o", "words", multiple=True, metavar="WORD[,WORD...]", help="Mount options; they win over mount.conf.")
@click.option("--foreground", is_flag=True, help="Stay, and log to stderr; SIGTERM or Ctrl-C flushes and unmounts.")
def mount(source: Path, mountpoint: Path, file: Path | None, words: tuple[str, ...], foreground: bool) -> None:
    """Mount the volume SOURCE at MOUNTPOINT. Returns once it is mounted; a daemon serves it from then on.

    SOURCE is a volume's folder, or a mount.conf that names it; a volume that hosts share (records in etcd) needs a
    mount.conf. Where there is no volume yet it is made first, with the smaller of 64GiB and half of the free space as
    its capacity. MOUNTPOINT is an empty directory.

    -o takes words of mount(8) (ro, noatime, nodev, _netdev, nofail, x-systemd.automount, ...) and every key of
    mount.conf; 'kvfuse config' lists those. The most used:

    \b
      cache             blocks make room for new ones when the volume is full; without it no file goes by itself
      allow_other       users other than who mounts may use it
      publish=strict    names are committed before a call returns [relaxed; strict where hosts share the volume]
      entry_timeout=5   seconds the kernel trusts a name [60]
      capacity=200GiB   of a volume that is made now
      exact_sizes=2MiB  block sizes that fit without waste, of a volume made now

    \b
    Examples:
      kvfuse mount /srv/kv /mnt/kv -o cache
      kvfuse mount /srv/kv /mnt/kv -o allow_other,capacity=200GiB
      kvfuse mount /etc/kvfuse/mount.conf /mnt/kv --foreground
    """
    load = partial(config.load, source, file=file, words=words)
    if VARIABLE in os.environ and (holding := Holding.from_environment()) is not None:
        daemon.run_held(load, mountpoint, holding, in_background=not foreground)
        return
    effective = load()
    _ = effective.options.title  # ConfigError where nothing names the volume
    check_machine(effective.options.mount)
    point = check_mountpoint(mountpoint)
    check_shape(effective)
    again = None
    if outlives(effective.options.mount):
        again = _again(source, point, file, words, foreground=foreground)
    if foreground and again is not None:
        daemon.hold(effective, point, again)
    elif foreground:
        daemon.run(effective, point, announce=lambda: note(f"mounted on {point}"))
    else:
        daemon.start(effective, point, again)


def _again(source: Path, point: Path, file: Path | None, words: tuple[str, ...], *, foreground: bool) -> list[str]:
    """The words of this command, for whichever folder it is begun in."""
    said = ["mount", str(source.absolute()), str(point)]
    if file is not None:
        said += ["-c", str(file.absolute())]
    for word in with_whole_paths(words):
        said += ["-o", word]
    return [*said, "--foreground"] if foreground else said
