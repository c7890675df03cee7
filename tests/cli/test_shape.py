"""Options that count when a volume is made, at a mount of one that is there."""

from __future__ import annotations

import pytest
from cli_lab import Place, assert_fails, kvfuse

MADE = "capacity=128MiB,slab_size=1MiB,segment_size=32MiB,chunk_size=512KiB,metadata_size=40MiB,exact_sizes=48KiB"


@pytest.fixture
def made(place: Place) -> Place:
    conf = place.base / "mount.conf"
    lines = [f'{name} = "{value}"' for name, _, value in (word.partition("=") for word in MADE.split(",")[:-1])]
    conf.write_text("\n".join(["[volume]", f'path = "{place.volume}"', *lines]) + "\n")
    assert kvfuse("format", conf).returncode == 0
    return place


DIFFERENT = {
    "capacity=64MiB": "volume.capacity is 64MiB there, but the volume .* has 128MiB: leave the option out, or ",
    "capacity=256MiB": "has 128MiB",
    "slab_size=2MiB": "volume.slab_size is 2MiB there, .* has 1MiB",
    "segment_size=64MiB": "volume.segment_size is 64MiB there",
    "chunk_size=1MiB": "volume.chunk_size is 1MiB there, .* has 512KiB: .*user.kvfuse.chunk_size",
    "metadata_size=64MiB": "volume.metadata_size is 64MiB there, .* has 40MiB",
}


def test_what_differs_is_refused_with_the_remedy(made: Place) -> None:
    before = made.tree()
    for word, message in DIFFERENT.items():
        assert_fails(
            kvfuse("mount", made.volume, made.point, "-o", f"cache,{word}"), 2, f"^kvfuse: -o {word}: .*{message}"
        )
        foreground = kvfuse("mount", made.volume, made.point, "--foreground", "-o", word)
        assert_fails(foreground, 2, message)
        assert not made.is_mounted
    conf = made.base / "other.conf"
    conf.write_text(f'[volume]\npath = "{made.volume}"\ncapacity = "1GiB"\n')
    assert_fails(kvfuse("mount", conf, made.point), 2, f"{conf}:3: volume.capacity is 1GiB there")
    assert made.tree() == before


def test_what_is_so_may_be_said_again(made: Place) -> None:
    """As lines of fstab, and scripts that mount, say it each time. More exact sizes are welcome."""
    for words in (MADE, MADE.replace("48KiB", "80KiB"), "noatime"):
        done = kvfuse("mount", made.volume, made.point, "-o", words)
        assert done.returncode == 0, done.stderr
        assert kvfuse("umount", made.point).returncode == 0
    done = kvfuse("mount", made.base / "mount.conf", made.point)
    assert done.returncode == 0, done.stderr
    assert kvfuse("umount", made.point).returncode == 0


@pytest.mark.parametrize("words", ["capacity=100MB", "capacity=100000000,segment_size=3MiB", "metadata_size=33MiB"])
def test_a_volume_that_a_mount_made_is_mounted_again(place: Place, words: str) -> None:
    for _ in range(2):
        done = kvfuse("mount", place.volume, place.point, "-o", f"capacity=100000000,{words}")
        assert done.returncode == 0, done.stderr
        assert kvfuse("umount", place.point).returncode == 0
