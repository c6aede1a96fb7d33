"""Classification of the exceptions of torch and of graphs: after a lack of memory, the adapter frees memory and tries
again; after the loss of the CUDA context or of a graph, the process must end.
"""

from __future__ import annotations

import errno
import re

from sie_contracts.errors import InternalFailure

# Messages of failed allocations by torch's allocator, by mmap of a file, by oneDNN, by OpenVINO, by C++ and for a
# thread's stack. The last three messages are from CUDA's driver and libraries; the CUDA context still works after them.
# The exceptions are of type RuntimeError or torch.AcceleratorError, so only the text identifies a failed allocation.
_ALLOCATION = (
    "DefaultCPUAllocator",
    "Cannot allocate memory",
    "could not create a memory",
    "can't alloc",
    "bad_alloc",
    "can't start new thread",
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
)


# oneDNN's errors have only a message. "could not create a primitive" means that memory for the primitive's code is
# missing. "could not create a primitive descriptor" means that oneDNN lacks the operation, for example a product of two
# precisions.
_NO_PRIMITIVE = re.compile("could not create a primitive(?! descriptor)")


class GraphLost(Exception):
    """Raised if a graph had no memory for a pass. The graph keeps shapes of the failed pass, so its later passes may
    fail. A process that serves with the graph must end.
    """


def cancelled() -> InternalFailure:
    return InternalFailure("no client waits for the answer any more", reason="cancelled")


def is_out_of_memory(error: BaseException) -> bool:
    import torch

    if isinstance(error, torch.OutOfMemoryError | MemoryError | GraphLost):
        return True
    if isinstance(error, OSError):  # ENOMEM: the kernel had no memory, for example to list a folder
        return error.errno == errno.ENOMEM
    if type(error) not in (RuntimeError, torch.AcceleratorError):
        return False
    return is_primitive_refused(error) or any(text in str(error) for text in _ALLOCATION)


def is_primitive_refused(error: BaseException) -> bool:
    """Return whether this exception means that oneDNN had no memory for the code of a primitive."""
    return _NO_PRIMITIVE.search(str(error)) is not None


# messages for a kernel that CUDA could not start, e.g. because it was built for another GPU; the context still works
_NOT_STARTED = (
    "no kernel image is available",
    "invalid device function",
    "invalid configuration argument",
    "too many resources requested for launch",
)


def is_device_fatal(error: BaseException) -> bool:
    """Return whether the error means that the CUDA context is lost. All later CUDA calls of the process then fail."""
    import torch

    survived = is_out_of_memory(error) or any(text in str(error) for text in _NOT_STARTED)
    return isinstance(error, torch.AcceleratorError) and not survived
