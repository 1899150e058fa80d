from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def checkpoints() -> Path:
    """The sample ModelOpt exports: grouped, shared-bf16, ungrouped-2-shared."""
    return Path(__file__).parent / "data" / "checkpoints"


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests never touch the user's cache."""
    monkeypatch.setenv("FLASHINFER_COMPAT_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "cache"))
