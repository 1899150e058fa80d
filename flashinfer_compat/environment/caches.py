"""Says where caches are kept and whether they can be used. Creates and writes nothing."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from flashinfer_compat.environment.model import CacheDirectory, CachePurpose, Section
from flashinfer_compat.environment.mounts import Mount, mount_of, read_mounts
from flashinfer_compat.environment.reading import NotAvailableError, gather

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

__all__ = ["cache_directory", "describe_directory", "gather_caches"]


def cache_directory(environ: Mapping[str, str] | None = None) -> Section[str]:
    """This package's own cache directory, which may not exist yet, or why there is none.

    FLASHINFER_COMPAT_CACHE_DIR, else XDG_CACHE_HOME/flashinfer_compat, else ~/.cache/flashinfer_compat.

    Args:
        environ: The variables; None means the process's own.
    """
    variables = os.environ if environ is None else environ
    return gather(lambda: str(_own(variables)[0]))


def gather_caches(environ: Mapping[str, str]) -> tuple[CacheDirectory, ...]:
    """The directories FlashInfer, Triton and this package keep their caches in."""
    mounts = read_mounts()
    return tuple(_gather_one(purpose, choose, environ, mounts) for purpose, choose in _CHOICES.items())


def describe_directory(purpose: CachePurpose, path: Path, origin: str, mounts: Sequence[Mount]) -> CacheDirectory:
    """What can be known about the directory at the absolute `path` without writing to it."""
    nearest = _nearest_existing(path)
    mount = mount_of(str(nearest.resolve()), mounts)
    reason = _obstacle(nearest, mount)
    return CacheDirectory(
        purpose=purpose,
        path=str(path),
        origin=origin,
        exists=path.is_dir(),
        writable=reason is None,
        filesystem=mount.filesystem if mount else None,
        is_network=mount.is_network if mount else None,
        reason=reason,
    )


def _gather_one(
    purpose: CachePurpose,
    choose: Callable[[Mapping[str, str]], tuple[Path, str]],
    environ: Mapping[str, str],
    mounts: Sequence[Mount],
) -> CacheDirectory:
    try:
        path, origin = choose(environ)
        return describe_directory(purpose, path.absolute(), origin, mounts)
    except (NotAvailableError, OSError, RuntimeError, ValueError) as error:
        return CacheDirectory(purpose, None, "none", False, False, None, None, str(error))


def _flashinfer(environ: Mapping[str, str]) -> tuple[Path, str]:
    """FlashInfer 0.7.4, jit/env.py, `FLASHINFER_CACHE_DIR`."""
    base = environ.get("FLASHINFER_WORKSPACE_BASE")
    origin = "home directory" if base is None else "FLASHINFER_WORKSPACE_BASE"
    return Path(_home(environ) if base is None else base, ".cache", "flashinfer"), origin


def _cubins(environ: Mapping[str, str]) -> tuple[Path, str]:
    """FlashInfer 0.7.4, jit/env.py, `_get_cubin_dir`, apart from the flashinfer_cubin package."""
    chosen = environ.get("FLASHINFER_CUBIN_DIR")
    if chosen:
        return Path(chosen), "FLASHINFER_CUBIN_DIR"
    workspace, origin = _flashinfer(environ)
    return workspace / "cubins", origin


def _triton(environ: Mapping[str, str]) -> tuple[Path, str]:
    """Triton 3.6, knobs.py, `cache_knobs`."""
    chosen = environ.get("TRITON_CACHE_DIR")
    if chosen:
        return Path(chosen), "TRITON_CACHE_DIR"
    home = environ.get("TRITON_HOME")
    origin = "TRITON_HOME" if home else "home directory"
    return Path(home or _home(environ), ".triton", "cache"), origin


def _own(environ: Mapping[str, str]) -> tuple[Path, str]:
    chosen = environ.get("FLASHINFER_COMPAT_CACHE_DIR")
    if chosen:
        # A shell leaves the ~ of a quoted value; expanduser would take the home of this process.
        first, _, below = chosen.partition("/")
        path = Path(_home(environ), below) if first == "~" else Path(chosen)
        return path.absolute(), "FLASHINFER_COMPAT_CACHE_DIR"
    base = Path(environ.get("XDG_CACHE_HOME", ""))
    if base.is_absolute():  # The XDG specification has relative paths ignored.
        return base / "flashinfer_compat", "XDG_CACHE_HOME"
    home = _home(environ)
    if not home.is_dir():
        raise NotAvailableError(f"the home directory {home} is not a directory; set FLASHINFER_COMPAT_CACHE_DIR")
    return home / ".cache" / "flashinfer_compat", "home directory"


_CHOICES: dict[CachePurpose, Callable[[Mapping[str, str]], tuple[Path, str]]] = {
    CachePurpose.FLASHINFER: _flashinfer,
    CachePurpose.CUBINS: _cubins,
    CachePurpose.TRITON: _triton,
    CachePurpose.OWN: _own,
}


def _home(environ: Mapping[str, str]) -> Path:
    """HOME, else the user database's entry, as `pathlib.Path.home`."""
    home = environ.get("HOME")
    if home is None:
        import pwd

        try:
            home = pwd.getpwuid(os.getuid()).pw_dir
        except KeyError:
            raise NotAvailableError(
                f"HOME is not set and user {os.getuid()} has no entry in the user database"
            ) from None
    if not Path(home).is_absolute():
        raise NotAvailableError(f"HOME is not an absolute path: {home!r}")
    return Path(home)


def _nearest_existing(path: Path) -> Path:
    return next(folder for folder in (path, *path.parents) if os.path.lexists(folder))


def _obstacle(nearest: Path, mount: Mount | None) -> str | None:
    """Why nothing can be written in the existing `nearest`, or None."""
    if not nearest.is_dir():
        return f"{nearest} is not a directory"
    if mount is not None and mount.read_only:
        return f"{mount.point} is mounted read-only"
    if mount is not None and mount.is_of_the_kernel:
        return f"{mount.point} is a file system of the kernel ({mount.filesystem}), where nobody can make files"
    # Root passes every test of permission; the mounts are not always told.
    if os.statvfs(nearest).f_flag & os.ST_RDONLY:
        return f"the file system of {nearest} is read-only"
    if not os.access(nearest, os.W_OK | os.X_OK):
        return f"no permission to write in {nearest}"
    return None
