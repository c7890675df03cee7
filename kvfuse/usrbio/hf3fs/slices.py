"""The memory of `hf3fs`: an object, and slices of it, that are buffers and carry the result of their last operation.

Before Python 3.12 only types written in C can be buffers, so these are arrays of numpy: slicing makes a view, not a
copy, and as their type is uint8 (format "B"), bytes can be assigned to a memoryview of them. Other than arrays they
are compared, hashed and judged true as plain objects are: engines look for slices in lists and dicts.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kvfuse.usrbio.client.iov import Iov
from kvfuse.usrbio.hf3fs.mount_link import SharedThing


class iovec(np.ndarray[Any, np.dtype[np.uint8]]):
    """Shared memory that rings read into and write from: what `hf3fs.make_iovec` makes, and each slice of it."""

    memory: SharedThing[Iov] | None = None
    """what it is a part of. None of arrays that numpy made out of it: rings take no such thing"""
    base_off = 0
    """where it begins in the memory, bytes"""
    result = 0
    """of the last operation that came back: bytes, or -errno"""
    userdata: Any = None
    """that of the last operation that came back"""

    @classmethod
    def of(cls, array: np.ndarray[Any, np.dtype[np.uint8]], memory: SharedThing[Iov]) -> iovec:
        """All of the memory, which ``array`` is a mapping of."""
        whole = array.view(cls)
        whole.memory = memory
        return whole

    @property
    def iov(self) -> iovec:
        """Itself: 3FS's object wraps another one, which is the buffer."""
        return self

    def __getitem__(self, index: Any) -> Any:
        """A part, for a slice. ValueError unless its step is 1."""
        part = super().__getitem__(index)
        if type(index) is slice:
            start, _, step = index.indices(len(self))
            if step != 1:
                raise ValueError(f"a slice of an iovec has the step 1, not {step}")
            part.base_off = self.base_off + start
            part.memory = self.memory
        return part

    def __setitem__(self, index: Any, value: Any) -> None:
        """Put bytes, or any buffer, into a part."""
        super().__setitem__(index, np.frombuffer(value, np.uint8) if type(index) is slice else value)

    def __repr__(self) -> str:
        return f"<iovec of {len(self)} bytes at {self.base_off}, result {self.result}>"

    __hash__ = object.__hash__  # type: ignore[assignment]  # arrays have none: numpy's stubs say None

    def __eq__(self, other: object) -> bool:
        return self is other

    def __ne__(self, other: object) -> bool:
        return self is not other

    def __bool__(self) -> bool:
        return True
