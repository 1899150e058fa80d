"""What the stand-in refuses or misreads, each at a release where the real one does and at one where it does not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import standin  # noqa: E402
from launches import LOGITS, ROUTED, Layer  # noqa: E402
from standin import BackendSupportedError, DeviceFaultError, LaunchError  # noqa: E402

from flashinfer_compat.numerics import quantize_nvfp4  # noqa: E402

GARBAGE = "garbage"
Change = Callable[[Any], Any]


def launch(layer: Layer, version: str, entry: str, changes: dict[str, Any]) -> tuple[standin.StandIn, Any]:
    flashinfer = standin.release(version)
    arguments = layer.arguments(flashinfer, entry, **changes)
    return flashinfer, flashinfer.objects[entry](**arguments)


def assert_outcome(layer: Layer, version: str, entry: str, changes: dict[str, Any], outcome: Any) -> None:
    if isinstance(outcome, type):
        with pytest.raises(outcome):
            launch(layer, version, entry, changes)
        return
    flashinfer, [output, *_] = launch(layer, version, entry, changes)
    assert bool(flashinfer.calls[-1].garbage) == (outcome == GARBAGE)
    assert bool(output.isnan().any()) == (outcome == GARBAGE)


def rows(count: int) -> Change:
    """As many rows, by leaving some out or repeating the last."""

    def change(tensor: torch.Tensor) -> torch.Tensor:
        raw = tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor
        return raw[[min(index, len(tensor) - 1) for index in range(count)]].view(tensor.dtype)

    return change


def experts(count: int, logits: bool = True, **more: Any) -> dict[str, Any]:
    """A layer of `count` experts; only the sample's 16 have weights here."""
    routing: dict[str, Any] = {}
    if logits:
        generator = torch.Generator().manual_seed(0)
        routing["routing_logits"] = lambda old: torch.randn(len(old), count, generator=generator).to(old.dtype)
        routing["routing_bias"] = lambda old: torch.zeros(count, dtype=old.dtype)
    return {"num_experts": count, **routing, **more}


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8)


