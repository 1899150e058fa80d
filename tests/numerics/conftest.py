from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import settings

# The first call into PyTorch can take a second.
settings.register_profile("numerics", settings.get_profile(settings.get_current_profile_name()), deadline=None)
settings.load_profile("numerics")


@pytest.fixture(scope="session")
def checkpoints() -> Path:
    return Path(__file__).parents[1] / "data" / "checkpoints"
