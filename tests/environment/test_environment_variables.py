from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from flashinfer_compat.environment import EnvironmentVariable, VariableOrigin
from flashinfer_compat.environment.variables import gather_variables, initial_environ, is_relevant


@pytest.mark.parametrize(
    ("name", "relevant"),
    [
        ("FLASHINFER_CUBIN_DIR", True),
        ("FLASHINFER_COMPAT_CACHE_DIR", True),
        ("CUDA_HOME", True),
        ("TORCH_CUDA_ARCH_LIST", True),
        ("HOME", True),
        ("VLLM_USE_FLASHINFER_MOE_FP4", True),
        ("SGLANG_PLUGINS", True),
        ("SGLANG_PORT", False),
        ("VLLM_LOGGING_LEVEL", False),
        ("MOE_SETTING", False),
        ("MY_FLASHINFER_X", False),
        ("PATH", False),
    ],
)
def test_which_variables_are_relevant(name, relevant):
    assert is_relevant(name) is relevant


def test_a_given_environment_has_no_known_origin():
    assert gather_variables({"PATH": "/bin", "HOME": "/h", "FLASHINFER_A": ""}) == (
        EnvironmentVariable("FLASHINFER_A", "", VariableOrigin.UNKNOWN),
        EnvironmentVariable("HOME", "/h", VariableOrigin.UNKNOWN),
    )


@pytest.mark.parametrize(
    "name", ["FLASHINFER_HUB_TOKEN", "VLLM_MOE_API_KEY", "FLASHINFER_SECRET", "FLASHINFER_PASSWORD_X"]
)
def test_secrets_are_masked(name):
    (variable,) = gather_variables({name: "abc123"})
    assert variable.value == "***"


def test_credentials_in_a_url_are_masked():
    value = "https://user:pa55@cubins.example/x https://other.example/a@b"
    (variable,) = gather_variables({"FLASHINFER_CUBINS_REPOSITORY": value})
    assert variable.value == "https://***@cubins.example/x https://other.example/a@b"


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="needs /proc")
def test_variables_set_in_the_process_are_told_from_inherited_ones():
    code = (
        "import json, os\n"
        "os.environ['FLASHINFER_NEW'] = 'x'\n"
        "os.environ['FLASHINFER_CHANGED'] = 'after'\n"
        "from flashinfer_compat.environment.variables import gather_variables\n"
        "print(json.dumps({v.name: v.origin.value for v in gather_variables(None) if v.name.startswith('FLASHINFER')}))"
    )
    variables = {
        "PYTHONPATH": os.pathsep.join(sys.path),
        "FLASHINFER_KEPT": "a=b",
        "FLASHINFER_CHANGED": "before",
        "FLASHINFER_EMPTY": "",
    }
    output = subprocess.run([sys.executable, "-c", code], env=variables, capture_output=True, text=True, check=True)
    assert json.loads(output.stdout) == {
        "FLASHINFER_KEPT": "inherited",
        "FLASHINFER_CHANGED": "set in process",
        "FLASHINFER_EMPTY": "inherited",
        "FLASHINFER_NEW": "set in process",
    }


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"A=1\0B=x=y\0C=\0", {"A": "1", "B": "x=y", "C": ""}),
        (b"A=first\0A=second\0", {"A": "first"}),
        (b"A=\xff\0", {"A": "\udcff"}),
        (b"", None),
        (b"\0\0\0\0", None),
        (b"VLLM::EngineCore\0\0\0", None),
        (b"A=1\0worker 3 of 8\0", None),
    ],
)
def test_initial_variables_are_parsed_or_known_to_be_overwritten(tmp_path, content, expected):
    (tmp_path / "environ").write_bytes(content)
    assert initial_environ(str(tmp_path / "environ")) == expected


def test_a_system_that_does_not_tell_gives_none(tmp_path):
    assert initial_environ(str(tmp_path / "absent")) is None
