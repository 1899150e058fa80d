"""The SGLang plugin's two hooks: around the gate that turns fusion off, and around each model's layout."""

from __future__ import annotations

import importlib.metadata
import logging
from collections.abc import Callable
from dataclasses import fields, replace
from functools import partial
from typing import Any

from flashinfer_compat import machine
from flashinfer_compat.engines.agreement import facts_of, require_same
from flashinfer_compat.engines.checkpoint import read_model
from flashinfer_compat.engines.gate import Decision, Outcome
from flashinfer_compat.engines.sglang_gate import QUANTIZATION, Server, decide, is_asked_about, left_alone
from flashinfer_compat.errors import StrategyUnavailableError

__all__ = ["around_layout", "around_runner_gate", "register_hooks"]

RUNNER_GATE = "sglang.srt.arg_groups.overrides._moe_runner_fusion_disable"
LAYOUT = "sglang.srt.layers.moe.utils.resolve_shared_experts_config"

_Read = Callable[[str, Any], Any]
"""A server argument by name; the second argument is for one that is not there."""

_logger = logging.getLogger(__name__)


def register_hooks() -> None:
    """Put both hooks around SGLang's functions."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(RUNNER_GATE, around_runner_gate, HookType.AROUND)
    HookRegistry.register(LAYOUT, around_layout, HookType.AROUND)


def around_runner_gate(original: Callable[[Any], dict[str, Any]], view: Any) -> dict[str, Any]:
    """Around SGLang's blanket disable: what it declares, or nothing where fusion of this model works here.

    Args:
        original: SGLang's function.
        view: the server arguments as resolved so far.
    """
    # A field that another SGLang release lacks is taken to be unset.
    read = partial(getattr, view)
    decision = _decision(_server(read), read)
    # A warning as SGLang's own line about this: nothing less is shown before a server has set up its logging.
    _logger.warning("flashinfer_compat: %s", decision)
    # SGLang's function does nothing but disable and say so.
    return {} if decision.outcome is Outcome.LIFTED else original(view)


def around_layout(original: Callable[..., Any], model_class: Any, hf_config: Any, quant_config: Any) -> Any:
    """Around the layout of one model, which each rank settles before it builds and loads the model.

    Without the plugin no model of this server would be fused. So a draft model, or one that is not NVFP4, is not; and
    for the one that the gate has looked at, all ranks must have come to the same plan.

    Raises:
        RankDisagreementError: the ranks differ.
        StrategyUnavailableError: the server was told to fuse, and this rank cannot.
    """
    from sglang.srt.runtime_context import get_context, get_exec, get_flags

    def read(name: str, _unset: Any) -> Any:
        return get_context().config_leaf(name)

    server = _server(read)
    if not is_asked_about(server):
        return original(model_class, hf_config, quant_config)
    is_nvfp4 = quant_config is not None and quant_config.get_name() == QUANTIZATION
    if not is_nvfp4 or get_flags().moe.in_speculative_scope:
        with get_exec().moe.override(disable_shared_experts_fusion=True):
            return original(model_class, hf_config, quant_config)
    layout = original(model_class, hf_config, quant_config)
    # The record keeps what the user said, the leaves what was settled.
    said = replace(server, disable_shared_experts_fusion=get_context().server_args.disable_shared_experts_fusion)
    if layout.num_fused_shared_experts or not left_alone(said, machine.this_machine()):
        _require_agreement(server, read, layout.num_fused_shared_experts)
    return layout


def _require_agreement(server: Server, read: _Read, fused: int) -> None:
    facts, decision = {"num_fused_shared_experts": str(fused)}, None
    if fused:
        decision = _decision(server, read)
        facts["fusion"] = decision.outcome.value
        if decision.plan is not None:
            facts.update(facts_of(decision.plan))
    require_same(facts, _world())
    if decision is not None and decision.outcome is not Outcome.LIFTED:
        raise StrategyUnavailableError(f"This server was told to fuse shared experts, but {decision}.")


def _decision(server: Server, read: _Read) -> Decision:
    return decide(server, machine.this_machine(), lambda: read_model(read("model_path", ""), read("revision", None)))


def _server(read: _Read) -> Server:
    from sglang.srt.environ import envs

    unset = Server(
        sglang=importlib.metadata.version("sglang"),
        per_token_activation=bool(envs.SGLANG_FLASHINFER_NVFP4_PER_TOKEN_ACTIVATION.get()),
    )
    names = {one.name for one in fields(Server)} - {"sglang", "per_token_activation"}
    return replace(unset, **{name: read(name, getattr(unset, name)) for name in names})


def _world() -> Any:
    """All ranks' CPU group; None where SGLang has made none."""
    from sglang.srt.runtime_context import get_parallel

    try:
        return get_parallel().world_group.cpu_group
    except RuntimeError:
        return None
