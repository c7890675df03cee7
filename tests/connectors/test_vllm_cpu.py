"""vLLM itself on a CPU, with a model of random weights: cold, restarted, and where daemon or engine is killed.

The tokens are always those that the first, cold, run generated. Seconds to the first token are printed.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from engine_host import LABS, ROOT
from engine_mounts import outliving_mount
from engine_python import engine_python
from killer import serving_of
from mounting import KvfuseMount, wait_until
from vllm_cpu_engine import NEW_TOKENS, PROMPT_TOKENS

BLOCK_TOKENS = 128
"""of vLLM on a CPU"""
PROMPTS = range(4)
BLOCKS = PROMPT_TOKENS // BLOCK_TOKENS
"""of a prompt"""
NAMESPACE = "cpu"

Row = dict[str, Any]

# vLLM starts four times, which takes half a minute each where nothing else runs.
pytestmark = [pytest.mark.needs("vllm-cpu"), pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def plugin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What an installation of kvfuse tells vLLM: the plug-in that it calls in each of its processes."""
    place = tmp_path_factory.mktemp("plugin")
    folder = place / f"kvfuse-{version('kvfuse')}.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: kvfuse\nVersion: {version('kvfuse')}\n")
    (folder / "entry_points.txt").write_text("[vllm.general_plugins]\nkvfuse = kvfuse.connectors.vllm:register\n")
    return place


@pytest.fixture(scope="module")
def mount() -> Iterator[KvfuseMount]:
    """One that outlives its daemon."""
    with outliving_mount() as mount:
        yield mount


class Run:
    """One life of the engine."""

    def __init__(self, name: str, folder: Path, mount: KvfuseMount, namespace: str = NAMESPACE) -> None:
        python = engine_python("vllm-cpu")
        environment = os.environ | {"PYTHONPATH": f"{folder}:{ROOT}:{LABS}", "PYTHONWARNINGS": "ignore"}
        self._name, self._log = name, folder / "log"
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [python, str(LABS / "vllm_cpu_engine.py"), str(folder), str(mount.point), namespace],
                env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True,
            )  # fmt: skip
        self._answer("READY")

    def ask(self, prompt: int) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{prompt}\n")
        self._process.stdin.flush()

    def row(self) -> Row:
        """What it generated for the first prompt that it was asked, and has not answered yet."""
        row: Row = json.loads(self._answer("ROW "))
        print(f"{self._name}: first token after {row['first']:.3f} s, {row['cached']} tokens cached")
        assert len(row["ids"]) == NEW_TOKENS
        return row

    def rows(self, prompts: range) -> list[Row]:
        for prompt in prompts:
            self.ask(prompt)
        return [self.row() for _ in prompts]

    def _answer(self, word: str) -> str:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(word):
                return line.removeprefix(word)
        raise AssertionError(f"vLLM ended with {self._process.wait()}:\n{self._log.read_text()[-5000:]}")

    def kill(self) -> None:
        self._process.kill()
        self._process.communicate()

    def end(self) -> str:
        """What it said."""
        self._process.communicate(timeout=120)
        assert self._process.returncode == 0, self._log.read_text()[-5000:]
        return self._log.read_text()


@pytest.fixture(scope="module")
def cold(plugin: Path, mount: KvfuseMount) -> list[Row]:
    """Of a run that found nothing, and stored all."""
    run = Run("cold", plugin, mount)
    rows = run.rows(PROMPTS)
    wait_until(lambda: stored(mount, NAMESPACE) >= len(PROMPTS) * BLOCKS, "the blocks to be stored")
    said = run.end()
    assert "Failed to load plugin" not in said
    assert "kvfuse registers nothing" not in said
    assert [row["cached"] for row in rows] == [0] * len(PROMPTS)
    return rows


def stored(mount: KvfuseMount, namespace: str) -> int:
    return len(os.listdir(mount.point / namespace))


def ids(rows: list[Row]) -> list[list[int]]:
    return [row["ids"] for row in rows]


def is_loaded(row: Row) -> bool:
    return bool(row["cached"] >= PROMPT_TOKENS - BLOCK_TOKENS)


def test_a_restarted_vllm_computes_no_prompt_again(plugin: Path, mount: KvfuseMount, cold: list[Row]) -> None:
    run = Run("restarted", plugin, mount)
    loaded = run.rows(PROMPTS)
    assert all(map(is_loaded, loaded)), loaded
    assert ids(loaded) == ids(cold)

    for prompt in PROMPTS:
        run.ask(prompt)
    again = [run.row()]
    daemon = serving_of(mount.pid)
    assert daemon is not None
    os.kill(daemon, signal.SIGKILL)  # in the middle of the second prompt
    again += [run.row() for _ in PROMPTS[1:]]
    assert ids(again) == ids(cold)

    def is_found_again() -> bool:
        run.ask(PROMPTS[-1])
        row = run.row()
        assert row["ids"] == cold[-1]["ids"]
        return is_loaded(row)

    wait_until(is_found_again, "vLLM to find blocks of the next daemon")
    run.end()


def test_a_vllm_that_is_killed_leaves_what_it_stored(plugin: Path, mount: KvfuseMount, cold: list[Row]) -> None:
    namespace = "killed"
    run = Run("killed", plugin, mount, namespace)
    for prompt in PROMPTS:
        run.ask(prompt)
    assert run.row()["ids"] == cold[0]["ids"]
    wait_until(lambda: stored(mount, namespace) > 0, "some blocks to be stored")
    run.kill()  # in the middle of another prompt
    count = stored(mount, namespace)
    assert count < len(PROMPTS) * BLOCKS

    run = Run("after the kill", plugin, mount, namespace)
    rows = run.rows(PROMPTS)
    assert rows[0]["cached"] > 0
    assert ids(rows) == ids(cold)
    run.end()
