"""What tests of the operations start from."""

from __future__ import annotations

from pathlib import Path

import pytest
import stock_ranks


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A training state that stock torch saved on four ranks."""
    return stock_ranks.saved(tmp_path_factory.mktemp("stock") / "step-00000012")
