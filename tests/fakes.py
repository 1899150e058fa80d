"""Real folders of fake distributions, as pip would leave them."""

from __future__ import annotations

import base64
import hashlib
from pathlib import Path

from flashinfer_compat.signatures.model import Symbol
from flashinfer_compat.signatures.recorded import recorded


def install(
    site: Path, name: str, version: str, files: dict[str, str] | None = None, requires: tuple[str, ...] = ()
) -> None:
    """Write a distribution with its RECORD into `site`."""
    folder = site / f"{name.replace('-', '_')}-{version}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    metadata += "".join(f"Requires-Dist: {one}\n" for one in requires)
    contents = {**(files or {}), f"{folder.name}/METADATA": metadata}
    record = []
    for path, text in contents.items():
        target = site / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, "utf-8")
        data = text.encode()
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        record.append(f"{path},sha256={digest},{len(data)}")
    record.append(f"{folder.name}/RECORD,,")
    (folder / "RECORD").write_text("\n".join(record) + "\n", "utf-8")


def install_flashinfer(
    site: Path,
    version: str,
    like: str | None = None,
    extra: dict[str, str] | None = None,
    requires: tuple[str, ...] = (),
) -> None:
    """A package whose source has exactly the entry points of a recorded release; importing it fails."""
    files = {"flashinfer/__init__.py": "raise AssertionError('flashinfer must not be imported')\n"}
    for name, symbol in recorded(like or version).symbols.symbols.items():
        stem = symbol.module.replace(".", "/")
        path = f"{stem}.py" if symbol.module != "flashinfer" else f"{stem}/__init__.py"
        files[path] = files.get(path, "from enum import IntEnum\n") + _definition(name, symbol)
    names = {one.module for one in recorded(like or version).symbols.symbols.values()}
    exports = "".join(
        f"from {symbol.module} import {name}\n"
        for name, symbol in recorded(like or version).symbols.symbols.items()
        if symbol.module not in ("flashinfer", "flashinfer.fused_moe")
    )
    files["flashinfer/__init__.py"] += exports
    if "flashinfer.fused_moe" not in names:
        files["flashinfer/fused_moe/__init__.py"] = exports
    for module in names:
        parts = module.split(".")
        for depth in range(1, len(parts)):
            files.setdefault("/".join(parts[:depth]) + "/__init__.py", "")
    # A module that also is a folder of modules is a package.
    for path in [one for one in files if one.endswith(".py") and one.removesuffix(".py") + "/__init__.py" in files]:
        package = path.removesuffix(".py") + "/__init__.py"
        files[package] += files.pop(path)
    install(site, "flashinfer-python", version, {**files, **(extra or {})}, requires)


def install_torch(site: Path, version: str = "2.13.0+cu130", cuda: str | None = "13.0") -> None:
    """A torch that only says how it was built."""
    files = {
        "torch/__init__.py": "raise AssertionError('torch must not be imported')\n",
        "torch/version.py": f"__version__ = {version!r}\ncuda = {cuda!r}\nhip = None\ngit_version = 'x'\n",
    }
    install(site, "torch", version, files)


def _definition(name: str, symbol: Symbol) -> str:
    if symbol.members is not None:
        return f"class {name}(IntEnum):\n" + "".join(f"    {one} = {value!r}\n" for one, value in symbol.members)
    text = Symbol(name, "m", symbol.parameters).to_text().removeprefix("m")
    text = text.replace("<object>", "object()").replace("<factory>", "None")
    return f"def {name}{text}:\n    pass\n"
