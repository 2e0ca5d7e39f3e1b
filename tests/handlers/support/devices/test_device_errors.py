"""Tests for what runtimes of accelerators say: words for no memory, words for a lost device, and who may say them."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import pytest

from marserve_handlers.errors import describe_failure
from marserve_handlers.support.devices.device_errors import is_out_of_memory, says_lost, words_of_loss


def of(module: str, name: str, text: str, base: type[Exception] = Exception) -> Exception:
    """An exception as that module's own, which is not installed here."""
    error: Exception = type(name, (base,), {"__module__": module})(text)
    return error


def of_onnx_runtime(text: str, name: str = "RuntimeException") -> Exception:
    """As ONNX Runtime raises it."""
    return of("onnxruntime.capi.onnxruntime_pybind11_state", name, text)


def of_torch(text: str) -> Exception:
    """As torch 2.9 and later raise CUDA's errors."""
    return of("torch", "AcceleratorError", text, RuntimeError)


def raised_in_c(text: str) -> RuntimeError:
    """What a C++ extension's `std::runtime_error` becomes."""
    try:
        ctypes.pythonapi.PyErr_SetString(ctypes.py_object(RuntimeError), text.encode())
    except RuntimeError as error:
        return error
    raise AssertionError


def raised_by(function: Callable[[], Any]) -> Exception:
    """What a function raises."""
    try:
        function()
    except Exception as error:
        return error
    raise AssertionError


ARENA = (
    "[ONNXRuntimeError] : 6 : RUNTIME_EXCEPTION : Non-zero status code returned while running Conv node. Name:'c1' "
    "Status Message: bfc_arena.cc:376 void* onnxruntime::BFCArena::AllocateRawInternal(size_t, bool) "
)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("CUDA out of memory. Tried to allocate 20.00 MiB"),
        RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported"),
        of_torch("HIP error: out of memory"),
        RuntimeError("CUDA driver error: out of memory"),
        RuntimeError("Triton Error [CUDA]: out of memory"),
        RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
        RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("cuFFT error: CUFFT_ALLOC_FAILED"),
        RuntimeError("[TensorRT-LLM][ERROR] Cuda Runtime (out of memory)"),
        RuntimeError("NCCL Error 1: Cuda failure 2 'out of memory'"),
        of_onnx_runtime(ARENA + "Failed to allocate memory for requested buffer of size 939524096"),
        of_onnx_runtime(ARENA + "Available memory of 0 is smaller than requested bytes of 2048"),
        of_onnx_runtime("[ONNXRuntimeError] : 1 : FAIL : CUDA failure 2: out of memory ; GPU=0 ; hostname=n", "Fail"),
        of("cupy_backends.cuda.api.runtime", "CUDARuntimeError", "cudaErrorMemoryAllocation: out of memory"),
        of("numba.cuda.cudadrv.driver", "CudaAPIError", "[2] Call to cuMemAlloc results in CUDA_ERROR_OUT_OF_MEMORY"),
        RuntimeError("level_zero backend failed with error: 39 (UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY)"),
        RuntimeError("std::bad_alloc"),
    ],
)
def test_the_runtimes_words_for_no_memory_are_known(error: Exception) -> None:
    """Of torch, cuDNN, cuBLAS, ONNX Runtime, Triton, TensorRT, CuPy, Numba, and of the drivers."""
    assert is_out_of_memory(error)
    assert describe_failure(error).kind == "memory"


@pytest.mark.parametrize(
    "error",
    [
        ValueError("CUDA out of memory"),
        RuntimeError("the robot ran out of memory"),
        RuntimeError("cuda graphs: out of memory is not what this is about"),
        of_onnx_runtime("Invalid Feed Input Name: CUDA failure 2: out of memory", "InvalidArgument"),
        RuntimeError("CUDA error: device-side assert triggered"),
    ],
)
def test_other_words_are_no_lack_of_memory(error: Exception) -> None:
    """What an author raises, what quotes an input, and CUDA's other errors."""
    assert not is_out_of_memory(error)


