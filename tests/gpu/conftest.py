"""Skipped, visibly, without a device: ``pytest tests/gpu -n 0`` on one device runs all in a few minutes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[Any]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if HERE in Path(item.path).parents:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
