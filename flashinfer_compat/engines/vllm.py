"""The vLLM plugin: with FLASHINFER_COMPAT_VLLM_FUSION=1, a shared expert is fused where that is known to work.

vLLM loads it by its entry-point group `vllm.general_plugins`, under the name flashinfer_compat, in every process. It
puts this package's model class in the place of vLLM's, from which it is derived; that class decides for its model
(`vllm_gate`) and, where the decision is no, builds exactly what vLLM builds.
"""

from __future__ import annotations

import logging

from flashinfer_compat.engines.switch import is_on

__all__ = ["SWITCH", "register"]

SWITCH = "FLASHINFER_COMPAT_VLLM_FUSION"
"""The environment variable that switches the plugin on, in every process of the server."""

_logger = logging.getLogger(__name__)


def register() -> None:
    """What vLLM calls in each of its processes, any number of times: register the model, or do nothing.

    It raises nothing. Where it cannot be sure of the vLLM at hand it says so in one line, and vLLM is as without it.
    """
    if not is_on(SWITCH):
        return
    try:
        # Imported here only: a server that does not use the plugin should not pay for it.
        from flashinfer_compat.engines.vllm_plugin import register_model

        refused = register_model()
    except Exception as error:
        refused = f"{type(error).__name__}: {error}"
    if refused:
        _logger.warning("flashinfer_compat: fusion of shared experts left as it is: %s", refused)
