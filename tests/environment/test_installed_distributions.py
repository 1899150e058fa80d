from __future__ import annotations

import importlib.metadata
import sys

import pytest
from fake_installs import install, make_editable

from flashinfer_compat.environment import FileCheck, RecordState
from flashinfer_compat.environment.distributions import gather_distributions, scan


def gather(*entries, level=FileCheck.SIZES):
    return gather_distributions([str(entry) for entry in entries], level)


def test_a_distribution_is_described_by_its_metadata(tmp_path):
    dist_info = install(
        tmp_path,
        "flashinfer-python",
        "0.7.4",
        {"flashinfer/__init__.py": ""},
        ["torch", "nvidia-cutlass-dsl>=4.8.0", 'rich>=13; extra == "b12x"'],
    )
    (found,) = gather(tmp_path).found
    assert (found.name, found.version, found.location) == ("flashinfer-python", "0.7.4", str(tmp_path))
    assert found.metadata_path == str(dist_info)
    assert found.requires == ("torch", "nvidia-cutlass-dsl>=4.8.0", 'rich>=13; extra == "b12x"')
    assert (found.editable, found.source, found.problems) == (False, None, ())
    assert (found.files.state, found.files.checked) == (RecordState.MATCHES, 3)


def test_families_of_distributions_and_other_spellings_are_found(tmp_path):
    names = ["nvidia-cutlass-dsl", "nvidia-cutlass-dsl-libs-base", "nvidia-cutlass-dsl-libs-cu13"]
    names += ["flashinfer-jit-cache-sm100a", "tensorrt_llm", "TensorRT.LLM"]
    for number, name in enumerate(names):
        install(tmp_path / str(number), name)
    install(tmp_path / "0", "nvidia-cutlass")
    install(tmp_path / "0", "requests")
    found = gather(*(tmp_path / str(number) for number in range(len(names)))).found
    assert [copy.name for copy in found] == [*names[:4], "tensorrt-llm", "tensorrt-llm"]


def test_copies_are_kept_in_search_order(tmp_path):
    install(tmp_path / "a", "torch", "2.9.0")
    install(tmp_path / "b", "torch", "2.13.0")
    assert [copy.version for copy in gather(tmp_path / "a", tmp_path / "b").found] == ["2.9.0", "2.13.0"]
    assert [copy.version for copy in gather(tmp_path / "b", tmp_path / "a").found] == ["2.13.0", "2.9.0"]


def test_two_versions_left_in_one_folder_are_both_reported_in_the_order_of_the_standard_library(tmp_path):
    install(tmp_path, "flashinfer-python", "0.6.7")
    install(tmp_path, "flashinfer-python", "0.7.4")
    first = next(iter(importlib.metadata.distributions(name="flashinfer-python", path=[str(tmp_path)])))
    found = gather(tmp_path).found
    assert {copy.version for copy in found} == {"0.6.7", "0.7.4"}
    assert found[0].version == first.version


def test_one_folder_under_two_links_is_one_copy(tmp_path):
    install(tmp_path / "lib", "torch")
    (tmp_path / "lib64").symlink_to("lib")
    assert len(gather(tmp_path / "lib", tmp_path / "lib64").found) == 1


def test_a_dist_info_without_metadata_is_represented(tmp_path):
    dist_info = install(tmp_path, "cuda-tile", "1.4.0")
    (dist_info / "METADATA").unlink()
    (found,) = gather(tmp_path).found
    assert (found.name, found.version) == ("cuda-tile", None)
    assert found.problems == ("the metadata file is missing or cannot be read",)
    assert found.files.missing == ("cuda_tile-1.4.0.dist-info/METADATA",)


def test_a_folder_in_place_of_the_metadata_file_is_represented(tmp_path):
    dist_info = install(tmp_path, "cuda-tile", "1.4.0")
    (dist_info / "METADATA").unlink()
    (dist_info / "METADATA").mkdir()
    (found,) = gather(tmp_path).found
    assert found.version is None
    assert found.files.changed == ("cuda_tile-1.4.0.dist-info/METADATA",)


@pytest.mark.parametrize(
    ("metadata", "version", "problem"),
    [
        ("Name: torch\nVersion: main-1234\n", "main-1234", "'main-1234' is not a PEP 440 version"),
        ("Name: torch\n\nVersion: 2.9.0", None, "the metadata gives no version"),
        ("Name: torch\nVersion:\n", None, "the metadata gives no version"),
        ("", None, "the metadata file is empty or no metadata"),
        ("\x80\x81 binary", None, "the metadata file is empty or no metadata"),
    ],
)
def test_a_version_that_is_none_or_no_pep440_is_represented(tmp_path, metadata, version, problem):
    dist_info = install(tmp_path, "torch")
    (dist_info / "METADATA").write_bytes(metadata.encode("latin-1"))
    (found,) = gather(tmp_path).found
    assert (found.version, found.problems) == (version, (problem,))


def test_folded_headers_are_joined(tmp_path):
    dist_info = install(tmp_path, "torch")
    (dist_info / "METADATA").write_text("Name: torch\nVersion: 2\nRequires-Dist: triton\n  >=3\nRequires-Dist: sympy\n")
    assert gather(tmp_path).found[0].requires == ("triton >=3", "sympy")


def test_a_header_can_hold_lines_of_spaces(tmp_path):
    dist_info = install(tmp_path, "torch")
    (dist_info / "METADATA").write_text(
        "Name: torch\nVersion: 2\nLicense: MIT\n        \n  text\nRequires-Dist: sympy\n"
    )
    assert gather(tmp_path).found[0].requires == ("sympy",)


