"""Says which folder an import would load, without importing."""

from __future__ import annotations

import importlib.machinery
import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING

from flashinfer_compat.environment.model import ImportablePackage, Owner
from flashinfer_compat.environment.reading import read_regular
from flashinfer_compat.environment.records import record_lists

if TYPE_CHECKING:
    from collections.abc import Sequence

    from flashinfer_compat.environment.model import Distribution

__all__ = ["PACKAGES", "gather_packages", "literals", "locate"]

PACKAGES = {
    "flashinfer": ("flashinfer-python",),
    "flashinfer_cubin": ("flashinfer-cubin",),
    "flashinfer_jit_cache": ("flashinfer-jit-cache",),
    "torch": ("torch",),
    "triton": ("triton", "pytorch-triton"),
}
"""Import names, and the distributions that install them."""

_VERSION_FILES = ("_build_meta.py", "version.py", "__init__.py")


def gather_packages(
    search_path: Sequence[str] | None, distributions: Sequence[Distribution]
) -> tuple[ImportablePackage, ...]:
    """Those of `PACKAGES` that can be imported.

    Args:
        search_path: Directories to look in; None asks the interpreter's own finders, editable installs' among them.
        distributions: What is installed on that path, in search order.
    """
    located = ((name, locate(name, search_path)) for name in PACKAGES)
    return tuple(_describe(name, spec, distributions) for name, spec in located if spec is not None)


def locate(name: str, search_path: Sequence[str] | None) -> importlib.machinery.ModuleSpec | None:
    """The spec an import of the top-level `name` would use, or None."""
    if search_path is not None:
        return importlib.machinery.PathFinder.find_spec(name, list(search_path))
    try:
        return importlib.util.find_spec(name)
    except ValueError:
        # A module put into sys.modules by hand has no spec; the path still says what is installed.
        return importlib.machinery.PathFinder.find_spec(name)


def literals(path: Path) -> dict[str, str | None]:
    """The names a source file assigns a literal string or None to, in any branch; the last assignment counts.

    Raises:
        OSError: The file cannot be read.
        SyntaxError: It is not Python source.
        ValueError: It contains null bytes.
    """
    import ast

    tree = ast.parse(read_regular(path))
    values: dict[str, str | None] = {}
    for node in ast.walk(tree):
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and isinstance(node.value, ast.Constant):
            value = node.value.value
            if value is None or isinstance(value, str):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                values.update({target.id: value for target in targets if isinstance(target, ast.Name)})
    return values


def _describe(
    name: str, spec: importlib.machinery.ModuleSpec, distributions: Sequence[Distribution]
) -> ImportablePackage:
    folders = list(spec.submodule_search_locations or ())
    origin = spec.origin if spec.has_location else None
    location = folders[0] if folders else (str(Path(origin).parent) if origin else None)
    installed = [copy for owner in PACKAGES[name] for copy in distributions if copy.name == owner]
    owner = next((copy for copy in installed if location and _owns(copy, name, location, bool(folders))), None)
    return ImportablePackage(
        name=name,
        origin=origin,
        location=location,
        owner=Owner(owner.name, owner.version) if owner else None,
        version_from_source=_stated_version(location) if location and folders else None,
        shadowed=bool(installed) and owner is not installed[0],
    )


def _owns(distribution: Distribution, name: str, location: str, is_folder: bool) -> bool:
    """Whether the package at `location` is the one `distribution` installed."""
    folder = Path(location).resolve()
    if distribution.source is not None:
        return folder.is_relative_to(Path(distribution.source).resolve())
    if (folder.parent if is_folder else folder) != Path(distribution.location).resolve():
        return False
    recorded = record_lists(distribution.metadata_path, f"{name}/__init__.py" if is_folder else f"{name}.py")
    return recorded is not False  # Without a RECORD, lying side by side is all there is to go by.


def _stated_version(location: str) -> str | None:
    for file_name in _VERSION_FILES:
        try:
            version = literals(Path(location, file_name)).get("__version__")
        except (OSError, SyntaxError, ValueError):
            continue
        if version is not None:
            return version
    return None
