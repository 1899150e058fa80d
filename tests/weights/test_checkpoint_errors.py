from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import torch
from checkpoint_variants import GROUPED, MLP, SHARED_BF16, Json, Tensors, sample_tensors, split_files, write_variant
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from flashinfer_compat.errors import CheckpointError
from flashinfer_compat.weights.checkpoint import load_moe_layer

if TYPE_CHECKING:
    from pathlib import Path

EXPERT = MLP + "experts.7."
SHARED = MLP + "shared_experts."
LAYER_TENSORS = sorted(name for name in sample_tensors(GROUPED) if name.startswith(MLP))


def refusal(checkpoint: Path) -> CheckpointError:
    with pytest.raises(CheckpointError) as caught:
        load_moe_layer(checkpoint, 1)
    return caught.value


def refusal_of(tmp_path: Path, name: str, tensor: torch.Tensor, sample: Path = GROUPED) -> CheckpointError:
    """The error with tensor `name` replaced; it must name the tensor."""
    error = refusal(write_variant(tmp_path, sample, tensors=lambda tensors: tensors.update({name: tensor})))
    assert error.subject == name
    return error


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(name=st.sampled_from(LAYER_TENSORS))
def test_any_missing_tensor_is_named(name: str, tmp_path: Path) -> None:
    error = refusal(write_variant(tmp_path, tensors=lambda tensors: tensors.pop(name)))
    # Without gate.weight the layer is looked for under its usual name.
    assert error.subject == name
    assert str(tmp_path / "model.safetensors") in error.expected


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(name=st.sampled_from(LAYER_TENSORS))
def test_any_tensor_of_another_dtype_is_named(name: str, tmp_path: Path) -> None:
    stored = sample_tensors(GROUPED)[name]
    error = refusal_of(tmp_path, name, torch.zeros(stored.shape, dtype=torch.int16))
    assert "dtype" in error.expected
    assert "I16" in error.actual


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(name=st.sampled_from(LAYER_TENSORS))
def test_any_tensor_of_another_shape_is_named(name: str, tmp_path: Path) -> None:
    stored = sample_tensors(GROUPED)[name]
    error = refusal_of(tmp_path, name, torch.zeros(*stored.shape, 2, dtype=stored.dtype))
    assert error.expected == f"shape {list(stored.shape)}"
    assert error.actual == f"{[*stored.shape, 2]} in {tmp_path / 'model.safetensors'}"


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 0.0, -1.0])
@pytest.mark.parametrize("suffix", ["weight_scale_2", "input_scale"])
@pytest.mark.parametrize("linear", [EXPERT + "up_proj.", SHARED + "down_proj."])
def test_scalar_scales_must_be_positive_and_finite(linear: str, suffix: str, value: float, tmp_path: Path) -> None:
    error = refusal_of(tmp_path, linear + suffix, torch.tensor(value))
    assert error.actual == str(value)


@pytest.mark.parametrize("byte", [0x7F, 0xFF])
@pytest.mark.parametrize("linear", [EXPERT + "gate_proj.", SHARED + "down_proj."])
def test_nan_block_scale_is_refused(linear: str, byte: int, tmp_path: Path) -> None:
    scale = sample_tensors(GROUPED)[linear + "weight_scale"]
    scale.view(torch.uint8)[3, 5] = byte
    error = refusal_of(tmp_path, linear + "weight_scale", scale)
    assert error.actual == f"1 NaN among {scale.numel()}"


def test_largest_block_scale_is_not_nan(tmp_path: Path) -> None:
    name = EXPERT + "gate_proj.weight_scale"
    scale = sample_tensors(GROUPED)[name]
    scale.view(torch.uint8)[3, 5] = 0x7E
    checkpoint = write_variant(tmp_path, tensors=lambda tensors: tensors.update({name: scale}))
    assert float(load_moe_layer(checkpoint, 1).routed.gate_up_block_scale[7, 0, 3, 5]) == 448.0


@pytest.mark.parametrize("suffix", ["weight", "e_score_correction_bias"])
def test_router_must_be_finite(suffix: str, tmp_path: Path) -> None:
    name = f"{MLP}gate.{suffix}"
    tensor = sample_tensors(GROUPED)[name]
    tensor.view(-1)[3] = float("nan")
    assert refusal_of(tmp_path, name, tensor).expected == "finite values"


def test_unquantized_routed_expert_is_refused(tmp_path: Path) -> None:
    error = refusal_of(tmp_path, EXPERT + "down_proj.weight", torch.zeros(256, 128, dtype=torch.bfloat16))
    assert error.expected == "dtype uint8"
    assert error.actual.startswith("bfloat16 in ")


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float16, torch.float32])
def test_shared_expert_of_another_format_is_refused(dtype: torch.dtype, tmp_path: Path) -> None:
    error = refusal_of(tmp_path, SHARED + "gate_proj.weight", torch.zeros(128, 256).to(dtype))
    assert error.expected == "dtype uint8 (NVFP4) or bfloat16"
    assert error.actual.startswith(str(dtype).removeprefix("torch."))


def test_shared_projections_of_two_formats_are_refused(tmp_path: Path) -> None:
    name = SHARED + "down_proj.weight"
    error = refusal_of(tmp_path, name, torch.zeros(256, 128, dtype=torch.bfloat16))
    assert error.expected == f"dtype uint8, as {SHARED}gate_proj.weight has"


