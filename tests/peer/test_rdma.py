"""Runs the tests of RDMA, ``rdma_*.py`` of this folder, in a virtual machine that has devices for it."""

from __future__ import annotations

from pathlib import Path

import pytest
from places import ROOT
from vm_tests import run_in_machine

LIMIT = 900
"""seconds; it takes a quarter of that where nothing else runs"""


@pytest.mark.root
@pytest.mark.timeout(LIMIT + 20)
def test_rdma_in_a_virtual_machine() -> None:
    run_in_machine(LIMIT, *sorted(str(path.relative_to(ROOT)) for path in Path(__file__).parent.glob("rdma_*.py")))
