"""What another release changes. Expectations are read in FlashInfer's sources and metadata, release by release."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import flashinfer_compat as fc
from flashinfer_compat.architectures import ARCHITECTURES
from flashinfer_compat.cli import main
from flashinfer_compat.cli.comparison import print_comparison
from flashinfer_compat.doctor.compare import Comparison, compare
from flashinfer_compat.doctor.question import Premise, Source
from flashinfer_compat.signatures.model import Kind
from flashinfer_compat.signatures.recorded import recorded, releases

SCHEMA = json.loads((Path(fc.__file__).parent / "schemas" / "compare-1.json").read_text("utf-8"))
VALIDATOR = jsonschema.Draft202012Validator(SCHEMA)
SNAPSHOT = Path(__file__).parent / "snapshots" / "compare-0.6.15.post1-0.7.4.txt"
LOGITS, ROUTED = "trtllm_fp4_block_scale_moe", "trtllm_fp4_block_scale_routed_moe"
PAIRS = st.tuples(st.sampled_from(releases()), st.sampled_from(releases()))


def compared(old: str, new: str, architecture: str | None = "sm100") -> Comparison:
    return compare(recorded(old), recorded(new), Premise(architecture, Source.ASKED))


def entry_point(old: str, new: str, name: str) -> Any:
    return next(one for one in compared(old, new).entry_points if one.name == name)


def numbers(old: str, new: str, name: str) -> Any:
    return next(one for one in compared(old, new).enumerations if one.name == name)


# The upgrade that sglang made: 0.6.15.post1 to 0.7.4.
UPGRADE = compared("0.6.15.post1", "0.7.4")


def test_logits_become_native_and_topk_stays_expanded() -> None:
    logits, topk = UPGRADE.strategies
    assert (logits.old.strategy.value, logits.new.strategy.value) == ("split", "native")
    (native,) = logits.alternatives
    assert (native.strategy.value, native.backend.value) == ("native", "trtllm")
    assert [(one.code.value, "num_fused_shared_experts" in one.message) for one in native.reasons] == [
        ("keyword_missing", True)
    ]
    assert "0.6.17" in native.reasons[0].way_out
    assert (topk.old.strategy.value, topk.new.strategy.value, topk.alternatives) == ("expanded", "expanded", ())
    assert "native on trtllm instead of split on trtllm" in UPGRADE.summary


def test_features_that_the_upgrade_brings() -> None:
    gained = {one.new.feature.name for one in UPGRADE.features if one.gained}
    assert gained == {
        "fused_shared_logits",  # 0.6.17
        "lora_delta",  # 0.6.18
        "routing_topksigmoid",  # 0.6.18
        "silu_and_mul_quantize",  # 0.6.16
        "scale_layout",  # 0.7.0
        "valid_sizes",  # 0.7.0
        "autotune_v2",  # 0.7.0
        "workspace",  # 0.7.4
        "nvfp4_4over6",  # 0.7.4, in the MoE
    }
    assert not any(one.lost for one in UPGRADE.features)
    # Accepted since 0.7.0, but the kernel computes from slots that nothing has written; cuTile has no SM100.
    unusable = {one.new.feature.name: one.new.evidence.value for one in UPGRADE.features if not one.gained}
    assert unusable == dict.fromkeys(("fused_shared_routed", "cutile_nvfp4_bf16", "cutile_nvfp4"), "present")


@pytest.mark.parametrize(
    ("name", "added"),
    [
        (
            LOGITS,
            (
                "num_fused_shared_experts valid_hidden_size valid_intermediate_size hidden_states_scale_layout "
                "workspace_buffer nvfp4_4over6"
            ),
        ),
        (
            ROUTED,
            (
                "gemm1_lora_delta valid_hidden_size valid_intermediate_size num_fused_shared_experts "
                "hidden_states_scale_layout workspace_buffer nvfp4_4over6 routing_metadata"
            ),
        ),
        ("fp4_quantize", "nvfp4_4over6 batch_invariant"),
        ("nvfp4_quantize", "out_scale nvfp4_4over6 batch_invariant"),
        ("mm_fp4", "batch_invariant"),
    ],
)
def test_arguments_that_the_upgrade_appends(name: str, added: str) -> None:
    change = next(one for one in UPGRADE.entry_points if one.name == name)
    assert [one.name for one in change.added] == added.split()
    assert not any(one.required or one.inserted for one in change.added)
    assert (change.removed, change.moved, change.required, change.breaks_positional_from) == ((), (), (), None)
    assert not change.breaks_callers
    keyword_only = [one.name for one in change.added if one.position is None]
    assert keyword_only == [one for one in added.split() if one == "batch_invariant"]


def test_defaults_and_choices_that_the_upgrade_changes() -> None:
    (default,) = entry_point("0.6.15.post1", "0.7.4", "fp4_quantize").defaults
    assert (default.name, default.old, default.new) == ("backend", "'cuda'", "'auto'")
    (choices,) = entry_point("0.6.15.post1", "0.7.4", "mm_fp4").choices
    assert set(choices.new.split(", ")) - set(choices.old.split(", ")) == {"cutedsl_low_latency", "cake"}


def test_numbers_that_the_upgrade_changes() -> None:
    by_name = {one.name: one for one in UPGRADE.enumerations}
    assert set(by_name) == {"RoutingMethodType", "ActivationType", "QuantVariant", "QuantFormat"}
    assert by_name["RoutingMethodType"].reused == ((9, "Unspecified", "TopKSigmoid"),)
    assert by_name["RoutingMethodType"].renumbered == (("Unspecified", 9, 10),)
    activation = by_name["ActivationType"]
    assert activation.reused == ((10, "InvalidType", "Situ"),)
    assert activation.renumbered == (("InvalidType", 10, 11),)
    assert activation.added == (("Situ", 10), ("ClampedRelu2", 12), ("PowLU", 13))
    assert (by_name["QuantVariant"].kind, by_name["QuantFormat"].kind) == ("removed", "added")


def test_issues_and_requirements_that_the_upgrade_changes() -> None:
    assert {one.id for one in UPGRADE.issues_ended} == {"import-needs-cuda", "fp4-quantize-unchecked-gpu"}
    assert {one.id for one in UPGRADE.issues_begun} == {"routed-fused-shared"}
    always = {one.name: (one.old, one.new) for one in UPGRADE.requirements if not one.condition}
    assert always["nvidia-cutlass-dsl"] == (">=4.5.0", ">=4.8.0")
    assert always["nvidia-cudnn-frontend"] == (">=1.13.0", ">=1.32.0")
    assert always["apache-tvm-ffi"][1] == "<0.2,>=0.1.11"
    assert "torch" not in always
    assert any('extra == "cu13"' in one.condition for one in UPGRADE.requirements)


# Other pairs.
@pytest.mark.parametrize(
    ("old", "new", "name", "inserted", "breaks_from"),
    [
        ("0.2.9", "0.2.10", LOGITS, "gemm1_bias gemm1_alpha gemm1_beta gemm1_clamp_limit gemm2_bias", 7),
        ("0.2.11.post2", "0.2.11.post3", LOGITS, "enable_pdl", 28),
        ("0.2.13", "0.2.14", ROUTED, "gated_act_type", 29),
        ("0.6.10.post1", "0.6.11", LOGITS, "per_token_scale", 29),
        ("0.6.10.post1", "0.6.11", ROUTED, "per_token_scale", 29),
        # enable_pdl=True in seventh place would invert the scale.
        ("0.6.10.post1", "0.6.11", "fp4_quantize", "is_global_scale_inversed", 7),
        ("0.6.15.post1", "0.6.16", "cutlass_fused_moe", "use_wfp4afp8_humming", 27),
    ],
)
def test_arguments_inserted_in_the_middle_break_positional_calls(
    old: str, new: str, name: str, inserted: str, breaks_from: int
) -> None:
    change = entry_point(old, new, name)
    assert [one.name for one in change.added if one.inserted] == inserted.split()
    assert change.breaks_positional_from == breaks_from
    assert change.breaks_callers


def test_an_argument_that_takes_anothers_place_is_told() -> None:
    # 0 was SwiGLU as gated_act_type and is Gelu as activation_type.
    change = entry_point("0.6.2", "0.6.3", LOGITS)
    assert [(one.name, one.instead_of) for one in change.added] == [("activation_type", "gated_act_type")]
    assert change.removed == ("gated_act_type",)


def test_an_argument_that_goes_shifts_what_follows() -> None:
    change = entry_point("0.5.3", "0.6.0", LOGITS)
    assert change.removed == ("tile_tokens_dim",)
    assert change.breaks_positional_from == 25


def test_an_argument_becomes_required_or_optional() -> None:
    assert entry_point("0.4.1", "0.5.0", LOGITS).required == ("tile_tokens_dim",)
    optional = {one.name for one in entry_point("0.3.1", "0.4.0", "mm_fp4").defaults if one.old is None}
    assert optional == {"alpha", "out_dtype"}
    (finalize,) = (one for one in entry_point("0.2.9", "0.2.10", LOGITS).defaults if one.name == "do_finalize")
    assert (finalize.old, finalize.new) == ("False", "True")


def test_an_argument_becomes_positional() -> None:
    moved = {one.name: (one.old, one.new) for one in entry_point("0.6.12", "0.6.13", "nvfp4_quantize").moved}
    assert moved == {"per_token_activation": (None, 8), "expanded_idx_to_permuted_idx": (None, 9)}


@pytest.mark.parametrize(
    ("old", "new", "name", "reused"),
    [
        ("0.6.12", "0.6.13", "ActivationType", ((7, "Identity", "SwigluStep"), (8, "InvalidType", "Identity"))),
        ("0.6.13", "0.6.14", "ActivationType", ((8, "Identity", "GegluTanh"), (9, "InvalidType", "Identity"))),
        ("0.2.13", "0.2.14", "RoutingMethodType", ((5, "Unspecified", "TopK"),)),
        ("0.6.7", "0.6.8", "RoutingMethodType", ((6, "Unspecified", "SigmoidRenorm"),)),
        ("0.6.10", "0.6.11", "RoutingMethodType", ((8, "Unspecified", "Sigmoid"),)),
    ],
)
def test_numbers_that_name_another_member(old: str, new: str, name: str, reused: tuple[object, ...]) -> None:
    assert numbers(old, new, name).reused == reused


def test_a_downgrade_takes_away_what_the_upgrade_brings() -> None:
    back = compared("0.7.4", "0.6.15.post1")
    assert (UPGRADE.direction, back.direction) == ("upgrade", "downgrade")
    assert back.strategies[0].new.strategy.value == "split"
    (native,) = back.strategies[0].alternatives
    assert (native.new.value, native.reasons[0].code.value) == ("absent", "keyword_missing")
    assert {one.new.feature.name for one in back.features if one.lost} == {
        one.new.feature.name for one in UPGRADE.features if one.gained
    }
    assert back.issues_begun == UPGRADE.issues_ended
    assert entry_point("0.7.4", "0.6.15.post1", LOGITS).removed[0] == "num_fused_shared_experts"


def test_a_gpu_without_the_kernels_sees_no_other_strategy() -> None:
    for change in compared("0.6.15.post1", "0.7.4", "sm90").strategies:
        assert change.alternatives == ()
        assert change.old.backend == change.new.backend
    assert {one.new.feature.name for one in compared("0.6.15.post1", "0.7.4", "sm90").features if one.gained} >= {
        "cutile_nvfp4_bf16"  # 0.7.1, on SM89, SM90, SM120, SM121
    }


def test_a_gpu_that_the_new_release_is_the_first_for() -> None:
    logits, _ = compared("0.6.15.post1", "0.7.4", "sm107").strategies
    assert logits.new.strategy.value == "native"
    assert logits.old.backend.value != "trtllm"
    assert {reason.code.value for one in logits.alternatives for reason in one.reasons} >= {"architecture"}


# What holds for every pair.
@settings(max_examples=30, deadline=None)
@given(PAIRS, st.sampled_from([None, *ARCHITECTURES]))
def test_every_comparison_follows_the_schema_and_fits_80_columns(pair: tuple[str, str], arch: str | None) -> None:
    import contextlib
    import io

    comparison = compared(*pair, arch)
    VALIDATOR.validate(json.loads(json.dumps(comparison.to_dict())))
    for verbose in (False, True):
        with contextlib.redirect_stdout(io.StringIO()) as output:
            print_comparison(comparison, verbose=verbose)
        for line in output.getvalue().splitlines():
            assert len(line) <= 80 or " " not in line.strip(), line


@settings(max_examples=30, deadline=None)
@given(PAIRS)
def test_positional_calls_stay_right_up_to_the_argument_that_is_told(pair: tuple[str, str]) -> None:
    old, new = (recorded(one).symbols for one in pair)
    changes = {one.name: one for one in compared(*pair).entry_points}
    for name, symbol in old.symbols.items():
        after = new.get(name)
        if after is None or symbol.parameters is None:
            continue
        before, now = (
            [one.name for one in found.parameters or () if one.kind == Kind.POSITIONAL_OR_KEYWORD]
            for found in (symbol, after)
        )
        broken = changes[name].breaks_positional_from if name in changes else None
        same = len(before) if broken is None else broken - 1
        assert before[:same] == now[:same]
        assert broken is None or before[same] != next(iter(now[same:]), None)


@settings(max_examples=30, deadline=None)
@given(PAIRS)
def test_back_again_undoes_it(pair: tuple[str, str]) -> None:
    there, back = compared(*pair), compared(*reversed(pair))
    assert (there.issues_ended, there.issues_begun) == (back.issues_begun, back.issues_ended)
    assert {(one.name, one.condition, one.old, one.new) for one in there.requirements} == {
        (one.name, one.condition, one.new, one.old) for one in back.requirements
    }
    assert [one.name for one in there.entry_points] == [one.name for one in back.entry_points]
    for one, other in zip(there.entry_points, back.entry_points, strict=True):
        assert {added.name for added in one.added} == set(other.removed)
    for one, other in zip(there.enumerations, back.enumerations, strict=True):
        assert [(value, new, old) for value, old, new in one.reused] == sorted(
            other.reused, key=lambda reused: [value for value, _, _ in one.reused].index(reused[0])
        )


def test_nothing_changes_from_a_release_to_itself() -> None:
    same = compared("0.7.4", "0.7.4")
    assert same.direction == "same"
    parts = (same.features, same.entry_points, same.enumerations, same.issues_ended, same.issues_begun)
    assert not any((*parts, same.requirements))


def test_the_schema_refuses_another_form() -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    content = json.loads(json.dumps(UPGRADE.to_dict()))
    for change in ({"schema_version": 2}, {"extra": 1}, {"direction": "sideways"}, {"features": [{"name": "x"}]}):
        with pytest.raises(jsonschema.ValidationError):
            VALIDATOR.validate({**content, **change})


# The command.
def test_the_output_is_as_recorded(capsys: pytest.CaptureFixture[str]) -> None:
    """To renew the snapshot, delete it and run this test twice."""
    assert main(["doctor", "--compare", "0.6.15.post1", "0.7.4", "--arch", "sm100"]) == 0
    text = capsys.readouterr().out
    if not SNAPSHOT.exists():
        SNAPSHOT.write_text(text, "utf-8")
        pytest.fail(f"{SNAPSHOT} was not there and has been written")
    assert text == SNAPSHOT.read_text("utf-8")


def test_json_is_the_comparison(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--compare", "0.6.15.post1", "0.7.4+cu130", "--arch", "10.0", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(json.dumps(UPGRADE.to_dict()))


def test_without_a_gpu_here_and_in_the_question_sm100_is_assumed_and_told(
    capsys: pytest.CaptureFixture[str],
) -> None:
    from flashinfer_compat.machine import architecture_of, this_environment

    assert main(["doctor", "--compare", "0.7.2", "0.7.4", "--json"]) == 0
    here = architecture_of(this_environment())
    expected = {"value": here, "source": "this machine"} if here else {"value": "sm100", "source": "assumed"}
    assert json.loads(capsys.readouterr().out)["architecture"] == expected
    main(["doctor", "--compare", "0.7.2", "0.7.4"])
    assert "--arch names another" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--compare", "0.7.4", "0.7.3"], "0.7.2.post1"),
        (["--compare", "0.6.99", "0.7.4"], "0.6.18.post1"),
        (["--compare", "0.7.2", "0.7.4", "--arch", "sm1000"], "sm100"),
        (["--compare", "0.7.2", "0.7.4", "--cuda", "12.8"], "--cuda"),
        (["--compare", "0.7.2", "0.7.4", "--live"], "--live"),
    ],
)
def test_a_comparison_without_sense_is_exit_code_2(
    arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", *arguments]) == 2
    assert text in capsys.readouterr().err
