"""Runs tests that need devices which this machine has not in a virtual one: RDMA, and NVMe over fabrics.

One after the other, so in one file: each of them keeps two processors busy.
"""

from __future__ import annotations

import pytest
from places import ROOT
from vm_tests import run_in_machine

LIMIT = 1500
"""seconds for each; it takes a fifth of that where nothing else runs"""

pytestmark = [pytest.mark.root, pytest.mark.needs("qemu"), pytest.mark.timeout(LIMIT + 20)]


def test_rdma() -> None:
    run_in_machine(LIMIT, *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "tests/peer").glob("rdma_*.py")))


def test_segments_on_nvme_over_fabrics() -> None:
    """Mounts, while the device is blank; then the contract of segments by TCP and by RDMA, then faults."""
    contract = "tests/remote/segments/test_segments_conformance.py"
    files = "tests/nvmeof/nvmeof_mounts.py", contract, "tests/nvmeof/nvmeof_engine.py"
    # Of the tests at many offsets some will do: that is arithmetic, which other devices try.
    run_in_machine(LIMIT, *files, plugins=["vm_fixtures"], chosen="not neighbours_stay or 4097")
