"""Stand-ins for FlashInfer's compiled modules, below its own Python code.

A release's wrappers pass their arguments to the C++ binding by position. They are bound here to the parameters of the
release's own C++ source, checked against its types, and handed by name to what the stand-in computes and refuses.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from standin.calls import Call, Era
from standin.compiled_kernels import KERNELS
from standin.compiled_source import CppParameter, exported

__all__ = ["CompiledModule", "bind"]


class CompiledModule:
    """What a loaded library shows to Python: the functions its source exports, by attribute."""

    def __init__(self, era: Era, source: str, calls: list[Call]) -> None:
        self._era, self._calls = era, calls
        self._functions = exported(source)
        self._is_torch_library = "TORCH_LIBRARY" in source

    def __getattr__(self, name: str) -> Any:
        if name not in self._functions:
            raise AttributeError(f"the library exports {sorted(self._functions)}, and no {name}")
        parameters = self._functions[name]

        def function(*arguments: Any) -> Any:
            bound = bind(name, parameters, arguments)
            if name not in KERNELS:
                raise NotImplementedError(f"the stand-in for FlashInfer {self._era.version} does not compute {name}")
            return KERNELS[name](self._era, bound, self._calls)

        # A torch operator is called by itself or through its only overload.
        return _Operator(function) if self._is_torch_library else function


class _Operator:
    def __init__(self, function: Callable[..., Any]) -> None:
        self.default = function

    def __call__(self, *arguments: Any) -> Any:
        return self.default(*arguments)


def bind(name: str, parameters: tuple[CppParameter, ...], arguments: tuple[Any, ...]) -> dict[str, Any]:
    """The arguments by C++ parameter name.

    Raises:
        TypeError: there are too few or too many, or one is not of its parameter's type; TVM FFI and torch refuse both.
    """
    if len(arguments) != len(parameters):
        raise TypeError(f"{name} takes {len(parameters)} arguments, got {len(arguments)}")
    for number, (parameter, argument) in enumerate(zip(parameters, arguments, strict=True)):
        if not _is_of(argument, parameter.type):
            raise TypeError(f"{name}: argument {number}, {parameter.name}, must be {parameter.type}, got {argument!r}")
    return {parameter.name: argument for parameter, argument in zip(parameters, arguments, strict=True)}


_TYPES: Mapping[str, tuple[type, ...]] = {
    "Tensor": (torch.Tensor,),
    "TensorView": (torch.Tensor,),
    "int64_t": (int,),
    "bool": (bool, int),
    "double": (float, int),
    # An enumeration, passed as its number.
    "Fp8QuantizationType": (int,),
}


def _is_of(argument: Any, type_name: str) -> bool:
    outer, _, inner = type_name.removesuffix(">").partition("<")
    if outer == "Optional":
        return argument is None or _is_of(argument, inner)
    if outer == "Array":
        return isinstance(argument, (list, tuple)) and all(_is_of(one, inner) for one in argument)
    if type_name not in _TYPES:
        raise NotImplementedError(f"C++ type {type_name}")
    return isinstance(argument, _TYPES[type_name])
