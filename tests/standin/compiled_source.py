"""The functions that a C++ source of FlashInfer exports to Python, with their parameters, read from its text."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

__all__ = ["CppParameter", "exported"]

_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
# TVM FFI from 0.4.0rc4, a torch library before.
_EXPORT = re.compile(r'(?:TVM_FFI_DLL_EXPORT_TYPED_FUNC\(\s*|\bm\.def\(\s*")(\w+)"?\s*,\s*&?([\w:]+)\s*\)')
_QUALIFIERS = re.compile(r"\bconst\b|[&]")
_NAMESPACE = re.compile(r"\b(?:at|std|tvm::ffi|ffi|torch)::")


@dataclass(frozen=True)
class CppParameter:
    """One parameter of an exported function."""

    name: str
    type: str
    """Without const, references and namespaces, such as `Optional<TensorView>` or `int64_t`."""


def exported(source: str) -> Mapping[str, tuple[CppParameter, ...]]:
    """The exported functions by the names that Python calls them by.

    Raises:
        ValueError: an exported function is defined in this source not exactly once, or a parameter cannot be read.
    """
    text = _COMMENT.sub(" ", source)
    return {name: _parameters(text, function.rpartition("::")[2]) for name, function in _EXPORT.findall(text)}


def _parameters(text: str, function: str) -> tuple[CppParameter, ...]:
    # A definition has a return type before it and a body after it; a call has neither.
    definitions = re.findall(rf"[\w>&*]\s+{function}\s*\(([^{{;]*?)\)\s*\{{", text)
    if len(definitions) != 1:
        raise ValueError(f"{function} is exported, and defined {len(definitions)} times")
    return tuple(_parameter(one) for one in _split(definitions[0]))


def _split(parameters: str) -> Iterator[str]:
    """The parts between commas that are in no angle brackets."""
    depth, start = 0, 0
    for position, character in enumerate(parameters):
        depth += {"<": 1, ">": -1}.get(character, 0)
        if character == "," and depth == 0:
            yield parameters[start:position]
            start = position + 1
    if parameters[start:].strip():
        yield parameters[start:]


def _parameter(text: str) -> CppParameter:
    words = _NAMESPACE.sub("", _QUALIFIERS.sub(" ", text)).split()
    if len(words) < 2 or not words[-1].isidentifier():
        raise ValueError(f"not a type and a name: {text.strip()!r}")
    return CppParameter(words[-1], "".join(words[:-1]).replace("optional<", "Optional<"))
