"""What the door makes of errors: the one table is whole, and nothing else reaches pyfuse3."""

from __future__ import annotations

import errno
import inspect
import logging
from typing import Any

import pyfuse3
import pytest

from kvfuse import errors
from kvfuse.errnos import ERRNO, errno_of
from kvfuse.fs.ops import KvfuseOperations
from kvfuse.fs.virtual import VirtualFolder

pytestmark = pytest.mark.ring(1)

PYFUSE3_ANSWERS = {"poll"}
"""handlers left to pyfuse3, whose ENOSYS lets the kernel answer by itself"""


def subclasses(kind: type[Exception]) -> set[type[Exception]]:
    return {kind}.union(*(subclasses(child) for child in kind.__subclasses__()))


class FailingVolume:
    """A volume of which every operation raises one error."""

    def __init__(self, error: Exception) -> None:
        self.error = error
        self.tree = self.inodes = self.files = self
        self.seal = None

    def may_keep(self, directory: int, *, means_directory: bool = False) -> bool:
        return True

    def may_keep_attributes(self, ino: int) -> bool:
        return True

    def __getattr__(self, name: str) -> Any:
        async def fail(*_: object) -> None:
            raise self.error

        return fail


def door_to(error: Exception) -> KvfuseOperations:
    volume: Any = FailingVolume(error)
    return KvfuseOperations(volume, VirtualFolder({}), entry_timeout=1, attr_timeout=1, negative_timeout=1)


OPERATION_ERRORS = [kind for kind in subclasses(errors.OperationError) if kind.__module__ == errors.__name__]
"""engines have more of their own, which do not leave them"""


@pytest.mark.parametrize("kind", sorted(OPERATION_ERRORS, key=lambda kind: kind.__name__))
def test_every_error_of_an_operation_has_an_errno_of_its_own(kind: type[Exception]) -> None:
    generic = {errors.OperationError, errors.EngineError, errors.MediumError, errors.Corrupt}
    assert errno_of(kind("message")) in errno.errorcode
    assert kind in ERRNO or kind in generic


def test_an_error_without_a_row_is_answered_as_its_base() -> None:
    class Fuller(errors.NoSpace):
        pass

    assert errno_of(Fuller()) == errno.ENOSPC
    assert errno_of(errors.Corrupt()) == errno.EIO
    assert errno_of(ZeroDivisionError()) is None


def test_every_handler_is_answered() -> None:
    handlers = {
        name
        for name, member in vars(pyfuse3.Operations).items()
        if inspect.iscoroutinefunction(member) and name not in PYFUSE3_ANSWERS
    }
    ours = vars(KvfuseOperations)
    assert handlers <= ours.keys()
    assert all(hasattr(ours[name], "__wrapped__") for name in handlers)


async def test_an_error_becomes_its_errno() -> None:
    context: Any = None
    with pytest.raises(pyfuse3.FUSEError) as caught:
        await door_to(errors.NoSpace("full")).getattr(1, context)
    assert caught.value.errno == errno.ENOSPC


async def test_what_nobody_expected_is_eio_logged_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    door = door_to(ZeroDivisionError("by accident"))
    context: Any = None
    with caplog.at_level(logging.ERROR), pytest.raises(pyfuse3.FUSEError) as caught:
        await door.getattr(1, context)
    assert caught.value.errno == errno.EIO
    assert door.stats()["unexpected_error_count"] == 1
    assert "ZeroDivisionError: by accident" in caplog.text
    assert "getattr" in caplog.text


async def test_an_absent_name_is_an_answer_that_the_kernel_may_keep() -> None:
    context: Any = None
    entry = await door_to(errors.NotFound("absent")).lookup(1, b"absent", context)
    assert entry.st_ino == 0
    assert entry.entry_timeout == 1


@pytest.mark.parametrize(("flags", "number"), [(0, errno.ESTALE), (0o200, errno.EEXIST)])
async def test_a_creation_that_lost_a_race_asks_the_kernel_to_look_again(flags: int, number: int) -> None:
    class Context:
        uid = gid = pid = 0

    context: Any = Context()
    with pytest.raises(pyfuse3.FUSEError) as caught:
        await door_to(errors.Exists("there")).create(1, b"there", 0o644, flags, context)
    assert caught.value.errno == number
