"""The sample layer, and one thread for its small matrices."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from launches import Layer

# pytest reads this file without torch too, where the tests beside it are left out.


@pytest.fixture(scope="module")
def layer() -> Layer:
    from launches import Layer

    return Layer(Path(__file__).parents[1] / "data" / "checkpoints" / "grouped")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """The matrices are small; threads would only wait for each other."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
