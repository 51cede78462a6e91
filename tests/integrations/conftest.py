"""Checks the set-up before any test: with a broken torchvision every test of a transformers model
fails, with an error that does not say why."""

from __future__ import annotations

import pytest
import vision


@pytest.fixture(autouse=True, scope="session")
def _importable_torchvision() -> None:
    if error := vision.why_not_importable():
        reason = (
            f"torchvision cannot be imported, so transformers cannot either: {error}\n"
            f"It was built for another torch. Uninstall it, or: {vision.HOW}"
        )
        pytest.fail(reason, pytrace=False)
