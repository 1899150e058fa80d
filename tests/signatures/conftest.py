from __future__ import annotations

import pytest


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    # These download some 180 MB, so they run only where they are asked for by name.
    if "archives" not in config.getoption("markexpr"):
        for item in items:
            if item.get_closest_marker("archives"):
                item.add_marker(pytest.mark.skip(reason="run with -m archives"))
