"""Man pages and completion for shells: made from this version, read by man and by the shells themselves."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from cli_lab import kvfuse

from kvfuse.cli import BESIDE, COMMANDS, cli
from kvfuse.cli.manual import COMPLETIONS, FILES, escape
from kvfuse.options import config

PAGES = ("man1/kvfuse.1", "man5/kvfuse.conf.5", "man8/mount.kvfuse.8")

needs_man = pytest.mark.skipif(shutil.which("man") is None, reason="needs the Debian package man-db")


@pytest.fixture(scope="module")
def share() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="kvfuse-test-") as folder:
        done = kvfuse("manual", folder)
        assert done.returncode == 0, done.stderr
        assert {str(Path(line).relative_to(folder)) for line in done.stdout.splitlines()} == FILES.keys()
        yield Path(folder)


def shown(page: Path) -> str:
    """As man shows it, in wide lines, which man must find nothing wrong with."""
    environment = {**os.environ, "LC_ALL": "C.UTF-8", "MANWIDTH": "500", "MAN_KEEP_FORMATTING": ""}
    command = ["man", "--warnings", "--no-hyphenation", "--no-justification", "--local-file", page]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return re.sub(r".\x08|\x1b\[[\d;]*m", "", done.stdout)


@needs_man
@pytest.mark.parametrize("page", PAGES)
def test_man_finds_nothing_wrong(share: Path, page: str) -> None:
    text = shown(share / "man" / page)
    assert text.lstrip().startswith(Path(page).stem)
    assert "SEE ALSO" in text


@needs_man
def test_man_finds_the_pages_by_name(share: Path) -> None:
    environment = {**os.environ, "MANPATH": str(share / "man"), "LC_ALL": "C.UTF-8"}
    for name in ("kvfuse", "kvfuse.conf", "mount.kvfuse"):
        found = subprocess.run(["man", "--where", name], env=environment, capture_output=True, text=True, check=True)
        assert found.stdout.startswith(str(share))


@needs_man
def test_the_page_has_every_command_and_option(share: Path) -> None:
    text = shown(share / "man" / PAGES[0])
    context = click.Context(cli, info_name="kvfuse")
    count = 0
    for name, (target, _) in COMMANDS.items():
        assert re.search(rf"^ +kvfuse {name}\b", text, re.MULTILINE), name
        command = cli.get_command(context, name) if target != BESIDE else None
        for parameter in command.params if command is not None else ():
            for option in parameter.opts if isinstance(parameter, click.Option) else ():
                assert re.search(rf"^ +(?:\S+, )*{re.escape(option)}\b", text, re.MULTILINE), (name, option)
                count += 1
    assert count > 30
    for line in ("kvfuse mount /srv/kv /mnt/kv -o cache", "kvfuse doctor --bundle report.tar.gz"):
        assert line in text, "examples can be copied"


@needs_man
def test_the_page_of_mount_conf_has_every_key(share: Path) -> None:
    text = shown(share / "man" / PAGES[1])
    for section in {key.split(".")[0] for key in config.KEYS}:
        part = re.split(r"^\[", text.partition(f"\n[{section}]")[2], flags=re.MULTILINE)[0]
        for key in (key for key in config.KEYS if key.startswith(f"{section}.")):
            assert re.search(rf"^ +{key.split('.')[1]} = \S", part, re.MULTILINE), key
    assert 'path = "/var/lib/kvfuse"' in text


@needs_man
def test_the_page_of_mount_has_every_word(share: Path) -> None:
    text = shown(share / "man" / PAGES[2])
    for word, _ in config.flag_words():
        assert re.search(rf"^ +{word}\b", text, re.MULTILINE), word
    for name, key in config.NAMES.items():
        assert name == key or re.search(rf"^ +{name}=VALUE\s+{re.escape(key)}: ", text, re.MULTILINE), name


def test_bash_completes_commands_and_options(share: Path) -> None:
    script = share / COMPLETIONS["bash"]
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"

    def complete(*words: str) -> set[str]:
        asked = f'source {script}; COMP_WORDS=({" ".join(words)} ""); COMP_CWORD={len(words) - 1}'
        asked += (
            '; COMP_WORDS[COMP_CWORD]="' + words[-1] + '"; _kvfuse_completion kvfuse; printf "%s\\n" "${COMPREPLY[@]}"'
        )
        done = subprocess.run(
            ["bash", "-c", asked], env={**os.environ, "PATH": path}, capture_output=True, text=True, check=True
        )
        assert done.stderr == ""
        return set(done.stdout.split())

    assert complete("kvfuse", "u") == {"umount", "upgrade"}
    assert complete("kvfuse", "b") == {"bench"}
    assert {"--json", "--bundle", "--names"} <= complete("kvfuse", "doctor", "--")
    assert "--capacity" in complete("kvfuse", "namespace", "create", "--cap")


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_read_theirs(share: Path, shell: str) -> None:
    script = share / COMPLETIONS[shell]
    assert "_KVFUSE_COMPLETE" in script.read_text()
    if shutil.which(shell) is None:
        pytest.skip(f"needs {shell}")
    subprocess.run([shell, "-n", script], check=True)


def test_they_go_again(share: Path, tmp_path: Path) -> None:
    assert kvfuse("manual", tmp_path).returncode == 0
    (tmp_path / "man/man1/other.1").write_text("another's")
    assert kvfuse("manual", "--remove", tmp_path).returncode == 0
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["other.1"]
    assert kvfuse("manual", "--remove", tmp_path).returncode == 0


def test_text_is_no_command_of_troff() -> None:
    assert escape(".so /etc/passwd\n'x\n\\fBa-b\"") == "\\&.so /etc/passwd\n\\&'x\n\\efBa\\-b\\(dq"
