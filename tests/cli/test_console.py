"""All that commands print: each at a terminal, with names that were commands of it, or markup, if not escaped."""

from __future__ import annotations

import ast
import errno
import io
import json
import logging
import os
import random
import re
import signal
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from cli_lab import CAPACITY, kvfuse
from mounting import KVFUSE, PATIENCE_S, wait_until
from places import ROOT

from kvfuse.cli import COMMANDS, mounts
from kvfuse.cli.console import LogFormatter, printable

NAME = os.fsdecode(b"\r\x0b\xc3\x85\x1b]0;owned\x07\x1b[38;5;213m\xe2\x80\xae\xc2\x9b[bold]:smile:\xff")
"""renames a terminal, colours it, turns the direction of its text; rich's markup and emoji code; and it is no UTF-8"""
UTF8 = NAME[:-1]
SHOWN = r"\r\x0bÅ\x1b]0;owned\x07\x1b[38;5;213m\u202e\x9b[bold]:smile:\xff"
RAW = b"\x1b]0;", b"\x1b[38;5;213m", b"\xe2\x80\xae", b"\xc2\x9b", b"\xff", "\U0001f604".encode()
LF = "line\nend"


# -- the function -----------------------------------------------------------------------------------


def test_what_is_printable_stays() -> None:
    for text in ("/mnt/kv", "Grüße, 世界 ≥ 5 µs ▁█·", r"a\b", "[red] :smile:", ""):
        assert printable(text) == text
    assert printable(NAME) == SHOWN
    assert printable(Path("/mnt") / LF) == r"/mnt/line\nend"
    assert printable("\ud800 \U000e0041 \u2028 \t \x7f") == r"\ud800 \U000e0041 \u2028 \t \x7f"


def test_no_text_gets_through(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(2_000):
        name = os.fsdecode(rng.randbytes(rng.randrange(1, 40)))
        text = name + "".join(chr(rng.randrange(0x110000)) for _ in range(rng.randrange(20)))
        said = printable(text)
        assert said.isprintable()
        assert printable(said) == said
        said.encode()


def test_a_log_has_a_line_a_message() -> None:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(LogFormatter("%(levelname)s %(message)s"))
    log = logging.Logger("test")
    log.addHandler(handler)
    log.warning("%s\nis bad", NAME)
    try:
        raise OSError(errno.EIO, "bad", NAME)
    except OSError:
        log.exception("failed")
    first, second, *trace = stream.getvalue().splitlines()
    assert (first, second) == (rf"WARNING {SHOWN}\nis bad", "ERROR failed")
    assert len(trace) > 2
    assert all(line.isprintable() for line in trace)


# -- no other way -----------------------------------------------------------------------------------

PRINTS = re.compile(
    r"click\.(echo|secho|style|confirm|prompt|pause|clear|progressbar|echo_via_pager|get_text_stream|get_binary_stream)"
    r"|sys\.(__)?std(out|err)(__)?|print|pprint|os\.write|logging\.Formatter|traceback\.print_\w+"
)


def ways_to_print(source: str) -> Iterator[str]:
    """Calls by which a module prints, and packages that print for it."""
    tree = ast.parse(re.sub(r"sys\.std(out|err)\.flush\(\)", "pass", source))
    for_types = {
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    for node in set(ast.walk(tree)) - for_types:
        if isinstance(node, ast.Attribute | ast.Name) and PRINTS.fullmatch(ast.unparse(node)):
            yield ast.unparse(node)
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in ("rich", "pprint"):
            yield str(node.module)
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] in ("rich", "pprint"))
        if isinstance(node, ast.ImportFrom) and node.module == "click":
            yield from (f"click.{alias.name}" for alias in node.names)


