"""Loaders of models as their packages are, on a mount: all bytes come, by files and by rings."""

from __future__ import annotations

from pathlib import Path

import pytest
from engine_mounts import damage
from engine_python import engine_python
from mounting import temporary_mount

from kvfuse.errors import KvfuseError
from kvfuse_bench.loading.checkpoint import write_checkpoint
from kvfuse_bench.loading.loaders import LOADERS, ON_RINGS
from kvfuse_bench.loading.loads import Place, load_once, missing_modules

pytestmark = [pytest.mark.needs("fastsafetensors"), pytest.mark.engines("lmdb+file")]

MIB = 1 << 20


@pytest.fixture(scope="module")
def python() -> Path:
    return Path(engine_python("fastsafetensors"))


@pytest.mark.parametrize("name", LOADERS)
def test_a_loader_gets_all_bytes(python: Path, name: str, tmp_path: Path) -> None:
    assert not missing_modules(python, name)
    with temporary_mount(["capacity=1GiB"]) as mount:
        folder = mount.point / "model"
        folder.mkdir()
        checkpoint = write_checkpoint(folder, 160 * MIB, 2)
        mount.unmount()
        mount.mount()  # nothing of it is verified, or in the page cache of the mount
        for _ in ("cold", "warm"):
            assert load_once(python, name, Place(folder, checkpoint), tmp_path)["checks"] == checkpoint.checks


def test_damaged_weights_are_an_error(python: Path, tmp_path: Path) -> None:
    with temporary_mount(["capacity=1GiB"]) as mount:
        folder = mount.point / "model"
        folder.mkdir()
        place = Place(folder, write_checkpoint(folder, 80 * MIB, 1))
        damage(mount, "model", place.checkpoint.paths[0].name)
        mount.mount()
        for name in ON_RINGS:
            with pytest.raises(KvfuseError, match=name):
                load_once(python, name, place, tmp_path)
        assert "Input/output error" in (tmp_path / "loader.log").read_text()
