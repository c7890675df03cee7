"""Pages for users say what is so: commands, options, keys and files that they name are there."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from places import ROOT

from kvfuse.cli import COMMANDS, cli
from kvfuse.options import config

PAGES = [ROOT / name for name in ("README.md", "ARCHITECTURE.md", "mount.conf")]
PAGES += sorted((ROOT / "compat").glob("*/README.md"))
PAGES += sorted((ROOT / "docs").glob("*.md"))
SCRIPTS = sorted((ROOT / "examples").rglob("*.sh"))
IDS = [path.name for path in PAGES]
NO_KEYS = {"mount.conf", "volume.api", "segments.failed_reads"}
"""a file, a module, a figure of `kvfuse stats`"""
SECTIONS = sorted({key.split(".")[0] for key in config.KEYS})


def commands_of(path: Path) -> Iterator[list[str]]:
    """The words of what a page has one type: in blocks of code, and as `kvfuse ...` in lines."""
    text = path.read_text()
    lines = [line for block in re.findall(r"^```\w*\n(.*?)^```", text, re.M | re.S) for line in block.splitlines()]
    lines += re.findall(r"`(kvfuse [a-z][^`]*)`", text)
    for line in lines if path.suffix == ".md" else text.splitlines():
        for part in re.split(r"&&|;|\||\$\(", line.partition("#")[0].replace("\\|", " ")):
            match = re.match(r"\s*(?:\S*/)?(kvfuse [a-z].*)", part)
            if match:
                yield shlex.split(match[1].replace("'", "").replace('"', "").rstrip("\\"))[1:]


def unknown_words(words: list[str]) -> list[str]:
    """What of a command there is not."""
    if words[0] not in COMMANDS:
        return [words[0]]
    context = click.Context(cli)
    command = cli.get_command(context, words[0])
    rest = words[1:]
    while isinstance(command, click.Group) and rest and (inner := command.get_command(context, rest[0])) is not None:
        command, rest = inner, rest[1:]
    assert command is not None
    known = {name for option in command.params for name in (*option.opts, *option.secondary_opts)} | {"--help", "-h"}
    return [word for word in rest if word.startswith("-") and word.partition("=")[0] not in known]


@pytest.mark.parametrize("page", [*PAGES, *SCRIPTS], ids=[*IDS, *(str(path.parent.name) for path in SCRIPTS)])
def test_commands_are_there(page: Path) -> None:
    unknown = [(words, left) for words in commands_of(page) if (left := unknown_words(words))]
    assert unknown == []


def test_what_is_not_there_is_found() -> None:
    assert unknown_words(["frobnicate"]) == ["frobnicate"]
    assert unknown_words(["namespace", "create", "/mnt/kv", "--capacity", "1", "--size=5"]) == ["--size=5"]
    found = [words for page in PAGES for words in commands_of(page)]
    assert len(found) > 100
    assert {words[0] for words in found} >= {"mount", "replay", "upgrade", "namespace", "bench"}


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_keys_are_there(page: Path) -> None:
    named = set(re.findall(rf"`({'|'.join(SECTIONS)})\.([a-z_]+)( =[^`]*)?`", page.read_text()))
    keys = {f"{section}.{key}" for section, key, _ in named}
    assert keys - set(config.KEYS) - NO_KEYS == set()


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\((?!https?://)([^)#]+)(?:#[^)]*)?\)", page.read_text())
    assert [link for link in links if not (page.parent / link).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_nothing_is_installed_that_is_not_published(page: Path) -> None:
    """Nor do programs say so."""
    published = re.compile(r"pip install ([^\n`#]* )?'?kvfuse(\[\w+\])?'?(?![/\w-])")
    for source in (page, *(ROOT / "kvfuse").rglob("*.py")):
        found = [match[0] for match in published.finditer(source.read_text()) if "/kvfuse" not in match[0]]
        assert found == [], source
