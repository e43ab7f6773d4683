"""The program as a fixture."""

from pathlib import Path

import pytest
from cli_support import Cairn


@pytest.fixture
def cairn(tmp_path: Path) -> Cairn:
    return Cairn(tmp_path)
