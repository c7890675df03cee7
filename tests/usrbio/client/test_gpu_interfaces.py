"""Memory of GPUs as other libraries show it: what is taken, and what is refused, with a reason. No GPU is needed."""

from __future__ import annotations

import ctypes
import gc
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvfuse.usrbio.client.gpu import interfaces
from kvfuse.usrbio.client.gpu.interfaces import LEGACY_STREAM, is_on_device, memory_of, memory_of_capsule, stream_number

ADDRESS = 0x7F00_0000_1000


def interface(**changes: Any) -> SimpleNamespace:
    """An object with a `__cuda_array_interface__` of 2 x 3 numbers of 4 bytes."""
    shown = {"shape": (2, 3), "typestr": "<f4", "data": (ADDRESS, False), "version": 3, **changes}
    return SimpleNamespace(__cuda_array_interface__=shown)


def tensor(**changes: Any) -> SimpleNamespace:
    """What is used of a tensor of torch."""
    parts = {
        "device": SimpleNamespace(type="cuda", index=1),
        "data_ptr": lambda: ADDRESS,
        "is_contiguous": lambda: True,
        "numel": lambda: 10,
        "element_size": lambda: 2,
    }
    return SimpleNamespace(**{**parts, **changes})


def test_a_cuda_array_interface_is_read() -> None:
    shown = interface()
    memory = memory_of(shown)
    assert memory[:3] == (ADDRESS, 24, None)
    assert memory.owner is shown
    assert memory.stream() == LEGACY_STREAM
    assert memory_of(interface(version=2, stream=77)).stream() == 77
    assert memory_of(interface(strides=(12, 4))).size == 24
    assert memory_of(interface(shape=(1, 6), strides=(999, 4))).size == 24  # the stride of one row means nothing
    assert memory_of(interface(shape=())).size == 4
    assert is_on_device(shown)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"strides": (24, 4)}, "not contiguous"),
        ({"strides": (4, 8)}, "not contiguous"),
        ({"strides": (4,)}, "not contiguous"),
        ({"data": (ADDRESS, True)}, "read-only"),
        ({"shape": (0, 3)}, "no bytes"),
        ({"data": (0, False)}, "no bytes"),
        ({"version": 1}, "version 1"),
        ({"mask": interface()}, "mask"),
        ({"typestr": "|t1"}, "bits"),
        ({"stream": 0}, "stream 0"),
        ({"data": None}, "not what it should be"),
        ({"typestr": "?"}, "not what it should be"),
    ],
)
def test_other_cuda_array_interfaces_are_refused(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        memory_of(interface(**changes))


def test_a_tensor_is_read_without_its_other_interfaces(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = tensor()
    assert memory_of(shown)[:4] == (ADDRESS, 20, 1, shown)
    assert is_on_device(shown)
    asked: list[int] = []

    def current_stream(index: int) -> SimpleNamespace:
        asked.append(index)
        return SimpleNamespace(cuda_stream=4321)

    monkeypatch.setitem(
        interfaces.sys.modules, "torch", SimpleNamespace(cuda=SimpleNamespace(current_stream=current_stream))
    )
    assert memory_of(shown).stream() == 4321
    assert asked == [1]


def test_other_tensors_are_refused() -> None:
    on_host = tensor(device=SimpleNamespace(type="cpu", index=None))
    assert not is_on_device(on_host)
    with pytest.raises(ValueError, match=r"'cpu'.*client\.wrap"):
        memory_of(on_host)
    with pytest.raises(ValueError, match="not contiguous"):
        memory_of(tensor(is_contiguous=lambda: False))
    with pytest.raises(ValueError, match="no bytes"):
        memory_of(tensor(numel=lambda: 0))


def test_what_shows_nothing_is_refused() -> None:
    for thing in (b"bytes", 7, None):
        assert not is_on_device(thing)
        with pytest.raises(TypeError, match="no memory of a GPU"):
            memory_of(thing)


def test_streams_are_numbers_or_have_one() -> None:
    assert stream_number(5) == 5
    assert stream_number(SimpleNamespace(cuda_stream=6)) == 6
    assert stream_number(SimpleNamespace(ptr=7)) == 7
    assert stream_number(SimpleNamespace(__cuda_stream__=lambda: (0, 8))) == 8
    assert stream_number(SimpleNamespace(__cuda_stream__=(0, 9))) == 9
    with pytest.raises(TypeError, match="no stream"):
        stream_number("stream")


# -- DLPack -----------------------------------------------------------------------------------------

_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype, _new_capsule.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
CUDA, CUDA_HOST, ROCM = 2, 3, 10


class Producer:
    """What a library exports: 2 x 3 numbers of 2 bytes, of a device. It counts calls of its deleter."""

    def __init__(
        self, device: int = CUDA, *, versioned: bool = False, major: int = 1, flags: int = 0, bits: int = 16,
        shape: tuple[int, ...] = (2, 3), strides: tuple[int, ...] | None = None, address: int = ADDRESS,
    ) -> None:  # fmt: skip
        self.deleted = 0
        self.asked: list[dict[str, Any]] = []
        self._device = device
        self._versioned = versioned
        self._deleter = interfaces._DELETER(self._delete)
        self.managed = (interfaces._ManagedVersioned if versioned else interfaces._Managed)()
        self.managed.deleter = ctypes.cast(self._deleter, ctypes.c_void_p)
        if versioned:
            self.managed.major, self.managed.minor, self.managed.flags = major, 0, flags
        part = self.managed.tensor
        part.data, part.device_type, part.device_id, part.byte_offset = address, device, 3, 64 if address else 0
        part.ndim, part.code, part.bits, part.lanes = len(shape), 2, bits, 1
        part.shape = (ctypes.c_int64 * len(shape))(*shape)
        if strides is not None:
            part.strides = (ctypes.c_int64 * len(strides))(*strides)

    def _delete(self, pointer: int) -> None:
        assert pointer == ctypes.addressof(self.managed)
        self.deleted += 1

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._device, 3

    def __dlpack__(self, **wanted: Any) -> object:
        self.asked.append(wanted)
        if "max_version" in wanted and not self._versioned:
            raise TypeError("unexpected keyword argument 'max_version'")
        return _new_capsule(
            ctypes.addressof(self.managed), b"dltensor_versioned" if self._versioned else b"dltensor", None
        )


@pytest.mark.parametrize("versioned", [False, True])
def test_a_capsule_of_dlpack_is_taken_and_given_back_once(versioned: bool) -> None:
    producer = Producer(versioned=versioned)
    assert is_on_device(producer)
    memory = memory_of(producer)
    assert memory[:3] == (ADDRESS + 64, 12, 3)
    assert producer.asked[-1]["stream"] == -1
    assert producer.deleted == 0
    owner = memory.owner
    del memory
    gc.collect()
    assert producer.deleted == 0
    del owner
    gc.collect()
    assert producer.deleted == 1


def test_a_capsule_is_taken_only_once() -> None:
    producer = Producer()
    capsule = producer.__dlpack__(stream=None)
    memory = memory_of_capsule(capsule)
    with pytest.raises(TypeError, match="somebody has taken"):
        memory_of_capsule(capsule)
    with pytest.raises(TypeError, match="no capsule"):
        memory_of_capsule("capsule")
    del memory
    gc.collect()
    assert producer.deleted == 1


@pytest.mark.parametrize(
    ("producer", "reason"),
    [
        (Producer(strides=(4, 1)), "not contiguous"),
        (Producer(shape=(0, 3)), "no bytes"),
        (Producer(shape=(-1, 3)), "negative"),
        (Producer(bits=4, shape=(3,)), "12 bits"),
        (Producer(address=0), "no bytes"),
        (Producer(versioned=True, flags=1), "read-only"),
        (Producer(versioned=True, major=2), r"DLPack 2\.0"),
    ],
)
def test_other_tensors_of_dlpack_are_refused_and_given_back(producer: Producer, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        memory_of(producer)
    gc.collect()
    assert producer.deleted == 1


@pytest.mark.parametrize(("device", "reason"), [(CUDA_HOST, "pinned memory of the host"), (ROCM, "type 10")])
def test_memory_of_other_devices_is_refused(device: int, reason: str) -> None:
    producer = Producer(device)
    assert not is_on_device(producer)
    with pytest.raises(ValueError, match=reason):
        memory_of(producer)
    assert producer.asked == []
    with pytest.raises(ValueError, match=reason):  # it said something else of itself than its capsule does
        memory_of_capsule(producer.__dlpack__())
    gc.collect()
    assert producer.deleted == 1


@pytest.mark.parametrize("versioned", [False, True])
def test_strides_that_mean_the_same_are_contiguous(versioned: bool) -> None:
    assert memory_of(Producer(strides=(3, 1), versioned=versioned)).size == 12


def test_arrays_of_numpy_are_memory_of_the_host() -> None:
    array = np.arange(10)
    assert not is_on_device(array)
    with pytest.raises(ValueError, match="the processor's"):
        memory_of(array)
    for capsule in (array.__dlpack__(), array.__dlpack__(max_version=(1, 0))):
        with pytest.raises(ValueError, match="the processor's"):
            memory_of_capsule(capsule)
