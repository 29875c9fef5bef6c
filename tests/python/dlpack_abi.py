"""DLPack 1.1 by hand, in ctypes: a producer that can say anything, and a consumer that looks at everything.

Source: dmlc/dlpack, include/dlpack/dlpack.h. Written apart from the library's own structs, so that both must be right.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np

CPU, CUDA, CUDA_HOST, CUDA_MANAGED, EXT = 1, 2, 3, 13, 12
READ_ONLY, IS_COPIED, PADDED = 1, 2, 4
INT, UINT, FLOAT, BFLOAT, COMPLEX, BOOL, F8_E4M3, F8_E4M3FN, F8_E5M2, F8_E8M0 = 0, 1, 2, 4, 5, 6, 8, 10, 12, 14
KINDS = {"i": INT, "u": UINT, "f": FLOAT, "c": COMPLEX, "b": BOOL}


class Device(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int32), ("id", ctypes.c_int32)]


class DataType(ctypes.Structure):
    _fields_ = [("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16)]


class Tensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device", Device),
        ("ndim", ctypes.c_int32),
        ("dtype", DataType),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


Deleter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class Managed(ctypes.Structure):
    _fields_ = [("tensor", Tensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p)]


class ManagedVersioned(ctypes.Structure):
    _fields_ = [
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", Tensor),
    ]


api = ctypes.pythonapi
api.PyCapsule_New.restype = ctypes.py_object
api.PyCapsule_New.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
api.PyCapsule_GetName.restype = ctypes.c_char_p
api.PyCapsule_GetName.argtypes = [ctypes.py_object]
api.PyCapsule_GetPointer.restype = ctypes.c_void_p
api.PyCapsule_GetPointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
api.PyCapsule_SetName.argtypes = [ctypes.py_object, ctypes.c_char_p]


def capsule_name(capsule: object) -> str:
    return api.PyCapsule_GetName(capsule).decode()


class Producer:
    """Hands out one array as capsules, and counts what comes back. `bad` replaces fields of the tensor."""

    def __init__(
        self,
        array: np.ndarray,
        *,
        versioned: bool = True,
        code: int | None = None,
        bits: int | None = None,
        lanes: int = 1,
        flags: int = 0,
        device: tuple[int, int] = (CPU, 0),
        tensor_device: tuple[int, int] | None = None,
        offset: int = 0,
        null_strides: bool = False,
        null_deleter: bool = False,
        shape: Sequence[int] | None = None,
        strides: Sequence[int] | None = None,
        version: tuple[int, int] = (1, 1),
        raises: BaseException | None = None,
        **bad: object,
    ) -> None:
        self.array = array
        self.device = device
        self.versioned = versioned
        self.raises = raises
        self.given: list[object] = []
        self.deleted: list[int] = []
        self.asked: list[dict[str, object]] = []
        self.flags, self.version, self.null_deleter = flags, version, null_deleter
        shape = array.shape if shape is None else shape
        if strides is None:
            strides = [step // array.itemsize for step in array.strides]
        self._shape = (ctypes.c_int64 * max(1, len(shape)))(*shape)
        self._strides = (ctypes.c_int64 * max(1, len(strides)))(*strides)
        code = KINDS[array.dtype.kind] if code is None else code
        bits = array.itemsize * 8 if bits is None else bits
        self.tensor = Tensor(
            array.ctypes.data - offset if array.size else None,
            Device(*(device if tensor_device is None else tensor_device)),
            len(shape),
            DataType(code, bits, lanes),
            self._shape,
            None if null_strides else self._strides,
            offset,
        )
        for name, value in bad.items():
            setattr(self.tensor, name, value)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device

    def __dlpack__(self, **arguments: object) -> object:
        self.asked.append(arguments)
        if self.raises is not None:
            raise self.raises
        if not self.versioned and arguments.keys() - {"stream"}:  # as it was before DLPack 1.0
            raise TypeError(f"no such arguments: {sorted(arguments)}")
        return self.capsule()

    def capsule(self) -> object:
        delete = Deleter(lambda pointer: self.deleted.append(pointer))
        pointer = None if self.null_deleter else ctypes.cast(delete, ctypes.c_void_p)
        if self.versioned:
            managed = ManagedVersioned(*self.version, None, pointer, self.flags, self.tensor)
        else:
            managed = Managed(self.tensor, None, pointer)
        self.given.append((managed, delete))
        name = NAMES[self.versioned]
        return api.PyCapsule_New(ctypes.addressof(managed), name, None)

    @property
    def settled(self) -> bool:
        """Every capsule's deleter ran exactly once, with its own struct."""
        return sorted(self.deleted) == sorted(ctypes.addressof(managed) for managed, _ in self.given)


NAMES = {False: b"dltensor", True: b"dltensor_versioned"}


class Consumer:
    """Takes a capsule as another library would."""

    def __init__(self, capsule: object) -> None:
        name = api.PyCapsule_GetName(capsule)
        self.versioned = name == NAMES[True]
        pointer = api.PyCapsule_GetPointer(capsule, name)
        api.PyCapsule_SetName(capsule, b"used_" + name)
        self.managed = (ManagedVersioned if self.versioned else Managed).from_address(pointer)
        self._pointer = pointer

    @property
    def tensor(self) -> Tensor:
        return self.managed.tensor

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape[i] for i in range(self.tensor.ndim))

    @property
    def strides(self) -> tuple[int, ...]:
        return tuple(self.tensor.strides[i] for i in range(self.tensor.ndim))

    def bytes(self, size: int) -> bytes:
        return ctypes.string_at(self.tensor.data + self.tensor.byte_offset, size)

    def delete(self) -> None:
        """Without the GIL: ctypes gives it up around calls of C functions."""
        ctypes.CFUNCTYPE(None, ctypes.c_void_p)(self.managed.deleter)(self._pointer)
