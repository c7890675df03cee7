"""The image that deploy/image/build makes: what is in it, and that its list of contents says so."""

from __future__ import annotations

import hashlib
import json
import subprocess
import tarfile
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from kube_lab import build_image

from kvfuse import __version__

pytestmark = [pytest.mark.root, pytest.mark.needs("kubernetes"), pytest.mark.timeout(1200)]
LABEL = "a.test"


@dataclass(frozen=True)
class Image:
    """An archive, and the tree of its layers."""

    archive: Path
    tree: Path

    def document(self, name: str) -> Any:
        with tarfile.open(self.archive) as archive:
            file = archive.extractfile(name)
            assert file is not None
            return json.load(file)

    def run(self, *words: str) -> str:
        """Standard output of a program in the tree."""
        done = subprocess.run(["chroot", self.tree, *words], capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    @property
    def contents(self) -> dict[str, Any]:
        found = json.loads((self.tree / "usr/share/kvfuse/contents.cdx.json").read_text())
        assert isinstance(found, dict)
        return found


@pytest.fixture(scope="module")
def image() -> Iterator[Image]:
    with tempfile.TemporaryDirectory(prefix="kvfuse-test-") as name:
        folder = Path(name)
        archive = build_image(folder, LABEL)
        found = Image(archive, folder / "tree")
        with tarfile.open(archive) as opened:
            opened.extractall(folder / "archive", filter="data")
        found.tree.mkdir()
        for layer in found.document("manifest.json")[0]["Layers"]:
            subprocess.run(["tar", "-C", found.tree, "-xf", folder / "archive" / layer], check=True)
        yield found


def test_layers_are_those_that_the_configuration_names(image: Image) -> None:
    (row,) = image.document("manifest.json")
    assert row["RepoTags"] == [f"kvfuse:{LABEL}"]
    config = image.document(row["Config"])
    with tarfile.open(image.archive) as archive:
        for name, wanted in zip(row["Layers"], config["rootfs"]["diff_ids"], strict=True):
            file = archive.extractfile(name)
            assert file is not None
            assert f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}" == wanted
    assert config["config"]["Labels"]["org.opencontainers.image.version"] == f"{__version__}+{LABEL}"


def test_programs_run(image: Image) -> None:
    for program in ("kvfuse", "kvfuse-csi"):
        assert image.run(program, "--version") == f"{program} {__version__}+{LABEL}\n"
    modules = "pyfuse3, hiredis, pyverbs.device, kvfuse.native._blocks, kvfuse.native._native, kvfuse.native._fusewire"
    image.run("/opt/kvfuse/bin/python", "-c", f"import {modules}, kvfuse.native._peers")
    assert (image.tree / "usr/sbin/mount.kvfuse").stat().st_mode & 0o111
    assert image.run("sh", "-c", "mount.kvfuse 2>&1 || true").startswith("usage: mount.kvfuse")


def test_the_list_of_contents_is_whole(image: Image) -> None:
    contents = image.contents
    assert (contents["bomFormat"], contents["metadata"]["component"]["version"]) == (
        "CycloneDX",
        f"{__version__}+{LABEL}",
    )
    listed = {row["name"]: row for row in contents["components"]}
    installed = set(image.run("dpkg-query", "-W", "-f", "${Package}\n").split())
    metadata = (image.tree / "opt/kvfuse/lib").glob("python3*/site-packages/*.dist-info/METADATA")
    python = {path.read_text().partition("\nName: ")[2].partition("\n")[0] for path in metadata}
    assert listed.keys() == installed | python
    assert {"kvfuse", "kvfuse-kubernetes", "grpcio", "fuse3", "librados2"} <= listed.keys()
    without = {name for name, row in listed.items() if not row.get("licenses")}
    assert without & python == set()
    assert [name for name in without if not (image.tree / f"usr/share/doc/{name}/copyright").exists()] == []


def test_there_is_nothing_that_no_program_reads(image: Image) -> None:
    patterns = "var/lib/apt/lists/*", "usr/share/man/*", "opt/kvfuse/bin/pip*", "run/*", "opt/kvfuse-*"
    assert [str(path) for pattern in patterns for path in image.tree.glob(pattern)] == []
    site = next((image.tree / "opt/kvfuse/lib").glob("python3*/site-packages"))
    assert not (site / "pip").exists()
    assert (site / "kvfuse/__pycache__").is_dir(), "compiled"
    assert not any(path.suffix == ".c" or path.name == "tests" for path in site.rglob("*"))
