"""What an accelerator's runtime says when it fails: memory ran out, or the device is lost to this process.

Runtimes differ in the types of their exceptions, and models in TorchScript and C++ extensions lose the type on the way,
so words are compared as well, along the causes of an exception. Words count only in exceptions that a runtime raises: a
handler's own may quote what a client sent, and a client must not be able to say that a device is lost. Knows no torch
and no ONNX Runtime; types are looked at by name.
"""

from __future__ import annotations

import dis
import re
from collections.abc import Iterator

# A chain of causes is followed so far; authors may build longer ones, and loops.
_MOST_CAUSES = 20
_MOST_WORDS = 500

# Packages whose exceptions are their runtime's own words, though they are no RuntimeError.
_RUNTIMES = frozenset(
    (
        *("torch", "onnxruntime", "cupy", "cupy_backends", "numba", "pycuda", "cuda", "triton", "nvidia"),
        *("tensorrt", "tensorrt_llm"),
    )
)
# Of those, what complains of an input may quote a client's words.
_ABOUT_INPUTS = frozenset(("InvalidArgument", "NotImplemented", "NoSuchFile", "NotFound"))

# Compared in lower case.
_MEMORY_WORDS = (
    "cuda out of memory",
    "hip out of memory",
    "mps backend out of memory",
    "xpu out of memory",
    "defaultcpuallocator: can't allocate memory",
    "defaultcpuallocator: not enough memory",
    "std::bad_alloc",
    # ONNX Runtime's arenas
    "failed to allocate memory for requested buffer",
    "is smaller than requested bytes of",
    # libraries
    "cublas_status_alloc_failed",
    "cudnn_status_alloc_failed",
    "device_allocation_failed",
    "host_allocation_failed",
    "cusolver_status_alloc_failed",
    "cusparse_status_alloc_failed",
    "cufft_alloc_failed",
    "hipblas_status_alloc_failed",
    "rocblas_status_memory_error",
    "miopenstatusallocfailed",
    # drivers
    "cuda_error_out_of_memory",
    "cudaerrormemoryallocation",
    "hiperroroutofmemory",
    "ur_result_error_out_of_device_memory",
    "ur_result_error_out_of_host_memory",
)
# `CUDA error: out of memory`, `CUDA driver error: out of memory`, `CUDA failure 2: out of memory`,
# `Triton Error [CUDA]: out of memory`, `Cuda Runtime (out of memory)`, NCCL's `Cuda failure 2 'out of memory'`.
_RUNTIME_OUT_OF_MEMORY = re.compile(
    r"\b(?:cuda|hip|triton error \[(?:cuda|hip)\])[:\]]* ?(?:driver |runtime )?(?:api )?(?:error|failure)?"
    r"(?: in allocate)?(?: ?\d+)?[:(' ]{1,3}out of memory"
)

# Errors after which every later call of the process fails as well, as CUDA's and HIP's documentation has them.
_LOST_WORDS = re.compile(
    r"device-side assert triggered"
    r"|an illegal memory access was encountered"
    r"|an illegal instruction was encountered"
    r"|misaligned address"
    r"|operation not supported on global/shared address space"
    r"|invalid program counter"
    r"|unspecified launch failure"
    r"|hardware stack error"
    r"|the launch timed out and was terminated"
    r"|uncorrectable (?:ecc|nvlink) error"
    r"|context is destroyed"
    r"|invalid device context"
    r"|(?:cuda|hip) (?:error|failure)(?: \d+)?: unknown error"
    r"|(?:cuda|hip)_?error_?(?:illegal_?address|illegal_?instruction|launch_?(?:failed|failure|timeout)|assert|unknown"
    r"|ecc_?not_?correctable|ecc_?uncorrectable|misaligned_?address|invalid_?pc|hardware_?stack_?error)"
    r"|(?:cudnn|cublas|hipblas)_status_execution_failed"
)
_RUNTIME_SPEAKS = re.compile(r"\b(?:cuda|hip|cudnn|cublas|hipblas|nccl|rccl)")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether host or device memory ran out: by the type of an exception or of one of its causes, or by its words."""
    return any(_ran_out(cause) for cause in _causes(error))


def words_of_loss(error: BaseException) -> str:
    """What a runtime says of a device that is lost to this process: one line; empty where it says nothing of that."""
    for cause in _causes(error):
        if not _is_of_runtime(cause) and not (isinstance(cause, RuntimeError) and _is_raised_in_c(cause)):
            continue
        for line in str(cause).splitlines():
            if says_lost(line):
                return f"{type(cause).__name__}: {line.strip()}"[:_MOST_WORDS]
    return ""


def says_lost(line: str) -> bool:
    """Whether a line that a runtime wrote says that its device is lost to the process."""
    text = line.lower()
    return _RUNTIME_SPEAKS.search(text) is not None and _LOST_WORDS.search(text) is not None


def _ran_out(error: BaseException) -> bool:
    if isinstance(error, MemoryError):
        return True
    if any(base.__name__ == "OutOfMemoryError" for base in type(error).__mro__):
        return True
    if not isinstance(error, RuntimeError) and not _is_of_runtime(error):
        return False
    text = str(error).lower()
    return any(words in text for words in _MEMORY_WORDS) or _RUNTIME_OUT_OF_MEMORY.search(text) is not None


def _is_of_runtime(error: BaseException) -> bool:
    kind = type(error)
    return kind.__name__ not in _ABOUT_INPUTS and str(kind.__module__).partition(".")[0] in _RUNTIMES


def _is_raised_in_c(error: BaseException) -> bool:
    """Whether no `raise` of Python's made this exception: C++ extensions raise a plain RuntimeError."""
    last = error.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    if last is None:
        return False
    return dis.opname[last.tb_frame.f_code.co_code[last.tb_lasti]] not in ("RAISE_VARARGS", "RERAISE")


def _causes(error: BaseException) -> Iterator[BaseException]:
    """An exception and what it was raised from, or in the handling of, as a traceback shows it."""
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen and len(seen) < _MOST_CAUSES:
        yield cause
        seen.add(id(cause))
        above = None if cause.__suppress_context__ else cause.__context__
        cause = cause.__cause__ if cause.__cause__ is not None else above