def test_nothing_else_prints() -> None:
    folder = ROOT / "kvfuse" / "cli"
    found = {
        (path.name, way)
        for path in folder.glob("*.py")
        if path.name != "console.py"
        for way in ways_to_print(path.read_text())
    }
    # To the pipe of a parent that waits, as JSON; lines of the log in JSON, which escapes; where stderr leads.
    ways = {("daemon.py", "os.write"), ("logs.py", "logging.Formatter"), ("logs.py", "sys.stderr")}
    assert found == ways


@pytest.mark.parametrize(
    "line",
    [
        "print('x')",
        "click.echo('x')",
        "click.secho('x')",
        "from click import echo",
        "from rich.table import Table",
        "import rich",
        "sys.stderr.write('x')",
        "sys.stdout.buffer.write(b'x')",
        "os.write(2, b'x')",
    ],
)
def test_other_ways_are_found(line: str) -> None:
    assert list(ways_to_print(line))
    assert not list(ways_to_print("sys.stdout.flush()\nif TYPE_CHECKING:\n    from rich.text import Text"))


# -- every command ----------------------------------------------------------------------------------


class Terminal:
    """What a command shows there, and how it ends."""

    def __init__(self, words: Sequence[str | Path], until: str = "", number: int = signal.SIGINT) -> None:
        """``until``: for a command that goes on, what it shows before it gets signal ``number``."""
        ours, theirs = os.openpty()
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "TERM": "xterm-256color", "COLUMNS": "400"}
        command = ["env", "--default-signal=INT", *KVFUSE, *map(str, words)]  # in the background it would be ignored
        process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment)
        os.close(theirs)
        self.output = b""
        while part := self._read(ours):
            self.output += part
            if until and until.encode() in self.output:
                process.send_signal(number)
                until = ""
        os.close(ours)
        self.status = process.wait(PATIENCE_S)

    @staticmethod
    def _read(descriptor: int) -> bytes:
        try:
            return os.read(descriptor, 1 << 16)
        except OSError as error:  # nobody has the other end any more
            if error.errno != errno.EIO:
                raise
            return b""

    @property
    def text(self) -> str:
        """Without what tables and progress are drawn with."""
        return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", self.output.decode("utf-8", "backslashreplace"))


class Hostile:
    """A mount whose volume, point, namespace and files have such a name."""

    def __init__(self, base: Path) -> None:
        self.volume, self.point, self.nothing = base / f"volume{UTF8}", base / f"mnt{NAME}", base / f"nothing{NAME}"
        self.conf = base / f"conf{NAME}"
        self.conf.write_text(f'[volume]\nnme = "{SHOWN[:3]}"\n'.replace("\\", "\\\\"))
        self.point.mkdir()
        self.cache, self.file, self.folder = (self.point / f"{kind}{NAME}" for kind in ("cache", "file", "folder"))
        self.markup = self.point / "x[" / "red]"


