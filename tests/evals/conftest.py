"""Fixtures of the long-context tasks."""

from pathlib import Path

import pytest

from tests.evals.tiny import small_haystack


@pytest.fixture(scope="session")
def haystack_file(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The small haystack as a file."""
    path: Path = tmp_path_factory.mktemp("haystack") / "text.txt"
    path.write_text(small_haystack(), encoding="utf-8")
    return str(path)
