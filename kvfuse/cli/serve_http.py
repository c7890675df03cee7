"""kvfuse serve-http"""

from __future__ import annotations

import logging
import os
import resource
import sys
from pathlib import Path

import click

from kvfuse.cli import Failure
from kvfuse.cli.console import note, say, say_lines
from kvfuse.cli.daemon import SWITCH_SECONDS, be_nice, calm_collector, cancel_on_signal, make_services
from kvfuse.cli.logs import start_logging
from kvfuse.cli.volumes import ensure_volume
from kvfuse.errors import KvfuseError, VolumeBusy
from kvfuse.options import config
from kvfuse.options.options import Options

log = logging.getLogger(__name__)

DEFAULT_ADDRESS = "127.0.0.1:8080"


@click.command("serve-http")
@click.argument("source", type=Path, required=False)
@click.option("--listen", metavar="ADDRESS", help=f"HOST:PORT, or unix:PATH. [http.listen, or {DEFAULT_ADDRESS}]")
@click.option("-c", "--config", "file", type=Path, help="A mount.conf, beside the volume SOURCE.")
@click.option("-o", "words", multiple=True, metavar="WORD[,WORD...]", help="Options as of 'kvfuse mount -o'.")
@click.option("--new-token", metavar="NAME", help="Print a new token, and its lines for the users' file.")
def serve_http_command(
    source: Path | None, listen: str | None, file: Path | None, words: tuple[str, ...], new_token: str | None
) -> None:
    """Open the volume SOURCE and answer HTTP requests for its files and blocks, until SIGTERM or Ctrl-C.

    It needs neither FUSE nor root. A volume that is mounted on this host answers by the daemon of the mount, with
    http.listen in its mount.conf. docs/http.md has the requests; GET /openapi.json describes them for programs.

    Clients of unix:PATH are the users that the kernel says. Those of HOST:PORT show a token: http.users names the file
    with their users; on a loopback address, http.anonymous=UID:GID lets in who shows none.

    \b
    Examples:
      kvfuse serve-http /srv/kv --listen unix:/run/kvfuse-http.sock
      kvfuse serve-http /srv/kv -o http.anonymous=1000:1000
      kvfuse serve-http --new-token router >> token-and-user
    """
    if new_token is not None:
        from kvfuse.http.http_users import make_token

        token, lines = make_token(new_token)
        say(token)
        say_lines(lines)
        return
    if source is None:
        raise click.UsageError("SOURCE is missing: name the volume's folder, or a mount.conf")
    if listen is not None:
        words = (*words, f"http.listen={listen}")
    effective = config.load(source, file=file, words=words)
    if effective.options.http.listen is None:
        effective = config.load(source, file=file, words=(*words, f"http.listen={DEFAULT_ADDRESS}"))
    _run(effective.options)


def _run(options: Options) -> None:
    import trio

    from kvfuse.http.http_door import open_files

    open_files(options.http)  # before a volume is made
    os.umask(0o077)  # the volume's files are this process's alone
    be_nice(options.mount.nice)
    sys.setswitchinterval(SWITCH_SECONDS)
    _, files_max = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (files_max, files_max))
    if made := ensure_volume(options):
        note(made)
    start_logging(options.log, None, Path("/"))
    try:
        trio.run(_serve, options)
    except VolumeBusy as error:
        raise Failure(
            f"{error}; set http.listen in the mount.conf of that mount: its daemon then answers", 4
        ) from error


async def _serve(options: Options) -> None:
    import trio

    from kvfuse import failing
    from kvfuse.fs.doors import run_services
    from kvfuse.volume.running import open_volume

    failure: KvfuseError | None = None
    async with trio.open_nursery() as nursery:
        await nursery.start(cancel_on_signal, nursery.cancel_scope)
        try:
            async with open_volume(options) as volume:
                volume.sections["service_failures"] = lambda: dict(failing.failures)
                async with run_services(make_services(options), volume, must_begin=True):
                    calm_collector()
                    note(f"HTTP requests are answered at {options.http.listen}")
                    await trio.sleep_forever()
        except KvfuseError as error:  # carried past the nursery, which would wrap it in a group
            failure = error
        nursery.cancel_scope.cancel()
    if failure is not None:
        raise failure
    log.info("%s is closed, everything is written", options.title)
