"""A service that is restarted finds the blocks of its tier again: systemd keeps their memory meanwhile."""

from __future__ import annotations

import functools
import json
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trio
from mounting import FOREGROUND, PATIENCE_S, wait_until
from service_manager import ServiceManager

from kvfuse.options import config
from kvfuse.sizes import KIB
from kvfuse.usrbio.client import BlockStore, connect
from kvfuse.volume.check.volume_check import fsck

pytestmark = pytest.mark.root

BLOCKS = 40
WORDS = "outlive=true,capacity=256MiB,cache.tier_size=16MiB"


class Service:
    """A mount in the foreground, under a service manager. Each volume is clean at the end."""

    def __init__(self, folder: Path, manager: ServiceManager) -> None:
        self.folder, self.point, self.manager = folder, folder / "mnt", manager
        self.point.mkdir()
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, volume: str = "volume") -> None:
        command = [*FOREGROUND, str(self.folder / volume), str(self.point), "-o", WORDS]
        said = self.manager.said.count("READY=1")
        with (self.folder / "log").open("ab") as log:
            self.process = self.manager.start(command, log)
        process = self.process
        wait_until(lambda: self.manager.said.count("READY=1") > said or process.poll() is not None, "the mount")
        assert process.poll() is None, self.log

    def stop(self, number: int = signal.SIGTERM) -> None:
        assert self.process is not None
        self.process.send_signal(number)
        status = self.process.wait(PATIENCE_S)
        assert status == (0 if number == signal.SIGTERM else -number), self.log
        self.process = None

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text()

    def tier(self) -> dict[str, Any]:
        return dict(json.loads((self.point / ".kvfuse" / "stats").read_bytes())["tier"])


@pytest.fixture
def service() -> Iterator[Service]:
    folder = Path(tempfile.mkdtemp(prefix="kvfuse-test-"))
    manager = ServiceManager(folder)
    service = Service(folder, manager)
    try:
        with manager.running():
            yield service
            if service.process is not None:
                service.stop()
        for volume in folder.glob("volume*"):
            report = trio.run(functools.partial(fsck, config.load(volume).options, verify=True))
            assert report.clean, [problem.text for problem in report.problems][:10]
    finally:
        if service.process is not None:
            service.process.kill()
            service.process.wait()
        if os.path.ismount(service.point):
            subprocess.run(["umount", "-l", service.point], check=False)
        shutil.rmtree(folder)


def block(number: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.full(64 * KIB, number, np.uint8)


def put(service: Service, first: int = 1) -> None:
    """Blocks that are files: a folder that is there stays what it is."""
    (service.point / "blocks").mkdir(exist_ok=True)
    with connect(service.point) as client, BlockStore(client, "blocks") as store:
        keys = [b"%d" % number for number in range(BLOCKS)]
        assert store.put_many(keys, [block(first + number) for number in range(BLOCKS)]).all()


def get(service: Service, first: int = 1) -> None:
    """Every byte is compared."""
    with connect(service.point) as client, BlockStore(client, "blocks") as store:
        for number in range(BLOCKS):
            found = np.zeros(64 * KIB, np.uint8)
            assert store.get_into(b"%d" % number, found) == len(found)
            assert (found == block(first + number)).all()


def test_blocks_are_found_again(service: Service) -> None:
    service.start()
    put(service)
    get(service)
    for _ in range(2):
        blocks = service.tier()["blocks"]
        assert blocks == BLOCKS
        service.stop()
        assert not os.path.ismount(service.point)
        assert service.manager.stored
        service.start()
        assert not service.manager.stored, "nobody keeps what is in use"
        assert service.tier()["adopted"] == BLOCKS
        get(service)
        assert service.tier()["misses"] == 0
    put(service, first=100)
    get(service, first=100)


@pytest.mark.ring(3)
def test_those_of_another_volume_are_not(service: Service) -> None:
    """Its files have the same numbers."""
    service.start()
    put(service)
    service.stop()
    service.start("volume-2")
    assert service.tier()["adopted"] == 0
    assert "shared memory of another volume is not used" in service.log
    put(service, first=100)
    get(service, first=100)
    service.stop()
    service.start()
    assert service.tier()["adopted"] == 0
    get(service)


@pytest.mark.ring(3)
@pytest.mark.parametrize("how", ["stopped", "killed", "lost", "not kept"])
def test_without_them_it_begins_as_ever(service: Service, how: str) -> None:
    service.manager.keeps = how != "not kept"
    service.start()
    put(service)
    service.stop(signal.SIGKILL if how == "killed" else signal.SIGTERM)
    if how == "stopped":
        service.manager.forget()
    elif how == "killed":
        assert not service.manager.stored, "what was in use when it ended is not to be trusted"
    elif how == "lost":
        os.close(service.manager.stored.pop(0)[1])
    service.start()
    assert service.tier()["adopted"] == 0
    if how != "killed":
        get(service)
    put(service)
    get(service)


def test_descriptors_of_others_do_no_harm(service: Service) -> None:
    service.start()
    put(service)
    service.stop()
    reader, writer = os.pipe()
    service.manager.stored.insert(0, ("connection", reader))
    service.start()
    os.close(writer)
    assert service.tier()["adopted"] == BLOCKS
    get(service)
