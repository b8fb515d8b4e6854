"""What the kernels' tests share."""

from __future__ import annotations

# isort: off
import tests.interpreter  # noqa: F401, before Triton is imported

# isort: on
import pytest
import torch


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Where the kernels run."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
