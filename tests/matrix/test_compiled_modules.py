"""Bindings read from C++ sources, and the stand-in behind them."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from cpp_excerpts import GEMM_0_2_13, LAUNCHER_0_6_17, QUANTIZER_0_2_13, QUANTIZER_0_7_4  # noqa: E402
from standin.calls import Call, Era  # noqa: E402
from standin.compiled import CompiledModule, bind  # noqa: E402
from standin.compiled_source import CppParameter, exported  # noqa: E402
from standin.faults import LaunchError  # noqa: E402

from flashinfer_compat.numerics import interleave_block_scale, quantize_nvfp4  # noqa: E402


def test_the_launcher_of_a_release_is_read_in_order() -> None:
    (parameters,) = exported(LAUNCHER_0_6_17).values()
    assert len(parameters) == 37
    assert parameters[0] == CppParameter("routing_input_mode", "int64_t")
    assert parameters[1] == CppParameter("routing_logits", "Optional<TensorView>")
    assert [one.name for one in parameters[20:26]] == [
        "num_experts",
        "top_k",
        "num_fused_shared_experts",
        "n_group",
        "topk_group",
        "intermediate_size",
    ]
    assert parameters[34] == CppParameter("config_index", "Array<int64_t>")


def test_a_torch_library_exports_functions_of_a_namespace() -> None:
    functions = exported(GEMM_0_2_13)
    assert set(functions) == {"fp4_gemm", "fp4_gemm_tactic_num"}
    assert functions["fp4_gemm_tactic_num"] == ()
    assert {one.type for one in functions["fp4_gemm"]} == {"Tensor", "int64_t"}
    assert functions["fp4_gemm"][-1] == CppParameter("tactic", "int64_t")


def test_comments_declarations_and_calls_are_not_definitions() -> None:
    source = """
    void f(int64_t a);  // void f(bool b) {
    /* void f(double c) { */
    void g(TensorView x) { f(x.size(0)); }
    void f(int64_t a, Array<Optional<Tensor>> const& b) { g(b); }
    TVM_FFI_DLL_EXPORT_TYPED_FUNC(f, f);
    """
    assert exported(source) == {"f": (CppParameter("a", "int64_t"), CppParameter("b", "Array<Optional<Tensor>>"))}


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("TVM_FFI_DLL_EXPORT_TYPED_FUNC(f, f);", "defined 0 times"),
        ("void f(bool a) {}\nvoid f(bool a) {}\nTVM_FFI_DLL_EXPORT_TYPED_FUNC(f, f);", "defined 2 times"),
        ("void f(bool) {}\nTVM_FFI_DLL_EXPORT_TYPED_FUNC(f, f);", "not a type and a name"),
    ],
)
def test_what_cannot_be_read_is_an_error(source: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        exported(source)


def parameter(type_name: str) -> tuple[CppParameter, ...]:
    return (CppParameter("x", type_name),)


@pytest.mark.parametrize(
    ("type_name", "good", "bad"),
    [
        ("TensorView", [torch.zeros(1)], [None, 1, [1]]),
        ("Optional<TensorView>", [None, torch.zeros(1)], [1, True]),
        ("int64_t", [1, -1, True], [None, 1.0, "1", torch.zeros(1)]),
        ("bool", [True, 1], [None, 1.0]),
        ("double", [1.0, 1], [None, "1"]),
        ("Optional<double>", [None, 2.5], [torch.zeros(1)]),
        ("Array<int64_t>", [[-1, -1], ()], [None, -1, [None]]),
        ("Array<Tensor>", [[], [torch.zeros(1)]], [[1], None]),
    ],
)
def test_an_argument_is_of_its_parameters_type(type_name: str, good: list[Any], bad: list[Any]) -> None:
    for value in good:
        assert bind("f", parameter(type_name), (value,)) == {"x": value}
    for value in bad:
        with pytest.raises(TypeError, match=r"f: argument 0, x, must be"):
            bind("f", parameter(type_name), (value,))


def test_the_number_of_arguments_is_fixed() -> None:
    with pytest.raises(TypeError, match="takes 1 arguments, got 2"):
        bind("f", parameter("bool"), (True, True))
    with pytest.raises(TypeError, match="takes 1 arguments, got 0"):
        bind("f", parameter("bool"), ())


def values() -> torch.Tensor:
    return torch.randn(33, 64, generator=torch.Generator().manual_seed(0)).bfloat16()


def test_the_quantizer_writes_into_the_wrappers_buffers() -> None:
    calls: list[Call] = []
    module = CompiledModule(Era("0.7.4"), QUANTIZER_0_7_4, calls)
    # Longer than needed, as 0.6.8 to 0.7.2 allocate it.
    codes, scale = torch.empty(33, 32, dtype=torch.uint8), torch.full((48 * 4,), 9, dtype=torch.uint8)
    result = module.fp4_quantize(values(), torch.ones(1), codes, scale, 16, False, False, False, False, True, 0)
    expected = quantize_nvfp4(values(), 1.0)
    assert result is None
    assert torch.equal(codes, expected.codes)
    assert torch.equal(scale[: 33 * 4], expected.block_scale.view(torch.uint8).flatten())
    assert bool((scale[33 * 4 :] == 9).all())
    (call,) = calls
    assert (call.name, call["is_sf_swizzled_layout"], call["is_global_scale_inversed"]) == (
        "fp4_quantize",
        False,
        False,
    )


def test_a_buffer_that_is_too_small_is_refused() -> None:
    module = CompiledModule(Era("0.7.4"), QUANTIZER_0_7_4, [])
    codes, scale = torch.empty(33, 32, dtype=torch.uint8), torch.empty(33 * 4, dtype=torch.uint8)
    with pytest.raises(LaunchError, match="scaleFP8SF must hold 512 bytes, not 132"):
        module.fp4_quantize(values(), torch.ones(1), codes, scale, 16, False, True, False, False, True, 0)


def test_a_torch_operator_returns_its_tensors_and_has_an_overload() -> None:
    operator = CompiledModule(Era("0.2.13"), QUANTIZER_0_2_13, []).fp4_quantize
    expected = quantize_nvfp4(values(), 1.0)
    for function in (operator, operator.default):
        codes, scale = function(values(), torch.ones(1), 16, False, True, False, True)
        assert torch.equal(codes, expected.codes)
        assert torch.equal(scale, interleave_block_scale(expected.block_scale).view(torch.uint8).flatten())


def test_swapped_arguments_are_caught() -> None:
    module = CompiledModule(Era("0.7.4"), QUANTIZER_0_7_4, [])
    codes, scale = torch.empty(33, 32, dtype=torch.uint8), torch.empty(512, dtype=torch.uint8)
    with pytest.raises(TypeError, match="argument 4, sfVecSize"):
        module.fp4_quantize(values(), torch.ones(1), codes, scale, None, False, True, False, False, True, 0)
    # Both are Python integers; the value is what gives it away.
    with pytest.raises(NotImplementedError, match="sf_vec_size"):
        module.fp4_quantize(values(), torch.ones(1), codes, scale, False, 16, True, False, False, True, 0)


def test_a_function_that_the_source_does_not_export_is_missing() -> None:
    module = CompiledModule(Era("0.7.4"), QUANTIZER_0_7_4, [])
    with pytest.raises(AttributeError, match=r"exports \['fp4_quantize'\], and no fp5_quantize"):
        _ = module.fp5_quantize


def test_an_exported_function_that_is_not_modelled_says_so() -> None:
    source = "void other(bool a) {}\nTVM_FFI_DLL_EXPORT_TYPED_FUNC(other, other);"
    with pytest.raises(NotImplementedError, match="does not compute other"):
        CompiledModule(Era("0.7.4"), source, []).other(True)


class Layer:
    """Four experts on three tokens, whose weights are all zero: what is returned matters here, not what is computed."""

    def __init__(self, version: str) -> None:
        self.module = CompiledModule(Era(version), LAUNCHER_0_6_17, [])
        self.weights = torch.empty(3, 1, dtype=torch.bfloat16)

    def __call__(self, do_finalize: bool) -> list[torch.Tensor]:
        def scales(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.uint8).view(torch.float8_e4m3fn)

        def codes(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.uint8)

        packed = torch.tensor([[(1 << 16) | 0x3F80], [0x3F00], [(1 << 16) | 0x4000]], dtype=torch.int32)
        one, output = torch.ones(4), torch.empty(3, 256, dtype=torch.bfloat16)
        result: list[torch.Tensor] = self.module.trtllm_fp4_block_scale_moe(
            *(1, None, packed, self.weights, None, codes(3, 128), scales(3, 16)),
            *(codes(4, 256, 128), scales(4, 256, 16), None, None, None, None),
            *(codes(4, 256, 64), scales(4, 256, 8), None, one, one, one, None),
            *(4, 1, None, None, None, 128, 0, 4, None, 1, do_finalize, True, 3, output, [-1, -1], True, None),
        )
        return result


@pytest.mark.parametrize(("version", "count"), [("0.4.0", 3), ("0.4.1", 2), ("0.6.4", 2), ("0.6.5", 3), ("0.6.17", 3)])
def test_without_finalizing_the_weights_are_left_in_the_wrappers_buffer(version: str, count: int) -> None:
    layer = Layer(version)
    result = layer(do_finalize=False)
    assert len(result) == count
    assert result[0].shape[1] == 256
    assert layer.weights.flatten().tolist() == [1.0, 0.5, 2.0]


def test_finalized_output_is_the_only_result() -> None:
    (output,) = Layer("0.6.17")(do_finalize=True)
    assert torch.equal(output, torch.zeros(3, 256, dtype=torch.bfloat16))
