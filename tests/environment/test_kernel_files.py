from __future__ import annotations

import pytest
from fake_installs import flashinfer_files, install

from flashinfer_compat.environment import CachePurpose, FileCheck, collect
from flashinfer_compat.environment.kernels import MODULES

ARTIFACT = "8ee504/batched_gemm-fdba-16ba"
# The form of FlashInfer 0.7.4's artifacts.py, other classes and all.
ARTIFACTS = f'''
class ArtifactPath:
    """Where cubins are published."""

    TRTLLM_GEN_FMHA: str = "f50085/fmha/trtllm-gen/"
    TRTLLM_GEN_BMM: str = (
        "{ARTIFACT}/"
    )


class CheckSumHash:
    TRTLLM_GEN_BMM: str = "49bce8"
'''


def kernels(tmp_path, **environ):
    found = collect([str(tmp_path / "site")], {"HOME": str(tmp_path / "home"), "PATH": "", **environ}, FileCheck.NONE)
    assert found.kernels.reason is None
    return found.kernels.value


def install_flashinfer(tmp_path, artifacts=ARTIFACTS, **more):
    (tmp_path / "home").mkdir(exist_ok=True)
    files = {**flashinfer_files(), "flashinfer/artifacts.py": artifacts, **more}
    install(tmp_path / "site", "flashinfer-python", "0.7.4", files)


def write(path, text=""):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_a_machine_without_flashinfer_has_no_kernel_files(tmp_path):
    found = kernels(tmp_path)
    assert (found.batched_gemm, found.packaged, found.prebuilt, found.compiled) == (None, None, (), ())
    assert found.cached.has_batched_gemm is None


def test_the_artifact_is_read_from_the_source(tmp_path):
    install_flashinfer(tmp_path)
    assert kernels(tmp_path).batched_gemm == ARTIFACT


@pytest.mark.parametrize("artifacts", ["", "class ArtifactPath: pass\n", "def (:\n", "ArtifactPath = 3\n"])
def test_a_source_in_another_form_gives_no_artifact(tmp_path, artifacts):
    install_flashinfer(tmp_path, artifacts)
    found = kernels(tmp_path)
    assert found.batched_gemm is None
    assert found.cached.has_batched_gemm is None


@pytest.mark.parametrize(("file", "there"), [("checksums.txt", True), ("Bmm_x_sm100f.cubin", True), ("readme", False)])
def test_cubins_are_looked_for_where_flashinfer_downloads_to(tmp_path, file, there):
    install_flashinfer(tmp_path)
    assert kernels(tmp_path).cached.has_batched_gemm is False
    write(tmp_path / "home" / ".cache" / "flashinfer" / "cubins" / ARTIFACT / file)
    assert kernels(tmp_path).cached.has_batched_gemm is there


def test_cubins_are_looked_for_in_the_variable_and_the_package(tmp_path):
    install_flashinfer(tmp_path)
    write(tmp_path / "chosen" / ARTIFACT / "a.cubin")
    package = {"flashinfer_cubin/__init__.py": "", f"flashinfer_cubin/cubins/{ARTIFACT}/a.cubin": ""}
    install(tmp_path / "site", "flashinfer-cubin", "0.7.4", package)
    found = kernels(tmp_path, FLASHINFER_CUBIN_DIR=str(tmp_path / "chosen"))
    for folder, origin in ((found.cached, "FLASHINFER_CUBIN_DIR"), (found.packaged, "flashinfer_cubin")):
        assert (folder.origin, folder.exists, folder.writable, folder.has_batched_gemm) == (origin, True, True, True)
    assert found.packaged.path == str(tmp_path / "site" / "flashinfer_cubin" / "cubins")


def test_a_package_folder_that_is_a_file_cannot_be_written(tmp_path):
    install(
        tmp_path / "site",
        "flashinfer-cubin",
        "0.7.4",
        {"flashinfer_cubin/__init__.py": "", "flashinfer_cubin/cubins": ""},
    )
    (tmp_path / "home").mkdir()
    folder = kernels(tmp_path).packaged
    assert (folder.exists, folder.writable) == (False, False)
    assert "is not a directory" in folder.reason


def test_the_release_of_downloaded_headers_is_read(tmp_path):
    install_flashinfer(tmp_path)
    assert kernels(tmp_path).cached.headers_of is None
    below = "flashinfer/trtllm/batched_gemm/trtllmGen_bmm_export/.artifact_hash"
    write(tmp_path / "home" / ".cache" / "flashinfer" / "cubins" / below, f"{ARTIFACT}/\n")
    assert kernels(tmp_path).cached.headers_of == ARTIFACT


def test_prebuilt_modules_are_found_in_packages(tmp_path):
    module = MODULES[0]
    install_flashinfer(tmp_path, **{f"flashinfer/data/aot/{module}/{module}.so": ""})
    files = {"flashinfer_jit_cache/__init__.py": "", f"flashinfer_jit_cache/jit_cache/{module}/{module}.so": ""}
    install(tmp_path / "site", "flashinfer-jit-cache", "0.7.4+cu130", files)
    assert kernels(tmp_path).prebuilt == (f"flashinfer/{module}", f"flashinfer_jit_cache/{module}")


def test_compiled_modules_are_found_in_the_folders_of_their_releases(tmp_path):
    install_flashinfer(tmp_path)
    cache = tmp_path / "home" / ".cache" / "flashinfer"
    for folder in ("0.7.4/100a", "0.6.17/100a_103a", "100a"):
        write(cache / folder / "cached_ops" / MODULES[0] / f"{MODULES[0]}.so")
        write(cache / folder / "cached_ops" / "norm" / "norm.so")
    found = {(one.release, one.architectures) for one in kernels(tmp_path).compiled}
    assert found == {("0.7.4", "100a"), ("0.6.17", "100a_103a"), (None, "100a")}


def test_a_cache_without_a_place_has_no_kernel_files(tmp_path):
    install_flashinfer(tmp_path)
    found = kernels(tmp_path, HOME="relative")
    assert (found.cached.path, found.compiled) == (None, ())
    caches = collect([], {"HOME": "relative", "PATH": ""}, FileCheck.NONE).caches.value
    assert any(cache.purpose is CachePurpose.CUBINS and cache.path is None for cache in caches)
