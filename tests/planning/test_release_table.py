"""What runs on which FlashInfer release and GPU, for layers that people know.

To read the table: find the release's row; the GPUs that FlashInfer's trtllm-gen kernels run on there are in its second
column, and the cells say what those GPUs get. Everything else (older, newer and desktop GPUs, or no GPU) gets what is
portable.

A cell is `strategy num_experts`, where num_experts is what FlashInfer is called with: the shared experts count under
`expanded`, and so do padding ids where a release wants a multiple of 4. `*`: the entry point cannot route this way, so
routing happens before the call. `portable`: from SM80 on the Triton kernels, fused where the layer allows it; otherwise
split on the torch backend. `refused`: nothing can run it.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from problem_fields import changed

from flashinfer_compat.architectures import ARCHITECTURES
from flashinfer_compat.errors import StrategyUnavailableError
from flashinfer_compat.features.target import Target
from flashinfer_compat.planning.plan import plan
from flashinfer_compat.problem import Problem
from flashinfer_compat.signatures.recorded import releases
from flashinfer_compat.vocabulary import RoutingInput, RoutingMethod, SharedExpertFormat

R1 = Problem(
    hidden_size=7168,
    intermediate_size=2048,
    num_experts=256,
    top_k=8,
    num_shared_experts=1,
    shared_format=SharedExpertFormat.NVFP4,
    routing_method=RoutingMethod.DEEPSEEK_V3,
    n_group=8,
    topk_group=4,
    routed_scaling_factor=2.5,
)
PROBLEMS = {
    "R1": R1,
    "R1 bf16": changed(R1, shared_format="bf16"),
    "Kimi-K2": changed(R1, num_experts=384, n_group=1, topk_group=1),
    "small": Problem(
        hidden_size=2048,
        intermediate_size=1408,
        num_experts=64,
        top_k=6,
        num_shared_experts=2,
        shared_format=SharedExpertFormat.NVFP4,
        routing_method=RoutingMethod.RENORMALIZE,
    ),
    "MiniMax-M2": Problem(
        hidden_size=3072, intermediate_size=1536, num_experts=256, top_k=8, routing_method=RoutingMethod.MINIMAX2
    ),
    "R1 EP8": changed(R1, ep_size=8, shared_placement="replicated"),
}
REFUSED_EVERYWHERE = {
    "R1 EP8, placement of the shared expert not said": changed(R1, ep_size=8),
    "R1, caller scales the output": changed(R1, routed_scaling="output"),
}

TABLE = """
releases            | kernels on        | R1 logits  | R1 topk      | R1 bf16 logits | R1 bf16 topk | Kimi-K2 logits | Kimi-K2 topk | small logits | small topk  | MiniMax-M2 logits | MiniMax-M2 topk | R1 EP8 logits | R1 EP8 topk
0.2.9rc1 0.2.9rc2   |                   |            |              |                |              |                |              |              |             |                   |                 |               |
0.2.9 0.2.9         | sm100             | split 256  | portable     | split 256      | portable     | portable       | portable     | portable     | portable    | portable          | portable        | split 256     | portable
0.2.10 0.3.0.post1  | sm100             | split 256  | portable     | split 256      | portable     | portable       | portable     | split 64     | expanded 68 | portable          | portable        | split 256     | portable
0.3.1 0.3.1.post1   | sm100 sm103       | split 256  | portable     | split 256      | portable     | portable       | portable     | split 64     | expanded 68 | portable          | portable        | split 256     | portable
0.4.0rc0 0.4.0rc2   | sm100 sm103       | portable   | portable     | portable       | portable     | portable       | portable     | split 64     | expanded 96 | portable          | portable        | portable      | portable
0.4.0rc3 0.4.1      | sm100 sm103       | portable   | portable     | portable       | portable     | portable       | portable     | split 64     | expanded 68 | portable          | portable        | portable      | portable
0.5.0rc1 0.5.0rc3   | sm100 sm103       | split 256  | portable     | split 256      | portable     | portable       | portable     | split 64     | expanded 68 | portable          | portable        | split 256     | portable
0.5.0 0.6.8rc1      | sm100 sm103       | split 256  | expanded 260 | split 256      | split 256    | split 384      | expanded 388 | split 64     | expanded 68 | split 256*        | split 256       | split 256     | split 256
0.6.8 0.6.16rc5     | sm100 sm103       | split 256  | expanded 257 | split 256      | split 256    | split 384      | expanded 385 | split 64     | expanded 66 | split 256         | split 256       | split 256     | split 256
0.6.16 0.6.16.post4 | sm100 sm103 sm107 | split 256  | expanded 257 | split 256      | split 256    | split 384      | expanded 385 | split 64     | expanded 66 | split 256         | split 256       | split 256     | split 256
0.6.17rc1 0.7.4     | sm100 sm103 sm107 | native 256 | expanded 257 | split 256      | split 256    | split 384      | expanded 385 | split 64     | expanded 66 | split 256         | split 256       | split 256     | split 256
"""  # noqa: E501
"""Why the rows begin where they do:

