"""What a server says about itself: engine, version, model, and the settings that decide how MoE layers run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["PAGES", "ServerFacts", "facts_from", "fusion_is_off"]

PAGES = {
    "models": ("/v1/models",),
    "version": ("/version",),
    "info": ("/server_info?config_format=json", "/get_server_info"),
    "model": ("/model_info", "/get_model_info"),
}
"""Where it is asked, the later name where the earlier one is not found. SGLang: /server_info and /model_info, of old
releases /get_server_info and /get_model_info. vLLM: /version, and /server_info with VLLM_SERVER_DEV_MODE=1."""

_SGLANG = (
    "disable_shared_experts_fusion",
    "enforce_shared_experts_fusion",
    "moe_runner_backend",
    "moe_a2a_backend",
    "quantization",
    "attention_backend",
    "kv_cache_dtype",
    "tp_size",
    "ep_size",
    "dp_size",
    "speculative_algorithm",
    "enable_deterministic_inference",
)
"""Of SGLang's server arguments, as resolved. Nothing else is read: the page also holds the server's key."""

_VLLM = {
    "model_config": ("quantization",),
    "kernel_config": ("moe_backend", "enable_flashinfer_autotune"),
    "parallel_config": ("tensor_parallel_size", "data_parallel_size", "enable_expert_parallel"),
    "cache_config": ("cache_dtype",),
}
"""Of vLLM's configuration, by section."""

_VLLM_VARIABLES = ("FLASHINFER", "SHARED_EXPERT", "BATCH_INVARIANT")
"""Parts of the names of vLLM's environment variables that are told."""


@dataclass(frozen=True)
class ServerFacts:
    """What a server tells; empty or None where it does not."""

    url: str
    engine: str | None = None
    """`sglang` or `vllm`."""
    version: str | None = None
    models: tuple[str, ...] = ()
    model_path: str | None = None
    flags: Mapping[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """The facts as plain JSON values."""
        return {
            "url": self.url,
            "engine": self.engine,
            "version": self.version,
            "models": list(self.models),
            "model_path": self.model_path,
            "flags": dict(self.flags),
        }


def facts_from(url: str, pages: Mapping[str, Any]) -> ServerFacts:
    """Facts from the JSON of the pages that a server has, by their names in `PAGES`."""
    info, model, version = (_object(pages.get(name)) for name in ("info", "model", "version"))
    entries = _object(pages.get("models")).get("data")
    listed = [one for one in entries if isinstance(one, dict)] if isinstance(entries, list) else []
    owners = {one["owned_by"] for one in listed if isinstance(one.get("owned_by"), str)}
    engine = next((name for name in ("sglang", "vllm") if name in owners), None)
    flags: dict[str, Any] = {}
    if "vllm_config" in info:
        engine, flags = "vllm", _vllm_flags(info)
    elif "moe_runner_backend" in info or "disable_shared_experts_fusion" in info:
        engine, flags = "sglang", {name: info[name] for name in _SGLANG if name in info}
    told = info.get("version") or version.get("version")
    path = model.get("model_path")
    return ServerFacts(
        url,
        engine,
        told if isinstance(told, str) else None,
        tuple(one["id"] for one in listed if isinstance(one.get("id"), str)),
        path if isinstance(path, str) else None,
        flags,
    )


def fusion_is_off(facts: ServerFacts) -> bool | None:
    """Whether the server says that it does not fuse shared experts; None where it says nothing."""
    said = facts.flags.get("disable_shared_experts_fusion")
    return said if isinstance(said, bool) else None


def _vllm_flags(info: Mapping[str, Any]) -> dict[str, Any]:
    # Without config_format=json, which old releases do not know, the configuration is text for people.
    config, variables = _object(info["vllm_config"]), _object(info.get("vllm_env"))
    flags = {
        f"{section}.{name}": _object(config.get(section))[name]
        for section, names in _VLLM.items()
        for name in names
        if name in _object(config.get(section))
    }
    return flags | {name: value for name, value in variables.items() if any(part in name for part in _VLLM_VARIABLES)}


def _object(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}
