"""The command against `transformers serve` with tiny models of random weights, made on the spot."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

import flashinfer_compat as fc
from flashinfer_compat.cli import main

httpx = pytest.importorskip("httpx")
for library in ("torch", "transformers", "tokenizers", "fastapi", "uvicorn", "openai", "typer"):
    pytest.importorskip(library)

pytestmark = pytest.mark.server

SCHEMA = json.loads((Path(fc.__file__).parent / "schemas" / "ab-1.json").read_text("utf-8"))
STARTING = 180.0
"""Seconds in which the server must be there; 15 on an idle machine."""


def make_model(folder: Path, seed: int) -> str:
    """A two-layer Llama over single bytes, with a chat template; 430 kB."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    symbols = ["<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE(vocab={one: number for number, one in enumerate(symbols)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    fast.chat_template = "{% for one in messages %}{{ one['role'] }}: {{ one['content'] }}\n{% endfor %}assistant:"
    fast.save_pretrained(folder)
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(symbols),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        # Without an end every answer has its full length; a wide spread makes ties unlikely.
        bos_token_id=None,
        eos_token_id=None,
        initializer_range=0.5,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    return tuple(make_model(tmp_path_factory.mktemp("model"), seed) for seed in (1, 2))


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """One server that loads whichever model a request names."""
    folder = tmp_path_factory.mktemp("serve")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    program = "from transformers.cli.transformers import main; main()"
    command = [sys.executable, "-c", program, "serve", "--device", "cpu", "--host", "127.0.0.1", "--port", str(port)]
    # Nothing may be asked of a hub.
    environ = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(folder), "OMP_NUM_THREADS": "1"}
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(command, env=environ, stdout=log, stderr=subprocess.STDOUT)
    try:
        address = f"http://127.0.0.1:{port}"
        deadline = time.monotonic() + STARTING
        while not is_up(address):
            assert process.poll() is None, (folder / "log").read_text()
            assert time.monotonic() < deadline, (folder / "log").read_text()
            time.sleep(0.2)
        yield address
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def is_up(address: str) -> bool:
    try:
        return bool(httpx.get(f"{address}/health", timeout=5).status_code == httpx.codes.OK)
    except httpx.TransportError:
        return False


def ab(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, Any]:
    code = main(["ab", *arguments, "--max-tokens", "8", "--concurrency", "2", "--json"])
    content = json.loads(capsys.readouterr().out)
    if "error" not in content:
        jsonschema.Draft202012Validator(SCHEMA).validate(content)
    return code, content


@pytest.fixture
def prompts(tmp_path: Path) -> str:
    path = tmp_path / "prompts.txt"
    path.write_text("The capital of France is\ndef sort(values):\n日本で一番高い山は何ですか。\n1, 4, 9,\n", "utf-8")
    return str(path)


@pytest.mark.parametrize("stream", [[], ["--stream"]])
@pytest.mark.parametrize("chat", [[], ["--chat"]])
def test_a_model_agrees_with_itself(
    url: str,
    models: tuple[str, str],
    prompts: str,
    capsys: pytest.CaptureFixture[str],
    chat: list[str],
    stream: list[str],
) -> None:
    named = ["--model-a", models[0], "--model-b", models[0]]
    code, found = ab(capsys, url, f"{url}/v1", *named, "--prompts", prompts, *chat, *stream)
    assert code == 0
    assert found["determinism"]["exact_match_rate"] == found["comparison"]["exact_match_rate"] == 1
    assert all(one["answers"]["b"] for one in found["prompts"])
    # It takes `logprobs` and ignores it.
    assert [note.partition(".")[0] for note in found["notes"]] == [
        "Server A gives no log-probabilities",
        "Server B gives no log-probabilities",
        "A and B are the same address: one server was compared with itself",
    ]


def test_another_model_differs(
    url: str, models: tuple[str, str], prompts: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, found = ab(capsys, url, url, "--model-a", models[0], "--model-b", models[1], "--prompts", prompts)
    assert code == 1
    assert found["determinism"]["deterministic"] is True
    assert found["comparison"]["matched"] < found["comparison"]["compared"] == 4
    assert any(one["divergence"] and one["divergence"]["unit"] == "character" for one in found["prompts"])


def test_what_the_server_cannot_do_is_told(
    url: str, models: tuple[str, str], prompts: str, capsys: pytest.CaptureFixture[str]
) -> None:
    named = ["--model-a", models[0], "--prompts", prompts]
    code, found = ab(capsys, url, url, *named, "--model-b", "/no/such/model")
    assert (code, found["error"]["type"]) == (2, "HTTPStatusError")
    assert "HTTP 500, /v1/completions says 'Internal Server Error'" in found["error"]["message"]
    code, found = ab(capsys, url, url, *named, "--model-b", models[0], "--logprob-tolerance", "0.1")
    assert (code, found["error"]["type"]) == (2, "LogprobsMissingError")