0.2.9      first release; no entry for top-k; Renormalize with top_k 8 only
0.2.10     the entry for top-k, at most 128 experts and top_k 8
0.3.1      SM103
0.4.0rc0   DeepSeekV3 routing sorts registers that nothing has written; candidates take few numbers of experts
0.5.0rc1   DeepSeekV3 repaired; a candidate must also keep the limits of the release before it
0.5.0      top-k: 512 experts, top_k 10, multiples of 4; DeepSeekV3 without groups: 384 experts
0.6.8      top-k: any number of experts; MiniMax2 routing
0.6.16     SM107
0.6.17rc1  num_fused_shared_experts, which works from logits and with expert groups only
"""

EVER_KERNELS = ("sm100", "sm103", "sm107")
NEVER_KERNELS = ("sm75", "sm80", "sm86", "sm87", "sm89", "sm90", "sm110", "sm120", "sm121", None)


@dataclass(frozen=True)
class Row:
    first: str
    last: str
    kernels_on: frozenset[str]
    cells: dict[str, str]

    def __str__(self) -> str:
        return f"{self.first}..{self.last}"


def _rows() -> list[Row]:
    header, *lines = ([cell.strip() for cell in line.split("|")] for line in TABLE.strip().splitlines())
    rows = []
    for cells in lines:
        first, last = cells[0].split()
        rows.append(Row(first, last, frozenset(cells[1].split()), dict(zip(header[2:], cells[2:], strict=True))))
    return rows


ROWS = _rows()


def _releases_of(row: Row) -> tuple[str, ...]:
    every = releases()
    return every[every.index(row.first) : every.index(row.last) + 1]


def _found(problem: Problem, target: Target) -> str:
    try:
        decision = plan(problem, target)
    except StrategyUnavailableError:
        return "refused"
    if decision.call is None:
        return "portable" if (decision.backend.value, decision.strategy.value) == _portable(problem, target) else "?"
    before = "*" if decision.call.routed_before else ""
    return f"{decision.strategy.value} {decision.call.num_experts}{before}"


def _portable(problem: Problem, target: Target) -> tuple[str, str]:
    if target.architecture in ("sm75", None):
        return "torch", "split"
    fuses = problem.shared_format is SharedExpertFormat.NVFP4 and problem.ep_size == 1
    return "triton", ("native" if problem.routing_input is RoutingInput.LOGITS else "expanded") if fuses else "split"


def test_every_recorded_release_is_in_exactly_one_row() -> None:
    in_rows = [release for row in ROWS for release in _releases_of(row)]
    assert len(releases()) == 96
    assert in_rows == list(releases())


def test_every_architecture_is_in_exactly_one_group() -> None:
    assert sorted(filter(None, EVER_KERNELS + NEVER_KERNELS)) == sorted(ARCHITECTURES)


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_each_release_and_gpu_gets_what_the_table_says(row: Row) -> None:
    wrong = []
    for release in _releases_of(row):
        for architecture in EVER_KERNELS + NEVER_KERNELS:
            target = Target.from_release(release, architecture)
            for name, problem in PROBLEMS.items():
                for given in RoutingInput:
                    cell = row.cells[f"{name} {given.value}"]
                    expected = cell if architecture in row.kernels_on else "portable"
                    found = _found(changed(problem, routing_input=given), target)
                    if found != expected:
                        wrong.append(f"{release} {architecture} {name} {given.value}: {found}, expected {expected}")
    assert not wrong, "\n".join(wrong[:20])


@pytest.mark.parametrize("name", REFUSED_EVERYWHERE)
@pytest.mark.parametrize("given", RoutingInput)
def test_some_layers_are_refused_on_every_release_and_gpu(name: str, given: RoutingInput) -> None:
    problem = changed(REFUSED_EVERYWHERE[name], routing_input=given)
    ran = [
        (release, architecture)
        for release in releases()
        for architecture in ("sm100", "sm107", "sm90", None)
        if _found(problem, Target.from_release(release, architecture)) != "refused"
    ]
    assert not ran
