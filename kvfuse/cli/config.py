"""kvfuse config"""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import Any

import click

from kvfuse.cli.console import print_json, print_table, say_lines
from kvfuse.options import config
from kvfuse.sizes import format_size


def _shown(key: str, value: Any) -> str:
    """A value as one would write it, or what None stands for."""
    if value is None or (value == () and key in config.UNSET):
        return config.UNSET[key]
    if isinstance(value, bool):
        return str(value).lower()
    values = value if isinstance(value, tuple) else (value,)
    return ", ".join(format_size(part) if config.is_size(key) else str(part) for part in values) or "-"


@click.command("config")
@click.argument("source", required=False, type=Path)
@click.option("-c", "--config", "file", type=Path, help="The mount.conf.")
@click.option("-o", "words", multiple=True, metavar="WORD[,WORD...]", help="Options as of 'kvfuse mount -o'.")
@click.option("--json", "as_json", is_flag=True, help="For programs: sizes in bytes, times in seconds.")
@click.option("--template", is_flag=True, help="Print a commented mount.conf to start from.")
@click.option("--grafana", is_flag=True, help="Print a Grafana dashboard of the metrics; see metrics.listen.")
def config_command(
    source: Path | None, file: Path | None, words: tuple[str, ...], as_json: bool, template: bool, grafana: bool
) -> None:
    """Effective options of a mount, and where each came from. Nothing is mounted or changed.

    The same arguments as for 'kvfuse mount': -o wins over mount.conf, mount.conf over the defaults.

    \b
    Examples:
      kvfuse config
      kvfuse config /etc/kvfuse/mount.conf -o publish=strict
      kvfuse config --template > mount.conf
      kvfuse config --grafana > kvfuse.json
    """
    if template or grafana:
        name = "mount.conf" if template else "grafana.json"
        say_lines(resources.files("kvfuse").joinpath("data", name).read_text("utf-8").rstrip("\n"))
        return
    rows = list(config.load(source, file=file, words=words).rows())
    if as_json:
        print_json({key: {"value": value, "origin": origin} for key, value, origin in rows})
    else:
        print_table(["key", "value", "from"], [(key, _shown(key, value), origin) for key, value, origin in rows])
