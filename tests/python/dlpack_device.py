"""An array that DLPack reports to lie on a GPU, as torch's and CuPy's tensors do, without either.
Its memory is the host's: code that reads the numbers has not checked where they lie."""

import ctypes

CUDA, CUDA_PINNED, CUDA_MANAGED = 2, 3, 13
TEXTS = {  # how kvx calls them
    CUDA: "cuda:0",
    CUDA_PINNED: "pinned memory of the host",
    CUDA_MANAGED: "managed memory of CUDA",
}


class _Tensor(ctypes.Structure):
    """DLTensor of dlpack.h, and the three words that make it a DLManagedTensor."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.c_void_p),
        ("byte_offset", ctypes.c_uint64),
        ("manager", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    ]


class OnDevice:
    """`array` (float32, contiguous) as a tensor of a device."""

    def __init__(self, array, device_type=CUDA, device_id=0):
        self.array, self.device_type, self.device_id = array, device_type, device_id
        self.shape, self.dtype = array.shape, array.dtype
        sizes = (ctypes.c_int64 * array.ndim)(*array.shape)
        self._sizes = sizes
        self._tensor = _Tensor(
            data=array.ctypes.data,
            device_type=device_type,
            device_id=device_id,
            ndim=array.ndim,
            code=2,  # float
            bits=32,
            lanes=1,
            shape=ctypes.cast(sizes, ctypes.POINTER(ctypes.c_int64)),
        )

    def reshape(self, *shape):
        return OnDevice(self.array.reshape(*shape), self.device_type, self.device_id)

    def __dlpack_device__(self):
        return (self.device_type, self.device_id)

    def __dlpack__(self, **_):
        new_capsule = ctypes.pythonapi.PyCapsule_New
        new_capsule.restype = ctypes.py_object
        new_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
        return new_capsule(ctypes.addressof(self._tensor), b"dltensor", None)
