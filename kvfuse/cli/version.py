"""kvfuse version"""

from __future__ import annotations

import platform
from importlib import metadata

import click

import kvfuse
from kvfuse.cli.console import say


def installed_version(package: str) -> str | None:
    """The version of an installed Python package, or None."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


@click.command()
def version() -> None:
    """The version of kvfuse and of what it stands on."""
    parts = [f"{name} {installed_version(name) or 'missing'}" for name in ("pyfuse3", "trio", "lmdb")]
    say(f"kvfuse {kvfuse.__version__}")
    say(f"Python {platform.python_version()}, {', '.join(parts)}, Linux {platform.release()}")
