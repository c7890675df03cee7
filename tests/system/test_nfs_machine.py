"""NFS by clients and servers of the kernel, in a virtual machine that has them."""

from __future__ import annotations

import pytest
from nfs_lab import require_ganesha
from vm_tests import run_in_machine

LIMIT = 1500
"""seconds; it takes a fifth of that where nothing else runs"""

pytestmark = [pytest.mark.root, pytest.mark.needs("qemu", "ganesha"), pytest.mark.timeout(LIMIT + 20)]


def test_clients_of_the_kernel() -> None:
    require_ganesha()
    run_in_machine(LIMIT, "tests/nfs/nfs_mounts.py", plugins=["vm_fixtures"])
