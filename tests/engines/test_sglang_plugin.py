"""The plugin in the real SGLang: found by its loader, and asked through its own argument resolution."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fakes import install_flashinfer, install_torch

if importlib.util.find_spec("sglang") is None:
    pytest.skip("SGLang is not installed: scripts/test-engines.sh", allow_module_level=True)

SWITCH = {"FLASHINFER_COMPAT_SGLANG_FUSION": "1"}
SM100, SM103, SM90 = (10, 0), (10, 3), (9, 0)
RUNNERS = ("flashinfer_trtllm", "flashinfer_trtllm_routed")
OFF = {"disable_shared_experts_fusion": True}
NOT_NEWER = ("0.5.0", "0.6.0", "0.6.14", "0.6.15", "0.6.15.post1")
NEWER = ("0.6.16", "0.6.16.post4", "0.6.17", "0.6.18.post1", "0.7.0", "0.7.2", "0.7.4")

# What differs from a server that fuses (release 0.7.4, SM100, the sample checkpoint): the words in the plugin's line,
# and whether SGLang's blanket disable is lifted.
LIFTED = {
    "nothing": ({}, "on: expanded is eligible with FlashInfer 0.7.4 on sm100"),
    "sm103": ({"capability": SM103}, "on sm103"),
    "tensor parallel": ({"tp_size": 2}, "on: expanded"),
    "enforced": ({"enforce_shared_experts_fusion": True}, "on: --enforce-shared-experts-fusion"),
    "enforced against a self-check": ({"enforce_shared_experts_fusion": True, "refuted": True}, "is refuted"),
}
KEPT = {
    "expert parallel": ({"ep_size": 2, "tp_size": 2}, "expert parallelism"),
    "all-to-all": ({"moe_a2a_backend": "flashinfer"}, "expert parallelism"),
    "redundant experts": ({"ep_num_redundant_experts": 16}, "redundant experts"),
    "shared experts in bf16": ({"model": "shared-bf16"}, "in bf16, not NVFP4"),
    "two shared experts": ({"model": "ungrouped-2-shared"}, "2 shared experts"),
    "no checkpoint": ({"model": "nowhere"}, "Download the checkpoint"),
    "Hopper": ({"capability": SM90}, "sm90"),
    "no GPU": ({"capability": None}, "GPU"),
    "refuted here": ({"refuted": True}, "it was wrong"),
    "rank too narrow": ({"tp_size": 16}, "intermediate_size"),
    "disabled": ({"disable_shared_experts_fusion": True}, "--disable-shared-experts-fusion"),
    "disabled and enforced": (
        {"disable_shared_experts_fusion": True, "enforce_shared_experts_fusion": True},
        "--disable-shared-experts-fusion",
    ),
    "enforced with expert parallelism": (
        {"ep_size": 2, "enforce_shared_experts_fusion": True},
        "--enforce-shared-experts-fusion cannot be met",
    ),
    "enforced with bf16": (
        {"model": "shared-bf16", "enforce_shared_experts_fusion": True},
        "--enforce-shared-experts-fusion cannot be met",
    ),
}
OTHERS = {
    **{
        f"runner {runner}": ({"moe_runner_backend": runner}, f"the MoE runner is {runner}")
        for runner in (
            "auto",
            "triton",
            "deep_gemm",
            "flashinfer_cutlass",
            "flashinfer_cutedsl",
            "flashinfer_mxfp4",
            "experimental_sgl_trtllm",
            "lora_marlin",
            "cutlass",
        )
    },
    **{
        f"{runner}, {quantization}": (
            {"moe_runner_backend": runner, "quantization": quantization},
            f"the quantization is {quantization or 'not set'}",
        )
        for runner in RUNNERS
        for quantization in (None, "fp8", "modelopt_fp8", "modelopt_mixed", "nvfp4_online", "mxfp8")
    },
}


class Gate:
    """The rows asked of one process, and its answers by their names."""

    def __init__(self, folder: Path, checkpoints: Path) -> None:
        self.folder, self.checkpoints = folder, checkpoints
        self.rows: dict[str, dict[str, Any]] = {}
        self.answer: dict[str, Any] = {}

    def add(self, name: str, changes: dict[str, Any], release: str = "0.7.4") -> None:
        site = self.folder / release
        if not site.exists():
            site.mkdir()
            install_flashinfer(site, release)
            install_torch(site)
        arguments = {
            "moe_runner_backend": "flashinfer_trtllm",
            "quantization": "modelopt_fp4",
            "disable_shared_experts_fusion": False,
            "enforce_shared_experts_fusion": False,
            "tp_size": 1,
            "ep_size": 1,
            "moe_dp_size": 1,
            "moe_a2a_backend": "none",
            "ep_num_redundant_experts": 0,
            "revision": None,
            "model": "grouped",
            **changes,
        }
        row = {name: arguments.pop(name, default) for name, default in (("capability", SM100), ("refuted", False))}
        arguments["model_path"] = str(self.checkpoints / arguments.pop("model"))
        self.rows[name] = {"site": str(site), "arguments": arguments, **row}

    def ask(self, run_child: Callable[..., Any]) -> None:
        self.answer = run_child("ask_sglang_gate.py", list(self.rows.values()), **SWITCH)

    def __getitem__(self, name: str) -> dict[str, Any]:
        return self.answer["rows"][list(self.rows).index(name)]


@pytest.fixture(scope="module")
def gate(run_child: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory, checkpoints: Path) -> Gate:
    gate = Gate(tmp_path_factory.mktemp("sites"), checkpoints)
    for cases in (LIFTED, KEPT, OTHERS):
        for name, (changes, _) in cases.items():
            gate.add(name, changes)
    for release in (*NOT_NEWER, *NEWER):
        for runner in RUNNERS:
            for enforce in (False, True):
                changes = {"moe_runner_backend": runner, "enforce_shared_experts_fusion": enforce}
                gate.add(f"{release} {runner} {enforce}", changes, release)
    gate.ask(run_child)
    return gate


def test_sglangs_loader_finds_the_plugin_of_the_installed_distribution(gate: Gate) -> None:
    assert gate.answer["plugins"]["flashinfer_compat"] == ["flashinfer_compat.engines.sglang", "flashinfer-compat"]
    assert gate.answer["gate_is_hooked"]
    assert "sglang.srt.layers.moe.utils.resolve_shared_experts_config" in gate.answer["hooked"]


@pytest.mark.parametrize("name", LIFTED)
def test_where_it_works_the_disable_is_lifted(gate: Gate, name: str) -> None:
    found = gate[name]
    assert (found["alone"], found["declared"]) == (OFF, {})
    assert LIFTED[name][1] in found["lines"][0]


@pytest.mark.parametrize("name", KEPT)
def test_where_it_does_not_work_or_is_not_wanted_it_stays(gate: Gate, name: str) -> None:
    found = gate[name]
    assert (found["alone"], found["declared"]) == (OFF, OFF)
    assert KEPT[name][1] in found["lines"][0]


@pytest.mark.parametrize("name", OTHERS)
def test_other_runners_and_quantizations_are_left_as_they_are(gate: Gate, name: str) -> None:
    found = gate[name]
    assert found["declared"] == found["alone"]
    assert OTHERS[name][1] in found["lines"][0]


@pytest.mark.parametrize("enforce", [False, True])
@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("release", NOT_NEWER)
def test_with_an_older_flashinfer_nothing_changes(gate: Gate, release: str, runner: str, enforce: bool) -> None:
    found = gate[f"{release} {runner} {enforce}"]
    assert (found["alone"], found["declared"]) == (OFF, OFF)
    assert f"FlashInfer {release} is not newer than 0.6.15.post1" in found["lines"][0]


@pytest.mark.parametrize("enforce", [False, True])
@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("release", NEWER)
def test_with_a_newer_flashinfer_it_is_lifted(gate: Gate, release: str, runner: str, enforce: bool) -> None:
    found = gate[f"{release} {runner} {enforce}"]
    assert found["declared"] == {}
    assert f"FlashInfer {release} on sm100 (one routed call, 17 experts, top-5)" in found["lines"][0]


def test_each_decision_is_one_line(gate: Gate) -> None:
    assert {len(row["lines"]) for row in gate.answer["rows"]} == {1}


@pytest.mark.parametrize(
    "environ",
    [{"FLASHINFER_COMPAT_SGLANG_FUSION": "0"}, {**SWITCH, "SGLANG_PLUGINS": "another"}],
    ids=["0", "SGLANG_PLUGINS"],
)
def test_it_is_inert_unless_switched_on(
    run_child: Callable[..., Any], tmp_path: Path, checkpoints: Path, environ: dict[str, str]
) -> None:
    gate = Gate(tmp_path, checkpoints)
    gate.add("row", {})
    gate.answer = run_child("ask_sglang_gate.py", list(gate.rows.values()), **environ)
    assert not gate.answer["gate_is_hooked"]
    assert gate.answer["hooked"] == []
    assert gate["row"] == {"alone": OFF, "declared": OFF, "lines": []}


def test_the_whole_argument_resolution_fuses_without_any_flag(run_child: Callable[..., Any], checkpoints: Path) -> None:
    sample = str(checkpoints / "grouped")
    rows = [
        {"model_path": sample},
        {"model_path": sample, "moe_runner_backend": "flashinfer_trtllm_routed"},
        {"model_path": sample, "disable_shared_experts_fusion": True},
        {"model_path": sample, "tp_size": 2, "ep_size": 2},
        {"model_path": str(checkpoints / "shared-bf16")},
        {"model_path": sample, "moe_runner_backend": "triton"},
    ]
    found = run_child("resolve_sglang_arguments.py", rows, **SWITCH)
    settled = {"quantization": "modelopt_fp4", "moe_runner_backend": "flashinfer_trtllm"}
    routed = {**settled, "moe_runner_backend": "flashinfer_trtllm_routed"}
    triton = {**settled, "moe_runner_backend": "triton", "disable_shared_experts_fusion": False}
    assert found == [
        {**settled, "disable_shared_experts_fusion": False},
        {**routed, "disable_shared_experts_fusion": False},
        {**settled, "disable_shared_experts_fusion": True},
        {**settled, "disable_shared_experts_fusion": True},
        {**settled, "disable_shared_experts_fusion": True},
        triton,
    ], json.dumps(found, indent=1)
