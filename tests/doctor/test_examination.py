from __future__ import annotations

import dataclasses
import json
import typing
from pathlib import Path

import jsonschema
import pytest
from doctor_cases import CASES
from doctor_machines import B200, build, delete, flashinfer, gpu, healthy, live, nvcc, torch, variable, write
from referencing import Registry, Resource

import flashinfer_compat as fc
from flashinfer_compat.doctor.examination import examine
from flashinfer_compat.doctor.repairs import install_version
from flashinfer_compat.environment import FileCheck, model

SCHEMAS = Path(fc.__file__).parent / "schemas"
DOCTOR, CAPABILITIES = (
    json.loads((SCHEMAS / f"{name}-1.json").read_text("utf-8")) for name in ("doctor", "capabilities")
)
REGISTRY: Registry = Registry().with_resources([(CAPABILITIES["$id"], Resource.from_contents(CAPABILITIES))])
VALIDATOR = jsonschema.Draft202012Validator(DOCTOR, registry=REGISTRY)


def test_the_summary_says_what_runs_and_how_that_is_known(tmp_path: Path) -> None:
    examination = build(tmp_path, healthy()).examine()
    assert examination.exit_code == 0
    assert examination.summary.startswith("NVFP4 MoE with a shared expert runs as native on trtllm from logits (")
    assert " and expanded on trtllm from topk (" in examination.summary


def test_the_summary_does_not_promise_what_an_error_prevents(tmp_path: Path) -> None:
    examination = build(tmp_path / "gpu", *healthy(), delete("cuda"), delete("tools/ninja")).examine()
    assert examination.exit_code == 2
    assert examination.summary.startswith(
        "NVFP4 MoE is not expected to work here until the 2 errors below are repaired; then it runs as native on trtllm"
    )
    examination = build(tmp_path / "cpu", flashinfer("0.7.4"), torch(), delete("home"), write("home")).examine()
    assert examination.summary.startswith("NVFP4 MoE with a shared expert runs as split on torch from logits")
    assert examination.summary.endswith("FlashInfer itself is not expected to work until the error below is repaired.")


def test_warnings_are_exit_code_1_and_come_after_errors(tmp_path: Path) -> None:
    warned = build(tmp_path / "a", *healthy(), variable("FLASHINFER_CUBIN_DRI", "x")).examine()
    assert warned.exit_code == 1
    both = build(tmp_path / "b", *healthy(), variable("FLASHINFER_CUBIN_DRI", "x"), delete("tools/ninja")).examine()
    assert [one.severity.value for one in both.findings if one.severity.value != "note"] == ["error", "warning"]


def test_the_schema_is_one() -> None:
    jsonschema.Draft202012Validator.check_schema(DOCTOR)


@pytest.mark.parametrize("case", CASES[::4], ids=lambda case: f"{case.about}: {case.title}")
def test_every_report_follows_the_schema(tmp_path: Path, case) -> None:
    VALIDATOR.validate(json.loads(json.dumps(build(tmp_path / "machine", *case.steps).examine().to_dict())))


def test_this_machines_report_follows_the_schema() -> None:
    VALIDATOR.validate(json.loads(json.dumps(examine(FileCheck.NONE).to_dict())))


def test_the_schema_refuses_another_form(tmp_path: Path) -> None:
    report = build(tmp_path, *healthy(), live()).examine().to_dict()
    VALIDATOR.validate(json.loads(json.dumps(report)))
    for change in ({"schema_version": 2}, {"extra": 1}, {"exit_code": 3}, {"findings": [{"code": "x"}]}):
        with pytest.raises(jsonschema.ValidationError):
            VALIDATOR.validate({**json.loads(json.dumps(report)), **change})


def test_the_schema_names_every_fact() -> None:
    for name, definition in DOCTOR["$defs"].items():
        kind = getattr(model, name[0].upper() + name[1:], None)
        if kind is not None:
            fields = [field.name for field in dataclasses.fields(kind)]
            assert definition["required"] == fields == list(definition["properties"])
    assert set(typing.get_type_hints(model.Environment)) == set(DOCTOR["$defs"]["environment"]["properties"])


def test_the_json_says_what_the_findings_say(tmp_path: Path) -> None:
    examination = build(tmp_path, gpu(B200), flashinfer("0.7.1"), torch(), nvcc()).examine()
    report = examination.to_dict()
    assert report["summary"] == examination.summary
    assert report["exit_code"] == examination.exit_code == 2
    assert [one["code"] for one in report["findings"]] == [one.code for one in examination.findings]
    for one in report["findings"]:
        assert one["docs"] == f"docs/findings/{one['code']}.md"


