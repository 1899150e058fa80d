"""The safetensors files of a checkpoint, read lazily: a file is opened when a tensor of it is first asked for."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flashinfer_compat.errors import CheckpointError, DependencyMissingError
from flashinfer_compat.weights.config import read_json

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import TracebackType

    import torch

__all__ = ["CheckpointTensors", "StoredTensor", "open_tensors"]

_DTYPES = {"U8": "uint8", "F8_E4M3": "float8_e4m3fn", "F16": "float16", "BF16": "bfloat16", "F32": "float32"}
"""safetensors' names, in torch's words; other dtypes never fit and keep their name in errors."""


@dataclass(frozen=True)
class StoredTensor:
    """What a file's header says of one tensor."""

    dtype: str
    """In torch's words: `uint8`, `float8_e4m3fn`, `bfloat16`, `float32`."""
    shape: tuple[int, ...]
    path: Path
    """The file that holds it."""


class CheckpointTensors:
    """The tensors of a checkpoint by name; a context manager that closes its files at the end.

    Tensors are read on the CPU and may alias a mapped file: copy what is to be kept.
    """

    def __init__(self, files: Mapping[str, Path], listing: Path) -> None:
        """`files` says which file holds a tensor; `listing` is the file or folder that says so."""
        self._files = files
        self._listing = listing
        self._handles: dict[Path, Any] = {}
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> CheckpointTensors:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._handles.clear()
        self._stack.close()

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def stored(self, name: str) -> StoredTensor:
        """The dtype and shape of a tensor, from its file's header.

        Raises:
            CheckpointError: no such tensor, or its file is missing or damaged.
        """
        entry, path = self._slice(name)
        return StoredTensor(_DTYPES.get(entry.get_dtype(), entry.get_dtype()), tuple(entry.get_shape()), path)

    def read(
        self,
        name: str,
        dtypes: tuple[str, ...],
        shape: tuple[int, ...],
        part: tuple[slice, ...] | None = None,
    ) -> torch.Tensor:
        """A tensor, or the part of it that `part` selects, one slice an axis; only that part is read.

        Args:
            name: the tensor's name in the checkpoint.
            dtypes: the dtypes it may have.
            shape: its shape, whole.
            part: what to read; None reads all.

        Raises:
            CheckpointError: no such tensor, another dtype or shape, or its file is missing or damaged.
        """
        entry, path = self._slice(name)
        stored = self.stored(name)
        if stored.dtype not in dtypes:
            raise CheckpointError(name, f"dtype {' or '.join(dtypes)}", f"{stored.dtype} in {path}")
        if stored.shape != shape:
            raise CheckpointError(name, f"shape {list(shape)}", f"{list(stored.shape)} in {path}")
        whole = part is None or all(
            (section.start, section.stop) == (0, size) for section, size in zip(part, shape, strict=True)
        )
        try:
            tensor: torch.Tensor = self._handle(path).get_tensor(name) if whole else entry[part]
        except Exception as error:  # safetensors raises its own class, OSError or RuntimeError here
            raise CheckpointError(name, f"readable data in {path}", str(error)) from error
        return tensor

    def _slice(self, name: str) -> tuple[Any, Path]:
        path = self._files.get(name)
        if path is None:
            raise CheckpointError(name, f"this tensor in {self._listing}", "none of that name")
        handle = self._handle(path)
        try:
            return handle.get_slice(name), path
        except Exception as error:
            expected = f"this tensor in {path}, as {self._listing} says"
            raise CheckpointError(name, expected, f"a file without it ({error})") from error

    def _handle(self, path: Path) -> Any:
        if path not in self._handles:
            self._handles[path] = self._stack.enter_context(_open(path))
        return self._handles[path]


def open_tensors(directory: Path) -> CheckpointTensors:
    """Open a checkpoint's tensors: by model.safetensors.index.json, else model.safetensors, else all *.safetensors.

    With an index nothing but the index is read. Without one the headers are, to learn the names.

    Raises:
        CheckpointError: no safetensors file, a damaged one, a bad index, or a name that two files hold.
        DependencyMissingError: safetensors or torch is not installed.
    """
    _import_safetensors()
    index = directory / "model.safetensors.index.json"
    if index.exists():
        return CheckpointTensors(_indexed_files(index), index)
    single = directory / "model.safetensors"
    paths = [single] if single.exists() else sorted(directory.glob("*.safetensors"))
    if not paths:
        expected = "model.safetensors, or files *.safetensors with model.safetensors.index.json"
        raise CheckpointError(str(directory), expected, "no safetensors file")
    files: dict[str, Path] = {}
    for path in paths:
        with _open(path) as handle:
            names: list[str] = list(handle.keys())
        for name in names:
            if name in files:
                raise CheckpointError(name, "one file that holds this tensor", f"{files[name]} and {path}")
            files[name] = path
    return CheckpointTensors(files, single if paths == [single] else directory)


def _indexed_files(index: Path) -> dict[str, Path]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict):
        raise CheckpointError(f"{index}: weight_map", "an object of tensor name to file name", repr(weight_map))
    files = {}
    for name, file in weight_map.items():
        if not isinstance(file, str) or Path(file).name != file:
            raise CheckpointError(f"{index}: {name}", "the name of a file in the same folder", repr(file))
        files[name] = index.parent / file
    return files


def _open(path: Path) -> Any:
    safe_open = _import_safetensors()
    try:
        return safe_open(path, framework="pt", device="cpu")
    except FileNotFoundError:
        way_out = "Download the checkpoint's missing files."
        raise CheckpointError(str(path), "a file", "none there", way_out) from None
    except Exception as error:  # SafetensorError derives from Exception alone
        way_out = "The file is damaged or cut off: download it again."
        raise CheckpointError(str(path), "a whole safetensors file", str(error), way_out) from error


def _import_safetensors() -> Any:
    try:
        import torch  # noqa: F401
    except ImportError as error:
        raise DependencyMissingError("torch", "Loading a checkpoint") from error
    try:
        from safetensors import safe_open
    except ImportError as error:
        raise DependencyMissingError("safetensors", "Loading a checkpoint") from error
    return safe_open
