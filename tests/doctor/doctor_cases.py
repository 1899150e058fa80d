"""Machines and what the doctor finds on them. Expectations are written from FlashInfer's source, release by release."""

from __future__ import annotations

from dataclasses import dataclass

from doctor_machines import (
    A100,
    B200,
    B300,
    H200,
    RTX,
    Step,
    cached_cubins,
    compiled,
    cubin_package,
    delete,
    distribution,
    executable,
    flashinfer,
    gpu,
    healthy,
    jit_cache,
    live,
    ninja,
    nvcc,
    torch,
    variable,
    write,
)
from fakes import install_flashinfer, install_torch


@dataclass(frozen=True)
class Case:
    about: str
    """The code it triggers, or almost triggers."""
    title: str
    steps: tuple[Step | tuple[Step, ...], ...]
    expected: tuple[str, ...] = ()
    """Every code that is found, known-issue only where it is meant."""


def case(about: str, title: str, *steps: Step | tuple[Step, ...], expect: str = "") -> Case:
    return Case(about, title, steps, tuple(expect.split()))


OWN_CUBINS = variable("FLASHINFER_CUBIN_DIR", "{root}/home/.cache/flashinfer/cubins")
NO_CHECK = variable("FLASHINFER_DISABLE_VERSION_CHECK", "1")


NO_RECORD = delete("site/flashinfer_python-0.7.4.dist-info/RECORD")


def unreadable_source(machine):
    (machine.site / "flashinfer").mkdir()
    (machine.site / "flashinfer" / "__init__.py").write_text("def (:\n")


def older_metadata(machine):
    (machine.site / "flashinfer_python-0.7.4.dist-info").rename(machine.site / "flashinfer_python-0.6.10.dist-info")
    metadata = machine.site / "flashinfer_python-0.6.10.dist-info" / "METADATA"
    metadata.write_text("Metadata-Version: 2.1\nName: flashinfer-python\nVersion: 0.6.10\n")
    (machine.site / "flashinfer_python-0.6.10.dist-info" / "RECORD").unlink()


def editable(machine):
    """What pip install -e leaves, with the project folder itself on the search path."""
    folder = machine.site / "flashinfer_python-0.7.4.dist-info"
    url = f'{{"url": "file://{machine.site}", "dir_info": {{"editable": true}}}}'
    (folder / "direct_url.json").write_text(url)
    (folder / "RECORD").unlink()


def second_copy(machine):
    install_flashinfer(machine.lower, "0.6.17")


def remnant_of_torch(machine):
    folder = machine.site / "torch-2.9.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.9.0\n")


def ninja_distribution(machine):
    distribution("ninja", "1.13.0", files={"bin/ninja": "#!/bin/sh\n"})(machine)
    executable(machine.site / "bin" / "ninja")


def unknown_newer(machine):
    extra = {"flashinfer/tllm_enums.py": "class SfLayout: pass\n"}
    install_flashinfer(machine.site, "9.0.0", "0.7.4", extra)


def two_kinds(machine):
    from dataclasses import replace

    machine.gpus = (B200, replace(H200, index=1))


def fallen_off_the_bus(machine):
    machine.gpu_problems = ("GPU 1: nvmlDeviceGetHandleByIndex_v2 failed with code 15: GPU is lost",)


CUBIN_IN_THE_WAY = write("site/flashinfer_cubin/cubins", "a file, so nothing can be written below it")
TEXT_HOME = (delete("home"), write("home", "a file"))

