"""kvfuse connectors, as a user has it: with an adapter of an engine that is made up, and with those that are there."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from cli_lab import Place
from click.testing import CliRunner, Result
from places import ROOT

import kvfuse.connectors
from kvfuse.cli import cli, connectors
from kvfuse.cli.connectors import engine_names, load_config

TOY = """
PACKAGE = ENGINE = "click"
VERSIONS = "8 and newer"
def configuration(mount, namespace):
    return f"--kv-store {mount} --kv-namespace {namespace}\\n"
def check_engine():
    return ["set TOY_THREADS=2"]
"""


@pytest.fixture(autouse=True)
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An adapter for an engine that is installed, and a package that is no adapter."""
    for name in ("toy", "other"):
        (tmp_path / "more" / name).mkdir(parents=True)
        (tmp_path / "more" / name / "__init__.py").touch()
    (tmp_path / "more" / "toy" / "config.py").write_text(TOY)
    monkeypatch.setattr(kvfuse.connectors, "__path__", [*kvfuse.connectors.__path__, str(tmp_path / "more")])


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(cli, ["connectors", *map(str, arguments)])


def test_list_names_what_is_installed() -> None:
    done = run("list")
    assert done.exit_code == 0, done.output
    (row,) = (line.split() for line in done.output.splitlines() if line.strip().startswith("toy"))
    assert row[:5] == ["toy", "click", "8", "and", "newer"]
    assert row[6:] == ["kvfuse.connectors.toy", "docs/engines-toy.md"]
    assert "other" not in done.output


def test_every_adapter_says_how_it_is_configured() -> None:
    assert "toy" in engine_names()
    for name in engine_names():
        config = load_config(name)
        text = config.configuration("/mnt/kv", "llama")
        assert "/mnt/kv" in text
        assert "llama" in text
        assert config.PACKAGE
        assert config.VERSIONS
        assert name == "toy" or (ROOT / "docs" / f"engines-{name}.md").exists(), "the page that 'list' names"


def test_an_engine_that_nobody_knows() -> None:
    done = run("check", "nothing")
    assert done.exit_code == 2
    assert "'nothing' is not one of" in done.output


def test_config_for_a_mount_that_is_not_there_yet(tmp_path: Path) -> None:
    done = run("config", "toy", tmp_path, "--namespace", "llama")
    assert done.exit_code == 0
    assert f"--kv-store {tmp_path} --kv-namespace llama\n" in done.output
    assert "is not mounted now" in done.output


def test_a_check_without_a_mount(tmp_path: Path) -> None:
    done = run("check", "toy", tmp_path)
    assert done.exit_code == 1
    assert "is not in a kvfuse mount" in done.output
    assert "would run without its cache: mount" in done.output


def test_a_check_moves_blocks_and_leaves_nothing(place: Place) -> None:
    place.mount()
    done = run("check", "toy", place.point)
    assert done.exit_code == 0, done.output
    for words in ("set TOY_THREADS=2", "is not there yet", "all bytes right", "the adapter is for 8 and newer"):
        assert words in done.output
    assert "copied once more" not in done.output
    left = [name for name in os.listdir(place.point) if name != ".kvfuse"]
    assert left == []
    assert f"--kv-store {place.point} --kv-namespace toy\n" == run("config", "toy", place.point).output


def test_a_check_tells_what_the_namespace_is(place: Place) -> None:
    place.mount()
    folder = place.point / "models" / "llama"
    folder.mkdir(parents=True)
    os.setxattr(folder, connectors.NAMESPACE, b'kind=files capacity=1048576 descriptor={"model":"toy"}')
    done = run("check", "toy", place.point, "--namespace", "models/llama")
    assert done.exit_code == 0, done.output
    for words in ("files, up to 1MiB", "it never loses a block", '{"model":"toy"}', "all bytes right"):
        assert words in done.output
    assert os.listdir(folder.parent) == ["llama"]
    (place.point / "file").write_bytes(b"")
    done = run("check", "toy", place.point, "--namespace", "file")
    assert done.exit_code == 1
    assert "is not a folder" in done.output
