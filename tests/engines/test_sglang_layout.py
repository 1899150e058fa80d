"""The layout that each rank of the real SGLang settles before it loads a model, with the plugin."""

from __future__ import annotations

import importlib.util
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from fakes import install_flashinfer, install_torch

if importlib.util.find_spec("sglang") is None or importlib.util.find_spec("torchvision") is None:
    pytest.skip("SGLang or torchvision is not installed: scripts/test-engines.sh", allow_module_level=True)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def case(arguments: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {"arguments": arguments, "quantization": "modelopt_fp4", "draft": False, "said": False, **changes}


def question(folder: Path, checkpoints: Path, release: str, rank: int, ranks: int, port: int) -> dict[str, Any]:
    site = folder / f"{release}-{rank}"
    site.mkdir()
    install_flashinfer(site, release)
    install_torch(site)
    fusing = {
        "moe_runner_backend": "flashinfer_trtllm",
        "quantization": "modelopt_fp4",
        "model_path": str(checkpoints / "grouped"),
    }
    cases = [
        case(fusing),
        case(fusing, quantization=None),
        case(fusing, draft=True),
        case({**fusing, "moe_runner_backend": "triton"}),
        case({**fusing, "disable_shared_experts_fusion": True}),
    ]
    return {"site": str(site), "rank": rank, "ranks": ranks, "port": port, "cases": cases}


def ask(run_child: Callable[..., Any], *questions: dict[str, Any]) -> list[Any]:
    with ThreadPoolExecutor(len(questions)) as pool:
        asked = [
            pool.submit(run_child, "ask_sglang_layout.py", one, FLASHINFER_COMPAT_SGLANG_FUSION="1")
            for one in questions
        ]
        return [one.result() for one in asked]


def test_ranks_that_agree_fuse_the_checked_model_and_no_draft_or_other_quantization(
    run_child: Callable[..., Any], tmp_path: Path, checkpoints: Path
) -> None:
    """A bf16 draft on the trtllm runner would meet SGLang's own assertion against fused shared experts."""
    port = free_port()
    found = ask(run_child, *(question(tmp_path, checkpoints, "0.7.4", rank, 2, port) for rank in range(2)))
    assert found == [[1, 0, 0, 1, 0]] * 2


def test_ranks_with_different_releases_are_named_before_anything_is_loaded(
    run_child: Callable[..., Any], tmp_path: Path, checkpoints: Path
) -> None:
    port = free_port()
    releases = ("0.7.4", "0.7.2")
    questions = [question(tmp_path, checkpoints, one, rank, 2, port) for rank, one in enumerate(releases)]
    for one in ask(run_child, *questions):
        assert one[0].startswith("RankDisagreementError")
        assert "rank 1 has flashinfer.version = 0.7.2, most ranks 0.7.4" in one[0]
        assert one[1:] == [0, 0, 1, 0]


def test_a_rank_whose_flashinfer_is_too_old_stops_every_rank(
    run_child: Callable[..., Any], tmp_path: Path, checkpoints: Path
) -> None:
    port = free_port()
    releases = ("0.7.4", "0.6.15.post1")
    questions = [question(tmp_path, checkpoints, one, rank, 2, port) for rank, one in enumerate(releases)]
    for one in ask(run_child, *questions):
        assert "rank 1 has fusion = left as it is, most ranks on" in one[0]


def test_ranks_wait_for_nobody_where_nothing_is_asked_of_the_plugin(
    run_child: Callable[..., Any], tmp_path: Path, checkpoints: Path
) -> None:
    """One rank has the user's own flag and one layout, the other an old FlashInfer and two."""
    port = free_port()
    first = question(tmp_path, checkpoints, "0.7.4", 0, 2, port)
    second = question(tmp_path, checkpoints, "0.6.15.post1", 1, 2, port)
    disabled = first["cases"][-1]
    first["cases"] = [{**disabled, "said": True}]
    second["cases"] = [disabled, disabled]
    assert ask(run_child, first, second) == [[0], [0, 0]]
