"""Lines for the shell: plain pip, since FlashInfer's own command may not start."""

from __future__ import annotations

import re
import shlex
from typing import TYPE_CHECKING

from packaging.version import Version

from flashinfer_compat.signatures.recorded import releases
from flashinfer_compat.versions import parse_version

if TYPE_CHECKING:
    from flashinfer_compat.doctor.facts import Facts

__all__ = [
    "install_cubins",
    "install_jit_cache",
    "install_release",
    "install_torch",
    "install_version",
    "newest_release",
    "remove",
]

_WHEELS = "https://flashinfer.ai/whl"
"""FlashInfer 0.7.4, __main__.py, `_build_cubin_index_url`."""
_TORCH_WHEELS = "https://download.pytorch.org/whl"
_TORCH_CUDA = ("12.6", "12.8", "12.9", "13.0")
"""CUDA versions that torch is published for."""
_JIT_CACHE_CUDA = ("12.9", "13.0")
"""FlashInfer 0.7.4, __main__.py, `_SUPPORTED_JIT_CACHE_CUDA_VERSIONS`, as far as torch has them too."""
_CUBINS_ON_PYPI = (Version("0.4.0"), Version("0.6.13"))
"""First and last flashinfer-cubin there; newer ones are on FlashInfer's own index only."""


def newest_release() -> str:
    """The newest FlashInfer whose behaviour is recorded."""
    return next(one for one in reversed(releases()) if not Version(one).is_prerelease)


def install_release(facts: Facts, version: str) -> str:
    """Install a FlashInfer release. Kernel packages of another release go; new ones are a separate choice."""
    line = f"pip install flashinfer-python=={version}"
    stale = [name for name in ("flashinfer-cubin", "flashinfer-jit-cache") if _is_other(facts, name, version)]
    return f"{line} && pip uninstall -y {' '.join(stale)}" if stale else line


def _is_other(facts: Facts, name: str, version: str) -> bool:
    copy = facts.first_copy(name)
    return copy is not None and parse_version(copy.version or "") != parse_version(version)


def install_cubins(facts: Facts) -> str:
    """Install the flashinfer-cubin of the installed release; empty where there is none."""
    if facts.public_version is None or not facts.since("0.4.0"):
        return ""
    return install_version("flashinfer-cubin", facts.public_version, "--no-deps")


def install_jit_cache(facts: Facts) -> str:
    """Install the flashinfer-jit-cache of the installed release for torch's CUDA; empty where there is none."""
    torch = facts.environment.torch.value
    cuda = _newest_up_to(torch.cuda if torch else None, _JIT_CACHE_CUDA)
    if facts.public_version is None or cuda is None or not facts.since("0.4.0"):
        return ""
    # From 0.7.0 on the kernels are in packages that this one requires.
    options = () if facts.since("0.7.0rc3") else ("--no-deps",)
    return install_version("flashinfer-jit-cache", f"{facts.public_version}+{cuda}", *options)


def install_torch(facts: Facts) -> str:
    """Install a torch for the newest CUDA that the driver runs; empty where the driver is too old for any."""
    gpus = facts.environment.gpus.value
    cuda = _newest_up_to(gpus.driver_cuda_version if gpus else None, _TORCH_CUDA)
    return f"pip install --force-reinstall torch --index-url {_TORCH_WHEELS}/{cuda}" if cuda else ""


def install_version(name: str, version: str | None, *options: str) -> str:
    """Install a distribution, from the index that has this version; a local part says which of torch's and ours."""
    local = (version or "").partition("+")[2]
    index = ""
    if name == "torch" and re.fullmatch(r"cpu|cu\d+", local):
        version, index = (version or "").partition("+")[0], f"{_TORCH_WHEELS}/{local}"
    elif name.startswith("flashinfer-jit-cache"):
        index = f"{_WHEELS}/{local}" if local else _WHEELS
    elif name == "flashinfer-cubin" and version and not _is_on_pypi(version):
        index = _WHEELS
    words = ["pip install", *options, f"{name}=={version}" if version else name]
    return " ".join([*words, f"--index-url {index}"] if index else words)


def _is_on_pypi(cubin_version: str) -> bool:
    version, (first, last) = parse_version(cubin_version), _CUBINS_ON_PYPI
    return version is not None and first <= version <= last


def remove(path: str) -> str:
    """Remove a folder."""
    return f"rm -r {shlex.quote(path)}"


def _newest_up_to(version: str | None, published: tuple[str, ...]) -> str | None:
    """The label, such as cu130, of the newest published CUDA of the same major version that is not newer."""
    wanted = parse_version(version) if version else None
    if wanted is None:
        return None
    fitting = [one for one in published if Version(one).major == wanted.major and Version(one) <= wanted]
    return f"cu{fitting[-1].replace('.', '')}" if fitting else None