@pytest.mark.parametrize(
    ("level", "compared"),
    [
        (FileCheck.NONE, set()),
        (FileCheck.MOE, {"flashinfer-python", "flashinfer-cubin", "nvidia-cutlass-dsl-libs-base", "apache-tvm-ffi"}),
        (FileCheck.SIZES, {"flashinfer-python", "flashinfer-cubin", "nvidia-cutlass-dsl-libs-base", "apache-tvm-ffi"}),
        (
            FileCheck.HASHES,
            {
                "flashinfer-python",
                "flashinfer-cubin",
                "nvidia-cutlass-dsl-libs-base",
                "apache-tvm-ffi",
                "torch",
                "vllm",
            },
        ),
    ],
)
def test_sizes_are_compared_of_what_kernels_run_through(tmp_path, level, compared):
    names = ("flashinfer-python", "flashinfer-cubin", "nvidia-cutlass-dsl-libs-base", "apache-tvm-ffi", "torch", "vllm")
    for name in names:
        install(tmp_path, name)
    found = gather_distributions([str(tmp_path)], level).found
    assert {copy.name for copy in found if copy.files.state is RecordState.MATCHES} == compared
    assert {copy.name for copy in found if copy.files.state is RecordState.NOT_CHECKED} == set(names) - compared


def test_egg_info_folders_and_files_are_read(tmp_path):
    (tmp_path / "a" / "cuda_tile-2.1.egg-info").mkdir(parents=True)
    (tmp_path / "a" / "cuda_tile-2.1.egg-info" / "PKG-INFO").write_text("Name: cuda-tile\nVersion: 2.1\n")
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "cuda_tile-2.0.egg-info").write_text("Name: cuda-tile\nVersion: 2.0\n")
    found = gather(tmp_path / "a", tmp_path / "b").found
    assert [(copy.version, copy.files.state) for copy in found] == [
        ("2.1", RecordState.NO_RECORD),
        ("2.0", RecordState.NO_RECORD),
    ]


def test_an_editable_install_names_its_project_folder(tmp_path):
    project = tmp_path / "my checkout"
    dist_info = install(tmp_path / "site", "flashinfer-python", "0.7.4.dev3")
    make_editable(dist_info, project)
    (found,) = gather(tmp_path / "site").found
    assert (found.editable, found.source) == (True, str(project))


@pytest.mark.parametrize(
    "text",
    ['{"url": "file:///x", "dir_info": {}}', '{"url": "https://x/y.whl", "archive_info": {"hash": "sha256=0"}}'],
)
def test_an_install_from_a_folder_or_an_archive_is_not_editable(tmp_path, text):
    (install(tmp_path, "torch") / "direct_url.json").write_text(text)
    (found,) = gather(tmp_path).found
    assert (found.editable, found.source, found.problems) == (False, None, ())


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"url": 3}', '{"url": "file:///x", "dir_info": 7}', "\xff"])
def test_a_broken_direct_url_is_a_problem_of_its_own_distribution_only(tmp_path, text):
    (install(tmp_path, "torch", "2.9.0") / "direct_url.json").write_bytes(text.encode("latin-1"))
    install(tmp_path, "triton", "3.6.0")
    torch, triton = sorted(gather(tmp_path).found, key=lambda copy: copy.name)
    assert (torch.version, torch.editable) == ("2.9.0", False)
    assert torch.problems[0].startswith("direct_url.json cannot be read")
    assert (triton.version, triton.problems) == ("3.6.0", ())


def test_a_path_entry_that_cannot_be_listed_is_named_and_the_rest_is_read(tmp_path):
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "python311.zip").write_bytes(b"PK")
    install(tmp_path / "site", "torch", "2.9.0")
    result = gather(tmp_path / "loop", tmp_path / "absent", tmp_path / "python311.zip", tmp_path / "site")
    assert [copy.version for copy in result.found] == ["2.9.0"]
    (problem,) = result.unreadable
    assert problem.startswith(str(tmp_path / "loop"))
    assert "symbolic links" in problem


def test_everything_installed_here_reads_as_the_standard_library_reads_it():
    expected = {}
    for dist in importlib.metadata.distributions():
        expected.setdefault(dist.name.lower().replace("_", "-").replace(".", "-"), dist)
    found = {}
    for copy in scan(None, lambda name: True):
        found.setdefault(copy.name, copy)
    assert found.keys() == expected.keys()
    assert "pytest" in found
    for name, copy in found.items():
        assert copy.version == expected[name].version
        assert list(copy.requires) == [" ".join(line.split()) for line in expected[name].requires or []]
        assert copy.location in sys.path


def test_what_flashinfer_requires_beside_is_told_by_the_names_of_folders(tmp_path):
    requires = ["Einops", "cuda_python>=12", "click ; extra == 'x'", "tqdm", "torch"]
    install(tmp_path, "flashinfer-python", "0.7.4", requires=requires)
    for folder in ("einops-0.8.2.dist-info", "cuda_python-13.0.3-py3.11.egg-info", "torch-2.9.0.dist-info"):
        (tmp_path / folder).mkdir()
    (tmp_path / "numpy-2.0.dist-info").mkdir()
    (tmp_path / "click.egg-info").mkdir()
    found = gather_distributions([str(tmp_path)], FileCheck.NONE)
    assert sorted((one.name, one.version) for one in found.beside) == [
        ("click", None),
        ("cuda-python", "13.0.3"),
        ("einops", "0.8.2"),
    ]
