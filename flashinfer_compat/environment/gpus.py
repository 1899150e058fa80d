"""Asks the NVIDIA driver's management library (NVML) about the GPUs. NVML initialises no CUDA context."""

from __future__ import annotations

from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from flashinfer_compat.environment.model import Gpu, Gpus
from flashinfer_compat.environment.reading import NotAvailableError, gather

if TYPE_CHECKING:
    import ctypes
    from collections.abc import Iterator, Mapping, Sequence

__all__ = ["NVML_LIBRARIES", "gather_gpus"]

NVML_LIBRARIES = ("libnvidia-ml.so.1", "/usr/lib/wsl/lib/libnvidia-ml.so.1")
"""Tried in order: by the loader's search path, then where WSL keeps the Windows driver's."""

_TEXT_BYTES = 96
"""NVML_DEVICE_UUID_V2_BUFFER_SIZE and NVML_DEVICE_NAME_V2_BUFFER_SIZE; NVML's other texts are shorter."""


def gather_gpus(environ: Mapping[str, str], libraries: Sequence[str] = NVML_LIBRARIES) -> Gpus:
    """Every GPU the driver sees, whatever CUDA_VISIBLE_DEVICES says.

    Raises:
        NotAvailableError: There is no driver, or it does not work.
    """
    with _nvml(libraries) as nvml:
        count = nvml.integer("nvmlDeviceGetCount_v2")
        devices = [gather(partial(_describe, nvml, index)) for index in range(count)]
        return Gpus(
            driver_version=nvml.optional_text("nvmlSystemGetDriverVersion"),
            driver_cuda_version=_cuda_version(nvml),
            devices=tuple(device.value for device in devices if device.value is not None),
            visible=environ.get("CUDA_VISIBLE_DEVICES"),
            problems=tuple(f"GPU {index}: {device.reason}" for index, device in enumerate(devices) if device.reason),
        )


class _Nvml:
    """Calls NVML functions, whose results are return codes and whose values come back through pointers."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library

    def call(self, function: str, *arguments: Any) -> None:
        code = getattr(self._library, function)(*arguments)
        if code != 0:
            import ctypes

            describe = self._library.nvmlErrorString
            describe.restype = ctypes.c_char_p
            raise NotAvailableError(f"{function} failed with code {code}: {(describe(code) or b'').decode()}")

    def integer(self, function: str) -> int:
        import ctypes

        value = ctypes.c_int()
        self.call(function, ctypes.byref(value))
        return value.value

    def text(self, function: str, *arguments: Any) -> str:
        import ctypes

        buffer = ctypes.create_string_buffer(_TEXT_BYTES)
        self.call(function, *arguments, buffer, ctypes.c_uint(_TEXT_BYTES))
        return buffer.value.decode(errors="replace")

    def optional_text(self, function: str, *arguments: Any) -> str | None:
        try:
            return self.text(function, *arguments)
        except NotAvailableError:
            return None


@contextmanager
def _nvml(libraries: Sequence[str]) -> Iterator[_Nvml]:
    nvml = _Nvml(_load(libraries))
    nvml.call("nvmlInit_v2")
    try:
        yield nvml
    finally:
        nvml.call("nvmlShutdown")


def _load(libraries: Sequence[str]) -> ctypes.CDLL:
    import ctypes

    failures: list[str] = []
    for name in libraries:
        library = gather(partial(ctypes.CDLL, name))
        if library.value is not None:
            return library.value
        failures.append(str(library.reason))
    raise NotAvailableError(f"no NVIDIA driver library: {'; '.join(failures)}")


def _describe(nvml: _Nvml, index: int) -> Gpu:
    import ctypes

    handle = ctypes.c_void_p()
    nvml.call("nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(index), ctypes.byref(handle))
    major, minor = ctypes.c_int(), ctypes.c_int()
    nvml.call("nvmlDeviceGetCudaComputeCapability", handle, ctypes.byref(major), ctypes.byref(minor))
    return Gpu(
        index=index,
        name=nvml.text("nvmlDeviceGetName", handle),
        compute_capability=(major.value, minor.value),
        uuid=nvml.optional_text("nvmlDeviceGetUUID", handle),
        memory_bytes=_memory_bytes(nvml, handle),
    )


def _memory_bytes(nvml: _Nvml, handle: ctypes.c_void_p) -> int | None:
    import ctypes

    memory = (ctypes.c_ulonglong * 3)()  # nvmlMemory_t: total, free, used.
    try:
        nvml.call("nvmlDeviceGetMemoryInfo", handle, ctypes.byref(memory))
    except NotAvailableError:
        return None
    return int(memory[0])


def _cuda_version(nvml: _Nvml) -> str | None:
    try:
        number = nvml.integer("nvmlSystemGetCudaDriverVersion_v2")
    except NotAvailableError:
        return None
    return f"{number // 1000}.{number % 1000 // 10}"
