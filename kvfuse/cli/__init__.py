"""The command line: ``kvfuse COMMAND``. One file a command, imported only when it is used.

Every failure is one line on stderr and an exit status of ``EXIT_STATUS``; KVFUSE_DEBUG=1 shows the traceback instead.
"""

from __future__ import annotations

import importlib
import os
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, TYPE_CHECKING, Any

import click

from kvfuse import __version__
from kvfuse.cli.console import note, print_traceback, printable, take_any_character
from kvfuse.errors import ConfigError, KvfuseError, MountError, VolumeBusy, VolumeError, innermost

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem


class MountBusy(MountError):
    """Files below the mount point are still open."""


EXIT_STATUS: tuple[tuple[type[KvfuseError], int], ...] = (
    (ConfigError, 2),
    (VolumeBusy, 4),
    (MountBusy, 4),
    (VolumeError, 3),
    (MountError, 5),
    (KvfuseError, 1),
)
"""The first row that fits an error tells the exit status; 2 is also a wrong command line."""

GROUP = "kvfuse.commands"
"""of entry points, by which packages beside this one bring commands"""
BESIDE = ""
"""of a command: another package brings it"""
PACKAGES = "./tools/cluster ./benchmarks"
"""folders of the sources, with the packages that bring those commands"""

COMMANDS: dict[str, tuple[str, str]] = {
    "mount": ("kvfuse.cli.mount:mount", "Mount a volume; make it first if it is not there."),
    "umount": ("kvfuse.cli.umount:umount", "Unmount, and wait until everything is written."),
    "hold": ("kvfuse.cli.apart:hold", "Make a mount and keep it, while another process serves it."),
    "serve": ("kvfuse.cli.apart:serve", "Serve a mount that 'kvfuse hold' keeps."),
    "serve-http": ("kvfuse.cli.serve_http:serve_http_command", "Files and blocks over HTTP, without a mount."),
    "upgrade": ("kvfuse.cli.upgrade:upgrade", "Let another version serve a mount that is in use."),
    "status": ("kvfuse.cli.status:status", "What is mounted here, and is it well?"),
    "stats": ("kvfuse.cli.stats:stats", "Counters of a mount, once or live."),
    "top": ("kvfuse.cli.top:top", "A live page: namespaces, hit ratios, use, slabs."),
    "profile": ("kvfuse.cli.profile:profile", "Who reads and writes what now: processes, namespaces, latency."),
    "lsof": ("kvfuse.cli.lsof:lsof", "Which processes have files, rings or memory of a mount open."),
    "events": ("kvfuse.cli.events:events", "Which blocks of a folder are there, and each change."),
    "info": ("kvfuse.cli.info:info", "Where the bytes of a file lie."),
    "namespace": ("kvfuse.cli.namespace:namespace", "Folders with a policy of their own: caches, quotas."),
    "warmup": ("kvfuse.cli.warmup:warmup", "Read blocks and files into the tiers of this host."),
    "connectors": ("kvfuse.cli.connectors:connectors", "Adapters of inference engines: list, configure, check."),
    "format": ("kvfuse.cli.format:format_command", "Make a volume."),
    "resize": ("kvfuse.cli.resize:resize", "Give a volume more capacity, or less, while it is in use."),
    "destroy": ("kvfuse.cli.destroy:destroy", "Remove a volume for good."),
    "dump": ("kvfuse.cli.dump:dump", "Names, namespaces and metadata as JSON lines."),
    "load": ("kvfuse.cli.load:load", "Make the folders and namespaces of a dump."),
    "fsck": ("kvfuse.cli.fsck:fsck", "Check a volume; repair or rebuild it."),
    "config": ("kvfuse.cli.config:config_command", "Effective options, and where each came from."),
    "doctor": ("kvfuse.cli.doctor:doctor", "What is missing on this machine, and what mends it."),
    "manual": ("kvfuse.cli.manual:manual", "Write man pages and completion for shells."),
    "cluster-dev": (BESIDE, "etcd and Ceph on this machine, to try a shared volume."),
    "bench": (BESIDE, "Measure this machine, with a reference beside every figure."),
    "replay": (BESIDE, "Send KV-cache traffic through a mount and verify every byte."),
    "version": ("kvfuse.cli.version:version", "The version of kvfuse and of what it stands on."),
}
"""command -> (module:function or BESIDE, summary). The summaries stand here so that --help imports nothing."""


