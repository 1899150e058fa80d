"""The words this package uses everywhere: one enumeration for each closed set of names."""

from __future__ import annotations

import enum
from typing import TypeVar

from flashinfer_compat.errors import UnknownNameError

__all__ = [
    "Activation",
    "ActivationScaling",
    "Backend",
    "Evidence",
    "Numerics",
    "QuantizerArithmetic",
    "RoutedScaling",
    "RoutingInput",
    "RoutingMethod",
    "SharedExpertFormat",
    "SharedExpertPlacement",
    "Strategy",
    "parse",
]


class Strategy(str, enum.Enum):
    """How the shared experts run beside the routed ones."""

    NATIVE = "native"
    """One call from router logits; the kernel itself adds the shared experts."""
    EXPANDED = "expanded"
    """One call from top-k; the shared experts are appended as ordinary experts of weight 1.0."""
    SPLIT = "split"
    """The routed experts in one call, the shared experts as a dense MLP, added."""

    @property
    def is_fused(self) -> bool:
        """Whether routed and shared experts run in one kernel."""
        return self is not Strategy.SPLIT


class Backend(str, enum.Enum):
    """Which code computes the layer."""

    TRTLLM = "trtllm"
    """FlashInfer's trtllm-gen kernels (`trtllm_fp4_block_scale_moe` and its routed form)."""
    TRITON = "triton"
    """This package's kernels in Triton, for GPUs without FP4 units."""
    CUTILE = "cutile"
    """FlashInfer's cuTile kernels (`MoELayer` with `CuTileNvfp4Bf16Config`), which keep activations in bf16."""
    TORCH = "torch"
    """The reference in plain PyTorch, on any device."""


class Numerics(str, enum.Enum):
    """Which operands are rounded to NVFP4."""

    W4A4 = "w4a4"
    """Weights and the inputs of both GEMMs."""
    W4A16 = "w4a16"
    """Weights only."""


class QuantizerArithmetic(str, enum.Enum):
    """How activations are rounded to NVFP4; the two differ where a quotient lies on a rounding boundary."""

    MODELOPT = "modelopt"
    """Divides, as the library does that checkpoints are made and recorded with."""
    FLASHINFER = "flashinfer"
    """Multiplies by reciprocals, as FlashInfer's CUDA quantizer does."""


class ActivationScaling(str, enum.Enum):
    """Which global scale activations are rounded to NVFP4 with, inside the routed kernel."""

    CHECKPOINT = "checkpoint"
    """The checkpoint's input scales."""
    PER_TOKEN = "per_token"
    """Each row's own, amax / (6 * 448), at both GEMMs."""


class Evidence(str, enum.Enum):
    """How a capability is known, from weakest to strongest."""

    REFUTED = "refuted"
    """A numeric self-check ran here, with exactly this install, and disagreed with the reference, or failed."""
    ABSENT = "absent"
    """Not in this install."""
    PRESENT = "present"
    """The symbol and the keyword exist."""
    ELIGIBLE = "eligible"
    """The rules known for this release, GPU and problem hold; nothing was run."""
    VERIFIED = "verified"
    """A numeric self-check ran here, with exactly this install, and agreed with the reference."""

    @property
    def rank(self) -> int:
        """Position in the order refuted < absent < present < eligible < verified."""
        return list(Evidence).index(self)


class RoutingMethod(str, enum.Enum):
    """FlashInfer's `RoutingMethodType`, by name; the numbers change between releases."""

    DEFAULT = "default"
    """Softmax over all experts, then top-k."""
    RENORMALIZE = "renormalize"
    """Top-k, then softmax over the chosen."""
    DEEPSEEK_V3 = "deepseek_v3"
    """Sigmoid, bias, groups, top-k, weights renormalised and scaled."""
    LLAMA4 = "llama4"
    """Top-1, then sigmoid."""
    RENORMALIZE_NAIVE = "renormalize_naive"
    """Softmax over all experts, top-k, weights renormalised."""
    TOPK = "topk"
    """Top-k of the logits as they are."""
    SIGMOID_RENORM = "sigmoid_renorm"
    """Sigmoid, top-k, weights renormalised."""
    MINIMAX2 = "minimax2"
    """Sigmoid, bias, top-k, weights renormalised."""
    SIGMOID = "sigmoid"
    """Sigmoid, top-k."""
    TOPK_SIGMOID = "topk_sigmoid"
    """Top-k, then sigmoid."""

    @property
    def flashinfer_name(self) -> str:
        """The member's name in FlashInfer's `RoutingMethodType`."""
        return _ROUTING_METHOD_MEMBERS[self]


