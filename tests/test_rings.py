"""Every test is in one ring; those of rings 1 and 2 use nothing of the lab; and CI runs all of ring 3 by and by."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import pytest
import rings

LAB_WORDS = re.compile(r"\b(own_ceph|ceph_cluster|PROGRAMS|run_in_machine|EngineHost|engine_python)\b")
"""what finds or starts servers, machines and engines of the lab"""
SOME = """
[seconds.rings]
[seconds.lab]
test_rings = 300
test_imports = 230
test_budgets = 90
[needs]
test_rings = []
test_imports = []
test_budgets = ["ceph"]
test_failing = ["ceph"]
"""


def test_every_test_has_one_ring() -> None:
    assert {rings.ring_of(item) for item in rings.collected} <= {1, 2, 3}
    for item in rings.collected:
        assert rings.needs_of(item) <= set(rings.NEEDED), item.nodeid


def test_folders_are_there() -> None:
    assert [folder for folder in rings.FOLDERS if not (rings.TESTS / folder).is_dir()] == []


@functools.cache
def starting_the_lab(path: Path) -> set[str]:
    """Tests and fixtures of the file that name what does so."""
    text = path.read_text()
    functions = (node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    lines = text.splitlines()
    return {node.name for node in functions if LAB_WORDS.search("\n".join(lines[node.lineno - 1 : node.end_lineno]))}


def test_rings_1_and_2_use_nothing_of_the_lab() -> None:
    """As far as their files say; the next test is about what else they use."""
    wrong = {
        item.nodeid
        for item in rings.collected
        if rings.ring_of(item) != rings.LAB
        and item.path != Path(__file__)
        and starting_the_lab(item.path) & {item.name.partition("[")[0], *getattr(item, "fixturenames", ())}
    }
    assert wrong == set()


@pytest.mark.parametrize("ring", [1, 2])
def test_who_asks_for_the_lab_outside_of_it_fails(ring: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rings, "running", rings.LAB)
    rings.require_lab("ceph")
    monkeypatch.setattr(rings, "running", ring)
    with pytest.raises(AssertionError, match=rf"a test of ring {ring} uses ceph: mark it with needs\('ceph'\)"):
        rings.require_lab("ceph")


def test_every_file_of_ring_3_is_in_some_part() -> None:
    """Else CI would never run it: ``pytest --collect-only --record-durations`` puts it there."""
    found = rings.lab_files(rings.collected)
    recorded = {name: set(needs) for name, needs in rings.needs().items()}
    assert {name: needs for name, needs in found.items() if name not in recorded or needs - recorded[name]} == {}


def test_parts_are_all_of_ring_3(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rings, "DURATIONS", tmp_path / "durations.toml")
    rings.DURATIONS.write_text(SOME)
    rows = [([path.stem for path in part.files], part.needs, part.seconds) for part in rings.parts(4)]
    assert {part.slice for part in rings.parts(4)} == {(0, 1)}
    assert [part.slice for part in rings.parts(2) if part.seconds == 100] == [(0, 3), (1, 3), (2, 3)]
    assert rows == [
        (["test_rings"], set(), 300),
        (["test_imports"], set(), 230),
        (["test_budgets", "test_failing"], {"ceph"}, 90),
    ]
    assert [len(part.files) for part in rings.parts(5)] == [2, 2]


def test_what_needs_an_engine_is_a_part_for_each_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rings, "DURATIONS", tmp_path / "durations.toml")
    monkeypatch.setattr(rings, "ENGINES", tmp_path / "engines.toml")
    rings.DURATIONS.write_text(SOME.replace('"ceph"', '"vllm"'))
    rings.ENGINES.write_text('[versions]\nvllm = ["newest", "0.32.0", "0.31.0"]\n')
    rows = [([path.stem for path in part.files], part.needs) for part in rings.parts(4)]
    assert rows[2:] == [
        (["test_budgets", "test_failing"], {needed}) for needed in ("vllm", "vllm==0.32.0", "vllm==0.31.0")
    ]


def test_versions_are_of_engines_and_begin_with_the_newest() -> None:
    found = rings.versions()
    assert set(found) == {path.stem for path in (rings.TESTS.parent / "scripts" / "engines").glob("*.txt")}
    assert all(versions[0] == rings.NEWEST and len(versions) == len(set(versions)) > 1 for versions in found.values())
