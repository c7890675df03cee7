"""Runs tests of segments on NVMe over fabrics, ``nvmeof_*.py`` of this folder, in a virtual machine."""

from __future__ import annotations

import pytest
from vm_tests import run_in_machine

CONTRACT = "tests/remote/segments/test_segments_conformance.py"
FOLDER = "tests/nvmeof"
LIMIT = 1200
"""seconds; it takes a fourth of that where nothing else runs"""


@pytest.mark.root
@pytest.mark.slow
@pytest.mark.timeout(LIMIT + 20)
def test_segments_on_nvme_over_fabrics_in_a_virtual_machine() -> None:
    """Mounts, while the device is blank; then the contract of segments by TCP and by RDMA, then faults."""
    files = f"{FOLDER}/nvmeof_mounts.py", CONTRACT, f"{FOLDER}/nvmeof_engine.py"
    # Of the tests at many offsets some will do: that is arithmetic, which other devices try.
    run_in_machine(LIMIT, *files, plugins=["vm_fixtures"], chosen="not neighbours_stay or 4097")
