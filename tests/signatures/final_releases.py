"""The recorded releases without candidates."""

from __future__ import annotations

from packaging.version import Version

from flashinfer_compat.signatures.recorded import releases

FINALS = [version for version in releases() if not Version(version).is_prerelease]
