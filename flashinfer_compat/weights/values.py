"""One MoE layer's weights as frozen values, in the layout a ModelOpt NVFP4 checkpoint stores them in.

E is the number of experts held, H the hidden_size, I the intermediate_size (of this tensor-parallel rank). An NVFP4
value is `E2M1 code * block scale * global scale`; the input scale multiplies an activation's codes the same way.

Each value checks its sizes, dtypes and shapes when it is made (never its contents, so nothing waits for a device). A
size or rank out of range raises ArgumentError, a tensor of another dtype or shape TensorError; both name the field.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from flashinfer_compat.errors import ArgumentError, TensorError
from flashinfer_compat.problem import Problem, check_group_size
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

if TYPE_CHECKING:
    import torch

__all__ = ["DenseExperts", "LayerConfig", "MoELayerWeights", "Nvfp4Experts", "Router"]

_BLOCK = 16
"""Values that share one block scale."""


@dataclass(frozen=True)
class LayerConfig:
    """The sizes and the routing of one MoE layer."""

    hidden_size: int
    intermediate_size: int
    """Of one routed expert, whole (before tensor parallelism)."""
    num_experts: int
    """Routed experts."""
    top_k: int
    """Routed experts per token."""
    num_shared_experts: int
    n_group: int
    topk_group: int
    routed_scaling_factor: float
    norm_topk_prob: bool
    routing_method: RoutingMethod
    activation: Activation

    def __post_init__(self) -> None:
        for name in ("hidden_size", "intermediate_size"):
            size = getattr(self, name)
            if size < _BLOCK or size % _BLOCK:
                raise ArgumentError(name, f"a positive multiple of {_BLOCK} (the NVFP4 block)", str(size))
        _require_range("num_experts", self.num_experts, 1)
        _require_range("num_shared_experts", self.num_shared_experts, 0)
        _require_range("n_group", self.n_group, 1, self.num_experts)
        if self.num_experts % self.n_group:
            raise ArgumentError("n_group", f"a divisor of num_experts = {self.num_experts}", str(self.n_group))
        check_group_size(self.num_experts, self.n_group)
        _require_range("topk_group", self.topk_group, 1, self.n_group)
        _require_range("top_k", self.top_k, 1, self.topk_group * (self.num_experts // self.n_group))
        if not (math.isfinite(self.routed_scaling_factor) and self.routed_scaling_factor > 0):
            raise ArgumentError("routed_scaling_factor", "a positive finite number", str(self.routed_scaling_factor))


@dataclass(frozen=True)
class Router:
    """The linear layer that scores experts."""

    weight: torch.Tensor
    """[E, H], as stored (bf16 or float32)."""
    bias: torch.Tensor | None
    """[E] float32, added to the scores to choose experts, not to weigh them (DeepSeek's e_score_correction_bias)."""

    def __post_init__(self) -> None:
        _require_axes("Router.weight", self.weight, ("E", "H"))
        _require_tensor("Router.weight", self.weight, ("bfloat16", "float32"), tuple(self.weight.shape))
        if self.bias is not None:
            _require_tensor("Router.bias", self.bias, ("float32",), (self.weight.shape[0],))


@dataclass(frozen=True)
class Nvfp4Experts:
    """E gated MLPs in NVFP4. Index 0 of the second axis of `gate_up_*` is the gate projection, 1 is up."""

    gate_up_weight: torch.Tensor
    """uint8 [E, 2, I, H/2], two E2M1 codes a byte, low nibble first."""
    gate_up_block_scale: torch.Tensor
    """float8_e4m3fn [E, 2, I, H/16], row-major."""
    gate_up_global_scale: torch.Tensor
    """float32 [E, 2]; the checkpoint's weight_scale_2."""
    gate_up_input_scale: torch.Tensor
    """float32 [E, 2]; the checkpoint's input_scale, amax / (6 * 448)."""
    down_weight: torch.Tensor
    """uint8 [E, H, I/2]."""
    down_block_scale: torch.Tensor
    """float8_e4m3fn [E, H, I/16]."""
    down_global_scale: torch.Tensor
    """float32 [E]."""
    down_input_scale: torch.Tensor
    """float32 [E]."""

    def __post_init__(self) -> None:
        _require_axes("Nvfp4Experts.gate_up_weight", self.gate_up_weight, ("E", "2", "I", "H/2"))
        e, _, i, half = self.gate_up_weight.shape
        h = 2 * half
        if h % _BLOCK or i % _BLOCK:
            raise TensorError("Nvfp4Experts.gate_up_weight", f"H and I multiples of {_BLOCK}", f"H = {h}, I = {i}")
        expected = {
            "gate_up_weight": ("uint8", (e, 2, i, h // 2)),
            "gate_up_block_scale": ("float8_e4m3fn", (e, 2, i, h // _BLOCK)),
            "gate_up_global_scale": ("float32", (e, 2)),
            "gate_up_input_scale": ("float32", (e, 2)),
            "down_weight": ("uint8", (e, h, i // 2)),
            "down_block_scale": ("float8_e4m3fn", (e, h, i // _BLOCK)),
            "down_global_scale": ("float32", (e,)),
            "down_input_scale": ("float32", (e,)),
        }
        for name, (dtype, shape) in expected.items():
            _require_tensor(f"Nvfp4Experts.{name}", getattr(self, name), (dtype,), shape)

    @property
    def num_experts(self) -> int:
        """E."""
        return self.gate_up_weight.shape[0]

    @property
    def hidden_size(self) -> int:
        """H."""
        return self.down_weight.shape[1]

    @property
    def intermediate_size(self) -> int:
        """I, of this rank."""
        return self.gate_up_weight.shape[2]


@dataclass(frozen=True)
class DenseExperts:
    """E gated MLPs in bf16. Index 0 of the second axis of `gate_up_weight` is the gate projection, 1 is up."""

    gate_up_weight: torch.Tensor
    """bfloat16 [E, 2, I, H]."""
    down_weight: torch.Tensor
    """bfloat16 [E, H, I]."""

    def __post_init__(self) -> None:
        _require_axes("DenseExperts.gate_up_weight", self.gate_up_weight, ("E", "2", "I", "H"))
        e, _, i, h = self.gate_up_weight.shape
        _require_tensor("DenseExperts.gate_up_weight", self.gate_up_weight, ("bfloat16",), (e, 2, i, h))
        _require_tensor("DenseExperts.down_weight", self.down_weight, ("bfloat16",), (e, h, i))

    @property
    def num_experts(self) -> int:
        """E."""
        return self.gate_up_weight.shape[0]

    @property
    def hidden_size(self) -> int:
        """H."""
        return self.down_weight.shape[1]

    @property
    def intermediate_size(self) -> int:
        """I, of this rank."""
        return self.gate_up_weight.shape[2]


@dataclass(frozen=True)
class MoELayerWeights:
    """One MoE layer of a checkpoint, or one rank's part of it.

    Tensor parallelism cuts every expert's intermediate size, expert parallelism gives each rank whole routed experts.
    What `fp4_moe` returns on the ranks adds up to the layer's output.
    """

    config: LayerConfig
    """Of the whole layer."""
    router: Router
    routed: Nvfp4Experts
    """num_experts / ep_size MLPs of intermediate_size / tp_size."""
    shared: Nvfp4Experts | DenseExperts | None
    """One MLP (E = 1) of intermediate_size * num_shared_experts / tp_size, and where the placement is sharded over
    ep_size as well: checkpoints store several shared experts as one wide one."""
    layer: int
    tp_rank: int
    tp_size: int
    ep_rank: int = 0
    """Holds the routed experts from ep_rank * num_experts / ep_size on."""
    ep_size: int = 1
    shared_placement: SharedExpertPlacement | None = None
    """Needed with shared experts and ep_size > 1."""
    shared_gate: torch.Tensor | None = None
    """[1, H], as stored (bf16 or float32): the shared experts' output is multiplied by sigmoid(hidden_states @ gate.T),
    where a model has such a gate."""
    routed_input_scale: float | None = None
    """The largest gate or up input scale of the routed experts of all ranks, so that all ranks quantize alike; needed
    with ep_size > 1, otherwise it is that of the experts held."""

    def __post_init__(self) -> None:
        config = self.config
        for kind in ("tp", "ep"):
            _require_range(f"{kind}_size", getattr(self, f"{kind}_size"), 1)
            _require_range(f"{kind}_rank", getattr(self, f"{kind}_rank"), 0, getattr(self, f"{kind}_size") - 1)
        if config.intermediate_size % self.tp_size:
            raise ArgumentError("tp_size", f"a divisor of {config.intermediate_size}", str(self.tp_size))
        if config.num_experts % self.ep_size:
            raise ArgumentError("ep_size", f"a divisor of num_experts = {config.num_experts}", str(self.ep_size))
        if self.ep_size > 1:
            self._require_what_ranks_share()
        width = config.intermediate_size // self.tp_size
        _require_sizes("routed", self.routed, config.num_experts // self.ep_size, config.hidden_size, width)
        if tuple(self.router.weight.shape) != (config.num_experts, config.hidden_size):
            expected = f"shape {[config.num_experts, config.hidden_size]}"
            raise TensorError("router.weight", expected, str(list(self.router.weight.shape)))
        if (self.shared is None) != (config.num_shared_experts == 0):
            expected = f"weights of {config.num_shared_experts} shared experts, as config.num_shared_experts says"
            raise ArgumentError("shared", expected, "none" if self.shared is None else "weights")
        if self.shared_gate is not None:
            _require_tensor("shared_gate", self.shared_gate, ("bfloat16", "float32"), (1, config.hidden_size))
        if self.shared is not None:
            cuts = self.ep_size if self.shared_placement is SharedExpertPlacement.SHARDED else 1
            _require_sizes("shared", self.shared, 1, config.hidden_size, width * config.num_shared_experts // cuts)

    def _require_what_ranks_share(self) -> None:
        if self.routed_input_scale is None:
            expected = "the largest gate or up input scale of the routed experts of all ranks, with ep_size > 1"
            raise ArgumentError("routed_input_scale", expected, "None")
        if self.shared_placement is None and self.config.num_shared_experts:
            expected = "'replicated' or 'sharded', with shared experts and ep_size > 1"
            raise ArgumentError("shared_placement", expected, "None")

    @property
    def local_expert_offset(self) -> int:
        """Id of the first routed expert held."""
        return self.ep_rank * self.routed.num_experts

    @property
    def adds_shared(self) -> bool:
        """Whether this rank adds what it holds of the shared experts: a replicated one is added on one rank only."""
        replicated = self.shared_placement is SharedExpertPlacement.REPLICATED
        return self.shared is not None and not (replicated and self.ep_rank > 0)

    @property
    def shared_format(self) -> SharedExpertFormat:
        """How the checkpoint stores the shared experts."""
        if self.shared is None:
            return SharedExpertFormat.NONE
        return SharedExpertFormat.NVFP4 if isinstance(self.shared, Nvfp4Experts) else SharedExpertFormat.BF16

    def problem(
        self,
        routing_input: RoutingInput | str,
        *,
        routed_scaling: RoutedScaling | str = RoutedScaling.ROUTING_WEIGHTS,
        numerics: Numerics | str = Numerics.W4A4,
        activation_scaling: ActivationScaling | str = ActivationScaling.CHECKPOINT,
    ) -> Problem:
        """What planning needs to know of this layer; the arguments say how it will be called.

        Raises:
            ArgumentError: the sizes or arguments make no layer that can be run.
        """
        config = self.config
        return Problem(
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size // self.tp_size,
            num_experts=config.num_experts,
            top_k=config.top_k,
            num_shared_experts=config.num_shared_experts,
            shared_format=self.shared_format,
            routing_method=config.routing_method,
            routing_input=parse(RoutingInput, routing_input, "routing_input"),
            n_group=config.n_group,
            topk_group=config.topk_group,
            routed_scaling_factor=config.routed_scaling_factor,
            norm_topk_prob=config.norm_topk_prob,
            routed_scaling=parse(RoutedScaling, routed_scaling, "routed_scaling"),
            activation=config.activation,
            numerics=parse(Numerics, numerics, "numerics"),
            activation_scaling=parse(ActivationScaling, activation_scaling, "activation_scaling"),
            shared_gate=self.shared_gate is not None,
            ep_size=self.ep_size,
            shared_placement=self.shared_placement,
        )

    @property
    def input_scale_spread(self) -> float:
        """Largest over smallest gate/up input scale of all NVFP4 experts, shared ones included (1.0: all equal).

        A kernel that quantizes each token once needs one common scale, the largest; the spread says by how much that
        coarsens the expert with the smallest.
        """
        scales = [self.routed.gate_up_input_scale.flatten()]
        if isinstance(self.shared, Nvfp4Experts):
            scales.append(self.shared.gate_up_input_scale.flatten())
        largest = max(float(scale.max()) for scale in scales)
        smallest = min(float(scale.min()) for scale in scales)
        return largest / smallest


def _require_range(name: str, value: int, low: int, high: int | None = None) -> None:
    if value < low or (high is not None and value > high):
        raise ArgumentError(name, f"at least {low}" if high is None else f"{low} to {high}", str(value))


def _require_axes(field: str, tensor: torch.Tensor, axes: tuple[str, ...]) -> None:
    """Require as many axes, and for an axis given as a number that size."""
    shape = [str(size) for size in tensor.shape]
    if len(shape) != len(axes) or any(axis.isdigit() and axis != size for axis, size in zip(axes, shape, strict=True)):
        raise TensorError(field, f"shape [{', '.join(axes)}]", f"[{', '.join(shape)}]")


def _require_tensor(field: str, tensor: torch.Tensor, dtypes: tuple[str, ...], shape: tuple[int, ...]) -> None:
    # By name, so that this module needs no torch.
    dtype = str(tensor.dtype).removeprefix("torch.")
    if dtype not in dtypes:
        raise TensorError(field, f"dtype {' or '.join(dtypes)}", dtype)
    if tuple(tensor.shape) != shape:
        raise TensorError(field, f"shape {list(shape)}", str(list(tensor.shape)))


def _require_sizes(field: str, experts: Nvfp4Experts | DenseExperts, num: int, hidden: int, intermediate: int) -> None:
    found = (experts.num_experts, experts.hidden_size, experts.intermediate_size)
    if found != (num, hidden, intermediate):
        text = "{} experts, hidden_size {}, intermediate_size {}"
        raise TensorError(field, text.format(num, hidden, intermediate), text.format(*found))