def repair(root: Path, code: str, *steps) -> str:
    (line,) = {one.repair for one in build(root, *steps).examine().findings if one.code == code}
    return line


def test_repairs_are_right_for_the_release_and_the_gpu(tmp_path: Path) -> None:
    from doctor_machines import H200, cubin_package, jit_cache

    wheels = "https://flashinfer.ai/whl"
    old = (
        gpu(B200),
        flashinfer("0.6.12"),
        torch("2.9.0+cu129", "12.9"),
        cubin_package("0.6.11"),
        jit_cache("0.6.11+cu129"),
    )
    # flashinfer-cubin is on PyPI until 0.6.13.
    assert repair(tmp_path / "1", "cubin-version-mismatch", *old) == "pip install --no-deps flashinfer-cubin==0.6.12"
    assert repair(tmp_path / "2", "jit-cache-version-mismatch", *old) == (
        f"pip install --no-deps flashinfer-jit-cache==0.6.12+cu129 --index-url {wheels}/cu129"
    )
    new = (gpu(B200), flashinfer("0.7.4"), torch(), cubin_package("0.7.2"), jit_cache("0.7.2+cu130"))
    assert repair(tmp_path / "3", "cubin-version-mismatch", *new) == (
        f"pip install --no-deps flashinfer-cubin==0.7.4 --index-url {wheels}"
    )
    # From 0.7.0 on the kernels come as requirements.
    assert repair(tmp_path / "4", "jit-cache-version-mismatch", *new) == (
        f"pip install flashinfer-jit-cache==0.7.4+cu130 --index-url {wheels}/cu130"
    )
    # No flashinfer-jit-cache is published for CUDA 12.6: what is wrong can only go.
    none = (gpu(H200), flashinfer("0.7.4"), torch("2.7.1+cu126", "12.6"), jit_cache("0.7.2+cu129"))
    assert repair(tmp_path / "5", "jit-cache-version-mismatch", *none) == "pip uninstall -y flashinfer-jit-cache"
    # Kernel packages of the old release would be wrong beside the new one.
    unusable = (*healthy("0.4.1"), cubin_package("0.4.1"))
    line = repair(tmp_path / "6", "release-unusable", *unusable)
    assert line.startswith("pip install flashinfer-python==")
    assert line.endswith(" && pip uninstall -y flashinfer-cubin")
    driver = gpu(B200, driver=("570.86", "12.8"))
    assert repair(tmp_path / "7", "torch-newer-than-driver", *healthy(), driver).endswith("/whl/cu128")


@pytest.mark.parametrize(
    ("name", "version", "line"),
    [
        ("vllm", "0.33.0", "pip install vllm==0.33.0"),
        ("vllm", None, "pip install vllm"),
        ("torch", "2.13.0", "pip install torch==2.13.0"),
        ("torch", "2.9.0+cu129", "pip install torch==2.9.0 --index-url https://download.pytorch.org/whl/cu129"),
        ("torch", "2.9.0a0+git1", "pip install torch==2.9.0a0+git1"),
        ("flashinfer-cubin", "0.6.13", "pip install flashinfer-cubin==0.6.13"),
        ("flashinfer-cubin", "0.7.4", "pip install flashinfer-cubin==0.7.4 --index-url https://flashinfer.ai/whl"),
        (
            "flashinfer-jit-cache-sm100f",
            "0.7.4+cu130",
            "pip install flashinfer-jit-cache-sm100f==0.7.4+cu130 --index-url https://flashinfer.ai/whl/cu130",
        ),
    ],
)
def test_each_version_comes_from_the_index_that_has_it(name: str, version: str | None, line: str) -> None:
    assert install_version(name, version) == line


def test_disabling_the_version_check_makes_a_mismatch_worse(tmp_path: Path) -> None:
    from doctor_machines import jit_cache

    ignored = (*healthy(), jit_cache("0.7.2+cu130"))
    severities = [
        one.severity.value
        for root, more in (("a", ()), ("b", (variable("FLASHINFER_DISABLE_VERSION_CHECK", "1"),)))
        for one in build(tmp_path / root, *ignored, *more).examine().findings
        if one.code == "jit-cache-version-mismatch"
    ]
    assert severities == ["warning", "error"]


def test_a_fault_is_as_bad_as_the_release_makes_it(tmp_path: Path) -> None:
    from doctor_machines import cubin_package

    severities = {}
    for release, other in (("0.7.1", "0.7.0"), ("0.7.2", "0.7.1")):
        found = build(tmp_path / release, *healthy(release), cubin_package(other)).examine().findings
        severities[release] = next(one.severity.value for one in found if one.code == "cubin-version-mismatch")
    assert severities == {"0.7.1": "error", "0.7.2": "warning"}
