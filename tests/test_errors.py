from __future__ import annotations

import copy
import inspect
import pickle
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest

from flashinfer_compat import errors
from flashinfer_compat.errors import (
    ArgumentError,
    BackendUnavailableError,
    CheckpointError,
    DependencyMissingError,
    ExpertParallelismError,
    FlashInferCompatError,
    RecordedDataError,
    StrategyUnavailableError,
    TensorError,
    UnknownNameError,
    UnknownReleaseError,
    nearest,
)

EXAMPLES = [
    FlashInferCompatError("message"),
    ArgumentError("top_k", "at most 8", "9"),
    ArgumentError("top_k", "at most 8", "9", "Lower it."),
    TensorError("hidden_states", "bfloat16", "float32", "Convert it."),
    UnknownNameError("backend", "trtlm", ["trtllm", "torch"]),
    UnknownReleaseError("flashinfer version", "0.7.3", ["0.7.2", "0.7.4"], "0.7.2"),
    CheckpointError("model.safetensors", "a tensor w", "none", "Download it again."),
    StrategyUnavailableError("native cannot run", [{"code": "needs_keyword", "message": "x"}, {"code": "needs_gpu"}]),
    ExpertParallelismError("native cannot run", [{"code": "expert_parallelism"}]),
    BackendUnavailableError("no GPU"),
    DependencyMissingError("torch", "loading weights"),
    RecordedDataError("flashinfer.json: broken"),
]


def test_every_error_is_public_and_has_an_example() -> None:
    classes = {value for value in vars(errors).values() if inspect.isclass(value) and issubclass(value, Exception)}
    assert {one.__name__ for one in classes} == set(errors.__all__)
    assert {type(one) for one in EXAMPLES} == classes


@pytest.mark.parametrize("error", EXAMPLES, ids=lambda error: type(error).__name__)
def test_an_error_survives_pickling_and_copying(error: FlashInferCompatError) -> None:
    copies = [pickle.loads(pickle.dumps(error, protocol)) for protocol in range(pickle.HIGHEST_PROTOCOL + 1)]
    for one in [*copies, copy.copy(error), copy.deepcopy(error)]:
        assert type(one) is type(error)
        assert str(one) == str(error)
        assert one.args == error.args
        assert vars(one) == vars(error)
        assert getattr(one, "name", None) == getattr(error, "name", None)


def test_notes_survive_pickling() -> None:
    error = ArgumentError("a", "b", "c")
    error.__dict__["__notes__"] = ["a note"]
    assert pickle.loads(pickle.dumps(error)).__notes__ == ["a note"]


def fail(value: int) -> None:
    raise UnknownReleaseError("flashinfer version", str(value), ["0.7.4"])


def test_an_error_leaves_a_worker_process() -> None:
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool, pytest.raises(UnknownReleaseError) as caught:
        pool.submit(fail, 3).result()
    assert (caught.value.argument, caught.value.choices) == ("flashinfer version", ("0.7.4",))


def test_messages_name_subject_expected_actual_and_way_out() -> None:
    assert str(ArgumentError("top_k", "at most 8", "9")) == "top_k: expected at most 8, got 9."
    assert str(TensorError("w", "bf16", "f32", "Convert it.")) == "w: expected bf16, got f32. Convert it."
    assert str(CheckpointError("f.json", "an object", "a list", "x.")) == "f.json: expected an object, got a list. x."
    assert str(UnknownNameError("backend", "trtlm", ["trtllm", "torch"])) == (
        "backend: expected one of trtllm, torch, got 'trtlm'. Did you mean 'trtllm'?"
    )
    assert str(DependencyMissingError("torch", "Loading weights")) == (
        "Loading weights needs torch, which is not installed. Run: pip install torch"
    )


def test_errors_are_what_callers_would_catch() -> None:
    assert issubclass(ArgumentError, ValueError)
    assert issubclass(UnknownReleaseError, UnknownNameError)
    assert issubclass(DependencyMissingError, ImportError)
    assert issubclass(ExpertParallelismError, NotImplementedError)
    assert DependencyMissingError("torch", "x").name == "torch"
    error = StrategyUnavailableError("x", iter([{"code": "a"}, {"code": "b"}]))
    assert error.codes == error.codes == ("a", "b")
    assert StrategyUnavailableError("x").codes == ()


@pytest.mark.parametrize(
    ("name", "choices", "expected"),
    [
        ("split", ["native", "split"], "split"),
        ("SPLIT", ["native", "split"], "split"),
        ("Deepseekv3", ["DeepSeekV3", "Default"], "DeepSeekV3"),
        ("zzz", ["native", "split"], None),
        ("", ["native"], None),
        ("native", [], None),
    ],
)
def test_nearest(name: str, choices: list[str], expected: str | None) -> None:
    assert nearest(name, choices) == expected
    assert nearest(name, iter(choices)) == expected


def test_base_modules_load_neither_torch_nor_flashinfer() -> None:
    code = (
        "import sys\n"
        "from flashinfer_compat import architectures, errors, problem, versions, vocabulary\n"
        "from flashinfer_compat.signatures import cache, live, recorded\n"
        "print([name for name in ('torch', 'flashinfer', 'numpy', 'difflib') if name in sys.modules])\n"
    )
    root = Path(errors.__file__).parents[1]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
