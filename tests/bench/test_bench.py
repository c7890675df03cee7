"""Content that shows any mistake, the folder of blocks as a cache, the replay, and the measuring functions."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvfuse.errors import KvfuseError, MountError
from kvfuse_bench import measures, qos, short, suite
from kvfuse_bench.cache import BlockFolder, Outcome, read_whole
from kvfuse_bench.content import KEY_SIZE, BlockContent, block_key
from kvfuse_bench.daemons import barefs_mount, kvfuse_mount, memory_of
from kvfuse_bench.measures import MIB
from kvfuse_bench.rounds import Figure, Measured, Side, alternate

SIZE = 192 * 1024
KEYS = [block_key("test", index) for index in range(40)]


# -- content


@pytest.fixture
def content() -> BlockContent:
    """The block KEYS[0] stands in the buffer, as if just read."""
    content = BlockContent(SIZE)
    content.buffer[:SIZE] = content.fill(KEYS[0])
    return content


def test_the_right_content_is_accepted(content: BlockContent) -> None:
    assert content.difference(KEYS[0], content.buffer[:SIZE]) is None


@pytest.mark.parametrize("offset", [0, KEY_SIZE - 1, KEY_SIZE, 8191, 8192, SIZE // 2 + 3, SIZE - 1])
def test_one_flipped_bit_is_noticed_and_located(content: BlockContent, offset: int) -> None:
    content.buffer[offset] ^= 0x10
    assert re.search(
        rf"in 1 bytes, the first at offset {offset},", content.difference(KEYS[0], content.buffer[:SIZE]) or ""
    )


def test_another_block_is_noticed_and_named(content: BlockContent) -> None:
    assert KEYS[0].hex() in (content.difference(KEYS[1], content.buffer[:SIZE]) or "")


@pytest.mark.parametrize("piece", [512, 4096, 8192, 64 * 1024])
def test_two_swapped_pieces_are_noticed(content: BlockContent, piece: int) -> None:
    first, second = bytes(content.buffer[piece : 2 * piece]), bytes(content.buffer[2 * piece : 3 * piece])
    content.buffer[piece : 3 * piece] = second + first
    assert content.difference(KEYS[0], content.buffer[:SIZE])


@pytest.mark.parametrize("start", [0, 4096, SIZE // 2, SIZE - 512])
def test_a_zeroed_tail_is_noticed(content: BlockContent, start: int) -> None:
    content.buffer[start:SIZE] = bytes(SIZE - start)
    difference = content.difference(KEYS[0], content.buffer[:SIZE]) or ""
    assert difference == "is all zeros" if start == 0 else f"the first at offset {start}" in difference


@pytest.mark.parametrize("size", [0, SIZE - 1, SIZE + 1])
def test_a_wrong_length_is_noticed(content: BlockContent, size: int) -> None:
    assert f"{size} bytes, not {SIZE}" in (content.difference(KEYS[0], content.buffer[:size]) or "")


def test_content_depends_on_the_key_alone() -> None:
    assert bytes(BlockContent(SIZE).fill(KEYS[3])) == bytes(BlockContent(SIZE).fill(KEYS[3]))
    small = bytes(BlockContent(4096).fill(KEYS[3]))
    assert bytes(BlockContent(SIZE).fill(KEYS[3])).startswith(small)
    assert len(set(KEYS)) == len(KEYS)


@pytest.mark.parametrize("size", [0, 24, 1001])
def test_sizes_that_cannot_be_verified_are_refused(size: int) -> None:
    with pytest.raises(ValueError, match="multiple of 8"):
        BlockContent(size)


# -- the folder as a cache


def outcomes(folder: BlockFolder, keys: list[bytes]) -> list[Outcome]:
    return [answer.outcome for answer in folder.ask(keys)]


def block_file(target: Path, key: bytes) -> Path:
    return target / "blocks" / key.hex()[:2] / key.hex()[2:]


def test_a_block_is_stored_once_and_then_hit(tmp_path: Path) -> None:
    with BlockFolder(tmp_path, SIZE, 2, capacity=100 * SIZE) as folder:
        assert outcomes(folder, KEYS) == [Outcome.STORED] * len(KEYS)
        assert outcomes(folder, KEYS) == [Outcome.HIT] * len(KEYS)
        assert folder.used == len(KEYS) * SIZE
    assert block_file(tmp_path, KEYS[7]).read_bytes() == bytes(BlockContent(SIZE).fill(KEYS[7]))


def test_the_least_recently_used_blocks_make_room(tmp_path: Path) -> None:
    with BlockFolder(tmp_path, SIZE, 2, capacity=10 * SIZE) as folder:
        folder.ask(KEYS[:10])
        folder.ask(KEYS[:2])
        assert outcomes(folder, KEYS[10:12]) == [Outcome.STORED] * 2
        assert folder.used == 10 * SIZE
        assert folder.removed_count == 2
    there = [block_file(tmp_path, key).exists() for key in KEYS[:12]]
    assert there == [True, True, False, False] + [True] * 8


def test_a_later_run_finds_the_blocks_and_no_leftovers(tmp_path: Path) -> None:
    with BlockFolder(tmp_path, SIZE, 1, capacity=10 * SIZE) as folder:
        folder.ask(KEYS[:4])
    unfinished = block_file(tmp_path, KEYS[0]).with_suffix(".part")
    unfinished.write_bytes(b"torn")
    with BlockFolder(tmp_path, SIZE, 1, capacity=10 * SIZE) as folder:
        assert (folder.found_count, folder.used) == (4, 4 * SIZE)
        assert outcomes(folder, KEYS[:4]) == [Outcome.HIT] * 4
    assert not unfinished.exists()


def test_a_lost_block_is_a_miss_and_counted_once(tmp_path: Path) -> None:
    with BlockFolder(tmp_path, SIZE, 1, capacity=10 * SIZE) as folder:
        folder.ask(KEYS[:4])
        block_file(tmp_path, KEYS[2]).unlink()
        assert outcomes(folder, KEYS[:4]) == [Outcome.HIT, Outcome.HIT, Outcome.STORED, Outcome.HIT]
        assert folder.used == 4 * SIZE


def test_two_exchanged_blocks_are_wrong(tmp_path: Path) -> None:
    with BlockFolder(tmp_path, SIZE, 2, capacity=10 * SIZE) as folder:
        folder.ask(KEYS[:3])
        first, second = block_file(tmp_path, KEYS[0]), block_file(tmp_path, KEYS[1])
        first.rename(tmp_path / "aside")
        second.rename(first)
        (tmp_path / "aside").rename(second)
        answers = folder.ask(KEYS[:3])
    assert [answer.outcome for answer in answers] == [Outcome.WRONG, Outcome.WRONG, Outcome.HIT]
    assert answers[0].detail.startswith(f"{first} differs")
    assert answers[0].detail.endswith(f"it starts like block {KEYS[1].hex()}")


@pytest.fixture
def small_tmpfs(tmp_path: Path) -> Iterator[Path]:
    """A file system with room for about ten blocks beside its folders."""
    if os.geteuid() != 0:
        pytest.skip("mounting tmpfs takes root")
    point = tmp_path / "small"
    point.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={10 * SIZE}", "tmpfs", str(point)], check=True)
    yield point
    subprocess.run(["umount", str(point)], check=True)


def test_a_full_file_system_stores_no_more_until_there_is_room(small_tmpfs: Path) -> None:
    with BlockFolder(small_tmpfs, SIZE, 2, capacity=1000 * SIZE) as folder:
        found = outcomes(folder, KEYS[:20])
        assert found.count(Outcome.STORED) + found.count(Outcome.NO_ROOM) == 20
        assert found.count(Outcome.NO_ROOM) >= 10
        assert folder.used == 0, "as many of the oldest went as were asked for: all of them"
        assert outcomes(folder, KEYS[20:25]) == [Outcome.STORED] * 5
    assert not list(small_tmpfs.rglob("*.part"))


def test_a_file_longer_than_the_buffer_is_read_no_further(tmp_path: Path) -> None:
    path = tmp_path / "long"
    path.write_bytes(bytes(1000))
    assert read_whole(str(path), memoryview(bytearray(100))) == 100


# -- the command


def run_replay(target: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "kvfuse.cli", "replay", str(target), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def figure(output: str, name: str) -> str:
    """The right column of the table's row called ``name``."""
    found = re.search(rf"^\s*{re.escape(name)}\s{{2,}}(.+?)\s*$", output, re.MULTILINE)
    assert found, f"no {name!r} in:\n{output}"
    return found[1]