def test_scales_beside_a_bf16_shared_expert_are_refused(tmp_path: Path) -> None:
    error = refusal_of(tmp_path, SHARED + "up_proj.input_scale", torch.tensor(1.0), SHARED_BF16)
    assert "bfloat16" in error.expected


def test_shared_expert_narrower_than_configured_is_refused(tmp_path: Path) -> None:
    error = refusal(write_variant(tmp_path, config=lambda config: config.update(n_shared_experts=2)))
    assert error.subject == SHARED + "gate_proj.weight"
    assert error.expected == "shape [256, 128]"


def test_shared_expert_the_config_does_not_know_is_refused(tmp_path: Path) -> None:
    error = refusal(write_variant(tmp_path, config=lambda config: config.update(n_shared_experts=0)))
    assert error.subject == SHARED + "down_proj.weight"
    assert str(tmp_path / "config.json") in error.expected


def test_more_experts_than_configured_are_refused(tmp_path: Path) -> None:
    error = refusal(write_variant(tmp_path, config=lambda config: config.update(n_routed_experts=12)))
    assert error.subject == MLP + "experts.12.down_proj.weight"
    assert error.expected.startswith("12 routed experts")


@pytest.mark.parametrize("keep", [0, 5, 4000, -1], ids=["empty", "no-header", "half-header", "one-byte-short"])
def test_truncated_file_is_named(keep: int, tmp_path: Path) -> None:
    file = write_variant(tmp_path) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    error = refusal(tmp_path)
    assert error.subject == str(file)
    assert "download" in error.way_out


def test_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    assert refusal(tmp_path / "nowhere").subject == str(tmp_path / "nowhere" / "config.json")


def test_folder_without_safetensors_is_named(tmp_path: Path) -> None:
    (write_variant(tmp_path) / "model.safetensors").unlink()
    error = refusal(tmp_path)
    assert error.subject == str(tmp_path)
    assert error.actual == "no safetensors file"


def two_files(tmp_path: Path) -> tuple[Path, Path]:
    checkpoint = write_variant(tmp_path)
    files = {"a.safetensors": lambda name: "experts.7." not in name, "b.safetensors": lambda name: "experts.7." in name}
    split_files(checkpoint, files, index=True)
    return checkpoint, checkpoint / "b.safetensors"


def test_indexed_file_that_is_missing_is_named(tmp_path: Path) -> None:
    checkpoint, file = two_files(tmp_path)
    file.unlink()
    error = refusal(checkpoint)
    assert error.subject == str(file)
    assert error.actual == "none there"


def test_indexed_file_that_is_damaged_is_named(tmp_path: Path) -> None:
    checkpoint, file = two_files(tmp_path)
    file.write_bytes(b"\x00" * 64)
    assert refusal(checkpoint).subject == str(file)


def test_tensor_missing_in_the_file_the_index_names(tmp_path: Path) -> None:
    checkpoint, file = two_files(tmp_path)
    tensors: Tensors = {EXPERT + "gate_proj.input_scale": torch.tensor(1.0)}
    save_file(tensors, file)
    error = refusal(checkpoint)
    assert error.subject == EXPERT + "gate_proj.weight"
    assert str(file) in error.expected
    assert str(checkpoint / "model.safetensors.index.json") in error.expected


@pytest.mark.parametrize(
    ("document", "subject"),
    [
        ("{", ""),
        ("[]", ""),
        ("{}", ": weight_map"),
        (json.dumps({"weight_map": {"x": "../other/model.safetensors"}}), ": x"),
        (json.dumps({"weight_map": {"x": 3}}), ": x"),
    ],
)
def test_bad_index_is_named(document: str, subject: str, tmp_path: Path) -> None:
    index = write_variant(tmp_path) / "model.safetensors.index.json"
    index.write_text(document, encoding="utf-8")
    assert refusal(tmp_path).subject == f"{index}{subject}"


def test_tensor_in_two_files_without_index_is_refused(tmp_path: Path) -> None:
    checkpoint = write_variant(tmp_path)
    files: dict[str, Any] = {"a.safetensors": lambda name: True, "b.safetensors": lambda name: "experts.7.down" in name}
    split_files(checkpoint, files, index=False)
    error = refusal(checkpoint)
    assert error.subject.startswith(EXPERT + "down_proj.")
    assert "a.safetensors and " in error.actual


@pytest.mark.parametrize("name", ["config.json", "hf_quant_config.json"])
@pytest.mark.parametrize("content", [b"{", b"", b"\xff\xfe", b"[1]", b"null"])
def test_bad_json_is_named(name: str, content: bytes, tmp_path: Path) -> None:
    file = write_variant(tmp_path) / name
    file.write_bytes(content)
    assert refusal(tmp_path).subject == str(file)


def test_messages_say_expected_actual_and_way_out(tmp_path: Path) -> None:
    def edit(config: Json) -> None:
        config["model_type"] = "deepseek_v33"

    message = str(refusal(write_variant(tmp_path, config=edit)))
    assert message.startswith(f"{tmp_path / 'config.json'}: model_type: expected one of deepseek_v3, ")
    assert "got 'deepseek_v33'" in message
