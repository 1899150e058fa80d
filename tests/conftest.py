from __future__ import annotations

import importlib.util
import signal
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
        "verification/*",
        "test_ops.py",
        "test_adoption.py",
    ]

# A shell starts what runs in its background with Ctrl-C ignored; the commands that tests interrupt would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    # These download some 300 MB, so they run only where they are asked for by name.
    if "archives" not in config.getoption("markexpr"):
        for item in items:
            if item.get_closest_marker("archives"):
                item.add_marker(pytest.mark.skip(reason="run with -m archives"))


@pytest.fixture(scope="session")
def checkpoints() -> Path:
    """The sample ModelOpt exports: grouped, shared-bf16, ungrouped-2-shared."""
    return Path(__file__).parent / "data" / "checkpoints"


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests never touch the user's cache."""
    monkeypatch.setenv("FLASHINFER_COMPAT_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "cache"))