def test_the_cause_of_an_exception_counts() -> None:
    """Whether it was raised from it or in its handling; not where that was switched off, and a loop has an end."""

    def wrap() -> None:
        try:
            raise RuntimeError("CUDA out of memory")
        except RuntimeError as error:
            raise ValueError("the model could not be run") from error

    def meanwhile() -> None:
        try:
            raise MemoryError
        except MemoryError:
            raise KeyError("x")  # noqa: B904

    def hidden() -> None:
        try:
            raise MemoryError
        except MemoryError:
            raise KeyError("x") from None

    loop = ValueError("a")
    loop.__cause__ = KeyError("b")
    loop.__cause__.__cause__ = loop

    assert [is_out_of_memory(raised_by(one)) for one in (wrap, meanwhile, hidden)] == [True, True, False]
    assert not is_out_of_memory(loop)


ILLEGAL = "CUDA failure 700: an illegal memory access was encountered ; GPU=0 ; hostname=n ; file=x.cc ; line=63 ; "


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (
            of_torch("CUDA error: device-side assert triggered\nSearch for `cudaErrorAssert' in https://docs"),
            "AcceleratorError: CUDA error: device-side assert triggered",
        ),
        (
            of_torch("HIP error: an illegal memory access was encountered"),
            "AcceleratorError: HIP error: an illegal memory access was encountered",
        ),
        (raised_in_c("CUDA error: unspecified launch failure"), "RuntimeError: CUDA error: unspecified launch failure"),
        (of_onnx_runtime(ILLEGAL), f"RuntimeException: {ILLEGAL.strip()}"),
        (of_onnx_runtime("HIP failure 719: unspecified launch failure", "Fail"), None),
        (of_onnx_runtime("CUDNN failure 5000: CUDNN_STATUS_EXECUTION_FAILED ; GPU=0"), None),
        (of_onnx_runtime("CUBLAS failure 13: CUBLAS_STATUS_EXECUTION_FAILED ; GPU=0"), None),
        (of_onnx_runtime("CUDA failure 999: unknown error ; GPU=0"), None),
        (of("cupy_backends.cuda.api.runtime", "CUDARuntimeError", "cudaErrorIllegalAddress: an illegal m"), None),
        (of("numba.cuda.cudadrv.driver", "CudaAPIError", "[719] Call to cu results in CUDA_ERROR_LAUNCH_FAILED"), None),
        (raised_in_c("CUDA failed with error uncorrectable ECC error encountered"), None),
    ],
)
def test_the_runtimes_words_for_a_lost_device_are_known(error: Exception, told: str | None) -> None:
    """The line that says it is what is told, cut to a bounded length."""
    words = words_of_loss(error)

    assert words
    assert told is None or words == told
    assert len(words) <= 500


@pytest.mark.parametrize(
    "error",
    [
        ValueError("CUDA error: device-side assert triggered"),
        RuntimeError("CUDA error: device-side assert triggered"),
        of_onnx_runtime(f"Invalid Feed Input Name:{ILLEGAL}", "InvalidArgument"),
        of_torch("CUDA error: operation not permitted when stream is capturing"),
        of_torch("CUDA error: no kernel image is available for execution on the device"),
        of_torch("CUDA error: out of memory"),
        of_torch("CUDA error: invalid argument"),
        of_onnx_runtime("Non-zero status code returned while running Gather node: indices out of data bounds"),
    ],
)
def test_what_a_client_can_have_said_and_what_passes_is_no_loss(error: Exception) -> None:
    """Python's own `raise` may quote an input; after an error that does not stay the device serves on."""
    assert words_of_loss(error) == ""


def test_a_python_raise_is_told_from_an_extensions() -> None:
    """Though it was raised again on its way, by another's `raise`."""

    def quote() -> None:
        raise RuntimeError("CUDA error: misaligned address")

    original = raised_in_c("CUDA error: misaligned address")

    def again() -> None:
        raise original

    assert words_of_loss(raised_by(quote)) == ""
    assert words_of_loss(raised_by(again)) == "RuntimeError: CUDA error: misaligned address"


def test_a_line_of_a_crash_says_it_too() -> None:
    """What C++ prints of an exception that it ends by."""
    assert says_lost("  what():  CUDA error: an illegal memory access was encountered")
    assert not says_lost("misaligned address")
