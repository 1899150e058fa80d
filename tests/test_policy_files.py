"""A policy is kept, read again by plan, and a file that is broken or foreign is named."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from fakes import install_flashinfer, install_torch
from hypothesis import given
from hypothesis import strategies as st
from measured_values import H200, row

import flashinfer_compat as fc
from flashinfer_compat.environment import Environment, FileCheck, Gpu, Gpus, Section, collect
from flashinfer_compat.machine import gpu_of, read_flashinfer, target_of
from flashinfer_compat.policy import Policy, PolicyError
from flashinfer_compat.policy_files import VARIABLE, kept_in, load_policy, read_policy, store_policy
from flashinfer_compat.problem import DEEPSEEK_R1

SCHEMA = json.loads((Path(fc.__file__).parent / "schemas" / "policy-1.json").read_text("utf-8"))
VALIDATOR = jsonschema.Draft202012Validator(SCHEMA)
ROWS = (row({1: (90.0, 103.0), 512: (300.0, 270.0)}, 512), row({1: (80.0, 90.0)}, None, numerics="w4a4"))
PROBLEM = replace(DEEPSEEK_R1, routing_input="topk", numerics="w4a16")


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FLASHINFER_COMPAT_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv(VARIABLE, raising=False)
    site = tmp_path / "site"
    install_flashinfer(site, "0.7.4")
    install_torch(site)
    return site


def look(site: Path, name: str = "NVIDIA H200", driver: str = "580.159", visible: str | None = None) -> Environment:
    found = collect(search_path=[str(site)], check_files=FileCheck.NONE)
    return replace(found, gpus=Section(Gpus(driver, "13.0", (Gpu(0, name, (9, 0), "GPU-1", 2**37),), visible)))


def planned(environment: Environment) -> fc.Plan:
    gpu = gpu_of(environment)
    rows = load_policy(environment, gpu.name if gpu else None)
    target = target_of(environment, read_flashinfer(environment))
    return fc.plan(PROBLEM, replace(target, libraries={"triton": "3.6.0"}, torch_cuda="13.0", policy=rows))


def test_plan_reads_what_was_kept_in_the_cache(site: Path) -> None:
    assert planned(look(site)).split_from_tokens is None
    path = store_policy(look(site), ROWS)
    assert path == kept_in(look(site))
    assert load_policy(look(site), "NVIDIA H200") == ROWS
    assert planned(look(site)).split_from_tokens == 512
    VALIDATOR.validate(json.loads(path.read_text()))
    assert list(path.parent.glob("policy*")) == [path]


@pytest.mark.parametrize("change", [{"driver": "590.1"}, {"name": "NVIDIA H100"}, {"visible": "0"}])
def test_the_cache_counts_for_exactly_this_machine(site: Path, change: dict[str, Any]) -> None:
    store_policy(look(site), ROWS)
    assert load_policy(look(site, **change), "NVIDIA H200") == ()


@pytest.mark.parametrize("damage", ["", "{", "[]", "{}", '{"schema_version": 1, "facts": {}, "rows": [1]}'])
def test_a_damaged_cache_is_as_none(site: Path, damage: str) -> None:
    path = store_policy(look(site), ROWS)
    assert path is not None
    path.write_text(damage)
    assert load_policy(look(site), "NVIDIA H200") == ()
    # And can be written again.
    store_policy(look(site), ROWS)
    assert load_policy(look(site), "NVIDIA H200") == ROWS


def test_a_later_run_replaces_only_what_it_measured(site: Path) -> None:
    store_policy(look(site), ROWS)
    newer = row({1: (90.0, 80.0)}, 1)
    store_policy(look(site), (newer,))
    assert set(load_policy(look(site), "NVIDIA H200")) == {newer, ROWS[1]}


def test_plan_reads_the_file_that_the_variable_names(
    site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "fleet.json"
    store_policy(look(site), ROWS, file)
    assert planned(look(site)).split_from_tokens is None
    monkeypatch.setenv(VARIABLE, str(file))
    # On another host with the same kind of GPU.
    assert planned(look(site, driver="590.1")).split_from_tokens == 512
    # It takes the place of the cache.
    store_policy(look(site), (row({1: (90.0, 80.0)}, 1),))
    assert planned(look(site)).split_from_tokens == 512


def test_a_file_of_another_gpu_is_refused(site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "h200.json"
    store_policy(look(site), ROWS, file)
    monkeypatch.setenv(VARIABLE, str(file))
    for gpu, said in (("NVIDIA H100", "NVIDIA H100"), (None, "a machine without a GPU")):
        with pytest.raises(PolicyError, match="measured on NVIDIA H200") as caught:
            load_policy(look(site), gpu)
        assert str(file) in caught.value.subject
        assert said in caught.value.expected
        assert VARIABLE in caught.value.way_out


BROKEN = {
    "nothing": "",
    "no JSON": "{",
    "no object": "[]",
    "another schema": '{"schema_version": 2, "facts": {}, "rows": []}',
    "no rows": '{"schema_version": 1, "facts": {}}',
    "rows of something else": '{"schema_version": 1, "facts": {}, "rows": [{"backend": "triton"}]}',
    "rows that are no list": '{"schema_version": 1, "facts": {}, "rows": 3}',
}


@pytest.mark.parametrize("content", BROKEN.values(), ids=BROKEN)
def test_a_file_that_is_no_policy_is_named(
    site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str
) -> None:
    file = tmp_path / "policy.json"
    file.write_text(content)
    monkeypatch.setenv(VARIABLE, str(file))
    with pytest.raises(PolicyError, match=r"policy\.json: expected a policy file of schema 1") as caught:
        load_policy(look(site), "NVIDIA H200")
    assert "bench --write-policy" in caught.value.way_out
    # Nor is it overwritten.
    with pytest.raises(PolicyError):
        store_policy(look(site), ROWS, file)
    assert file.read_text() == content


def test_a_missing_file_and_a_folder_are_named(site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for path, said in ((tmp_path / "none.json", "No such file"), (tmp_path, "is no regular file")):
        monkeypatch.setenv(VARIABLE, str(path))
        with pytest.raises(PolicyError, match=said):
            load_policy(look(site), "NVIDIA H200")


def whole(times: dict[int, tuple[float, float]]) -> dict[str, Any]:
    return json.loads(json.dumps(Policy({}, (row(times, None),)).to_dict()))


CHANGES: dict[str, Any] = {
    "a field of the file": lambda content: content.update(more=1),
    "a field of a row": lambda content: content["rows"][0].update(ep_size=8),
    "a field of times": lambda content: content["rows"][0]["times"][0].update(native=1.0),
    "a field of the origin": lambda content: content["rows"][0]["measured"].update(host="x"),
    "facts that are a list": lambda content: content.update(facts=[]),
    "rows that are an object": lambda content: content.update(rows={}),
    "a backend": lambda content: content["rows"][0].update(backend="cuda"),
    "a release that is a number": lambda content: content["rows"][0]["measured"]["releases"].update(torch=2.11),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_the_schema_and_the_loader_refuse_the_same(change: Callable[[dict[str, Any]], None]) -> None:
    content = whole({1: (90.0, 80.0)})
    VALIDATOR.validate(content)
    Policy.from_dict(content)
    change(content)
    with pytest.raises(jsonschema.ValidationError):
        VALIDATOR.validate(content)
    with pytest.raises(fc.ArgumentError):
        Policy.from_dict(content)


@pytest.mark.parametrize("split", [90.0, 91.0])
def test_a_switch_to_what_its_times_call_slower_is_refused(tmp_path: Path, split: float) -> None:
    content = whole({1: (90.0, 80.0), 8: (90.0, split)})
    content["rows"][0]["split_from_tokens"] = 8
    file = tmp_path / "policy.json"
    file.write_text(json.dumps(content))
    with pytest.raises(PolicyError, match="at which split takes"):
        read_policy(file)


def test_two_rows_of_the_same_are_refused(tmp_path: Path) -> None:
    content = whole({1: (90.0, 80.0)})
    content["rows"] += whole({1: (90.0, 100.0)})["rows"]
    file = tmp_path / "policy.json"
    file.write_text(json.dumps(content))
    with pytest.raises(PolicyError, match="two of expanded on triton, w4a16"):
        read_policy(file)


FIELDS = st.sampled_from(sorted(whole({1: (1.0, 2.0)})["rows"][0]))


@given(FIELDS, st.sampled_from([None, -1, 0, True, "x", [], {}, 1.5, [{}], [{"tokens": 0, "fused": 1, "split": 1}]]))
def test_a_row_with_one_wrong_value_is_none(field: str, value: Any) -> None:
    content = whole({1: (1.0, 2.0)})
    if (field, value) == ("split_from_tokens", None) or content["rows"][0][field] == value:
        return
    content["rows"][0][field] = value
    with pytest.raises((ValueError, KeyError, TypeError, AttributeError)):
        Policy.from_dict(content)


def test_the_command_line_says_which_file_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path / "none.json"))
    command = [sys.executable, "-m", "flashinfer_compat", "plan", "--input", "topk"]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 2
    assert "Traceback" not in run.stderr
    assert f"{VARIABLE}={tmp_path / 'none.json'}: expected a policy file" in run.stderr


def test_the_schema_is_one_and_read_policy_agrees(site: Path, tmp_path: Path) -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    file = tmp_path / "policy.json"
    store_policy(look(site), ROWS, file)
    assert read_policy(file).rows == ROWS
    assert read_policy(file).rows[0].origin == H200
    with pytest.raises(jsonschema.ValidationError):
        VALIDATOR.validate({**json.loads(file.read_text()), "more": 1})


@pytest.mark.parametrize(("split", "refused"), [(93.0, True), (92.0, False)])
def test_a_switch_before_what_its_times_call_slower_is_refused(tmp_path: Path, split: float, refused: bool) -> None:
    content = whole({1: (100.0, 120.0), 8: (90.0, 80.0), 64: (90.0, split)})
    content["rows"][0]["split_from_tokens"] = 8
    file = tmp_path / "policy.json"
    file.write_text(json.dumps(content))
    if not refused:
        assert read_policy(file).rows[0].split_from_tokens == 8
        return
    with pytest.raises(PolicyError, match=r"with 64 split takes 93\.0 us and fused 90\.0"):
        read_policy(file)
