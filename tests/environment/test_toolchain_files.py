from __future__ import annotations

import json

import pytest
from fake_installs import install, write_record

from flashinfer_compat.environment import Tool
from flashinfer_compat.environment.toolchain import gather_toolchain

VERSION_JSON = json.dumps({"cuda": {"version": "13.0.1"}, "cuda_nvcc": {"name": "CUDA NVCC", "version": "13.0.88"}})


def executable(path):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("#!/bin/sh\nexit 3\n")
    path.chmod(0o755)
    return path


def toolkit(root, version_json=None, header=None, header_folder="include"):
    executable(root / "bin" / "nvcc")
    if version_json is not None:
        (root / "version.json").write_text(version_json)
    if header is not None:
        (root / header_folder).mkdir(parents=True)
        (root / header_folder / "cuda.h").write_text(f"/*\n * CUDA_VERSION 1\n */\n{header}\n")
    return root


def nvcc(environ, default="/nonexistent"):
    return gather_toolchain(environ, [], str(default)).nvcc


def test_cuda_home_goes_before_cuda_path_and_path(tmp_path):
    home, path, other = (toolkit(tmp_path / name, VERSION_JSON) for name in ("home", "path", "other"))
    environ = {"CUDA_HOME": str(home), "CUDA_PATH": str(path), "PATH": str(other / "bin")}
    assert nvcc(environ).value == Tool(
        str(home / "bin" / "nvcc"), "13.0.88", str(home / "version.json"), f"CUDA_HOME={home}"
    )
    assert nvcc({**environ, "CUDA_HOME": ""}).value.origin == f"CUDA_PATH={path}"
    found = nvcc({"PATH": str(other / "bin")}, home).value
    assert (found.path, found.origin) == (str(other / "bin" / "nvcc"), "on PATH")
    assert nvcc({"PATH": ""}, home).value.origin == f"the default, {home}"


def test_a_cuda_home_without_nvcc_is_final_as_it_is_for_flashinfer(tmp_path):
    other = toolkit(tmp_path / "other", VERSION_JSON)
    found = nvcc({"CUDA_HOME": str(tmp_path / "empty"), "PATH": str(other / "bin")}, other)
    assert found.reason == f"no nvcc at {tmp_path / 'empty' / 'bin' / 'nvcc'} (CUDA_HOME={tmp_path / 'empty'})"


@pytest.mark.parametrize("folder", ["include", "targets/x86_64-linux/include"])
@pytest.mark.parametrize(
    ("define", "version"), [("#define CUDA_VERSION 12080", "12.8"), ("#define  CUDA_VERSION 13000", "13.0")]
)
def test_the_header_is_read_where_there_is_no_version_file(tmp_path, folder, define, version):
    root = toolkit(tmp_path, header=define, header_folder=folder)
    found = nvcc({"CUDA_HOME": str(root)}).value
    assert (found.version, found.version_source) == (version, str(root / folder / "cuda.h"))


@pytest.mark.parametrize("version_json", ["{", "[]", "{}", '{"cuda": 1}', '{"cuda": {"version": 13}}'])
def test_a_broken_version_file_is_passed_over(tmp_path, version_json):
    root = toolkit(tmp_path, version_json, "#define CUDA_VERSION 12090")
    assert nvcc({"CUDA_HOME": str(root)}).value.version == "12.9"


def test_a_version_file_of_the_toolkit_alone_is_enough(tmp_path):
    root = toolkit(tmp_path, '{"cuda": {"version": "12.4.1"}}')
    assert nvcc({"CUDA_HOME": str(root)}).value.version == "12.4.1"


def test_a_link_on_path_leads_to_the_toolkit(tmp_path):
    root = toolkit(tmp_path / "cuda-13", VERSION_JSON)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "nvcc").symlink_to(root / "bin" / "nvcc")
    found = nvcc({"PATH": str(tmp_path / "bin")}).value
    assert (found.path, found.version) == (str(tmp_path / "bin" / "nvcc"), "13.0.88")


@pytest.mark.parametrize("header", [None, "#define CUDA_VERSION_NAME 3"])
def test_an_unknown_version_says_where_it_was_looked_for(tmp_path, header):
    root = toolkit(tmp_path, header=header)
    found = nvcc({"CUDA_HOME": str(root)}).value
    assert found.version is None
    assert found.version_source == f"unknown: no version.json or include/cuda.h in {root}"


def ninja(environ, *site):
    return gather_toolchain(environ, [str(entry) for entry in site], "/nonexistent").ninja


@pytest.fixture
def ninja_wheel(tmp_path):
    site = tmp_path / "venv" / "lib" / "site"
    dist_info = install(site, "ninja", "1.13.0", {"ninja/__init__.py": ""})
    script = executable(tmp_path / "venv" / "bin" / "ninja")
    write_record(dist_info, [["ninja/__init__.py", "", "0"], ["../../bin/ninja", "", ""]])
    return site, script


def test_a_ninja_on_path_has_no_version_in_files(tmp_path):
    script = executable(tmp_path / "bin" / "ninja")
    found = ninja({"PATH": str(script.parent)}).value
    assert found == Tool(str(script), None, "unknown: no file states it", "on PATH")


def test_the_wheels_ninja_on_path_has_the_wheels_version(ninja_wheel):
    site, script = ninja_wheel
    found = ninja({"PATH": str(script.parent)}, site).value
    assert found == Tool(str(script), "1.13.0", "the Python distribution ninja", "on PATH")


def test_the_wheels_ninja_off_path_is_said_to_be_off_path(ninja_wheel):
    site, script = ninja_wheel
    found = ninja({"PATH": ""}, site).value
    assert (found.path, found.version) == (str(script), "1.13.0")
    assert found.origin.endswith("not on PATH")


def test_another_ninja_on_path_does_not_get_the_wheels_version(ninja_wheel, tmp_path):
    site, _ = ninja_wheel
    other = executable(tmp_path / "bin" / "ninja")
    assert ninja({"PATH": str(other.parent)}, site).value.version is None


def test_no_ninja_is_a_reason(ninja_wheel):
    site, script = ninja_wheel
    script.unlink()
    assert ninja({"PATH": ""}, site).reason.startswith("no ninja on PATH")
