"""The vLLM plugin: with FLASHINFER_COMPAT_VLLM_FUSION=1, a shared expert is fused where that is known to work.

vLLM loads it by its entry-point group `vllm.general_plugins`, under the name flashinfer_compat, in every process. It
puts this package's model class in the place of vLLM's, from which it is derived; that class decides for its model
(`vllm_gate`) and, where the decision is no, builds exactly what vLLM builds.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import logging
from pathlib import Path

from packaging.version import Version

from flashinfer_compat.engines.switch import is_on
from flashinfer_compat.engines.vllm_gate import ARCHITECTURE
from flashinfer_compat.engines.vllm_sources import SOURCES, differing

__all__ = ["SWITCH", "register"]

SWITCH = "FLASHINFER_COMPAT_VLLM_FUSION"
"""The environment variable that switches the plugin on, in every process of the server."""
THEIRS = ("vllm.model_executor.models.deepseek_v2", ARCHITECTURE)
OURS = ("flashinfer_compat.engines.vllm_model", ARCHITECTURE)

_logger = logging.getLogger(__name__)


def register() -> None:
    """What vLLM calls in each of its processes, any number of times: register the model, or do nothing.

    It raises nothing. Where it cannot be sure of the vLLM at hand it says so in one line, and vLLM is as without it.
    """
    if not is_on(SWITCH):
        return
    try:
        refused = _register()
    except Exception as error:
        refused = f"{type(error).__name__}: {error}"
    if refused:
        _logger.warning("flashinfer_compat: fusion of shared experts left as it is: %s", refused)


def _register() -> str:
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
