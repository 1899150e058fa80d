"""The printed tables, whose figures come from made-up measurements."""

from __future__ import annotations

from dataclasses import replace

import pytest
from measured_values import H200, R1, point, row, way

from flashinfer_compat.bench.results import Found, Point, Refusal, Report
from flashinfer_compat.bench.table import point_line, policy_sentence, refusal_lines, tables
from flashinfer_compat.reasons import Reason, ReasonCode

POINTS = (
    point(way("expanded"), 1, 100.0),
    point(way("split"), 1, 1234.56),
    point(way("split"), 8, None),
    Point(way("split", "trtllm", "w4a4"), 8, None, "it raised RuntimeError: no kernel"),
    point(way("split", sizes=replace(R1, intermediate_size=256)), 1, 20.0, floor=None),
)


def report(*points: Point, interrupted: bool = False) -> Report:
    return Report("cuda:0", H200, (1, 8), None, points, (), (), None, (), interrupted)


def test_each_layer_has_a_table() -> None:
    lines = list(tables(report(*POINTS)))
    assert lines[1] == "hidden_size 7168, intermediate_size 2048, 256 experts, top-8, 1 shared, weights 6.4 GB"
    cells = [line.split() for line in lines[3:7]]
    assert cells[0] == ["1", "triton", "expanded", "w4a16", "topk", "100.0", "2.00", "2.0e-03", "2", "kB", "15", "MB"]
    assert cells[1][5:7] == ["1234.6", "24.69"]
    assert lines[5].endswith("wrong result: relative error 1.0e+00, above 5e-03")
    assert lines[6].endswith("it raised RuntimeError: no kernel")
    assert len({line.index("triton") for line in (lines[3], lines[4], lines[5])}) == 1
    assert lines[8].startswith("hidden_size 7168, intermediate_size 256")
    assert lines[10].split()[6] == "-"


def test_nothing_measured_is_no_table() -> None:
    assert list(tables(report())) == []


def test_progress_says_what_was_just_measured() -> None:
    assert point_line(POINTS[0]) == "triton expanded w4a16, I=2048, T=1: 100.0 us, 2.00 x floor"
    assert point_line(POINTS[3]) == "trtllm split w4a4, I=2048, T=8: it raised RuntimeError: no kernel"


def test_what_a_policy_says() -> None:
    assert policy_sentence(row({1: (90, 103), 512: (300, 270)}, 512)) == (
        "triton w4a16, intermediate_size 2048, input topk: split in place of expanded from 512 tokens on (270 us "
        "instead of 300 at 512)."
    )
    assert policy_sentence(row({1: (90, 103)}, None)).endswith("input topk: expanded, whatever the number of tokens.")
    native = policy_sentence(row({1: (90, 103)}, None, fused="native"))
    assert native.endswith("input logits: native, whatever the number of tokens.")


def test_a_refusal_is_told_once_and_only_where_nothing_runs() -> None:
    near = Reason(ReasonCode.LIBRARY_MISSING, "It needs cuda-tile.")
    far = Reason(ReasonCode.NUMERICS, "It keeps activations in bf16.")
    refusals = [
        Refusal(way("split", "cutile", "w4a4"), (far, near)),
        Refusal(way("split", "cutile", "w4a16"), (near,)),
        Refusal(way("expanded", "cutile", "w4a4"), (far,)),
    ]
    running = [way("expanded", "cutile", "w4a16")]
    assert list(refusal_lines(refusals, running)) == ["split on cutile: It needs cuda-tile."]


@pytest.mark.parametrize(
    ("points", "interrupted", "code"),
    [(POINTS[:2], False, 0), (POINTS, False, 1), (POINTS[:1], True, 130), ((), True, 130)],
)
def test_exit_codes(points: tuple[Point, ...], interrupted: bool, code: int) -> None:
    assert report(*points, interrupted=interrupted).exit_code == code


def test_json_has_no_infinity() -> None:
    wrong = Found(None, "cuda_graph", 1, float("inf"), float("inf"), 5e-3, None, 1, 0, 0)
    found = Point(way("split"), 1, wrong, "wrong result").to_dict()["found"]
    assert (found["relative_error"], found["median_row_error"]) == (None, None)
