"""kvfuse info"""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import click

from kvfuse.cli.console import print_json, print_object
from kvfuse.cli.mounts import ANSWER_SECONDS, within
from kvfuse.errors import EngineTimeout, MountError

ATTRIBUTE = "kvfuse.info"


def read_info(path: Path) -> dict[str, Any]:
    """The volume's own description of a file. MountError where ``path`` is not in a kvfuse mount that answers."""
    try:
        content = within(ANSWER_SECONDS, os.getxattr, path, ATTRIBUTE)
    except EngineTimeout as error:
        raise MountError(f"the daemon of {path} does not answer: {error}") from error
    except OSError as error:
        if error.errno in (errno.ENODATA, errno.EOPNOTSUPP):
            raise MountError(f"{path} is not in a kvfuse mount; 'kvfuse status' lists them") from error
        raise
    information = json.loads(content)
    assert isinstance(information, dict)
    return information


@click.command()
@click.argument("path", type=Path)
@click.option("--json", "as_json", is_flag=True, help="For programs.")
def info(path: Path, as_json: bool) -> None:
    """Where the bytes of PATH lie: segment, slab and slot of every extent, its size class, and whether it is sealed.

    A sealed extent is immutable and carries checksums; one that was written in place since is not sealed.

    \b
    Example:
      kvfuse info /mnt/kv/blocks/0a1b2c
    """
    information = read_info(path)
    if as_json:
        print_json(information)
    else:
        print_object(information, str(path))
