"""A mount that outlives its daemon, from its beginning to its end, as a user of another place has it: a program.

``python outlive_guest.py FOLDER MOUNTED WORDS...`` with -o words; MOUNTED: 1 where FOLDER/mnt is mounted already. It
kills the daemon, upgrades, and unmounts; prints what it saw as one line of JSON. Uses the command line alone.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

KVFUSE = [sys.executable, "-P", "-m", "kvfuse.cli"]


def run(*words: str) -> str:
    done = subprocess.run([*KVFUSE, *words], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=300)
    if done.returncode != 0:
        raise SystemExit(f"kvfuse {' '.join(words)}: {done.stderr}")
    return done.stdout


def daemon_of(point: Path) -> int:
    return int(json.loads((point / ".kvfuse" / "stats").read_bytes())["pid"])


def main(folder: Path, is_mounted: bool, words: list[str]) -> None:
    volume, point = folder / "volume", folder / "mnt"
    seen: dict[str, Any] = {}
    if not is_mounted:
        options = [part for word in words for part in ("-o", word)]
        seen["mount"] = run("mount", str(volume), str(point), "-o", "outlive=true", *options)
    is_read_only = "ro" in words
    content = point / "file"
    if not is_read_only:
        content.write_bytes(b"x" * 100_000)
    with content.open("rb" if is_read_only else "r+b", buffering=0) as file:
        os.fsync(file.fileno())
        for number in range(2):
            former = daemon_of(point)
            os.kill(former, signal.SIGKILL)
            assert file.read(100_001) == b"x" * 100_000, "the open file goes on"
            file.seek(0)
            assert daemon_of(point) != former
            if not is_read_only:
                with (point / f"other-{number}").open("wb") as other:
                    other.write(b"y")
                    other.flush()
                    os.fsync(other.fileno())
            else:
                try:
                    (point / f"other-{number}").write_bytes(b"y")
                except OSError as error:
                    seen["error"] = error.errno
        seen["status"] = json.loads(run("status", str(point), "--json"))[0]
        if seen["status"]["holder"] is not None:
            seen["upgrade"] = run("upgrade", str(point))
        assert file.read(100_001) == b"x" * 100_000
        seen["names"] = sorted(os.listdir(point))
        seen["flags"] = os.statvfs(point).f_flag
    seen["table"] = next(
        row for row in os.fsdecode(Path("/proc/self/mountinfo").read_bytes()).split("\n") if str(point) in row
    )
    if not is_mounted:
        seen["umount"] = run("umount", str(point))
        assert not os.path.ismount(point)
    print(json.dumps(seen))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2] == "1", sys.argv[3:])
