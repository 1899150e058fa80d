"""The SGLang plugin: with FLASHINFER_COMPAT_SGLANG_FUSION=1, shared experts are fused where that is known to work.

SGLang turns fusion off for FlashInfer's trtllm runners. Its own code past that gate, from the checkpoint's loader to
FlashInfer's routed entry, handles a fused shared expert: this plugin opens the gate for one checked model and makes the
ranks agree. It is loaded by SGLang's entry-point group `sglang.srt.plugins`, under the name flashinfer_compat.
"""

from __future__ import annotations

from flashinfer_compat.engines.switch import is_on

__all__ = ["SWITCH", "register"]

SWITCH = "FLASHINFER_COMPAT_SGLANG_FUSION"
"""The environment variable that switches the plugin on, in every process of the server."""


def register() -> None:
    """What SGLang calls in each of its processes: register the two hooks, or do nothing where it is not switched on."""
    if not is_on(SWITCH):
        return
    # Imported here only: a server that does not use the plugin should not pay for it.
    from flashinfer_compat.engines.sglang_plugin import register_hooks

    register_hooks()
