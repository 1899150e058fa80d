"""The charts of made-up measurements."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
from measured_values import H200, R1, point, way

pytest.importorskip("matplotlib")

from flashinfer_compat.bench.plot import draw
from flashinfer_compat.bench.results import Point, Report
from flashinfer_compat.vocabulary import RoutingInput

TIMES = {1: 90.0, 8: 430.0, 64: 1700.0}
SMALL = replace(R1, intermediate_size=256)


def points(floor: float | None = 50.0) -> list[Point]:
    ways = [way(strategy, numerics=one) for strategy in ("expanded", "split") for one in ("w4a16", "w4a4")]
    ways += [way("expanded", sizes=SMALL)]
    return [point(one, tokens, time, floor) for one in ways for tokens, time in TIMES.items()]


def report(found: list[Point]) -> Report:
    return Report("cuda:0", H200, tuple(TIMES), None, tuple(found), (), (), None, (), False)


def texts(path: Path) -> list[str | None]:
    return [one.text for one in ElementTree.fromstring(path.read_bytes()).iter("{http://www.w3.org/2000/svg}text")]


def test_a_chart_for_each_layer_with_a_line_for_each_way_and_the_floor(tmp_path: Path) -> None:
    path = tmp_path / "times.svg"
    draw(report(points()), path)
    found = texts(path)
    assert found.count("triton expanded w4a16") == 2
    assert found.count("triton split w4a4") == 1
    assert found.count("floor (memory or products)") == 2
    assert {"1", "8", "64", "tokens", "microseconds", str(R1), str(SMALL)} <= set(found)
    assert any("NVIDIA H200" in (one or "") for one in found)
    assert list(tmp_path.iterdir()) == [path]


def test_equal_reports_give_equal_files(tmp_path: Path) -> None:
    one, other = tmp_path / "1.svg", tmp_path / "2.svg"
    draw(report(points()), one)
    draw(report(points()), other)
    assert one.read_bytes() == other.read_bytes()


def test_without_rates_there_is_no_floor(tmp_path: Path) -> None:
    draw(report(points(None)), tmp_path / "times.svg")
    assert "floor (memory or products)" not in texts(tmp_path / "times.svg")


def test_the_suffix_decides_the_kind(tmp_path: Path) -> None:
    draw(report(points()), tmp_path / "times.png")
    assert (tmp_path / "times.png").read_bytes().startswith(b"\x89PNG")


def test_ways_without_a_time_are_left_out(tmp_path: Path) -> None:
    gone = [replace(one, found=None, problem="it raised RuntimeError: x") for one in points()]
    draw(report(gone), tmp_path / "none.svg")
    assert "triton expanded w4a16" not in texts(tmp_path / "none.svg")
    draw(report([]), tmp_path / "empty.svg")
    assert texts(tmp_path / "empty.svg")


def test_the_routing_input_is_told_where_there_are_two(tmp_path: Path) -> None:
    logits = [
        replace(one, way=replace(one.way, routing_input=RoutingInput.LOGITS))
        for one in points()
        if one.way.sizes == R1 and not one.way.strategy.is_fused
    ]
    draw(report([*(one for one in points() if one.way.sizes == R1), *logits]), tmp_path / "both.svg")
    assert {"triton split w4a16, topk", "triton split w4a16, logits"} <= set(texts(tmp_path / "both.svg"))