def shown_by(hostile: Hostile) -> Iterator[tuple[str, list[str | Path], str]]:
    """(command, its words, what it shows of a hostile name: "" where nothing has to be shown)"""
    point, cache, file, nothing = hostile.point, hostile.cache, hostile.file, hostile.nothing
    yield "mount", [hostile.volume, point], f"mnt{SHOWN}"
    yield "mount", [hostile.volume, nothing], f"nothing{SHOWN}"
    yield "mount", [hostile.conf, nothing], f"conf{SHOWN}"
    yield "mount", [hostile.volume, nothing, "-o", f"x{NAME}"], f"x{SHOWN}"
    yield "umount", [file], f"file{SHOWN}"
    yield "upgrade", [file], f"file{SHOWN}"
    yield "upgrade", [point, "--python", nothing], f"nothing{SHOWN}"
    yield "upgrade", [point, "--python", hostile.conf], f"conf{SHOWN}"
    yield "status", [], f"mnt{SHOWN}"
    yield "status", [nothing], f"nothing{SHOWN}"
    yield "stats", [point], f"cache{SHOWN}"
    yield "top", [point, "--once"], f"cache{SHOWN}"
    yield "events", [cache, "--once"], f"block{SHOWN}"
    yield "events", [nothing, "--once"], f"nothing{SHOWN}"
    yield "info", [file], f"file{SHOWN}"
    yield "info", [hostile.markup], "x[/red]"
    yield "info", [nothing], f"nothing{SHOWN}"
    yield "namespace", ["create", hostile.folder, "--eviction", f"x{NAME}"], ""
    yield "namespace", ["list", point], f"cache{SHOWN}"
    yield "namespace", ["show", cache], f"cache{SHOWN}"
    yield "namespace", ["usage", cache], f"cache{SHOWN}"
    yield "namespace", ["set", file, "--capacity", "1GiB"], f"file{SHOWN}"
    yield "namespace", ["set", cache, "--capacity", f"x{NAME}"], ""
    yield "namespace", ["set", cache, f"x{NAME}"], r"not 'x\r\x0bÅ"
    yield "namespace", ["clear", file], f"file{SHOWN}"
    yield "namespace", ["delete", file], f"file{SHOWN}"
    yield "connectors", ["list"], ""
    yield "connectors", ["config", "sglang", point, "--namespace", NAME], ""
    yield "connectors", ["config", "vllm", nothing], f"nothing{SHOWN}"
    yield "connectors", ["check", "lmcache", point, "--namespace", NAME], SHOWN
    yield "connectors", ["check", NAME, point], ""
    yield "format", [hostile.volume], f"volume{SHOWN[:-4]}"
    yield "format", [file, "--capacity", NAME], ""
    yield "resize", [nothing, "--capacity", "1GiB"], f"nothing{SHOWN}"
    yield "fsck", [hostile.volume], f"volume{SHOWN[:-4]}"
    yield "fsck", [nothing], f"nothing{SHOWN}"
    yield "config", [hostile.volume], f"volume{SHOWN[:-4]}"
    yield "config", [hostile.conf], f"conf{SHOWN}"
    yield "doctor", [hostile.volume], ""
    yield "doctor", [hostile.conf], f"conf{SHOWN}"
    yield "cluster-dev", ["status", "--folder", nothing], f"nothing{SHOWN}"
    yield "bench", ["--folder", nothing], r"nothing\r\x0bÅ"
    yield "bench", ["--only", NAME], ""
    yield "bench", ["gpu", nothing], r"nothing\r\x0bÅ"
    yield "replay", [nothing], r"nothing\r\x0bÅ"
    yield "replay", ["--simulate", "--trace", hostile.conf], ""
    yield "replay", [cache, "--requests", "1", "--block-size", "4096"], ""
    yield "replay", [hostile.folder, "--requests", "1", "--block-size", "4096"], ""
    yield "version", [NAME], SHOWN
    yield NAME, [], r"command '\r\x0bÅ"


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hostile]:
    hostile = Hostile(tmp_path_factory.mktemp("hostile"))
    done = Terminal(["mount", hostile.volume, hostile.point, "-o", CAPACITY])
    assert done.status == 0, done.text
    assert not any(raw in done.output for raw in RAW)
    assert f"volume{SHOWN[:-4]}" in done.text, "it was made"
    hostile.file.write_bytes(bytes(100_000))
    hostile.folder.mkdir()
    hostile.markup.mkdir(parents=True)
    assert kvfuse("namespace", "create", hostile.cache).returncode == 0
    (hostile.cache / f"block{NAME}").write_bytes(bytes(10_000))
    yield hostile
    mounts.detach(hostile.point, lazy=True)


@pytest.mark.ring(3)
def test_every_command_at_a_terminal(hostile: Hostile) -> None:
    seen = set()
    for command, words, shown in shown_by(hostile):
        seen.add(command)
        done = Terminal([command, *words])
        what = f"{command} {words}: {done.output!r}"
        assert done.status in range(6), what
        assert "internal error" not in done.text, what
        assert "Traceback" not in done.text, what
        assert not any(raw in done.output for raw in RAW), what
        assert shown in done.text.replace("\r\n", "\n"), what
    assert seen == {*COMMANDS, NAME}


