"""kvfuse events"""

from __future__ import annotations

import json
import os
from pathlib import Path

import click

from kvfuse.cli import Failure
from kvfuse.cli.console import say_each
from kvfuse.errors import Disconnected


@click.command()
@click.argument("folder", type=Path)
@click.option("--json", "as_json", is_flag=True, help="For programs: an object a line.")
@click.option("--once", is_flag=True, help="End when all blocks that are there were told.")
def events(folder: Path, as_json: bool, once: bool) -> None:
    """The blocks of FOLDER, in a cache, and then each that is stored or removed on this host: a line each.

    First "present" for each block that is there, then "ready", then "stored", "removed" and "cleared" (all are gone),
    until Ctrl-C. It fails when the daemon ends, and when lines are taken so slowly that some were lost.

    \b
    Examples:
      kvfuse events /mnt/kv/llama
      kvfuse events /mnt/kv/llama --json | my-router
    """
    from kvfuse.usrbio.client.following import Follower
    from kvfuse.usrbio.protocol.wire import NewsKind

    try:
        with Follower(folder) as follower:
            for kind, names in follower:
                say_each(_line(kind.name.lower(), name, as_json) for name in names or [b""])
                if once and kind is NewsKind.READY:
                    return
    except Disconnected as error:
        raise Failure(f"{folder}: the daemon ended, or lines were lost: begin anew ({error})") from error
    except KeyboardInterrupt:
        return


def _line(word: str, name: bytes, as_json: bool) -> str:
    if as_json:
        return json.dumps({"event": word} | ({"name": os.fsdecode(name)} if name else {}))
    return f"{word} {os.fsdecode(name)}" if name else word
