from __future__ import annotations

import pytest
import torch

from flashinfer_compat import numerics as n
from flashinfer_compat.vocabulary import RoutingMethod

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def same_bytes(on_gpu: torch.Tensor, on_cpu: torch.Tensor) -> bool:
    return torch.equal(on_gpu.cpu().view(torch.uint8), on_cpu.view(torch.uint8))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gpu_quantizes_to_the_same_bytes(dtype: torch.dtype) -> None:
    values = (randn(3, 200, 512) * torch.logspace(-4, 4, 200).unsqueeze(1)).to(dtype)
    values[1, 7] = 0
    scales = torch.tensor([0.013, 1.7, 0.0004])
    on_cpu, on_gpu = n.quantize_nvfp4(values, scales), n.quantize_nvfp4(values.cuda(), scales.cuda())
    assert same_bytes(on_gpu.codes, on_cpu.codes)
    assert same_bytes(on_gpu.block_scale, on_cpu.block_scale)
    assert same_bytes(n.dequantize_nvfp4(on_gpu), n.dequantize_nvfp4(on_cpu))
    assert n.nvfp4_global_scale(values.cuda()).item() == n.nvfp4_global_scale(values).item()


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e4m3fn])
def test_a_gpu_lays_out_the_same_bytes(dtype: torch.dtype) -> None:
    scale = torch.randint(0, 256, (3, 256, 7), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)).view(
        dtype
    )
    on_gpu = scale.cuda()
    for transform in (n.interleave_block_scale, n.shuffle_block_scale, n.shuffle_rows, n.interleave_gate_up):
        assert same_bytes(transform(on_gpu), transform(scale))
    assert same_bytes(n.unshuffle_block_scale(n.shuffle_block_scale(on_gpu), 7), scale)
    assert n.w13_permutation(256, on_gpu.device).device == on_gpu.device


@pytest.mark.parametrize("method", RoutingMethod)
def test_a_gpu_routes_alike(method: RoutingMethod) -> None:
    logits, bias = randn(300, 64) * 3, randn(64, seed=1) * 0.1
    top_k = 1 if method is RoutingMethod.LLAMA4 else 8
    groups = {"n_group": 8, "topk_group": 4}
    on_cpu = n.route(logits, bias, method=method, top_k=top_k, **groups)
    on_gpu = n.route(logits.cuda(), bias.cuda(), method=method, top_k=top_k, **groups)
    assert torch.equal(on_gpu.ids.cpu(), on_cpu.ids)
    torch.testing.assert_close(on_gpu.weights.cpu(), on_cpu.weights, rtol=1e-5, atol=1e-7)
    assert torch.equal(
        n.pack_topk(on_cpu.ids.cuda(), on_cpu.weights.cuda()).cpu(), n.pack_topk(on_cpu.ids, on_cpu.weights)
    )


def test_equal_logits_go_to_the_lower_index_on_a_gpu() -> None:
    for num_experts in (13, 37, 256):
        logits = randn(50, 1).expand(-1, num_experts).cuda()
        ours = n.route(logits, None, method=RoutingMethod.DEEPSEEK_V3, top_k=5)
        assert torch.equal(ours.ids.cpu(), torch.arange(5).expand(50, 5))


def test_everything_but_the_checks_can_be_captured_in_a_graph() -> None:
    values, scale = randn(64, 256).cuda(), torch.tensor(0.01).cuda()
    logits = randn(64, 32).cuda()

    def step() -> list[torch.Tensor]:
        tensor = n.quantize_nvfp4(values, scale, check=False)
        layout = n.interleave_block_scale(tensor.block_scale).view(torch.uint8)
        topk = n.route(logits, logits[0], method=RoutingMethod.DEEPSEEK_V3, top_k=4, n_group=4, topk_group=2)
        packed = n.pack_topk(*vars(n.append_shared_experts(topk, 32, 1)).values())
        return [tensor.codes, n.dequantize_nvfp4(tensor), layout, packed, *n.unpack_topk(packed)]

    expected = step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(captured, expected, strict=True))
