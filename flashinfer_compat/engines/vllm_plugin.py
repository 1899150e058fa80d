"""Puts this package's model class in the place of vLLM's, in a vLLM that is known."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from pathlib import Path

from packaging.version import Version

from flashinfer_compat.engines.vllm_gate import ARCHITECTURE
from flashinfer_compat.engines.vllm_sources import SOURCES, differing

__all__ = ["register_model"]

THEIRS = ("vllm.model_executor.models.deepseek_v2", ARCHITECTURE)
OURS = ("flashinfer_compat.engines.vllm_model", ARCHITECTURE)


def register_model() -> str:
    """Register the model class; or why not."""
    installed = importlib.metadata.version("vllm")
    release = Version(installed).public
    if release not in SOURCES:
        return f"vLLM {installed} was not tested with it, {', '.join(SOURCES)} was"
    package = importlib.util.find_spec("vllm")
    assert package is not None
    assert package.origin is not None
    changed = differing(Path(package.origin).parent, release)
    if changed:
        return f"this vLLM {installed} is not the released one, it has another {', '.join(changed)}"
    # Imported here only: vLLM's configuration must not be read where the plugin is off.
    from vllm import ModelRegistry

    registered = ModelRegistry.models.get(ARCHITECTURE)
    found = (getattr(registered, "module_name", ""), getattr(registered, "class_name", ""))
    if found == OURS:
        return ""
    if found != THEIRS:
        return f"another plugin has registered {ARCHITECTURE}: {':'.join(found)}"
    ModelRegistry.register_model(ARCHITECTURE, ":".join(OURS))
    return ""
