"""Whole machines as real folders: a search path, a home, a CUDA toolkit and a PATH. Only the GPUs are told."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from fakes import install, install_flashinfer, install_torch

from flashinfer_compat.doctor.examination import Examination, examine_environment
from flashinfer_compat.doctor.live import LiveImport
from flashinfer_compat.environment import Environment, FileCheck, Gpu, Gpus, Section, collect

B200 = Gpu(0, "NVIDIA B200", (10, 0), "GPU-b2", 192 << 30)
B300 = Gpu(0, "NVIDIA B300", (10, 3), "GPU-b3", 288 << 30)
H200 = Gpu(0, "NVIDIA H200", (9, 0), "GPU-c3", 144 << 30)
A100 = Gpu(0, "NVIDIA A100", (8, 0), "GPU-a1", 80 << 30)
RTX = Gpu(0, "NVIDIA RTX PRO 6000", (12, 0), "GPU-d4", 96 << 30)

ARTIFACT = "8ee504/batched_gemm-fdba-16ba"
NO_DRIVER = "no NVIDIA driver library: OSError: libnvidia-ml.so.1: cannot open shared object file"
MODULE = "fused_moe_trtllm_sm100"


@dataclass
class Machine:
    """Folders below `root`, changed by the steps of a case."""

    root: Path
    environ: dict[str, str] = field(default_factory=dict)
    gpus: tuple[Gpu, ...] = ()
    driver: tuple[str, str] = ("580.95.05", "13.0")
    visible: str | None = None
    gpu_problems: tuple[str, ...] = ()
    live: LiveImport | None = None
    policy_problem: str = ""

    def __post_init__(self) -> None:
        for folder in (self.site, self.lower, self.home, self.tools):
            folder.mkdir(parents=True)
        self.environ = {"HOME": str(self.home), "PATH": str(self.tools), "CUDA_HOME": str(self.cuda), **self.environ}

    @property
    def site(self) -> Path:
        return self.root / "site"

    @property
    def lower(self) -> Path:
        """A second folder on the search path, behind `site`."""
        return self.root / "lower"

    @property
    def home(self) -> Path:
        return self.root / "home"

    @property
    def tools(self) -> Path:
        return self.root / "tools"

    @property
    def cuda(self) -> Path:
        return self.root / "cuda"

    @property
    def cache(self) -> Path:
        return self.home / ".cache" / "flashinfer"

    def collect(self) -> Environment:
        found = collect([str(self.site), str(self.lower)], self.environ, FileCheck.MOE)
        seen = Gpus(*self.driver, self.gpus, self.visible, self.gpu_problems)
        none = not self.gpus and not self.gpu_problems
        return replace(found, gpus=Section(None, NO_DRIVER) if none else Section(seen))

    def examine(self) -> Examination:
        return examine_environment(self.collect(), self.live, (), self.policy_problem)


Step = Callable[[Machine], object]


def gpu(*found: Gpu, visible: str | None = None, driver: tuple[str, str] | None = None) -> Step:
    def step(machine: Machine) -> None:
        machine.gpus, machine.visible = found, visible
        machine.driver = driver or machine.driver

    return step


def flashinfer(version: str, like: str | None = None, own: str | None = "", requires: tuple[str, ...] = ()) -> Step:
    """FlashInfer; `own` is what its source calls itself, None for a source that says nothing."""
    meta = {"flashinfer/_build_meta.py": f'__version__ = "{own or version}"\n'} if own is not None else {}
    artifacts = {
        "flashinfer/artifacts.py": f'class ArtifactPath:\n    TRTLLM_GEN_BMM: str = (\n        "{ARTIFACT}/"\n    )\n'
    }
    return lambda machine: install_flashinfer(machine.site, version, like, {**meta, **artifacts}, requires)


def torch(version: str = "2.13.0+cu130", cuda: str | None = "13.0") -> Step:
    return lambda machine: install_torch(machine.site, version, cuda)


def distribution(name: str, version: str, *requires: str, files: dict[str, str] | None = None) -> Step:
    return lambda machine: install(machine.site, name, version, files, requires)


def cubin_package(version: str, artifact: str = ARTIFACT) -> Step:
    files = {
        "flashinfer_cubin/__init__.py": "",
        "flashinfer_cubin/_build_meta.py": f'__version__ = "{version}"\n',
        f"flashinfer_cubin/cubins/{artifact}/checksums.txt": "",
    }
    return distribution("flashinfer-cubin", version, files=files)


def jit_cache(version: str, *, module: str = MODULE, provider: str = "") -> Step:
    """The package that brings kernels compiled; `provider` is the part of it that 0.7.0 and later need."""

    def step(machine: Machine) -> None:
        files = {
            "flashinfer_jit_cache/__init__.py": "",
            "flashinfer_jit_cache/_build_meta.py": f'__version__ = "{version}"\n',
        }
        if not provider:
            files[f"flashinfer_jit_cache/jit_cache/{module}/{module}.so"] = ""
        install(machine.site, "flashinfer-jit-cache", version, files)
        if provider:
            install(machine.site, f"flashinfer-jit-cache-{provider}", version)

    return step


def executable(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("#!/bin/sh\nexit 3\n", "utf-8")
    path.chmod(0o755)


def nvcc(version: str = "13.0.88") -> Step:
    def step(machine: Machine) -> None:
        executable(machine.cuda / "bin" / "nvcc")
        description = {"cuda": {"version": version}, "cuda_nvcc": {"version": version}}
        (machine.cuda / "version.json").write_text(json.dumps(description), "utf-8")

    return step


def ninja(machine: Machine) -> None:
    executable(machine.tools / "ninja")


def variable(name: str, value: str) -> Step:
    """Set a variable; `{root}` in the value is the machine's folder."""

    def step(machine: Machine) -> None:
        machine.environ[name] = value.format(root=machine.root)

    return step


def write(path: str, text: str = "") -> Step:
    """Write a file below the machine's folder."""

    def step(machine: Machine) -> None:
        target = machine.root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, "utf-8")

    return step


def delete(path: str) -> Step:
    def step(machine: Machine) -> None:
        target = machine.root / path
        shutil.rmtree(target) if target.is_dir() else target.unlink()

    return step


def cached_cubins(machine: Machine) -> None:
    write(f"home/.cache/flashinfer/cubins/{ARTIFACT}/checksums.txt")(machine)


def compiled(release: str | None, name: str = MODULE) -> Step:
    folder = f"home/.cache/flashinfer/{release}/100a" if release else "home/.cache/flashinfer/100a"
    return write(f"{folder}/cached_ops/{name}/{name}.so")


def live(**outcome: object) -> Step:
    usual = LiveImport(2.5, 60.0, False, "", "0.7.4", (), ())

    def step(machine: Machine) -> None:
        machine.live = replace(usual, **outcome)  # type: ignore[arg-type]

    return step


def healthy(version: str = "0.7.4") -> tuple[Step, ...]:
    """A B200 server whose FlashInfer has all it needs."""
    return (gpu(B200), flashinfer(version), torch(), nvcc(), ninja, cached_cubins)


def build(root: Path, *steps: Step | tuple[Step, ...]) -> Machine:
    machine = Machine(root)
    for step in steps:
        for one in step if isinstance(step, tuple) else (step,):
            one(machine)
    return machine
