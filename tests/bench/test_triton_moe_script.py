"""The script of issue figures, with the torch backend in the place of the GPU's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from benchmarks.triton_moe import bf16_weights, grouped_mm, main, table  # noqa: E402
from flashinfer_compat.bench.reference import deviation_of, expected  # noqa: E402
from flashinfer_compat.bench.shapes import Sizes  # noqa: E402
from flashinfer_compat.bench.workload import make_inputs, make_layer  # noqa: E402
from flashinfer_compat.vocabulary import Numerics  # noqa: E402

if not hasattr(torch, "_grouped_mm"):
    pytest.skip("this torch has no _grouped_mm", allow_module_level=True)

CPU = torch.device("cpu")


def test_it_writes_a_row_for_each_number_of_tokens(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "report.json"
    sizes = ["--hidden", "64", "--intermediate", "32", "--experts", "16", "--tokens", "24", "30"]
    main([*sizes, "--device", "cpu", "--backend", "torch", "--json", str(file)])
    report = json.loads(file.read_text())
    assert report["unit"] == "microseconds"
    assert [one["tokens"] for one in report["points"]] == [24, 30]
    for one in report["points"]:
        for name in ("fused w4a16", "split w4a16", "fused w4a4", "split w4a4", "grouped_mm bf16"):
            assert one[name] > 0
            assert one[f"{name} error"] < 1e-2
        assert one["floor"] is None
    assert "grouped_mm / fused" in capsys.readouterr().out


@pytest.mark.parametrize("tokens", [1, 9])
def test_the_baseline_computes_the_layer(tokens: int) -> None:
    sizes = Sizes(64, 32, 16, 4, 1)
    layer, inputs = make_layer(sizes, CPU), make_inputs(sizes, tokens, CPU)
    choice = inputs.chosen[0]
    output = grouped_mm(inputs.hidden_states, choice.ids, choice.weights, *bf16_weights(layer))
    right = expected(layer, inputs.hidden_states, choice, Numerics.W4A16)
    assert deviation_of(output, right).relative < 1e-2


def test_the_table_has_ratios_and_holes() -> None:
    row = {"intermediate_size": 256, "tokens": 1, "fused w4a16": 20.0, "fused w4a16 error": 2e-3, "floor": 10.0}
    row |= {"cutile fused w4a16": None, "cutile fused w4a16 error": None, "grouped_mm bf16": 2000.0}
    row["grouped_mm bf16 error"] = 5e-3
    lines = table([row]).splitlines()
    assert lines[0].split(" | ")[2:6] == ["floor", "fused w4a16", "cutile fused w4a16", "grouped_mm bf16"]
    assert lines[2] == "| 256 | 1 | 10 | 20 | - | 2000 | 2 | 100 |"
