"""The caller's buffers (routing replay, workspace, output), and options that change no number."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from launch_outcomes import good, misread, refused, run  # noqa: E402
from launches import LOGITS, ROUTED, Layer  # noqa: E402
from sample_experts import T, deltas  # noqa: E402
from standin import LaunchError  # noqa: E402

# The routing replay


def renormalize(top_k: int = 4, method: int = 1) -> dict[str, Any]:
    return {"n_group": None, "topk_group": None, "routing_method_type": method, "top_k": top_k}


@pytest.mark.parametrize(
    ("version", "changes", "written"),
    [
        ("0.6.8", {}, True),
        ("0.6.12", {"n_group": 1, "topk_group": 1}, False),
        ("0.6.13", {"n_group": 1, "topk_group": 1}, True),
        ("0.6.12", renormalize(), False),
        ("0.6.13", renormalize(), True),
        ("0.6.17", renormalize(1, 3), False),
        ("0.6.18", renormalize(1, 3), True),
        ("0.7.4", {}, True),
    ],
)
def test_replay_is_written_by_the_kernels_that_know_it(
    layer: Layer, version: str, changes: dict[str, Any], written: bool
) -> None:
    replay = torch.full((T + 2, changes.get("top_k", 4)), -7, dtype=torch.int16)
    call, [output] = run(layer, version, LOGITS, **changes, routing_replay_out=replay)
    assert output.isfinite().all()
    assert bool(call.garbage) != written
    assert (replay[:T] != -7).all() == written
    assert (replay[T:] == -7).all()


@pytest.mark.parametrize(("version", "outcome"), [("0.6.18", None), ("0.7.0", ValueError)])
def test_a_replay_buffer_that_is_too_short(layer: Layer, version: str, outcome: Any) -> None:
    short = {"routing_replay_out": torch.zeros(T - 1, 4, dtype=torch.int16)}
    if outcome is None:
        misread(layer, version, LOGITS, **short)
    else:
        refused(layer, version, outcome, LOGITS, **short)
    refused(layer, version, ValueError, LOGITS, routing_replay_out=torch.zeros(T, 4, dtype=torch.int32))


# Workspace and output


@pytest.mark.parametrize("entry", [LOGITS, ROUTED])
@pytest.mark.parametrize("size", [0, 1 << 16])
def test_a_workspace_of_any_size_changes_nothing(layer: Layer, entry: str, size: int) -> None:
    plain = good(layer, "0.7.4", entry)
    for dtype in (torch.uint8, torch.int8):
        buffer = torch.empty(size + 256, dtype=dtype)
        buffer = buffer[-buffer.data_ptr() % 256 :][:size]
        assert torch.equal(good(layer, "0.7.4", entry, workspace_buffer=buffer), plain)


@pytest.mark.parametrize(
    "changes",
    [
        {"workspace_buffer": torch.empty(1024, dtype=torch.float32)},
        {"workspace_buffer": torch.empty(4, 256, dtype=torch.uint8)},
        {"workspace_buffer": torch.empty(1024, dtype=torch.uint8)[8:]},
        {"workspace_buffer": torch.empty(1024, dtype=torch.uint8)[::2]},
        {"workspace_buffer": torch.empty(1024, dtype=torch.uint8), "do_finalize": False},
        {"workspace_buffer": torch.empty(1024, dtype=torch.uint8), "gemm1_lora_delta": deltas()},
    ],
)
def test_workspaces_that_are_refused(layer: Layer, changes: dict[str, Any]) -> None:
    refused(layer, "0.7.4", LaunchError, **changes)
    refused(layer, "0.7.2.post1", TypeError, workspace_buffer=torch.empty(1024, dtype=torch.uint8))


@pytest.mark.parametrize("version", ["0.6.0", "0.7.4"])
@pytest.mark.parametrize("width", [128, 100, 255])
def test_a_narrower_output_gets_the_first_columns(layer: Layer, version: str, width: int) -> None:
    plain = good(layer, version)
    output = torch.full((T, width), torch.nan, dtype=torch.bfloat16)
    assert good(layer, version, output=output) is output
    assert torch.equal(output, plain[:, :width])


@pytest.mark.parametrize(
    ("version", "shape", "dtype", "outcome"),
    [
        ("0.5.3", (T, 128), torch.bfloat16, "garbage"),
        ("0.5.3", (T, 256), torch.float32, "garbage"),
        ("0.5.3", (T - 1, 256), torch.bfloat16, "garbage"),
        ("0.5.3", (T, 256), torch.bfloat16, None),
        ("0.6.0", (T - 1, 256), torch.bfloat16, AssertionError),
        ("0.7.4", (T, 257), torch.bfloat16, AssertionError),
        ("0.7.4", (T, 256), torch.float16, ValueError),
    ],
)
def test_outputs_of_another_kind(layer: Layer, version: str, shape: Any, dtype: torch.dtype, outcome: Any) -> None:
    changes = {"output": torch.empty(shape, dtype=dtype)}
    if outcome is None:
        good(layer, version, **changes)
    elif outcome == "garbage":
        misread(layer, version, **changes)
    else:
        refused(layer, version, outcome, **changes)


@pytest.mark.parametrize(("version", "looked_at"), [("0.6.14", True), ("0.6.15", False)])
def test_an_output_that_is_not_written(layer: Layer, version: str, looked_at: bool) -> None:
    changes = {"output": torch.zeros(1, 1), "do_finalize": False}
    if looked_at:
        refused(layer, version, ValueError, **changes)
    else:
        run(layer, version, **changes)
        assert not changes["output"].any()


# What changes no number


@pytest.mark.parametrize("version", ["0.2.13", "0.6.0", "0.7.4"])
def test_pdl_and_the_tuners_limit(layer: Layer, version: str) -> None:
    plain = good(layer, version)
    for changes in ({"enable_pdl": True}, {"enable_pdl": False}, {"enable_pdl": 1}, {"tune_max_num_tokens": 1}):
        assert torch.equal(good(layer, version, **changes), plain)
    for changes in ({"enable_pdl": "yes"}, {"enable_pdl": torch.ones(())}, {"tune_max_num_tokens": None}):
        refused(layer, version, TypeError, **changes)
    refused(layer, "0.2.12", TypeError, tune_max_num_tokens=1)
    refused(layer, "0.2.11", TypeError, enable_pdl=True)
