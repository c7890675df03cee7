"""What /proc says of callers, whatever they call themselves."""

from __future__ import annotations

import subprocess
import sys

import pytest

from kvfuse.credentials import Capability, Credentials, process_status

NAMES = [b"\xff\xfe", b"a\rCapEff: 1", b"\x0bGroups:\x0c", b"\x85"]
RENAMED = """
import ctypes, os, sys
libc = ctypes.CDLL(None)
for number in range(64):
    libc.prctl(24, number, 0, 0, 0)
os.setresgid(65534, 65534, 65534)
libc.capset(ctypes.byref((ctypes.c_uint32 * 2)(0x20080522, 0)), ctypes.byref((ctypes.c_uint32 * 6)()))
libc.prctl(15, bytes.fromhex(sys.argv[1]))
print(flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("name", NAMES)
def test_a_name_gives_no_capabilities(name: bytes) -> None:
    """Of root without any, as in a container. A name that cannot be read as text was taken for a hidden process."""
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", RENAMED, name.hex()], stdin=pipe, stdout=pipe) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert process_status(process.pid)["Name"] == "\t" + name.decode("latin-1")
        assert not Credentials.of(process.pid, 0).has(Capability.DAC_OVERRIDE)
        process.communicate()