def bf16(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.bfloat16()


def flat_to_rows(scale: torch.Tensor) -> torch.Tensor:
    return scale.reshape(-1, 16)


def all_but_last(tensor: torch.Tensor) -> torch.Tensor:
    return tensor[:-1]


def slots(count: int) -> dict[str, Any]:
    """Top-k of a pretended width."""
    return {"top_k": count, "topk_ids": lambda old: torch.zeros(len(old), count, dtype=torch.int32)}


BF16_LOGITS = {"routing_logits": bf16}
UNGROUPED = {"n_group": 1, "topk_group": 1}
RENORMALIZE: dict[str, Any] = {"n_group": None, "topk_group": None, "routing_method_type": 1}

# name: entry, changes, a release with its outcome, and one on the other side of the border (None: there is none)
CASES: dict[str, tuple[str, dict[str, Any], tuple[str, Any], tuple[str, Any] | None]] = {
    # dtypes
    "bf16 hidden states": (ROUTED, {"hidden_states": bf16}, ("0.7.4", LaunchError), None),
    "uint8 input scale": (ROUTED, {"hidden_states_scale": as_bytes}, ("0.7.4", LaunchError), None),
    "uint8 weight scale": (ROUTED, {"gemm2_weights_scale": as_bytes}, ("0.5.0", LaunchError), None),
    "int8 weights": (ROUTED, {"gemm1_weights": lambda x: x.view(torch.int8)}, ("0.6.8", LaunchError), None),
    "fp16 logits": (LOGITS, {"routing_logits": lambda x: x.half()}, ("0.7.4", LaunchError), None),
    "bf16 logits, 0.2.9": (LOGITS, BF16_LOGITS, ("0.2.9", LaunchError), ("0.2.10", GARBAGE)),
    "bf16 logits, 0.5.3": (LOGITS, BF16_LOGITS, ("0.5.3", GARBAGE), ("0.6.0", LaunchError)),
    "bf16 logits, 0.6.8": (LOGITS, BF16_LOGITS, ("0.6.6", LaunchError), ("0.6.8", None)),
    "fp32 logits, Renormalize": (LOGITS, RENORMALIZE, ("0.6.7", GARBAGE), ("0.6.8", None)),
    "fp32 bias, 0.4.1": (LOGITS, {"routing_bias": lambda x: x.float()}, ("0.3.1", LaunchError), ("0.5.0", None)),
    "fp32 bias, 0.6.7": (
        LOGITS,
        {**experts(32), **UNGROUPED, "routing_bias": torch.zeros(32)},
        ("0.6.7", GARBAGE),
        ("0.6.8", None),
    ),
    "bf16 output scalar": (ROUTED, {"output1_scale_scalar": bf16}, ("0.5.2", LaunchError), ("0.5.3", GARBAGE)),
    "int64 ids": (ROUTED, {"topk_ids": lambda x: x.long()}, ("0.7.4", AssertionError), None),
    # missing or surplus tensors
    "no output scalar": (ROUTED, {"output1_scale_gate_scalar": None}, ("0.7.4", LaunchError), None),
    "no input scale": (ROUTED, {"hidden_states_scale": None}, ("0.7.4", LaunchError), None),
    "no bias": (LOGITS, {"routing_bias": None}, ("0.6.6", DeviceFaultError), ("0.6.8", None)),
    "no bias, no groups": (LOGITS, {"routing_bias": None, **UNGROUPED}, ("0.7.4", DeviceFaultError), None),
    "a number for a tensor": (ROUTED, {"output2_scale_scalar": 1.0}, ("0.7.4", TypeError), None),
    "a tensor for a number": (ROUTED, {"top_k": torch.tensor(4)}, ("0.7.4", TypeError), None),
    # shapes
    "2-D input scale": (ROUTED, {"hidden_states_scale": flat_to_rows}, ("0.2.12", LaunchError), ("0.2.13", None)),
    "input scales short": (ROUTED, {"hidden_states_scale": all_but_last}, ("0.5.2", LaunchError), ("0.5.3", GARBAGE)),
    "15 rows of scalars": (ROUTED, {"output2_scale_scalar": rows(15)}, ("0.5.2", LaunchError), ("0.5.3", GARBAGE)),
    "15 rows of gemm2 scales": (ROUTED, {"gemm2_weights_scale": rows(15)}, ("0.5.2", LaunchError), ("0.5.3", GARBAGE)),
    "15 rows of gemm1 scales": (ROUTED, {"gemm1_weights_scale": rows(15)}, ("0.6.7", LaunchError), None),
    "20 rows of gemm1 scales": (ROUTED, {"gemm1_weights_scale": rows(20)}, ("0.6.7", LaunchError), ("0.6.8", None)),
    "15 rows of weights": (ROUTED, {"gemm1_weights": rows(15)}, ("0.7.4", GARBAGE), None),
    "another intermediate size": (ROUTED, {"intermediate_size": 64}, ("0.5.2", LaunchError), ("0.6.8", GARBAGE)),
    "strided top-k": (ROUTED, {"topk_ids": lambda x: torch.stack((x, x), -1)[..., 0]}, ("0.7.4", GARBAGE), None),
    "expanded scalars": (ROUTED, {"output2_scale_scalar": torch.ones(1).expand(16)}, ("0.7.4", GARBAGE), None),
    "ids beyond": (ROUTED, {"topk_ids": lambda x: x + (16 << 16)}, ("0.7.4", GARBAGE), None),
    "output of float32": (ROUTED, {"output": torch.empty(1, 256)}, ("0.7.4", ValueError), ("0.5.3", GARBAGE)),
    # the tile argument
    "tile 128, 0.2.9": (LOGITS, {"tile_tokens_dim": 128}, ("0.2.9", LaunchError), ("0.2.10", None)),
    "no tile, 0.3.1": (ROUTED, {"tile_tokens_dim": None}, ("0.4.0", TypeError), ("0.4.1", None)),
    "tile, 0.6.0": (ROUTED, {"tile_tokens_dim": 8}, ("0.6.0", TypeError), ("0.5.3", None)),
    # activations
    "GeGLU's number": (ROUTED, {"gated_act_type": 3}, ("0.6.2", LaunchError), None),
    "Gelu": (ROUTED, {"activation_type": 0}, ("0.6.3", LaunchError), None),
    "Relu2": (ROUTED, {"activation_type": 6}, ("0.6.3", NotImplementedError), None),
    # sizes
    "17 experts, precomputed": (ROUTED, experts(17, logits=False), ("0.6.7", LaunchError), ("0.6.8", None)),
    "132 experts, precomputed": (ROUTED, experts(132, logits=False), ("0.4.1", LaunchError), ("0.5.0", None)),
    "516 experts, precomputed": (ROUTED, experts(516, logits=False), ("0.6.6", LaunchError), ("0.6.7", None)),
    "2052 experts, precomputed": (ROUTED, experts(2052, logits=False), ("0.6.15", GARBAGE), ("0.6.16", LaunchError)),
    "16 of 40 experts, 0.4.0rc2": (ROUTED, experts(40, logits=False), ("0.4.0rc2", LaunchError), ("0.4.0rc3", None)),
    "top-10": (ROUTED, slots(10), ("0.4.1", LaunchError), ("0.5.0", None)),
    "top-12": (ROUTED, slots(12), ("0.6.6", LaunchError), ("0.6.7", None)),
    "all experts": (ROUTED, slots(16), ("0.5.2", LaunchError), ("0.6.7", None)),
    "16 experts, grouped": (LOGITS, {}, ("0.6.7", LaunchError), ("0.6.8", None)),
    "DeepSeek from logits, 0.4": (LOGITS, {}, ("0.4.1", GARBAGE), ("0.5.0", None)),
    "18 experts, grouped": (LOGITS, experts(18, n_group=2), ("0.6.14", None), ("0.6.15", LaunchError)),
    "288 experts, grouped": (LOGITS, experts(288, n_group=8), ("0.7.4", LaunchError), None),
    "top-1 of 8 groups of 2": (LOGITS, {"n_group": 16, "topk_group": 4}, ("0.7.4", LaunchError), None),
    "too few reachable": (LOGITS, {"topk_group": 1, "n_group": 8}, ("0.5.2", LaunchError), ("0.6.3", GARBAGE)),
    "no topk_group": (LOGITS, {"topk_group": None}, ("0.5.2", LaunchError), ("0.6.3", GARBAGE)),
    "512 experts, ungrouped": (LOGITS, {**experts(512), **UNGROUPED}, ("0.6.2", LaunchError), ("0.6.3", None)),
    "1028 experts, ungrouped": (LOGITS, {**experts(1028), **UNGROUPED}, ("0.6.15", GARBAGE), ("0.6.16", LaunchError)),
    "160 experts, top-4": (LOGITS, {**experts(160), **UNGROUPED}, ("0.6.2", GARBAGE), ("0.6.3", None)),
    "no groups": (LOGITS, {"n_group": None, "topk_group": None}, ("0.6.6", ZeroDivisionError), ("0.6.8", None)),
    "zero groups": (LOGITS, {"n_group": 0, "topk_group": 0}, ("0.6.7.post3", ZeroDivisionError), ("0.6.8", None)),
    "groups with Renormalize": (ROUTED, {"n_group": 4, "topk_group": 2}, ("0.5.2", LaunchError), ("0.5.3", None)),
    "top-4 Renormalize, 0.2.9": (LOGITS, {**RENORMALIZE, **BF16_LOGITS}, ("0.2.9", LaunchError), ("0.2.10", None)),
    # methods
    "Default, precomputed": (ROUTED, {"routing_method_type": 0}, ("0.6.7", LaunchError), ("0.6.8", None)),
    "TopK of 260 experts": (
        LOGITS,
        {**experts(260), **RENORMALIZE, "routing_method_type": 5},
        ("0.6.8", GARBAGE),
        ("0.6.16", LaunchError),
    ),
    "Sigmoid": (LOGITS, {**RENORMALIZE, "routing_method_type": 8}, ("0.6.10", LaunchError), ("0.6.11", None)),
    "TopKSigmoid": (LOGITS, {**RENORMALIZE, "routing_method_type": 9}, ("0.6.17", LaunchError), ("0.6.18", None)),
    "Llama4 top-4": (ROUTED, {"routing_method_type": 3}, ("0.7.4", LaunchError), None),
    # the layout of the input scale
    "swizzled": (ROUTED, {"hidden_states_scale_layout": 0}, ("0.7.0", NotImplementedError), None),
    "parameter before its time": (ROUTED, {"hidden_states_scale_layout": 2}, ("0.6.18", TypeError), ("0.7.0", None)),
    # expert parallelism
    "offset beyond": (ROUTED, {"local_expert_offset": 1}, ("0.5.3", LaunchError), None),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_border(layer: Layer, name: str) -> None:
    entry, changes, (version, outcome), other = CASES[name]
    assert_outcome(layer, version, entry, changes, outcome)
    if other is not None:
        assert_outcome(layer, other[0], entry, changes, other[1])


def pair(dtype: torch.dtype) -> dict[str, Any]:
    return {"topk_ids": lambda packed: (packed >> 16, (packed << 16).view(torch.float32).to(dtype))}


@pytest.mark.parametrize(
    ("version", "dtype", "outcome"),
    [
        ("0.6.11.post3", torch.bfloat16, TypeError),
        ("0.6.12", torch.bfloat16, None),
        ("0.6.12", torch.float32, GARBAGE),
        ("0.6.14", torch.float32, GARBAGE),
        ("0.6.15", torch.float32, AssertionError),
        ("0.6.15.post1", torch.bfloat16, None),
        ("0.6.16", torch.float32, None),
        ("0.7.4", torch.float16, AssertionError),
    ],
)
def test_top_k_as_a_pair(layer: Layer, version: str, dtype: torch.dtype, outcome: Any) -> None:
    assert_outcome(layer, version, ROUTED, pair(dtype), outcome)


def test_a_list_is_no_pair(layer: Layer) -> None:
    changes = {"topk_ids": lambda packed: [packed >> 16, packed]}
    with pytest.raises(AttributeError):
        launch(layer, "0.7.4", ROUTED, changes)


@pytest.mark.parametrize(
    ("version", "changes", "outcome"),
    [
        ("0.6.17", UNGROUPED, GARBAGE),
        ("0.6.18.post1", UNGROUPED, GARBAGE),
        ("0.7.0", UNGROUPED, LaunchError),
        ("0.7.4", UNGROUPED, LaunchError),
        ("0.6.17", {"routing_method_type": 1}, ValueError),
        ("0.7.4", {"local_num_experts": 8}, ValueError),
        ("0.6.17", {"output2_scale_scalar": lambda x: x[:16]}, LaunchError),
        ("0.7.4", {"gemm2_weights": rows(16)}, LaunchError),
        ("0.7.4", {"gemm2_weights_scale": rows(16)}, GARBAGE),
        ("0.7.0", {"routing_replay_out": torch.empty(64, 4, dtype=torch.int16)}, ValueError),
        ("0.7.4", {"routing_replay_out": torch.empty(64, 5, dtype=torch.int16)}, ValueError),
        ("0.7.4", {"routing_replay_out": torch.empty(1, 4, dtype=torch.int16)}, ValueError),
        ("0.7.4", {"num_fused_shared_experts": 32}, LaunchError),
    ],
)
def test_native_shared_experts(layer: Layer, version: str, changes: dict[str, Any], outcome: Any) -> None:
    flashinfer = standin.release(version)
    arguments = layer.arguments(flashinfer, LOGITS, shared=True, **changes)
    if outcome == GARBAGE:
        [output] = flashinfer.objects[LOGITS](**arguments)
        assert flashinfer.calls[-1].garbage
        assert output.isnan().all()
    else:
        with pytest.raises(outcome):
            flashinfer.objects[LOGITS](**arguments)


def test_the_keyword_is_missing_before_0_6_17(layer: Layer) -> None:
    flashinfer = standin.release("0.6.16")
    arguments = layer.arguments(flashinfer, LOGITS)
    with pytest.raises(TypeError, match="num_fused_shared_experts"):
        flashinfer.objects[LOGITS](**arguments, num_fused_shared_experts=1)


@pytest.mark.parametrize("version", ["0.7.0", "0.7.4"])
def test_shared_experts_on_the_routed_entry_do_not_work(layer: Layer, version: str) -> None:
    flashinfer = standin.release(version)
    grouped = {"routing_method_type": 2, "n_group": 4, "topk_group": 2}

    def call(**changes: Any) -> Any:
        arguments = layer.arguments(flashinfer, ROUTED, shared=True, **changes)
        return flashinfer.objects[ROUTED](**arguments)

    with pytest.raises(ValueError, match="DeepSeekV3"):
        call()
    with pytest.raises(LaunchError, match="no-groups"):
        call(routing_method_type=2, n_group=1, topk_group=1)
    with pytest.raises(LaunchError, match="topk_ids"):
        call(**grouped)
    wider = {"topk_ids": lambda ids: torch.nn.functional.pad(ids, (0, 1), value=(16 << 16) | 0x3F80)}
    [output] = call(**grouped, topk_ids=lambda ids: wider["topk_ids"](ids) & 0x0007FFFF)
    assert "shared slots" in flashinfer.calls[-1].garbage[0]
    assert output[-1].isnan().all()
    with pytest.raises(TypeError):
        standin.release("0.6.18").objects[ROUTED](num_fused_shared_experts=1)


@pytest.mark.parametrize(("version", "outcome"), [("0.2.12", LaunchError), ("0.2.13", ZeroDivisionError)])
def test_no_tokens(layer: Layer, version: str, outcome: type[Exception]) -> None:
    nothing = {name: (lambda x: x[:0]) for name in ("hidden_states", "hidden_states_scale", "topk_ids")}
    assert_outcome(layer, version, ROUTED, nothing, outcome)


@pytest.mark.parametrize("name", ["valid_hidden_size", "valid_intermediate_size"])
def test_what_is_not_modelled_is_refused(layer: Layer, name: str) -> None:
    assert_outcome(layer, "0.7.4", LOGITS, {name: 1}, NotImplementedError)


# The dense path


@pytest.mark.parametrize(("version", "accepts"), [("0.6.12", False), ("0.6.13", True)])
def test_a_global_scale_is_converted_from_0_6_13(version: str, accepts: bool) -> None:
    quantize = standin.release(version).objects["fp4_quantize"]
    values, scale = torch.ones(2, 32, dtype=torch.bfloat16), torch.tensor(4.0, dtype=torch.bfloat16)
    if accepts:
        assert torch.equal(quantize(values, scale)[0], quantize(values, scale.float())[0])
    else:
        with pytest.raises(LaunchError, match="float32"):
            quantize(values, scale)
    with pytest.raises(TypeError):
        quantize(values, 4.0)
    with pytest.raises(NotImplementedError):
        quantize(values.float(), scale.float())
    with pytest.raises(LaunchError, match="contiguous"):
        quantize(torch.ones(2, 64, dtype=torch.bfloat16)[:, ::2], scale.float())


@pytest.mark.parametrize(("version", "shape"), [("0.6.7", (64, 16)), ("0.6.8", (128, 8))])
def test_padded_columns_are_shown_from_0_6_8(version: str, shape: tuple[int, int]) -> None:
    quantize = standin.release(version).objects["fp4_quantize"]
    values = torch.ones(2, 5 * 16, dtype=torch.bfloat16)
    scale = torch.tensor(4.0)
    if version == "0.6.7":
        with pytest.raises(RuntimeError, match="shape"):
            quantize(values, scale)
    else:
        assert quantize(values, scale)[1].shape == shape


def test_a_positional_enable_pdl_inverts_the_scale_from_0_6_11() -> None:
    values, scale = torch.ones(2, 32, dtype=torch.bfloat16), torch.tensor(4.0)
    for version, inverts in (("0.6.10", False), ("0.6.11", True)):
        flashinfer = standin.release(version)
        flashinfer.objects["fp4_quantize"](values, scale, 16, False, False, False, True)
        assert bool(flashinfer.calls[-1].arguments.get("is_global_scale_inversed")) == inverts


def dense(version: str, *args: Any, **kwargs: Any) -> Any:
    flashinfer = standin.release(version)
    a = quantize_nvfp4(torch.ones(5, 64), 0.01)
    b = quantize_nvfp4(torch.ones(kwargs.pop("columns", 32), 64), 0.01)
    swizzle = flashinfer.objects["nvfp4_block_scale_interleave"]
    scales = [swizzle(one.block_scale.view(torch.uint8)).reshape(-1, 4) for one in (a, b)]
    alpha = kwargs.pop("alpha", torch.tensor(1e-4))
    right = b.codes.T if kwargs.pop("transposed", True) else b.codes.T.contiguous()
    output = flashinfer.objects["mm_fp4"](
        a.codes, right, scales[0], scales[1].T, alpha, torch.bfloat16, *args, **kwargs
    )
    assert bool(flashinfer.calls[-1].garbage) == bool(output.isnan().any())
    return output


@pytest.mark.parametrize(
    ("good", "bad", "args", "kwargs", "outcome"),
    [
        ("0.5.1", "0.5.0", (None, 16, False, "cudnn"), {}, BackendSupportedError),
        ("0.5.1", "0.5.0", (), {}, BackendSupportedError),
        ("0.6.0", "0.5.3", (), {"backend": "auto"}, BackendSupportedError),
        ("0.6.5", "0.6.4", (), {"backend": "cute-dsl"}, BackendSupportedError),
        ("0.7.0", "0.6.18", (), {"backend": "cutedsl_low_latency"}, BackendSupportedError),
        (None, "0.7.4", (), {"backend": "b12x"}, BackendSupportedError),
        (None, "0.7.4", (), {"backend": "trtllm"}, NotImplementedError),
        (None, "0.7.4", (), {"use_8x4_sf_layout": True}, ValueError),
        (None, "0.7.4", (), {"alpha": 1.0}, TypeError),
        (None, "0.7.4", (), {"transposed": False}, LaunchError),
        (None, "0.7.4", (), {"backend": "cutlass", "columns": 40}, LaunchError),
        ("0.6.13", "0.6.14", (), {"backend": "cute-dsl", "columns": 4}, ValueError),
        ("0.7.1", "0.7.0", (), {"backend": "cute-dsl", "alpha": torch.ones(5)}, ValueError),
        ("0.4.0", "0.3.1", (), {"backend": "cudnn", "alpha": None}, TypeError),
        ("0.4.0", "0.7.4", (), {"backend": "cudnn", "block_size": 32}, ValueError),
    ],
)
def test_the_dense_gemm(
    good: str | None, bad: str, args: Any, kwargs: dict[str, Any], outcome: type[Exception]
) -> None:
    with pytest.raises(outcome):
        dense(bad, *args, **kwargs)
    if good is not None and "block_size" not in kwargs:
        assert dense(good, *args, **kwargs).isfinite().all()


@pytest.mark.parametrize("version", ["0.3.1", "0.4.1"])
def test_an_unknown_dense_backend_runs_nothing_before_0_5_0(version: str) -> None:
    assert dense(version, backend="nothing").isnan().all()