class Failure(click.ClickException):
    """One line on stderr, and an exit status."""

    def __init__(self, message: str, exit_status: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_status  # type: ignore[misc]  # click calls it a class variable

    def show(self, file: IO[Any] | None = None) -> None:
        note(f"kvfuse: {self.message}")


def exit_status(error: KvfuseError) -> int:
    return next(status for kind, status in EXIT_STATUS if isinstance(error, kind))


def describe(error: Exception) -> tuple[str, int]:
    """The line and the exit status that any failure of a command ends in; of several at once, the first one's."""
    first = innermost(error)
    if isinstance(first, KvfuseError):
        return str(first), exit_status(first)
    if isinstance(first, OSError) and first.strerror:
        return f"{first.filename}: {first.strerror}" if first.filename else first.strerror, 1
    return f"internal error: {type(first).__name__}: {first} (KVFUSE_DEBUG=1 shows where)", 1


@contextmanager
def _printable_errors() -> Iterator[None]:
    """Those that click shows, as of a wrong command line, repeat its words."""
    try:
        yield
    except click.ClickException as error:
        error.message = printable(error.message)  # type: ignore[misc]  # click calls it final
        raise


def _target_beside(command: str) -> str:
    """Find the module:function of a command that another package brings. Failure where that is not installed."""
    from importlib import metadata

    for entry in metadata.entry_points(group=GROUP, name=command):
        return entry.value
    remedy = f"{shlex.quote(sys.executable)} -m pip install {PACKAGES}"
    raise Failure(f"'{command}' is a package of its own; in the folder of kvfuse's sources, type: {remedy}")


class Commands(click.Group):
    """A group that knows its commands by name and imports the one that is asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        target = COMMANDS[cmd_name][0] or _target_beside(cmd_name)
        module_name, _, attribute = target.partition(":")
        try:
            command = getattr(importlib.import_module(module_name), attribute)
        except ModuleNotFoundError as error:
            if error.name == module_name:
                raise Failure(f"'{cmd_name}' is not part of this installation") from error
            raise Failure(f"'{cmd_name}' needs the Python package '{error.name}'; type: kvfuse doctor") from error
        if not isinstance(command, click.Command):
            raise TypeError(f"{module_name}:{attribute} is no command")
        return command

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Names of commands from the table: importing all of them would take seconds at each Tab."""
        from click.shell_completion import CompletionItem

        found = [name for name in COMMANDS if name.startswith(incomplete)]
        options = click.Command.shell_complete(self, ctx, incomplete)
        return [*(CompletionItem(name, help=COMMANDS[name][1]) for name in found), *options]

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, summary) for name, (_, summary) in COMMANDS.items()])

    def make_context(self, *arguments: Any, **named: Any) -> click.Context:
        with _printable_errors():
            return super().make_context(*arguments, **named)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            with _printable_errors():
                return super().invoke(ctx)
        except (click.ClickException, click.exceptions.Exit, click.Abort, BrokenPipeError):
            raise
        except Exception as error:
            if os.environ.get("KVFUSE_DEBUG"):
                print_traceback(error)
                raise click.exceptions.Exit(1) from error
            raise Failure(*describe(error)) from error


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, "-V", "--version", prog_name="kvfuse", message="%(prog)s %(version)s")
def cli() -> None:
    """A file system for KV caches: many blocks in a few large preallocated segments.

    \b
    A first mount, 8 GiB in a folder of this disk:
      kvfuse mount /var/tmp/kv-volume /mnt/kv -o cache,capacity=8GiB
      kvfuse status
      kvfuse umount /mnt/kv

    \b
    Exit status:
      0  done
      1  failed
      2  wrong command line, mount.conf or option
      3  the volume cannot be opened: damaged, of a newer format, or no volume
      4  busy: another daemon holds the volume, or files below the mount point are open
      5  the mount point or the machine does not allow the mount
    """


def main() -> None:
    """Entry point of the ``kvfuse`` script."""
    take_any_character()
    cli(prog_name="kvfuse")