@pytest.mark.parametrize("words", [["stats", "--watch"], ["top"], ["events"], ["mount"]])
def test_commands_that_go_on(hostile: Hostile, words: list[str]) -> None:
    place = [hostile.cache if words == ["events"] else hostile.point]
    if words == ["mount"]:
        place = [hostile.volume.with_name("second"), hostile.volume.with_name(f"at{NAME}"), "--foreground"]
        place[1].mkdir()
        place += ["-o", CAPACITY]
        done = Terminal([*words, *place], "mounted on", signal.SIGTERM)
        assert f"at{SHOWN}" in done.text
    else:
        done = Terminal([*words, *place], "block" if words == ["events"] else "mnt")
    assert not any(raw in done.output for raw in RAW), done.output
    assert done.status == 0, done.text


def test_the_log_and_a_traceback_too(hostile: Hostile, monkeypatch: pytest.MonkeyPatch) -> None:
    wait_until((hostile.volume / "log").exists, "the log")
    written = (hostile.volume / "log").read_bytes()
    assert f"is mounted on {hostile.point.parent}/mnt{SHOWN}".encode() in written
    assert not any(raw in written for raw in RAW)
    monkeypatch.setenv("KVFUSE_DEBUG", "1")
    done = Terminal(["info", hostile.nothing])
    assert done.status == 1
    assert "Traceback (most recent call last):" in done.text
    assert not any(raw in done.output for raw in RAW)


def texts_of(content: object) -> Iterator[str]:
    if isinstance(content, str):
        yield content
    elif isinstance(content, dict | list):
        for part in content.values() if isinstance(content, dict) else content:
            yield from texts_of(part)


def test_json_has_names_as_they_are(hostile: Hostile) -> None:
    for words in (["status", hostile.point], ["stats", hostile.point], ["namespace", "list", hostile.point]):
        done = kvfuse(*words, "--json")
        assert done.stdout.isascii()
        assert any(NAME in text for text in texts_of(json.loads(done.stdout)))
    shown = json.loads(kvfuse("namespace", "show", hostile.cache, "--json").stdout)
    assert shown["path"] == str(hostile.cache)
    events = [json.loads(line) for line in kvfuse("events", hostile.cache, "--once", "--json").stdout.splitlines()]
    assert {"event": "present", "name": f"block{NAME}"} in events


def test_a_terminal_of_ascii(hostile: Hostile) -> None:
    """Names that its bytes do not have are escaped, and end no command."""
    name = hostile.folder / "Grüße ≥"
    name.write_bytes(b"x")
    done = kvfuse("info", name, LC_ALL="C", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0", PYTHONIOENCODING="ascii")
    assert done.returncode == 0, done.stderr
    assert r"Gr\xc3\xbc\xc3\x9fe" in done.stdout


def test_damage_is_named_at_a_terminal(hostile: Hostile, tmp_path: Path) -> None:
    """fsck of a volume with such names, some of whose bytes are gone."""
    volume, point = tmp_path / f"volume{UTF8}", tmp_path / "mnt"
    point.mkdir()
    assert kvfuse("mount", volume, point, "-o", CAPACITY).returncode == 0
    for number in range(3):
        (point / f"file{number}{NAME}").write_bytes(os.urandom(200_000))
    assert kvfuse("umount", point).returncode == 0
    for segment in (volume / "segments").glob("*.seg"):
        with segment.open("r+b") as file:
            size = segment.stat().st_size
            for start in range(1 << 20, size, 1 << 16):
                file.seek(start)
                file.write(b"damage")
    done = Terminal(["fsck", volume, "--verify"])
    assert (done.status, "--repair" in done.text) == (1, True)
    assert not any(raw in done.output for raw in RAW), done.output
    rebuilt = Terminal(["fsck", volume, "--rebuild"])
    assert not any(raw in rebuilt.output for raw in RAW), rebuilt.output
