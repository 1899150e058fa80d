from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

if importlib.util.find_spec("torch") is None:
    # The core is tested without torch too; what computes is not.
    collect_ignore_glob = [
        "numerics/*",
        "weights/*",
        "backends/*",
        "contract/*",
        "standin_checks/*",
        "test_ops.py",
        "test_adoption.py",
    ]


@pytest.fixture(scope="session")
def checkpoints() -> Path:
    """The sample ModelOpt exports: grouped, shared-bf16, ungrouped-2-shared."""
    return Path(__file__).parent / "data" / "checkpoints"


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests never touch the user's cache."""
    monkeypatch.setenv("FLASHINFER_COMPAT_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "cache"))
