"""What hosts of one volume pay, in miniature: three hosts, real servers, and the command's table."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from kvfuse.errors import KvfuseError
from kvfuse_bench.commands.scale import scale
from kvfuse_bench.scale import run

pytestmark = pytest.mark.skipif(
    any(shutil.which(program) is None for program in ("etcd", "redis-server")), reason="needs etcd and Redis"
)
HOSTS = ["--hosts", "3", "--writers", "1", "--readers", "1", "--seconds", "2"]
RATES = ["--blocks", "64", "--looks", "64", "--files", "4"]


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "SETTLE_SECONDS", 0.0)
    monkeypatch.setattr(run, "CAPACITY", "1GiB")


@pytest.mark.parametrize("index", ["redis", "etcd"])
def test_three_hosts(tmp_path: Path, capsys: pytest.CaptureFixture[str], index: str) -> None:
    words = [*HOSTS, *RATES, "--index", index, "--folder", str(tmp_path), "--output", str(tmp_path / "results")]
    scale.main(words, standalone_mode=False)
    (file,) = (tmp_path / "results").iterdir()
    (result,) = json.loads(file.read_text())["scales"]
    assert result["is_clean"]
    quiet, blocks, files = result["phases"]
    assert [phase["name"] for phase in result["phases"]] == ["quiet", "blocks", "files"]
    assert blocks["done"]["blocks"] == 128
    assert blocks["done"]["found"] > 0
    assert blocks["done"]["got"] > 0
    assert not blocks["done"].get("wrong")
    assert files["done"]["files"] == 8
    for phase in result["phases"]:
        assert set(phase["costs"]) == {"idle", "writers", "readers"}
        for cost in phase["costs"].values():
            assert cost["hosts"] == 1
            assert 0 < cost["processor"] < phase["seconds"]
        assert sum(cost["sent"] for cost in phase["costs"].values()) > 0
    assert (blocks["index_processor"] > 0) == (index == "redis")
    assert quiet["etcd_bytes"][1] > 0
    assert set(result["look_up_ms"]) == {"present", "absent"}
    assert result["memory"] > 0
    assert "an idle host, for each" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == [tmp_path / "results"]


def test_too_few_hosts_are_refused(tmp_path: Path) -> None:
    with pytest.raises(KvfuseError, match="2 hosts are fewer than 4 that write and 2 that read"):
        scale.main(["--hosts", "2", "--folder", str(tmp_path)], standalone_mode=False)
