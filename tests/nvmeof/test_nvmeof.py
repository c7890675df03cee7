"""Runs tests of segments on NVMe over fabrics, ``nvmeof_*.py`` of this folder, in a virtual machine."""

from __future__ import annotations

import pytest
from vm_tests import run_in_machine

LIMIT = 600
"""seconds; it takes a quarter of that where nothing else runs"""


@pytest.mark.root
@pytest.mark.timeout(LIMIT + 20)
def test_segments_on_nvme_over_fabrics_in_a_virtual_machine() -> None:
    """The contract of segments on devices by TCP and by RDMA, then faults."""
    contract, engine = "tests/remote/segments/test_segments_conformance.py", "tests/nvmeof/nvmeof_engine.py"
    run_in_machine(LIMIT, contract, engine, plugins=["vm_fixtures"])
