"""The MoE layer a question is about, as one frozen value."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any

from flashinfer_compat.errors import ArgumentError
from flashinfer_compat.vocabulary import (
    Activation,
    ActivationScaling,
    Numerics,
    RoutedScaling,
    RoutingInput,
    RoutingMethod,
    SharedExpertFormat,
    SharedExpertPlacement,
    parse,
)

__all__ = ["DEEPSEEK_R1", "Problem", "check_group_size"]


def check_group_size(num_experts: int, n_group: int) -> None:
    """Require two experts in a group at least, where there are groups.

    Raises:
        ArgumentError: each expert is a group of its own.
    """
    if n_group > 1 and n_group == num_experts:
        expected = "groups of 2 experts or more, because a group's score is the sum of its two best"
        raise ArgumentError("n_group", expected, str(n_group), "Use n_group=1 for no groups.")


@dataclass(frozen=True)
class Problem:
    """One MoE layer as one rank runs it. Enumerations may be given by name where types are not checked.

    Raises:
        ArgumentError: a size or a combination that no MoE layer has; it names the field.
        UnknownNameError: a name that is not one of the enumeration's.
    """

    hidden_size: int
    intermediate_size: int
    """Of one routed expert on this rank."""
    num_experts: int
    """Routed experts of the whole layer, over all ranks."""
    top_k: int
    """Routed experts per token."""
    num_shared_experts: int = 0
    shared_format: SharedExpertFormat = SharedExpertFormat.NONE
    routing_method: RoutingMethod = RoutingMethod.DEEPSEEK_V3
    routing_input: RoutingInput = RoutingInput.LOGITS
    n_group: int = 1
    """Groups of experts in DeepSeekV3 routing; 1 is no groups, as are 0 and None."""
    topk_group: int = 1
    """Groups a token may choose from."""
    routed_scaling_factor: float = 1.0
    norm_topk_prob: bool = True
    """Whether DeepSeekV3 weights are divided by their sum."""
    routed_scaling: RoutedScaling = RoutedScaling.ROUTING_WEIGHTS
    activation: Activation = Activation.SWIGLU
    numerics: Numerics = Numerics.W4A4
    activation_scaling: ActivationScaling = ActivationScaling.CHECKPOINT
    shared_gate: bool = False
    """Whether the shared experts' output is multiplied by the sigmoid of a gate of its own."""
    ep_size: int = 1
    """Ranks the routed experts are spread over."""
    shared_placement: SharedExpertPlacement | None = None
    """Needed with shared experts under expert parallelism."""

    def __post_init__(self) -> None:
        for name, kind in _ENUMERATIONS.items():
            value = getattr(self, name)
            if value is not None or name not in _OPTIONAL:
                object.__setattr__(self, name, parse(kind, value, name))
        for name in ("n_group", "topk_group"):
            # Configurations write "no groups" as 1, 0 or null.
            if getattr(self, name) in (None, 0) and not isinstance(getattr(self, name), bool):
                object.__setattr__(self, name, 1)
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ArgumentError(name, f"an integer of at least {least}", repr(value))
        for name, multiple in (("hidden_size", 16), ("intermediate_size", 16)):
            if getattr(self, name) % multiple:
                raise ArgumentError(name, f"a multiple of {multiple}, the NVFP4 block", repr(getattr(self, name)))
        if self.top_k > self.num_experts:
            raise ArgumentError("top_k", f"at most num_experts={self.num_experts}", repr(self.top_k))
        if self.n_group > 1 and self.routing_method is not RoutingMethod.DEEPSEEK_V3:
            expected = f"1 with routing_method {self.routing_method.value}; only deepseek_v3 has groups"
            raise ArgumentError("n_group", expected, repr(self.n_group))
        if self.num_experts % self.n_group:
            raise ArgumentError("n_group", f"a divisor of num_experts={self.num_experts}", repr(self.n_group))
        check_group_size(self.num_experts, self.n_group)
        if self.topk_group > self.n_group:
            raise ArgumentError("topk_group", f"at most n_group={self.n_group}", repr(self.topk_group))
        if self.n_group > 1 and self.top_k > self.topk_group * (self.num_experts // self.n_group):
            reachable = self.topk_group * (self.num_experts // self.n_group)
            raise ArgumentError("top_k", f"at most the {reachable} experts of topk_group groups", repr(self.top_k))
        if self.num_experts % self.ep_size:
            raise ArgumentError("ep_size", f"a divisor of num_experts={self.num_experts}", repr(self.ep_size))
        factor = self.routed_scaling_factor
        is_number = isinstance(factor, (int, float)) and not isinstance(factor, bool)
        if not is_number or not math.isfinite(factor) or factor <= 0:
            raise ArgumentError("routed_scaling_factor", "a finite number greater than 0", repr(factor))
        for name in ("norm_topk_prob", "shared_gate"):
            if not isinstance(getattr(self, name), bool):
                raise ArgumentError(name, "True or False", repr(getattr(self, name)))
        if self.activation_scaling is ActivationScaling.PER_TOKEN and self.numerics is Numerics.W4A16:
            raise ArgumentError("activation_scaling", "checkpoint with numerics w4a16, which rounds none", "per_token")
        if self.shared_gate and self.num_shared_experts == 0:
            raise ArgumentError("shared_gate", "False without shared experts", "True")
        if (self.shared_format is SharedExpertFormat.NONE) != (self.num_shared_experts == 0):
            raise ArgumentError(
                "shared_format",
                "a format with shared experts, and 'none' without",
                f"{self.shared_format.value!r} with num_shared_experts={self.num_shared_experts}",
            )

    @property
    def is_grouped(self) -> bool:
        """Whether routing first chooses groups of experts."""
        return self.n_group > 1

    def to_dict(self) -> dict[str, Any]:
        """The fields as plain JSON values."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: getattr(value, "value", value) for name, value in values.items()}


_ENUMERATIONS: dict[str, type[Any]] = {
    "shared_format": SharedExpertFormat,
    "routing_method": RoutingMethod,
    "routing_input": RoutingInput,
    "routed_scaling": RoutedScaling,
    "activation": Activation,
    "numerics": Numerics,
    "activation_scaling": ActivationScaling,
    "shared_placement": SharedExpertPlacement,
}

_OPTIONAL = {"shared_placement"}

_LEAST = {
    "hidden_size": 1,
    "intermediate_size": 1,
    "num_experts": 1,
    "top_k": 1,
    "num_shared_experts": 0,
    "n_group": 1,
    "topk_group": 1,
    "ep_size": 1,
}

DEEPSEEK_R1 = Problem(
    hidden_size=7168,
    intermediate_size=2048,
    num_experts=256,
    top_k=8,
    num_shared_experts=1,
    shared_format=SharedExpertFormat.NVFP4,
    n_group=8,
    topk_group=4,
    routed_scaling_factor=2.5,
)
"""The layer of DeepSeek-R1 NVFP4, on one rank."""
