from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import jsonschema
import pytest

import flashinfer_compat as fc
from flashinfer_compat.architectures import ARCHITECTURES
from flashinfer_compat.report import capabilities_of
from flashinfer_compat.signatures.recorded import releases

SCHEMA = json.loads((Path(fc.__file__).parent / "schemas" / "capabilities-1.json").read_text("utf-8"))


def test_the_schema_is_one() -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)


def test_this_machines_report_follows_the_schema() -> None:
    report = fc.capabilities()
    jsonschema.validate(json.loads(report.to_json()), SCHEMA)
    assert fc.capabilities() is report
    with pytest.raises(dataclasses.FrozenInstanceError):
        report.features = {}


@pytest.mark.parametrize("architecture", [None, *ARCHITECTURES])
def test_every_releases_report_follows_the_schema(architecture: str | None) -> None:
    validator = jsonschema.Draft202012Validator(SCHEMA)
    # Every third release keeps this fast; the newest is always among them.
    for version in releases()[::-3]:
        validator.validate(capabilities_of(fc.Target.from_release(version, architecture)).to_dict())


def test_the_schema_refuses_another_form() -> None:
    report = fc.capabilities().to_dict()
    for change in ({"schema_version": 2}, {"extra": 1}, {"features": {"x": {"status": "maybe"}}}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate({**report, **change}, SCHEMA)


def test_what_blackwell_gets_from_the_newest_release() -> None:
    report = capabilities_of(fc.Target.from_release("0.7.4", "sm100"))
    states = {
        (one.routing_input.value, one.strategy.value, one.backend.value): one.status.value for one in report.strategies
    }
    assert states["logits", "native", "trtllm"] == "eligible"
    assert states["topk", "expanded", "trtllm"] == "eligible"
    assert states["logits", "split", "trtllm"] == "eligible"
    assert states["topk", "native", "trtllm"] == "absent"
    assert report.features["fused_shared_logits"].evidence is fc.Evidence.ELIGIBLE
    assert report.features["fused_shared_routed"].evidence is fc.Evidence.PRESENT


def test_nothing_is_verified_without_a_self_check() -> None:
    for version in ("0.6.17", "0.7.4"):
        report = capabilities_of(fc.Target.from_release(version, "sm100"))
        assert all(one.evidence is not fc.Evidence.VERIFIED for one in report.features.values())
        assert all(one.status is not fc.Evidence.VERIFIED for one in report.strategies)
