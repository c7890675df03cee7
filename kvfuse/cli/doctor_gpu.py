"""kvfuse doctor gpu"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import click

from kvfuse.cli.console import print_json, print_table
from kvfuse.cli.findings import OK, WARN, Finding
from kvfuse.peer.rdma_memories import problem
from kvfuse.usrbio.client import connect
from kvfuse.usrbio.client.gpu.cuda import HOW_TO_GET
from kvfuse.usrbio.client.gpu.examine import Examined, examine

ADAPTER = "an RDMA device can register memory of GPUs"
MENDS = {
    "needs pyverbs": "apt install python3-pyverbs; for the Python of the daemon",
    "no RDMA device": "an adapter with InfiniBand or RoCE, and its driver",
    "registers no dma-buf": "an adapter of mlx5, irdma, bnxt_re or efa, and a kernel that is newer",
    "exports no dma-buf": "the open kernel modules of NVIDIA's driver",
    "cuda-bindings": HOW_TO_GET,
    "no NVIDIA driver": "install NVIDIA's driver; in a container: --gpus all (nvidia-container-toolkit)",
}
"""words of a reason -> what mends it"""


def _remedy(reason: str) -> str:
    return next((remedy for words, remedy in MENDS.items() if words in reason), "") if reason else ""


def _finding(name: str, reason: str, detail: str) -> Finding:
    return Finding(name, WARN if reason else OK, reason or detail, _remedy(reason))


def findings_of(examined: Examined) -> Iterator[Finding]:
    """The rows of one GPU: what it can do, and the way that is taken."""
    can, choice = examined.capabilities, examined.choice
    yield _finding(examined.name, can.lacks_device, f"CUDA {examined.driver}")
    if not can.lacks_device:
        yield _finding("pinned memory", can.lacks_pinning, "staging memory can be pinned")
        yield _finding("pinned arenas", examined.lacks_arena_pinning, "blocks in shared memory need no staging")
        yield _finding("dma-buf", can.lacks_export, "the driver exports the GPU's memory")
        yield _finding("adapter", can.lacks_adapter, ADAPTER)
    for way, reason in choice.why_not.items():
        yield Finding(f"way {way.value}", WARN, f"not taken: {reason}")
    if choice.way is not None:
        yield Finding(f"way {choice.way.value}", OK, "taken")


def adapter_problem(mount: Path | None) -> str:
    """Why the daemon of a mount cannot register memory of a GPU, "" where it may be able to. FileNotFoundError,
    Disconnected.

    None: the same of a daemon that ran as this process does.
    """
    if mount is None:
        return problem()
    with connect(mount) as client:
        return client.session.lacks_adapter


@click.command("gpu")
@click.argument("mount", required=False, type=click.Path(path_type=Path), metavar="[MNT]")
@click.option("--json", "as_json", is_flag=True, help="For programs: a list of objects.")
def gpu(mount: Path | None, as_json: bool) -> None:
    """By which way blocks get to the GPUs of this machine, and why not by a better one. Changes nothing.

    With MNT, a mount: whether its daemon can register memory of a GPU (dma-buf); else whether one of this user on
    this host could. Exit status 1 where no GPU can be used.

    \b
    Examples:
      kvfuse doctor gpu
      kvfuse doctor gpu /mnt/kv
    """
    lacks_adapter = adapter_problem(mount)
    found = examine(lacks_adapter)
    findings = [finding for examined in found for finding in findings_of(examined)]
    if all(examined.capabilities.lacks_device for examined in found):
        findings.append(_finding("adapter", lacks_adapter, ADAPTER))
    if as_json:
        print_json([finding._asdict() for finding in findings])
    else:
        print_table(["", "state", "found", "to mend it"], findings)
    if all(examined.choice.way is None for examined in found):
        raise click.exceptions.Exit(1)