@pytest.mark.parametrize("arguments", [(), ("--tokens-per-block", "512", "--model", "qwen2.5-0.5b", "--workers", "1")])
def test_replay_of_generated_traffic(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    done = run_replay(tmp_path, "--requests", "20", "--block-size", "4096", *arguments)
    assert done.returncode == 0, done.stderr
    assert figure(done.stdout, "wrong") == "0"
    assert figure(done.stdout, "hit ratio") == figure(done.stdout, "of a cache that starts empty and never forgets")
    assert figure(done.stdout, "record round trips per 1,000 blocks") == "n/a"
    stored = sum(1 for path in (tmp_path / "blocks").rglob("*") if path.is_file())
    assert figure(done.stdout, "written") == f"{stored:,}"
    again = run_replay(tmp_path, "--requests", "20", "--block-size", "4096", *arguments)
    assert figure(again.stdout, "hit ratio") == "100.0%"


def test_replay_of_a_trace_stops_at_the_number_of_blocks(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    line = '{"timestamp": 0, "input_length": 1024, "output_length": 1, "hash_ids": [0, 1]}\n'
    trace.write_text(line * 3)
    done = run_replay(tmp_path, "--trace", str(trace), "--blocks", "150", "--block-size", "4096")
    assert done.returncode == 0, done.stderr
    assert figure(done.stdout, "blocks asked for") == "150"
    assert figure(done.stdout, "read and verified") == str(150 - 64)


def test_replay_names_a_damaged_block_and_fails(tmp_path: Path) -> None:
    limits = ("--blocks", "200", "--block-size", "4096")
    assert run_replay(tmp_path, *limits).returncode == 0
    damaged = next(path for path in sorted((tmp_path / "blocks").rglob("*")) if path.is_file())
    with damaged.open("r+b") as file:
        file.seek(1234)
        byte = file.read(1)[0]
        file.seek(1234)
        file.write(bytes([byte ^ 1]))
    done = run_replay(tmp_path, *limits)
    assert done.returncode == 1
    assert f"{damaged} differs in 1 bytes, the first at offset 1234" in done.stderr
    assert "kvfuse: 1 of 200 blocks were wrong" in done.stderr


def test_replay_keeps_to_the_capacity(tmp_path: Path) -> None:
    done = run_replay(tmp_path, "--blocks", "500", "--block-size", "4096", "--capacity-blocks", "100")
    assert done.returncode == 0, done.stderr
    assert sum(1 for path in (tmp_path / "blocks").rglob("*") if path.is_file()) == 100


def test_replay_refuses_what_it_cannot_do(tmp_path: Path) -> None:
    assert run_replay(tmp_path, "--block-size", "1001").returncode == 2
    assert run_replay(tmp_path / "absent").returncode == 2
    trace = tmp_path / "trace"
    trace.write_text("no trace\n")
    done = run_replay(tmp_path, "--trace", str(trace))
    assert done.returncode == 2
    assert "line 1" in done.stderr


# -- measuring


def test_blocks_are_stored_and_read(tmp_path: Path) -> None:
    assert measures.store_blocks(tmp_path, 30, 4096) > 0
    assert sorted(path.stat().st_size for path in tmp_path.iterdir()) == [4096] * 30
    assert measures.read_blocks(tmp_path, 30, 4096) > 0
    with pytest.raises(KvfuseError, match="4096 bytes, not 5000"):
        measures.read_blocks(tmp_path, 30, 5000)


def test_writers_together_store_every_block(tmp_path: Path) -> None:
    assert measures.store_blocks_together(tmp_path, 48, 4096, 8) > 0
    folders = sorted(tmp_path.iterdir())
    assert len(folders) == 8
    for folder in folders:
        assert sorted(map(str, folder.iterdir())) == measures.block_paths(folder, 6)


def test_paced_blocks_are_no_faster(tmp_path: Path) -> None:
    assert measures.store_blocks_paced(tmp_path, 60, 4096, rate=1000) < 1200


def test_absent_names_are_asked_for_and_must_be_absent(tmp_path: Path) -> None:
    assert measures.ask_absent_names(tmp_path, 100) > 0
    (tmp_path / f"absent-{5:032x}").touch()
    with pytest.raises(KvfuseError, match="is there"):
        measures.ask_absent_names(tmp_path, 100)


def test_small_files_fill_folders_of_a_thousand(tmp_path: Path) -> None:
    seen: list[int] = []
    assert measures.make_small_files(tmp_path, 1500, 100, seen.append) > 0
    assert [len(list(folder.iterdir())) for folder in sorted(tmp_path.iterdir())] == [1000, 500]
    assert seen == [1000, 1500]


def test_a_stream_is_written_whole_and_read_whole(tmp_path: Path) -> None:
    stream = tmp_path / "stream"
    assert measures.write_stream(stream, 3 * MIB) > 0
    assert stream.stat().st_size == 3 * MIB
    assert measures.read_stream(stream) > 0
    assert measures.copy_memory(MIB) > 0


def test_dropped_pages_are_gone_or_it_is_said(tmp_path: Path) -> None:
    stream = tmp_path / "stream"
    measures.write_stream(stream, 3 * MIB)
    assert measures.cached_share(stream) == 1.0
    if _file_system(tmp_path) == "tmpfs":
        with pytest.raises(KvfuseError, match="cannot be read cold"):
            measures.drop_cached(stream)
    else:
        measures.drop_cached(stream)
        assert measures.cached_share(stream) < 0.01


def _file_system(path: Path) -> str:
    found = subprocess.run(["stat", "-f", "-c", "%T", str(path)], capture_output=True, text=True, check=True)
    return found.stdout.strip()


def test_rounds_alternate_and_the_first_does_not_count() -> None:
    calls: list[tuple[str, int]] = []

    def side(name: str, values: list[float]) -> Side:
        def measure(number: int) -> float:
            calls.append((name, number))
            return values[number]

        return measure

    a, b = alternate({"a": side("a", [99, 1, 5, 2]), "b": side("b", [99, 4, 4, 4])}, 3)
    assert a == Measured("a", [1, 5, 2])
    assert (a.value, b.value) == (2, 4)
    assert calls == [("b", 0), ("a", 0), ("a", 1), ("b", 1), ("b", 2), ("a", 2), ("a", 3), ("b", 3)]


@pytest.mark.parametrize(
    ("value", "target", "ratio_target", "less", "met"),
    [
        (8.0, None, None, False, None),
        (8.0, 8.0, None, False, True),
        (8.0, 9.0, None, False, False),
        (8.0, 8.0, 0.8, False, True),
        (8.0, 8.0, 0.9, False, False),
        (8.0, 9.0, None, True, True),
        (8.0, 7.0, None, True, False),
    ],
)
def test_targets(value: float, target: float | None, ratio_target: float | None, less: bool, met: bool | None) -> None:
    figure = Figure("f", "u", Measured("a", [value]), Measured("b", [10.0]), target, ratio_target, less)
    assert figure.met is met
    assert figure.to_json()["ratio"] == pytest.approx(0.8)


# -- daemons and the suite


def test_the_bare_file_system_serves_and_goes(tmp_path: Path) -> None:
    point = tmp_path / "bare"
    with barefs_mount(point) as daemon:
        assert os.path.ismount(point)
        assert measures.store_blocks(point, 20, 65536) > 0
        assert measures.read_blocks(point, 20, 65536) > 0
        memory = memory_of(daemon.pid)
        assert memory.resident >= memory.anonymous > 0
        assert memory.resident == memory.anonymous + memory.file + memory.shared
    assert not os.path.ismount(point)


def test_a_daemon_that_does_not_mount_is_quoted(tmp_path: Path) -> None:
    (tmp_path / "volume").write_text("no folder")
    with (
        pytest.raises(MountError, match=r"ended with status \d+: .*volume"),
        kvfuse_mount(tmp_path / "volume", tmp_path / "mnt"),
    ):
        pass


def run_bench(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    places = ("--folder", str(tmp_path), "--output", str(tmp_path / "results"))
    command = [sys.executable, "-m", "kvfuse.cli", "bench", "--quick", "--rounds", "1", *places, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)


@pytest.mark.ring(3)
def test_bench_writes_a_table_and_json(tmp_path: Path) -> None:
    done = run_bench(tmp_path, "--only", "absent", "--only", "read-stream")
    assert done.returncode == 0, done.stderr
    assert "absent names" in done.stdout
    (result,) = (tmp_path / "results").iterdir()
    assert '"name": "1 MiB reads, cold"' in result.read_text()
    assert [path.name for path in tmp_path.iterdir()] == ["results"], "volumes are gone"


def test_every_bench_is_told_apart() -> None:
    assert not suite.BENCHES.keys() & suite.LARGE_BENCHES.keys()
    assert all(function.__doc__ for function in (suite.BENCHES | suite.LARGE_BENCHES).values())


@pytest.mark.ring(3)
@pytest.mark.parametrize("door", qos.READERS)
def test_reads_beside_a_flood_are_measured(tmp_path: Path, door: str) -> None:
    with kvfuse_mount(tmp_path / "volume", tmp_path / "mnt", "capacity=1GiB") as daemon:
        qos._prepare(daemon.mountpoint)
        for neighbour in ("", "puts"):
            row = qos._side(qos.READERS[door], daemon.mountpoint, neighbour, 20 * MIB, 0.1)(0)
            assert 0 < row["p50"] <= row["p99"]
        assert len(list((daemon.mountpoint / "flooded").iterdir())) > 0


def test_the_short_bench_prints_six_figures(tmp_path: Path) -> None:
    done = run_bench(tmp_path, "--short")
    assert done.returncode == 0, done.stderr
    assert all(name in done.stdout for name in short.FIGURES)
    (result,) = (tmp_path / "results").iterdir()
    figures = {figure["name"]: figure["value"] for figure in json.loads(result.read_text())["figures"]}
    assert figures.keys() == short.FIGURES.keys()
    assert all(value > 0 for value in figures.values())
    assert [path.name for path in tmp_path.iterdir()] == ["results"], "the volume is gone"
    refused = run_bench(tmp_path, "--short", "--large")
    assert refused.returncode == 2