CASES: tuple[Case, ...] = (
    # Machines on which nothing may be found.
    case("no-gpu", "a CPU box with nothing but torch", torch("2.13.0+cpu", None), expect="flashinfer-missing no-gpu"),
    case("no-gpu", "0.7.4 on a healthy B200", healthy()),
    case("no-gpu", "0.6.8 on a healthy B200", healthy("0.6.8")),
    case("no-gpu", "0.6.17 on a healthy B200 has issues of its own", healthy("0.6.17"), expect="known-issue"),
    case(
        "no-gpu",
        "0.7.4 with both kernel packages and no toolchain",
        *(gpu(B200), flashinfer("0.7.4"), torch(), cubin_package("0.7.4"), jit_cache("0.7.4+cu130", provider="sm100f")),
    ),
    case(
        "no-gpu",
        "0.6.13 with both kernel packages and no toolchain",
        *(gpu(B200), flashinfer("0.6.13"), torch("2.9.0+cu129", "12.9"), cubin_package("0.6.13")),
        *(jit_cache("0.6.13+cu129"),),
    ),
    # The install.
    case("flashinfer-missing", "a B200 without FlashInfer", gpu(B200), torch(), expect="flashinfer-missing"),
    case("flashinfer-missing", "an H200 without FlashInfer", gpu(H200), torch(), expect="flashinfer-missing"),
    case("flashinfer-missing", "FlashInfer is there", healthy()),
    case(
        "flashinfer-missing",
        "a folder named flashinfer without an __init__.py",
        *(gpu(B200), torch(), write("site/flashinfer/notes.txt")),
        expect="flashinfer-missing",
    ),
    case(
        "flashinfer-missing",
        "a file named flashinfer.py and nothing installed",
        *(gpu(B200), torch(), write("site/flashinfer.py")),
        expect="flashinfer-missing",
    ),
    case(
        "package-missing",
        "metadata without a package",
        *(gpu(B200), torch(), distribution("flashinfer-python", "0.7.4")),
        expect="package-missing",
    ),
    case("package-missing", "metadata with its package", healthy()),
    case(
        "package-missing",
        "an empty metadata folder",
        *(gpu(B200), torch(), lambda machine: (machine.site / "flashinfer_python-0.7.4.dist-info").mkdir()),
        expect="package-missing",
    ),
    *(
        case(
            "kernel-package-hollow",
            f"a leftover {folder} beside {release}{' with a variable' if more else ''}",
            *(*healthy(release), write(f"site/{folder}/cubins/a.cubin"), *more),
            expect=expect,
        )
        for release, folder, more, expect in (
            ("0.7.4", "flashinfer_cubin", (), "kernel-package-hollow"),
            ("0.7.4", "flashinfer_jit_cache", (NO_CHECK,), "kernel-package-hollow"),
            ("0.5.0", "flashinfer_cubin", (), "kernel-package-hollow"),
            ("0.5.0", "flashinfer_jit_cache", (), "kernel-package-hollow"),
            # jit/env.py looks for neither before 0.4.0.
            ("0.3.1", "flashinfer_cubin", (), "release-unusable"),
            ("0.7.4", "flashinfer_cubin", (OWN_CUBINS,), ""),
            ("0.6.15", "flashinfer_cubin", (OWN_CUBINS,), "kernel-package-hollow"),
        )
    ),
    case("kernel-package-hollow", "the package itself", *healthy(), cubin_package("0.7.4")),
    case(
        "package-missing",
        "a cubin distribution without its package",
        *(*healthy(), distribution("flashinfer-cubin", "0.7.4")),
        expect="package-missing",
    ),
    case(
        "package-unreadable",
        "source that is no Python",
        *(gpu(B200), torch(), unreadable_source),
        expect="package-unreadable",
    ),
    case("package-unreadable", "source that is Python", healthy()),
    case(
        "package-shadowed",
        "a project folder before the install",
        *(gpu(B200), torch(), lambda machine: install_flashinfer(machine.lower, "0.7.4")),
        *(write("site/flashinfer/__init__.py"),),
        expect="package-shadowed",
    ),
    case(
        "package-shadowed",
        "a file of its name before the install",
        *(gpu(B200), torch(), lambda machine: install_flashinfer(machine.lower, "0.7.4"), write("site/flashinfer.py")),
        expect="package-shadowed",
    ),
    case(
        "package-shadowed",
        "metadata that a removed install left in front",
        *(gpu(B200), remnant_of_torch, lambda machine: install_torch(machine.lower)),
        expect="package-shadowed flashinfer-missing",
    ),
    case(
        "package-shadowed",
        "a folder of another name",
        *(*healthy(), write("site/flashinfer_notes/__init__.py")),
    ),
    case("installed-twice", "two releases on the path", *healthy(), second_copy, expect="installed-twice"),
    case("installed-twice", "one release", healthy()),
    case(
        "files-changed",
        "an edited file",
        *(*healthy(), write("site/flashinfer/fused_moe/core.py", "# gone\n")),
        expect="files-changed",
    ),
    case("files-changed", "a deleted file", *healthy(), delete("site/flashinfer/artifacts.py"), expect="files-changed"),
    case("files-changed", "a new file beside the installed ones", *healthy(), write("site/flashinfer/mine.py")),
    case(
        "release-incomplete",
        "a module that ends too early, and no RECORD",
        *(*healthy(), NO_RECORD, write("site/flashinfer/fused_moe/core.py", "import torch\n")),
        expect="release-incomplete record-missing",
    ),
    case(
        "release-incomplete",
        "a module that is gone, and no RECORD",
        *(*healthy(), NO_RECORD, delete("site/flashinfer/fused_moe")),
        expect="release-incomplete record-missing",
    ),
    case("release-incomplete", "all is there", *healthy(), NO_RECORD, expect="record-missing"),
    case(
        "release-incomplete",
        "a RECORD tells which file it is",
        *(*healthy(), write("site/flashinfer/fused_moe/core.py", "import torch\n")),
        expect="files-changed",
    ),
    case(
        "record-missing",
        "a dist-info without RECORD",
        *(*healthy(), delete("site/flashinfer_python-0.7.4.dist-info/RECORD")),
        expect="record-missing",
    ),
    case("record-missing", "an editable install has none", *healthy(), editable, expect="editable-install"),
    case(
        "metadata-broken",
        "an empty METADATA",
        *(*healthy(), distribution("triton", "3.6.0", files={"triton/__init__.py": ""})),
        write("site/triton-3.6.0.dist-info/METADATA"),
        expect="metadata-broken",
    ),
    case(
        "metadata-broken",
        "a version that is no version",
        *(*healthy(), distribution("vllm", "main-branch")),
        expect="metadata-broken",
    ),
    case("metadata-broken", "a development version", *healthy(), distribution("vllm", "0.33.0.dev1+g1")),
    case("editable-install", "a project folder", *healthy(), editable, expect="editable-install"),
    case("editable-install", "an ordinary install", healthy()),
    case(
        "facts-missing",
        "a folder of the search path that cannot be listed",
        *healthy(),
        lambda machine: (machine.lower.rmdir(), machine.lower.symlink_to(machine.lower)),
        expect="facts-missing",
    ),
    case("facts-missing", "a folder of the search path that is not there", *healthy(), delete("lower")),
    # Versions.
    case(
        "version-conflict",
        "the code of one release, the metadata of another",
        *(*healthy(), older_metadata),
        expect="version-conflict record-missing",
    ),
    case(
        "version-conflict",
        "a local part in one of them",
        *(gpu(B200), flashinfer("0.7.4+cu130", "0.7.4", own="0.7.4"), torch(), nvcc(), ninja, cached_cubins),
    ),
    case(
        "version-unknown",
        "a checkout without build information",
        *(gpu(B200), flashinfer("0.0.0+unknown", "0.7.4"), torch(), nvcc(), ninja, cached_cubins),
        expect="version-unknown",
    ),
    case("version-unknown", "a release", healthy()),
    case(
        "release-unknown",
        "a release that is too new",
        *(gpu(B200), unknown_newer, torch(), nvcc(), ninja),
        expect="release-unknown",
    ),
    case(
        "release-unknown",
        "a newer release with known signatures",
        *(gpu(B200), flashinfer("0.7.5", "0.7.4"), torch(), nvcc(), ninja, cached_cubins),
    ),
    *(
        case(
            "cubin-version-mismatch",
            f"flashinfer-cubin {cubin} beside {release}{' unchecked' if more else ''}",
            *(gpu(B200), flashinfer(release, release.partition("+")[0]), torch(), nvcc(), ninja, cached_cubins),
            *(cubin_package(cubin), *more),
            expect=expect,
        )
        for release, cubin, more, expect in (
            # Since 0.4.0 a difference is fatal, since 0.7.2rc3 the package is ignored (jit/env.py).
            ("0.5.3", "0.5.2", (), "cubin-version-mismatch"),
            ("0.7.1", "0.7.0", (), "cubin-version-mismatch"),
            ("0.7.2", "0.7.1", (), "cubin-version-mismatch"),
            ("0.7.4", "0.7.2", (NO_CHECK,), "cubin-version-mismatch"),
            ("0.7.4", "0.7.4", (), ""),
            ("0.7.4", "0.7.4", (NO_CHECK,), ""),
            # The texts are compared, local parts included.
            ("0.7.1+cu130", "0.7.1", (), "cubin-version-mismatch"),
        )
    ),
    case(
        "cubin-version-mismatch",
        "FLASHINFER_CUBIN_DIR goes before the package since 0.6.16",
        *(*healthy("0.6.16"), cubin_package("0.6.15")),
        variable("FLASHINFER_CUBIN_DIR", "{root}/home/.cache/flashinfer/cubins"),
    ),
    case(
        "cubin-version-mismatch",
        "sources that do not know their version, since 0.6.10",
        *(gpu(B200), flashinfer("0.0.0+unknown", "0.6.13"), torch(), nvcc(), ninja, cubin_package("0.6.12")),
        expect="version-unknown",
    ),
    case(
        "cubin-version-mismatch",
        "sources that do not know their version, before 0.6.10",
        *(gpu(B200), flashinfer("0.0.0+unknown", "0.6.6"), torch(), nvcc(), ninja, cubin_package("0.6.6")),
        expect="cubin-version-mismatch version-unknown",
    ),
    *(
        case(
            "jit-cache-version-mismatch",
            f"flashinfer-jit-cache {cache} beside {release}{' unchecked' if more else ''}",
            *(gpu(B200), flashinfer(release), torch(), nvcc(), ninja, cached_cubins, jit_cache(cache)),
            *more,
            expect=expect,
        )
        for release, cache, more, expect in (
            ("0.6.13", "0.6.13+cu130", (), ""),
            ("0.6.13", "0.6.12+cu130", (), "jit-cache-version-mismatch"),
            # Until 0.7.0rc3 only the beginning is compared.
            ("0.6.1", "0.6.13+cu130", (), "jit-cache-version-mismatch"),
            ("0.6.15", "0.6.15.post1+cu130", (), "jit-cache-version-mismatch"),
            ("0.6.13", "0.6.12+cu130", (NO_CHECK,), "jit-cache-version-mismatch"),
            # Version 0.7.0rc3 wants parts for each GPU beside it.
            ("0.7.1", "0.7.0+cu130", (), "jit-cache-version-mismatch"),
            ("0.7.4", "0.7.2+cu130", (), "jit-cache-version-mismatch"),
        )
    ),
    case(
        "jit-cache-version-mismatch",
        "a shim and part of 0.7.4 with a CUDA suffix",
        *(gpu(B200), flashinfer("0.7.4"), torch(), cached_cubins, jit_cache("0.7.4+cu130", provider="sm100f")),
    ),
    case(
        "jit-cache-provider-missing",
        "a part for another GPU",
        *(*healthy(), jit_cache("0.7.4+cu130", provider="sm90a")),
        expect="jit-cache-provider-missing",
    ),
    case(
        "jit-cache-provider-missing",
        "exactly this GPU is not its family",
        *(gpu(B300), flashinfer("0.7.4"), torch(), nvcc(), ninja, cached_cubins),
        *(jit_cache("0.7.4+cu130", provider="sm100a"),),
        expect="jit-cache-provider-missing",
    ),
    case(
        "jit-cache-provider-missing",
        "the family's part",
        *(gpu(B300), flashinfer("0.7.4"), torch(), cached_cubins, jit_cache("0.7.4+cu130", provider="sm100f")),
    ),
    case("jit-cache-provider-missing", "0.6.13 has no parts", *healthy("0.6.13"), jit_cache("0.6.13+cu130")),
    case(
        "jit-cache-other-cuda",
        "CUDA 12 beside torch for 13",
        *(*healthy("0.6.13"), jit_cache("0.6.13+cu129")),
        expect="jit-cache-other-cuda",
    ),
    case("jit-cache-other-cuda", "CUDA 13.0 beside torch for 13.0", *healthy("0.6.13"), jit_cache("0.6.13+cu130")),
    case(
        "kernel-package-ignored",
        "0.3.1 looks for no flashinfer-cubin",
        *(*healthy("0.3.1"), cubin_package("0.4.0")),
        expect="kernel-package-ignored release-unusable",
    ),
    case("kernel-package-ignored", "0.4.1 does", *healthy("0.6.8"), cubin_package("0.6.8")),
    case(
        "requirement-unmet",
        "an older apache-tvm-ffi",
        *(gpu(B200), flashinfer("0.7.4", requires=("apache-tvm-ffi<0.2,>=0.1.11", "torch", "einops")), torch()),
        *(nvcc(), ninja, cached_cubins, distribution("apache-tvm-ffi", "0.1.9")),
        expect="requirement-unmet",
    ),
    case(
        "requirement-unmet",
        "no nvidia-cutlass-dsl",
        *(gpu(B200), flashinfer("0.7.4", requires=("nvidia-cutlass-dsl>=4.8.0",)), torch(), nvcc(), ninja),
        *(cached_cubins,),
        expect="requirement-unmet",
    ),
    case(
        "requirement-unmet",
        "an alpha that is new enough, and an extra nobody asked for",
        *(gpu(B200), flashinfer("0.7.2", requires=("nvidia-cutlass-dsl>=4.6.2a0", "cuda-tile==9; extra == 'x'"))),
        *(torch(), nvcc(), ninja, cached_cubins, distribution("nvidia-cutlass-dsl", "4.6.2")),
    ),
    case(
        "cutlass-dsl-half-upgraded",
        "libraries of another release",
        *(*healthy(), distribution("nvidia-cutlass-dsl", "4.8.0", "nvidia-cutlass-dsl-libs-base==4.8.0")),
        *(distribution("nvidia-cutlass-dsl-libs-base", "4.4.2"),),
        expect="cutlass-dsl-half-upgraded",
    ),
    case(
        "cutlass-dsl-half-upgraded",
        "libraries that are missing",
        *(*healthy(), distribution("nvidia-cutlass-dsl", "4.8.0", "nvidia-cutlass-dsl-libs-base==4.8.0")),
        expect="cutlass-dsl-half-upgraded",
    ),
    case(
        "cutlass-dsl-half-upgraded",
        "libraries of the same release",
        *(*healthy(), distribution("nvidia-cutlass-dsl", "4.8.0", "nvidia-cutlass-dsl-libs-base==4.8.0")),
        *(distribution("nvidia-cutlass-dsl-libs-base", "4.8.0"),),
    ),
    case(
        "cutlass-dsl-half-upgraded", "a release without them", *healthy(), distribution("nvidia-cutlass-dsl", "4.2.1")
    ),
    # torch, CUDA and the driver.
    case(
        "torch-missing",
        "FlashInfer without torch",
        *(gpu(B200), flashinfer("0.7.4"), nvcc(), ninja, cached_cubins),
        expect="torch-missing",
    ),
    case("torch-missing", "nothing at all", gpu(B200), expect="torch-missing flashinfer-missing"),
    case("torch-missing", "torch is there", gpu(B200), torch(), expect="flashinfer-missing"),
    case(
        "torch-unreadable",
        "a torch without its version file",
        *(*healthy(), write("site/torch/version.py")),
        expect="torch-unreadable",
    ),
    case("torch-unreadable", "a torch with it", healthy()),
    case(
        "torch-without-cuda",
        "a CPU build beside a GPU",
        *(gpu(B200), flashinfer("0.7.4"), torch("2.13.0+cpu", None), nvcc(), ninja, cached_cubins),
        expect="torch-without-cuda",
    ),
    case("torch-without-cuda", "a CPU build without a GPU", torch("2.13.0", None), expect="flashinfer-missing no-gpu"),
    case(
        "torch-newer-than-driver",
        "torch for 13.0, driver for 12.8",
        *(*healthy(), gpu(B200, driver=("570.86", "12.8"))),
        expect="torch-newer-than-driver",
    ),
    case(
        "torch-newer-than-driver",
        "a newer minor version runs",
        *(gpu(B200, driver=("570.86", "12.8")), flashinfer("0.7.4"), torch("2.9.0+cu129", "12.9"), nvcc("12.9.1")),
        *(ninja, cached_cubins),
    ),
    case(
        "torch-older-than-gpu",
        "torch for 12.6 on a B200",
        *(gpu(B200), flashinfer("0.7.4"), torch("2.7.1+cu126", "12.6"), nvcc(), ninja, cached_cubins),
        expect="torch-older-than-gpu",
    ),
    case(
        "torch-older-than-gpu",
        "torch for 12.6 on an H200",
        *(gpu(H200), flashinfer("0.7.4"), torch("2.7.1+cu126", "12.6")),
        expect="no-fp4-moe-kernel",
    ),
    case(
        "torch-too-old",
        "torch 2.5",
        *(gpu(B200), flashinfer("0.7.4"), torch("2.5.1+cu128", "12.8"), nvcc(), ninja, cached_cubins),
        expect="torch-too-old",
    ),
    case(
        "torch-too-old",
        "torch 2.6",
        *(gpu(B200), flashinfer("0.7.4"), torch("2.6.0+cu128", "12.8"), nvcc(), ninja, cached_cubins),
    ),
    case(
        "torch-untried",
        "a nightly of the next torch",
        *(gpu(B200), flashinfer("0.7.4"), torch("2.14.0.dev20261101+cu130", "13.0"), nvcc(), ninja, cached_cubins),
        expect="torch-untried",
    ),
    case(
        "torch-untried",
        "a repair release of the newest tried one",
        *(gpu(B200), flashinfer("0.7.4"), torch("2.13.1+cu130", "13.0"), nvcc(), ninja, cached_cubins),
    ),
    case(
        "import-needs-cuda",
        "0.7.0 with CuTe-DSL and a CPU build of torch",
        *(flashinfer("0.7.0"), torch("2.13.0+cpu", None), distribution("nvidia-cutlass-dsl", "4.6.2")),
        expect="import-needs-cuda no-gpu",
    ),
    case(
        "import-needs-cuda",
        "0.7.0 with CuTe-DSL and a CUDA build",
        *(*healthy("0.7.0"), distribution("nvidia-cutlass-dsl", "4.6.2")),
    ),
    case(
        "import-needs-cuda",
        "0.6.13 does not need it",
        *(flashinfer("0.6.13"), torch("2.13.0+cpu", None), distribution("nvidia-cutlass-dsl", "4.6.2")),
        expect="no-gpu",
    ),
    # GPUs.
    case("no-gpu", "FlashInfer on a machine without a driver", flashinfer("0.7.4"), torch(), expect="no-gpu"),
    case("gpus-hidden", "no GPU is visible", *healthy(), gpu(B200, visible=""), expect="gpus-hidden"),
    case("gpus-hidden", "one is", *healthy(), gpu(B200, visible="0")),
    case("gpu-unreadable", "one fell off the bus", *healthy(), fallen_off_the_bus, expect="gpu-unreadable"),
    case("gpu-unreadable", "all answer", healthy()),
    case("gpus-differ", "a B200 and an H200", *healthy(), two_kinds, expect="gpus-differ"),
    case("gpus-differ", "two B200", *healthy(), lambda machine: setattr(machine, "gpus", (B200, B200))),
    case("no-fp4-moe-kernel", "0.7.4 on an H200", gpu(H200), flashinfer("0.7.4"), torch(), expect="no-fp4-moe-kernel"),
    case(
        "no-fp4-moe-kernel", "0.6.17 on an H200", gpu(H200), flashinfer("0.6.17"), torch(), expect="no-fp4-moe-kernel"
    ),
    case("no-fp4-moe-kernel", "0.7.4 on an A100", gpu(A100), flashinfer("0.7.4"), torch(), expect="no-fp4-moe-kernel"),
    case("no-fp4-moe-kernel", "0.7.4 on SM120", gpu(RTX), flashinfer("0.7.4"), torch(), expect="no-fp4-moe-kernel"),
    case("no-fp4-moe-kernel", "0.2.14 on a B300", gpu(B300), flashinfer("0.2.14"), torch(), expect="no-fp4-moe-kernel"),
    case("no-fp4-moe-kernel", "0.7.4 on a B200", healthy()),
    case("release-unusable", "0.4.1 on a B200", *healthy("0.4.1"), expect="release-unusable"),
    case("release-unusable", "0.5.0 on a B200", *healthy("0.5.0")),
    case("known-issue", "0.7.4 on a B200", *healthy(), expect="known-issue"),
    case("known-issue", "0.6.3 on a B200 has none", *healthy("0.6.3")),
    case("known-issue", "0.7.4 on an H200", gpu(H200), flashinfer("0.7.4"), torch(), expect="no-fp4-moe-kernel"),
    # Kernels.
    case("nvcc-missing", "no toolkit", *healthy(), delete("cuda"), expect="nvcc-missing"),
    case("nvcc-missing", "compiled earlier", *healthy(), delete("cuda"), compiled("0.7.4"), expect="nvcc-missing"),
    case(
        "nvcc-missing", "an H200 compiles no FP4", gpu(H200), flashinfer("0.7.4"), torch(), expect="no-fp4-moe-kernel"
    ),
    case(
        "nvcc-missing", "FLASHINFER_NVCC names one", *healthy(), delete("cuda"), variable("FLASHINFER_NVCC", "/n/nvcc")
    ),
    case(
        "nvcc-missing",
        "jit-cache for CUDA 12.6 lacks the module",
        *healthy("0.6.13"),
        delete("cuda"),
        jit_cache("0.6.13+cu130", module="other"),
        expect="nvcc-missing",
    ),
    case("nvcc-too-old", "12.6 on a B200", *healthy(), nvcc("12.6.85"), expect="nvcc-too-old"),
    case("nvcc-too-old", "12.8 on a B200", *healthy(), nvcc("12.8.93")),
    case("nvcc-too-old", "12.8 on a B300", *healthy(), gpu(B300), nvcc("12.8.93"), expect="nvcc-too-old"),
    case("ninja-missing", "no ninja", *healthy(), delete("tools/ninja"), expect="ninja-missing"),
    case(
        "ninja-missing", "ninja off PATH", *healthy(), delete("tools/ninja"), ninja_distribution, expect="ninja-missing"
    ),
    case("ninja-missing", "ninja on PATH", healthy()),
    case(
        "jit-disabled", "nothing compiled", *healthy(), variable("FLASHINFER_DISABLE_JIT", "1"), expect="jit-disabled"
    ),
    case(
        "jit-disabled",
        "compiled in jit-cache",
        *healthy("0.6.13"),
        jit_cache("0.6.13+cu130"),
        variable("FLASHINFER_DISABLE_JIT", "1"),
    ),
    *(
        case(
            "arch-list-wrong",
            f"FLASHINFER_CUDA_ARCH_LIST={value!r} with {release}",
            *(*healthy(release), variable("FLASHINFER_CUDA_ARCH_LIST", value)),
            expect=expect,
        )
        for release, value, expect in (
            ("0.7.4", "10.0a", ""),
            ("0.7.4", "9.0a 10.0", ""),
            ("0.7.4", "10.0f", ""),
            ("0.7.4", "9.0a", "arch-list-wrong"),
            ("0.7.4", "10.3a", "arch-list-wrong"),
            ("0.7.4", "9.0a;10.0a", "arch-list-wrong"),
            ("0.7.4", "100a", "arch-list-wrong"),
            ("0.7.4", "9.0a  10.0a", "arch-list-wrong"),
            ("0.7.4", "", "arch-list-wrong"),
            ("0.5.0", "", "arch-list-wrong"),
            # 0.6.7 began to add the "a".
            ("0.6.6", "10.0", "arch-list-wrong"),
        )
    ),
    case("cubins-missing", "nothing downloaded yet", *healthy(), delete("home/.cache"), expect="cubins-missing"),
    case(
        "cubins-missing",
        "downloads forbidden",
        *healthy(),
        delete("home/.cache"),
        variable("FLASHINFER_NO_DOWNLOAD", "1"),
        expect="cubins-missing",
    ),
    case(
        "cubins-missing",
        "an empty FLASHINFER_CUBIN_DIR",
        *healthy(),
        variable("FLASHINFER_CUBIN_DIR", "{root}/cuda"),
        cubin_package("0.7.4"),
        expect="cubins-missing",
    ),
    case("cubins-missing", "in the package", *healthy(), delete("home/.cache"), cubin_package("0.7.4")),
    case("cubins-missing", "an H200 needs none", gpu(H200), flashinfer("0.7.4"), torch(), expect="no-fp4-moe-kernel"),
    case(
        "cubins-unwritable",
        "0.6.12 links headers inside the package",
        *healthy("0.6.12"),
        cubin_package("0.6.12"),
        delete("site/flashinfer_cubin/cubins"),
        CUBIN_IN_THE_WAY,
        expect="cubins-unwritable cubins-missing files-changed",
    ),
    case(
        "cubins-unwritable",
        "FLASHINFER_CUBIN_DIR below a file",
        *healthy(),
        variable("FLASHINFER_CUBIN_DIR", "{root}/site/torch/version.py/x"),
        expect="cubins-missing cubins-unwritable",
    ),
    case("cubins-unwritable", "0.7.4 does not write where all is there", *healthy(), cubin_package("0.7.4")),
    case(
        "cubin-directory-ignored",
        "0.6.12 prefers the package",
        *healthy("0.6.12"),
        cubin_package("0.6.12"),
        variable("FLASHINFER_CUBIN_DIR", "{root}/cubins"),
        expect="cubin-directory-ignored",
    ),
    case(
        "cubin-directory-ignored",
        "0.6.16 prefers the variable",
        *healthy("0.6.16"),
        cubin_package("0.6.16"),
        variable("FLASHINFER_CUBIN_DIR", "{root}/home/.cache/flashinfer/cubins"),
    ),
    *(
        case(
            "headers-stale",
            f"{release}, headers of {of}",
            *healthy(release),
            write(
                "home/.cache/flashinfer/cubins/flashinfer/trtllm/batched_gemm/trtllmGen_bmm_export/.artifact_hash", of
            ),
            expect=expect,
        )
        for release, of, expect in (
            ("0.6.7", "55bba5/batched_gemm-0d28130", "headers-stale"),
            ("0.6.7", "8ee504/batched_gemm-fdba-16ba/", ""),
            ("0.6.7.post1", "55bba5/batched_gemm-0d28130", ""),
        )
    ),
    # Caches.
    case(
        "cache-unwritable",
        "a home that is a file",
        *healthy(),
        *TEXT_HOME,
        expect="cache-unwritable cubins-missing cache-not-kept",
    ),
    case(
        "cache-unwritable",
        "a workspace elsewhere",
        *healthy(),
        *TEXT_HOME,
        variable("FLASHINFER_WORKSPACE_BASE", "{root}/work"),
        write("work/.cache/flashinfer/cubins/8ee504/batched_gemm-fdba-16ba/checksums.txt"),
        variable("FLASHINFER_COMPAT_CACHE_DIR", "{root}/own"),
    ),
    case(
        "cache-not-kept",
        "our own cache only",
        *healthy(),
        variable("FLASHINFER_COMPAT_CACHE_DIR", "{root}/site/torch/version.py/x"),
        expect="cache-not-kept",
    ),
    case("cache-not-kept", "our own cache is there", *healthy(), variable("FLASHINFER_COMPAT_CACHE_DIR", "{root}/own")),
    case(
        "compiled-for-another-release",
        "0.6.17 was here",
        *healthy(),
        compiled("0.6.17"),
        expect="compiled-for-another-release",
    ),
    case("compiled-for-another-release", "only this release was here", *healthy(), compiled("0.7.4")),
    case(
        "compiled-for-another-release",
        "0.3.1 shares its folder",
        *healthy("0.3.1"),
        compiled(None),
        expect="compiled-for-another-release release-unusable",
    ),
    case(
        "compiled-for-another-release",
        "a checkout shares its folder",
        gpu(B200),
        flashinfer("0.0.0+unknown", "0.7.4"),
        torch(),
        nvcc(),
        ninja,
        cached_cubins,
        compiled("0.0.0+unknown"),
        expect="compiled-for-another-release version-unknown",
    ),
    # Variables.
    case("variable-unknown", "a slip", *healthy(), variable("FLASHINFER_CUBIN_DRI", "/x"), expect="variable-unknown"),
    case(
        "variable-unknown",
        "a name of FlashInfer's Python",
        *healthy(),
        variable("FLASHINFER_CACHE_DIR", "/x"),
        expect="variable-unknown",
    ),
    case(
        "variable-unknown",
        "a build file's own name",
        *healthy(),
        variable("FLASHINFER_GIT_REF", "v0.7.4"),
        expect="variable-unknown",
    ),
    case("variable-unknown", "this package's own", *healthy(), variable("FLASHINFER_COMPAT_CACHE_DIR", "{root}/own")),
    case("variable-unknown", "a known one", *healthy(), variable("FLASHINFER_LOGLEVEL", "3")),
    case(
        "variable-unknown",
        "no FlashInfer reads it",
        variable("FLASHINFER_CUBIN_DRI", "/x"),
        torch(),
        expect="flashinfer-missing no-gpu",
    ),
    case(
        "variable-ignored",
        "0.6.6 always downloads",
        *healthy("0.6.6"),
        variable("FLASHINFER_NO_DOWNLOAD", "1"),
        expect="variable-ignored",
    ),
    case("variable-ignored", "0.6.13 does not", *healthy("0.6.13"), variable("FLASHINFER_NO_DOWNLOAD", "1")),
    *(
        case(
            "variable-unreadable",
            f"{name}={value!r} with {release}",
            *(*healthy(release), variable(name, value)),
            expect=expect,
        )
        for release, name, value, expect in (
            ("0.7.4", "FLASHINFER_LOGLEVEL", "debug", "variable-unreadable"),
            ("0.7.4", "FLASHINFER_LOGLEVEL", "", "variable-unreadable"),
            ("0.6.0", "FLASHINFER_LOGLEVEL", "1.5", "variable-unreadable"),
            ("0.7.4", "FLASHINFER_LOGLEVEL", " 3", ""),
            # Nothing reads it before 0.6.0.
            ("0.5.3", "FLASHINFER_LOGLEVEL", "debug", "variable-ignored"),
            ("0.7.4", "FLASHINFER_LOGGING_LEVEL", "10", "variable-unreadable"),
            ("0.7.4", "FLASHINFER_LOGGING_LEVEL", "", "variable-unreadable"),
            ("0.7.4", "FLASHINFER_LOGGING_LEVEL", "warning", ""),
            ("0.7.4", "FLASHINFER_DUMP_MAX_COUNT", "many", "variable-unreadable"),
            ("0.7.4", "FLASHINFER_DUMP_MAX_SIZE_GB", "0.5", ""),
        )
    ),
    case(
        "policy-unusable",
        "a file that is not there",
        *healthy(),
        lambda machine: setattr(machine, "policy_problem", "FLASHINFER_COMPAT_POLICY=/x: expected a file, got none."),
        expect="policy-unusable",
    ),
    case("policy-unusable", "no file is named", healthy()),
    # Engines.
    case(
        "engine-pin",
        "vLLM pins another release",
        *healthy(),
        distribution("vllm", "0.33.0", "flashinfer-python==0.7.2.post1"),
        expect="engine-pin",
    ),
    case(
        "engine-pin",
        "SGLang pins the cubin package too",
        *healthy(),
        cubin_package("0.7.4"),
        distribution("sglang", "0.5.23", "flashinfer_python==0.7.4", "flashinfer_cubin==0.7.2"),
        expect="engine-pin",
    ),
    case(
        "engine-pin",
        "SGLang pins this release",
        *healthy(),
        distribution("sglang", "0.5.24", "flashinfer_python==0.7.4"),
    ),
    case(
        "engine-pin",
        "a pin in an extra",
        *healthy(),
        distribution("vllm", "0.33.0", "flashinfer-python==0.7.2; extra == 'flashinfer'"),
    ),
    case(
        "engine-pin",
        "a local part",
        gpu(B200),
        flashinfer("0.7.4+cu130", "0.7.4", own="0.7.4"),
        torch(),
        nvcc(),
        ninja,
        cached_cubins,
        distribution("tensorrt_llm", "1.3.0", "flashinfer-python>=0.7,<0.8"),
    ),
    # The live import.
    case("import-fails", "an exception", *healthy(), live(problem="RuntimeError: no"), expect="import-fails"),
    case("import-fails", "no exception", *healthy(), live()),
    case("import-hangs", "no end", *healthy(), live(timed_out=True), expect="import-hangs"),
    case("import-hangs", "slow, but done", *healthy(), live(seconds=59.0)),
    case(
        "signatures-differ",
        "a replaced function",
        *healthy(),
        live(differences=("mm_fp4: parameters differ",)),
        expect="signatures-differ",
    ),
    case("signatures-differ", "as in the source", *healthy(), live()),
    case(
        "torch-lacks-architecture",
        "a build for Hopper",
        *healthy(),
        live(torch_architectures=("sm_90", "sm_90a")),
        expect="torch-lacks-architecture",
    ),
    case(
        "torch-lacks-architecture", "a build for Blackwell", *healthy(), live(torch_architectures=("sm_90", "sm_100"))
    ),
    case("torch-lacks-architecture", "PTX for Hopper", *healthy(), live(torch_architectures=("compute_90",))),
    case(
        "torch-lacks-architecture",
        "an older member of the family",
        *healthy(),
        gpu(B300),
        live(torch_architectures=("sm_100",)),
    ),
)
