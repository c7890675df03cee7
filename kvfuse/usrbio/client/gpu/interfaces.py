"""Which memory of a GPU an object of another library has: a torch tensor, `__cuda_array_interface__`, DLPack.

Only what is needed of each is read: where the bytes are, and that they lie one after the other and may be written.
Nothing here touches them, and no library is imported.
"""

from __future__ import annotations

import ctypes
import sys
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from math import prod
from typing import Any, NamedTuple

LEGACY_STREAM = 1
"""CUDA's name for the default stream that waits for, and is waited for by, ordinary streams"""
WRAP_IT = "use client.wrap for memory of the host"


class DeviceBytes(NamedTuple):
    """Bytes of a GPU, one after the other."""

    address: int
    size: int
    ordinal: int | None
    """of the GPU; None: the object does not say"""
    owner: object
    """keeps the memory"""
    stream: Callable[[], int | None] = lambda: LEGACY_STREAM
    """by which the memory is written and read now; None: none has to be waited for"""


def is_on_device(thing: Any) -> bool:
    """It says that its memory is a GPU's. For any object, at little expense."""
    if hasattr(thing, "data_ptr"):  # a tensor
        return bool(thing.device.type == "cuda")
    if hasattr(thing, "__cuda_array_interface__"):
        return True
    ask = getattr(thing, "__dlpack_device__", None)
    return ask is not None and ask()[0] in (_CUDA, _CUDA_MANAGED)


def memory_of(thing: object) -> DeviceBytes:
    """Raises TypeError for what shows no memory of a GPU, ValueError for memory that cannot be used."""
    if hasattr(thing, "data_ptr"):
        memory = _of_tensor(thing)
    elif hasattr(thing, "__cuda_array_interface__"):
        memory = _of_interface(thing, thing.__cuda_array_interface__)
    elif hasattr(thing, "__dlpack__"):
        memory = _of_dlpack(thing)
    else:
        raise TypeError(
            f"{type(thing).__name__} shows no memory of a GPU: it has neither __cuda_array_interface__ nor __dlpack__, "
            f"and is no tensor; {WRAP_IT}"
        )
    if memory.size == 0 or memory.address == 0:
        raise ValueError("the memory has no bytes")
    return memory


def stream_number(stream: object) -> int:
    """The handle of a stream: a number, or an object of torch, CuPy or cuda-core. TypeError."""
    if isinstance(stream, int):
        return stream
    for name in ("cuda_stream", "ptr"):  # torch; CuPy
        if isinstance(handle := getattr(stream, name, None), int):
            return handle
    if hasattr(stream, "__cuda_stream__"):
        pair = stream.__cuda_stream__
        return int((pair() if callable(pair) else pair)[1])
    raise TypeError(f"{type(stream).__name__} is no stream: give its handle, as stream.cuda_stream is of torch")


# -- tensors ----------------------------------------------------------------------------------------


def _of_tensor(tensor: Any) -> DeviceBytes:
    """torch has no types for some of its numbers in the other two interfaces."""
    kind = tensor.device.type
    if kind != "cuda":
        raise ValueError(f"the tensor is on the device {kind!r}, not on a GPU; {WRAP_IT}")
    if not tensor.is_contiguous():
        raise ValueError("the tensor is not contiguous: register what it is a part of, or its .contiguous()")
    size = tensor.numel() * tensor.element_size()
    index = tensor.device.index
    return DeviceBytes(tensor.data_ptr(), size, index, tensor, lambda: _torch_stream(index))


def _torch_stream(index: int | None) -> int:
    """The one that torch uses now, in this thread."""
    torch = sys.modules.get("torch")
    return int(torch.cuda.current_stream(index).cuda_stream) if torch is not None else LEGACY_STREAM


# -- __cuda_array_interface__ -----------------------------------------------------------------------


def _of_interface(thing: object, shown: Mapping[str, Any]) -> DeviceBytes:
    try:
        version, shape, typestr = int(shown["version"]), tuple(map(int, shown["shape"])), str(shown["typestr"])
        address, read_only = shown["data"]
        item_size = int(typestr[2:])
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"__cuda_array_interface__ is not what it should be: {error!r}") from error
    if version < 2:
        raise ValueError(f"__cuda_array_interface__ has version {version}, not 2 or 3")
    if typestr[1] == "t" or shown.get("mask") is not None:
        raise ValueError("the array has a mask, or bits that are no whole bytes")
    if read_only:
        raise ValueError("the array is read-only")
    if not _is_contiguous(shape, shown.get("strides"), item_size):
        raise ValueError("the array is not contiguous (in C order)")
    stream = shown.get("stream")
    if stream == 0:
        raise ValueError("the stream 0 of __cuda_array_interface__ may mean two streams: it must be 1 or 2")
    number = LEGACY_STREAM if stream is None else int(stream)
    return DeviceBytes(int(address or 0), prod(shape) * item_size, None, thing, lambda: number)