_ROUTING_METHOD_MEMBERS = {
    RoutingMethod.DEFAULT: "Default",
    RoutingMethod.RENORMALIZE: "Renormalize",
    RoutingMethod.DEEPSEEK_V3: "DeepSeekV3",
    RoutingMethod.LLAMA4: "Llama4",
    RoutingMethod.RENORMALIZE_NAIVE: "RenormalizeNaive",
    RoutingMethod.TOPK: "TopK",
    RoutingMethod.SIGMOID_RENORM: "SigmoidRenorm",
    RoutingMethod.MINIMAX2: "MiniMax2",
    RoutingMethod.SIGMOID: "Sigmoid",
    RoutingMethod.TOPK_SIGMOID: "TopKSigmoid",
}


class Activation(str, enum.Enum):
    """What stands between the two GEMMs; FlashInfer's `ActivationType`, by name."""

    SWIGLU = "swiglu"
    """silu(gate) * up."""
    GEGLU = "geglu"
    """gelu(gate) * up."""
    SWIGLU_STEP = "swiglu_step"
    """min(silu(gate), limit) * clamp(up, -limit, limit)."""
    RELU2 = "relu2"
    """relu(x)^2, not gated."""
    IDENTITY = "identity"
    """x, not gated."""
    SITU = "situ"
    """beta * tanh(up / beta) * alpha * tanh(gate / alpha) * sigmoid(gate)."""

    @property
    def flashinfer_name(self) -> str:
        """The member's name in FlashInfer's `ActivationType`."""
        return _ACTIVATION_MEMBERS[self]


_ACTIVATION_MEMBERS = {
    Activation.SWIGLU: "Swiglu",
    Activation.GEGLU: "Geglu",
    Activation.SWIGLU_STEP: "SwigluStep",
    Activation.RELU2: "Relu2",
    Activation.IDENTITY: "Identity",
    Activation.SITU: "Situ",
}


class SharedExpertFormat(str, enum.Enum):
    """How a checkpoint stores the shared experts."""

    NONE = "none"
    """The layer has no shared experts."""
    NVFP4 = "nvfp4"
    BF16 = "bf16"


class RoutingInput(str, enum.Enum):
    """What the caller hands to `fp4_moe` beside the hidden states."""

    LOGITS = "logits"
    """Router logits; `fp4_moe` chooses the experts."""
    TOPK = "topk"
    """Chosen experts and their weights."""


class RoutedScaling(str, enum.Enum):
    """Where `routed_scaling_factor` enters."""

    ROUTING_WEIGHTS = "routing_weights"
    """In the routing weights: applied by `fp4_moe` to logits, already inside top-k weights."""
    OUTPUT = "output"
    """The caller multiplies what `fp4_moe` returns; wrong for a shared expert, so refused with one."""


class SharedExpertPlacement(str, enum.Enum):
    """Under expert parallelism: which part of the shared expert each rank holds."""

    REPLICATED = "replicated"
    """Every rank holds the whole shared expert."""
    SHARDED = "sharded"
    """Every rank holds its slice of the shared expert's intermediate size."""


_E = TypeVar("_E", bound=enum.Enum)


def parse(kind: type[_E], value: str | _E, argument: str, *others: str) -> _E:
    """The member of `kind` that `value` names; `others` are words that the caller takes beside, for the error.

    Raises:
        UnknownNameError: `value` names none; the error gives the nearest valid name.
    """
    try:
        return kind(value)
    except ValueError:
        choices = (*others, *(str(member.value) for member in kind))
        raise UnknownNameError(argument, str(value), choices) from None
