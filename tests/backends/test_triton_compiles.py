"""Every kernel is compiled to machine code, which needs no GPU: the interpreter accepts more than the compiler."""

from __future__ import annotations

import os
import re
from typing import Any

import pytest

pytest.importorskip("torch")
triton = pytest.importorskip("triton", minversion="3.5")

if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("needs the compiler", allow_module_level=True)

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from flashinfer_compat.backends.triton.down import combine, down  # noqa: E402
from flashinfer_compat.backends.triton.gate_up import activate, gate_up  # noqa: E402
from flashinfer_compat.backends.triton.inputs import prepare_inputs  # noqa: E402
from flashinfer_compat.backends.triton.pairs import count_pairs  # noqa: E402
from flashinfer_compat.backends.triton.rounding import ROUNDINGS, UNROUNDED  # noqa: E402
from flashinfer_compat.backends.triton.routing import _route  # noqa: E402
from flashinfer_compat.backends.triton.tiles import tiles_for  # noqa: E402
from flashinfer_compat.vocabulary import QuantizerArithmetic  # noqa: E402

MODELOPT, FLASHINFER = ROUNDINGS[QuantizerArithmetic.MODELOPT], ROUNDINGS[QuantizerArithmetic.FLASHINFER]

INTEGERS = {"tokens", "first_expert", "pairs", "x_stride", "stride"}
POINTERS = {
    "x": "*bf16",
    "out": "*bf16",
    "rows": "*bf16",
    "weight": "*i32",
    "appended_weight": "*i32",
    "block_scale": "*u8",
    "appended_block_scale": "*u8",
    "factor": "fp32",
}
FLOATS = {"scale", "input_scale", "down_input_scale", "partial", "y", "extra", "weights", "logits", "bias"}

MLP = {
    "hidden": 512,
    "intermediate": 256,
    "appended_intermediate": 512,
    "experts": 6,
    "block_m": 64,
    "block_t": 16,
    "block_k": 128,
    "interpreted": False,
}
CHOICE = {"experts": 6, "top_k": 3, "appended": 2, "packed": True}
PAIRS = {"experts": 6, "top_k": 3, "packed": False, "bins": 16, "chunk_size": 128}
GATE_UP = {"geglu": False, "rounding": MODELOPT, "sides": 2, "down_block_k": 128, "split_k": 1}
ROUTING = {
    "members": 3,
    "groups": 2,
    "kept_groups": 1,
    "top_k": 3,
    "has_bias": True,
    "score": 2,
    "weigh": 3,
    "padded_members": 4,
    "padded_groups": 2,
    "padded_top_k": 4,
}
KERNELS: list[tuple[Any, dict[str, Any]]] = [
    (gate_up, {**MLP, **GATE_UP}),
    (gate_up, {**MLP, **GATE_UP, "rounding": FLASHINFER}),
    (
        gate_up,
        {**MLP, **GATE_UP, "geglu": True, "rounding": UNROUNDED, "sides": 1, "split_k": 2, "experts": 0, "block_t": 8},
    ),
    (down, {**MLP, "tiles": 1}),
    (down, {**MLP, "tiles": 4, "block_k": 256, "block_t": 8}),
    (
        activate,
        {
            **CHOICE,
            "intermediate": 256,
            "geglu": True,
            "rounding": MODELOPT,
            "down_block_k": 128,
            "split_k": 2,
            "width": 256,
            "interpreted": False,
        },
    ),
    (
        activate,
        {
            **CHOICE,
            "intermediate": 256,
            "geglu": False,
            "rounding": FLASHINFER,
            "down_block_k": 128,
            "split_k": 4,
            "width": 256,
            "interpreted": False,
        },
    ),
    (combine, {**CHOICE, "hidden": 512, "has_extra": True, "width": 256}),
    (count_pairs, PAIRS),
    (_route, ROUTING),
    (_route, {**ROUTING, "groups": 1, "padded_groups": 1, "members": 6, "padded_members": 8, "score": 1, "weigh": 4}),
] + [
    (
        prepare_inputs,
        {
            **CHOICE,
            **PAIRS,
            "hidden": 512,
            "counted": counted,
            "rounding": rounding,
            "sides": 2,
            "row_is_pair": counted,
            "block_t": 16,
            "block_k": 128,
            "width": 256,
            "interpreted": False,
        },
    )
    for counted, rounding in ((False, UNROUNDED), (True, MODELOPT), (True, FLASHINFER))
]


def kind_of(kernel: Any, name: str) -> str:
    if name in INTEGERS or (name == "rows" and kernel is gate_up):
        return "i32"
    return POINTERS.get(name, "*fp32" if name in FLOATS else "*i32")


def compiled_for(capability: int, kernel: Any, constants: dict[str, Any], warps: int = 4, stages: int = 3) -> Any:
    constants = constants | {"overlaps": capability >= 90}
    signature = {name: "constexpr" if name in constants else kind_of(kernel, name) for name in kernel.arg_names}
    if kernel is combine:
        # Packed pairs are ids and weights at once.
        signature["weights"] = "*i32"
    aligned = {(at,): [["tt.divisibility", 16]] for at, kind in enumerate(signature.values()) if kind.startswith("*")}
    return triton.compile(
        ASTSource(kernel, signature, constexprs=constants, attrs=aligned),
        target=GPUTarget("cuda", capability, 32),
        options={"num_warps": warps, "num_stages": stages},
    )


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize(("kernel", "constants"), KERNELS, ids=lambda value: getattr(value, "__name__", ""))
def test_a_kernel_compiles(kernel: Any, constants: dict[str, Any], capability: int) -> None:
    compiled = compiled_for(capability, kernel, constants)
    assert compiled.asm["cubin"]
    # A launch that does not wait could read what is not written yet.
    waits = ["griddepcontrol.wait"] if capability >= 90 else []
    assert re.findall(r"griddepcontrol\.\w+", compiled.asm["ptx"]) == waits
    assert ("rcp.approx.ftz.f32" in compiled.asm["ptx"]) == (constants.get("rounding") == FLASHINFER)
    if kernel in (gate_up, down):
        # Weights go from the asynchronous copy into registers and the tensor cores, 16 bytes at a time.
        assert "cp.async.cg.shared.global [" in compiled.asm["ptx"]
        assert "fma.rn.bf16x2" in compiled.asm["ptx"]


@pytest.mark.parametrize("tokens", [512, 1024, 8192])
def test_tiles_fit_the_shared_memory_of_small_gpus(tokens: int) -> None:
    # DeepSeek-R1's layer on SM89, whose programs may have 99 KB.
    tiles = tiles_for(tokens, 8, 256, 1, 7168, 2048, 101_376)
    for kernel, product, more in (
        (gate_up, tiles.gate_up, {**GATE_UP, "sides": 1, "down_block_k": tiles.down.block_k}),
        (down, tiles.down, {"tiles": tiles.down.tiles}),
    ):
        sizes = {"block_m": product.block_m, "block_t": tiles.block_t, "block_k": product.block_k}
        constants = {**MLP, "hidden": 7168, "intermediate": 2048, "appended_intermediate": 2048, **sizes, **more}
        assert compiled_for(89, kernel, constants, product.warps, product.stages).metadata.shared <= 101_376