def _is_contiguous(shape: tuple[int, ...], strides: Any, unit: int) -> bool:
    """``strides``: in the unit of ``unit``, None: the array is contiguous."""
    if strides is None or 0 in shape:
        return True
    if len(strides) != len(shape):
        return False
    for length, stride in zip(reversed(shape), reversed(tuple(strides)), strict=True):
        if length != 1 and stride != unit:
            return False
        unit *= length
    return True


# -- DLPack -----------------------------------------------------------------------------------------

_CPU, _CUDA, _CUDA_HOST, _CUDA_MANAGED = 1, 2, 3, 13
_ON_HOST = {_CPU: "the processor's", _CUDA_HOST: "pinned memory of the host"}
_MAJOR = 1
"""of the versions of DLPack, whose layout this is"""
_READ_ONLY = 1
"""flag of a versioned tensor"""
_NAME, _USED_NAME = b"dltensor", b"used_dltensor"
_VERSIONED, _USED_VERSIONED = b"dltensor_versioned", b"used_dltensor_versioned"
_NO_SYNC = -1
"""what is asked of the producer's stream: this module's callers wait for it themselves"""


class _Tensor(ctypes.Structure):
    """DLTensor, with DLDevice and DLDataType in it."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _Managed(ctypes.Structure):
    """DLManagedTensor."""

    _fields_ = (("tensor", _Tensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p))


class _ManagedVersioned(ctypes.Structure):
    """DLManagedTensorVersioned."""

    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", _Tensor),
    )


_DELETER = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_capsule_name = ctypes.pythonapi.PyCapsule_GetName
_capsule_name.restype, _capsule_name.argtypes = ctypes.c_char_p, (ctypes.py_object,)
_capsule_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_capsule_pointer.restype, _capsule_pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
_rename_capsule = ctypes.pythonapi.PyCapsule_SetName
_rename_capsule.argtypes = (ctypes.py_object, ctypes.c_char_p)


class _Owner:
    """A tensor that its producer keeps until the deleter is called: when this object goes."""

    def __init__(self, pointer: int, deleter: int | None) -> None:
        if deleter:
            weakref.finalize(self, _DELETER(deleter), pointer).atexit = False


def _of_dlpack(thing: Any) -> DeviceBytes:
    device_type, _ = thing.__dlpack_device__()
    if device_type not in (_CUDA, _CUDA_MANAGED):
        what = _ON_HOST.get(device_type, f"of a device of DLPack's type {device_type}")
        raise ValueError(f"the memory is {what}, not a GPU's; {WRAP_IT}")
    try:
        capsule = thing.__dlpack__(stream=_NO_SYNC, max_version=(_MAJOR, 0))
    except TypeError:  # a producer from before versions
        capsule = thing.__dlpack__(stream=_NO_SYNC)
    return memory_of_capsule(capsule)


def memory_of_capsule(capsule: object) -> DeviceBytes:
    """Take a capsule of DLPack: its tensor is the caller's now. ValueError, TypeError."""
    name: bytes | None = None
    with suppress(ctypes.ArgumentError, ValueError):  # it is no capsule
        name = _capsule_name(capsule)
    if name not in (_NAME, _VERSIONED):
        raise TypeError(f"{capsule!r} is no capsule of DLPack, or somebody has taken its tensor")
    pointer = _capsule_pointer(capsule, name)
    is_versioned = name == _VERSIONED
    managed = (_ManagedVersioned if is_versioned else _Managed).from_address(pointer)
    _rename_capsule(capsule, _USED_VERSIONED if is_versioned else _USED_NAME)  # else it called the deleter, too
    owner = _Owner(pointer, managed.deleter)
    if is_versioned and managed.major != _MAJOR:
        raise ValueError(f"DLPack {managed.major}.{managed.minor}: its tensors have another layout")
    if is_versioned and managed.flags & _READ_ONLY:
        raise ValueError("the array is read-only")
    return _of_dltensor(managed.tensor, owner)


def _of_dltensor(tensor: _Tensor, owner: _Owner) -> DeviceBytes:
    if tensor.device_type not in (_CUDA, _CUDA_MANAGED):
        what = _ON_HOST.get(tensor.device_type, f"of a device of DLPack's type {tensor.device_type}")
        raise ValueError(f"the memory is {what}, not a GPU's; {WRAP_IT}")
    shape = tuple(tensor.shape[: tensor.ndim]) if tensor.ndim else ()
    if min(shape, default=1) < 0:
        raise ValueError("the tensor of DLPack has a negative shape")
    strides = tuple(tensor.strides[: tensor.ndim]) if tensor.ndim and tensor.strides else None
    if not _is_contiguous(shape, strides, 1):
        raise ValueError("the array is not contiguous (in C order)")
    bits = prod(shape) * tensor.bits * tensor.lanes
    if bits % 8:
        raise ValueError(f"the array has {bits} bits, which are no whole bytes")
    address = (tensor.data or 0) + tensor.byte_offset
    return DeviceBytes(address, bits // 8, tensor.device_id, owner)
