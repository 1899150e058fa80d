"""The fake modules of a release: recorded signatures, recorded enumerations, computed or unavailable functions."""

from __future__ import annotations

import ast
import enum
import importlib.machinery
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any, Literal

import torch

from flashinfer_compat.signatures.entry_points import ENTRY_POINTS
from flashinfer_compat.signatures.model import FACTORY, OPAQUE, Parameter, Symbol
from flashinfer_compat.signatures.recorded import recorded
from standin import gemm, layout, moe, quantization, recipe
from standin.calls import UNSET, Call, Era, Kernel

__all__ = ["StandIn", "installed", "release"]

_KERNELS: Mapping[str, Kernel] = {**moe.KERNELS, **quantization.KERNELS, **layout.KERNELS, **gemm.KERNELS}

_TOP, _MOE, _CORE = "flashinfer", "flashinfer.fused_moe", "flashinfer.fused_moe.core"
_FP4, _QUANTIZATION = "flashinfer.fp4_quantization", "flashinfer.quantization"
_PUBLIC = {entry.name: entry.modules for entry in ENTRY_POINTS}

_EXPORTS: Mapping[str, tuple[tuple[str, str, str | None], ...]] = {
    "trtllm_fp4_block_scale_moe": ((_TOP, "0.2.9", None), (_MOE, "0.2.9", None)),
    "trtllm_fp4_block_scale_routed_moe": ((_TOP, "0.2.10", None), (_MOE, "0.2.10", None)),
    "reorder_rows_for_gated_act_gemm": ((_TOP, "0.2.9", None), (_MOE, "0.2.9", None)),
    "fp4_quantize": ((_TOP, "0.2.9", None), (_FP4, "0.2.9", None), (_QUANTIZATION, "0.6.7", None)),
    "nvfp4_quantize": ((_TOP, "0.2.9", None), (_FP4, "0.2.9", None), (_QUANTIZATION, "0.6.7", None)),
    "RoutingMethodType": ((_TOP, "0.2.9", None), (_MOE, "0.2.9", None), (_CORE, "0.6.7", None)),
    "ActivationType": ((_TOP, "0.6.3", None), (_MOE, "0.6.3", None), (_CORE, "0.6.7", None)),
    "GatedActType": ((_TOP, "0.2.14", "0.6.3"), (_MOE, "0.2.14", "0.6.3")),
    "SfLayout": ((_TOP, "0.2.9", None), (_QUANTIZATION, "0.6.7", None)),
    "RoutingInputMode": ((_MOE, "0.6.16", None), (_CORE, "0.6.16", None)),
}
"""(module, first release, release it is gone from) beside the module that defines a name; others: ENTRY_POINTS."""

_RECIPES_SINCE = "0.7.1"


class StandIn:
    """One release: its modules, its functions by name, and every call made of them."""

    def __init__(self, version: str) -> None:
        record = recorded(version)
        self.era = Era(record.version)
        self.symbols = record.symbols.symbols
        self.calls: list[Call] = []
        self.objects: dict[str, Any] = {}
        """The functions and enumerations, by entry point name."""
        # Enumerations first: defaults of functions name their members.
        for name, symbol in sorted(self.symbols.items(), key=lambda item: item[1].members is None):
            self.objects[name] = self._enumeration(symbol) if symbol.members is not None else self._function(symbol)
        self.modules: dict[str, ModuleType] = {}
        for name, symbol in self.symbols.items():
            for module in self._exporting(symbol):
                setattr(self._module(module), name, self.objects[name])
        if self.era.since(_RECIPES_SINCE):
            # They are no entry points of this package's, and so in no record.
            for found in (recipe.NVFP44Over6Config, recipe.NVFP44Over6ErrMode):
                self.objects[found.__name__] = found
                for module in (_TOP, _QUANTIZATION):
                    setattr(self._module(module), found.__name__, found)
        self._module(_TOP).__version__ = self.era.version  # type: ignore[attr-defined]

    def named(self, name: str) -> list[Call]:
        """The calls of one function."""
        return [call for call in self.calls if call.name == name]

    def _enumeration(self, symbol: Symbol) -> Any:
        members = dict(symbol.members or ())
        if all(isinstance(value, int) for value in members.values()):
            return enum.IntEnum(symbol.name, members, module=symbol.module)
        return enum.Enum(symbol.name, members, module=symbol.module)

    def _function(self, symbol: Symbol) -> Callable[..., Any]:
        signature = inspect.Signature([self._parameter(one) for one in symbol.parameters or ()])
        kernel = _KERNELS.get(symbol.name, _unavailable)

        def function(*args: Any, **kwargs: Any) -> Any:
            bound = signature.bind(*args, **kwargs)
            given = frozenset(bound.arguments)
            bound.apply_defaults()
            call = Call(symbol.name, dict(bound.arguments), given, frozenset(kwargs))
            self.calls.append(call)
            return kernel(self.era, call)

        function.__name__ = function.__qualname__ = symbol.name
        function.__module__ = symbol.module
        function.__signature__ = signature  # type: ignore[attr-defined]
        return function

    def _parameter(self, parameter: Parameter) -> inspect.Parameter:
        return inspect.Parameter(
            parameter.name,
            getattr(inspect.Parameter, parameter.kind),
            default=inspect.Parameter.empty if parameter.default is None else self._default(parameter.default),
            annotation=Literal[parameter.choices] if parameter.choices else inspect.Parameter.empty,
        )

    def _default(self, text: str) -> Any:
        if text in (OPAQUE, FACTORY):
            return UNSET
        owner, _, member = text.rpartition(".")
        if owner in self.objects:
            return self.objects[owner][member]
        if owner == "torch":
            return getattr(torch, member)
        return ast.literal_eval(text)

    def _exporting(self, symbol: Symbol) -> set[str]:
        if symbol.name in _EXPORTS:
            rows = _EXPORTS[symbol.name]
            found = {name for name, first, end in rows if self.era.since(first) and not (end and self.era.since(end))}
        else:
            found = set(_PUBLIC[symbol.name])
        return found | {symbol.module}

    def _module(self, name: str) -> ModuleType:
        if name not in self.modules:
            module = ModuleType(name)
            module.__path__ = []
            module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
            self.modules[name] = module
            parent, _, last = name.rpartition(".")
            # A function may share its name with a module; the function is what the package shows.
            if parent and not hasattr(self._module(parent), last):
                setattr(self._module(parent), last, module)
        return self.modules[name]


def release(version: str) -> StandIn:
    """The stand-in for a recorded release, not yet importable.

    Raises:
        UnknownReleaseError: the release is not recorded.
    """
    return StandIn(version)


@contextmanager
def installed(version: str) -> Iterator[StandIn]:
    """Let `import flashinfer` find the stand-in for a release; afterwards everything is as it was before."""
    standin = release(version)
    before = {name: module for name, module in sys.modules.items() if _is_flashinfer(name)}
    for name in before:
        del sys.modules[name]
    sys.modules.update(standin.modules)
    try:
        yield standin
    finally:
        for name in [name for name in sys.modules if _is_flashinfer(name)]:
            del sys.modules[name]
        sys.modules.update(before)


def _is_flashinfer(name: str) -> bool:
    return name == _TOP or name.startswith(f"{_TOP}.")


def _unavailable(era: Era, call: Call) -> Any:
    raise NotImplementedError(f"The stand-in for FlashInfer {era.version} does not compute {call.name}.")
