from __future__ import annotations

import importlib.metadata
import importlib.util

import pytest
from fake_installs import torch_files

from flashinfer_compat.environment import TorchBuild
from flashinfer_compat.environment.reading import NotAvailableError
from flashinfer_compat.environment.torch_build import gather_torch


def write(site, files):
    for path, text in files.items():
        (site / path).parent.mkdir(parents=True, exist_ok=True)
        (site / path).write_text(text)
    return [str(site)]


@pytest.mark.parametrize(("version", "cuda"), [("2.13.0+cpu", None), ("2.11.0+cu130", "13.0")])
def test_cpu_and_cuda_builds_are_told_apart(tmp_path, version, cuda):
    assert gather_torch(write(tmp_path, torch_files(version, cuda))) == TorchBuild(version, cuda, None, "cf30153c")


def test_older_and_rocm_version_files_are_read(tmp_path):
    text = "__version__ = '2.6.0+rocm6.2'\ndebug = False\ncuda = None\ngit_version = '12'\nhip = '6.2.41133'\n"
    path = write(tmp_path, {"torch/__init__.py": "", "torch/version.py": text})
    assert gather_torch(path) == TorchBuild("2.6.0+rocm6.2", None, "6.2.41133", "12")


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        ({}, "torch is not installed"),
        ({"torch.py": ""}, "torch is not installed"),
        ({"torch/__init__.py": ""}, "version.py cannot be read: .*No such file"),
        ({"torch/__init__.py": "", "torch/version.py": "cuda = ("}, "version.py cannot be read: "),
        ({"torch/__init__.py": "", "torch/version.py": "cuda = None"}, "states no __version__"),
        ({"torch/__init__.py": "", "torch/version.py/x": ""}, "version.py cannot be read: "),
    ],
)
def test_the_reason_is_kept_where_the_build_is_unknown(tmp_path, files, reason):
    with pytest.raises(NotAvailableError, match=reason):
        gather_torch(write(tmp_path, files))


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs PyTorch")
def test_the_installed_torch_is_read_as_its_metadata_says():
    # The metadata of published CUDA builds leaves out the local part, such as +cu124.
    found, said = gather_torch(None).version, importlib.metadata.version("torch")
    assert found.partition("+")[0] == said.partition("+")[0]
