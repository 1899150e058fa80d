"""What servers tell about themselves; pages as SGLang 0.5.23 and vLLM 0.33 write them, cut to a few fields."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from flashinfer_compat.ab.facts import facts_from, fusion_is_off

SGLANG: dict[str, Any] = {
    "models": {"object": "list", "data": [{"id": "r1", "owned_by": "sglang", "root": "r1"}]},
    "info": {
        "version": "0.5.23",
        "disable_shared_experts_fusion": True,
        "moe_runner_backend": "flashinfer_trtllm",
        "quantization": "modelopt_fp4",
        "tp_size": 8,
        "api_key": "secret",
        "internal_states": [{"api_key": "secret"}],
    },
    "model": {"model_path": "nvidia/DeepSeek-R1-NVFP4-v2", "is_generation": True},
}
VLLM: dict[str, Any] = {
    "models": {"data": [{"id": "r1", "owned_by": "vllm"}, {"id": "adapter", "owned_by": "vllm", "parent": "r1"}]},
    "version": {"version": "0.33.0"},
    "info": {
        "vllm_config": {
            "model_config": {"quantization": "modelopt_fp4", "hf_token": "secret"},
            "kernel_config": {"moe_backend": "flashinfer_trtllm"},
            "parallel_config": None,
        },
        "vllm_env": {"VLLM_DISABLE_SHARED_EXPERTS_STREAM": False, "VLLM_API_KEY": "secret"},
    },
}


def test_sglang() -> None:
    facts = facts_from("http://a", SGLANG)
    assert (facts.engine, facts.version, facts.models) == ("sglang", "0.5.23", ("r1",))
    assert facts.model_path == "nvidia/DeepSeek-R1-NVFP4-v2"
    assert facts.flags == {
        "disable_shared_experts_fusion": True,
        "moe_runner_backend": "flashinfer_trtllm",
        "quantization": "modelopt_fp4",
        "tp_size": 8,
    }
    assert fusion_is_off(facts) is True


def test_vllm() -> None:
    facts = facts_from("http://a", VLLM)
    assert (facts.engine, facts.version, facts.models) == ("vllm", "0.33.0", ("r1", "adapter"))
    assert facts.flags == {
        "model_config.quantization": "modelopt_fp4",
        "kernel_config.moe_backend": "flashinfer_trtllm",
        "VLLM_DISABLE_SHARED_EXPERTS_STREAM": False,
    }
    assert fusion_is_off(facts) is None
    # Without its developer mode, and with the configuration as text.
    assert facts_from("http://a", {**VLLM, "info": None}).engine == "vllm"
    assert facts_from("http://a", {"info": {"vllm_config": "model='r1', quantization=None"}}).flags == {}


def test_keys_stay_where_they_are() -> None:
    for pages in (SGLANG, VLLM):
        assert "secret" not in str(facts_from("http://a", pages).to_dict())


ANY = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(st.sampled_from(["data", "id", "owned_by", "version", "vllm_config", "model_config"]), inner)
    ),
    max_leaves=8,
)


@given(st.fixed_dictionaries({}, optional=dict.fromkeys(("models", "version", "info", "model"), ANY)))
def test_no_page_is_too_odd(pages: dict[str, Any]) -> None:
    facts = facts_from("http://a", pages)
    assert all(isinstance(one, str) for one in facts.models)
    assert facts.version is None or isinstance(facts.version, str)
