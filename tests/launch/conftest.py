"""The cluster of this folder's tests, started once for all of them."""

from collections.abc import Iterator

import pytest

from tests.launch.lab import TOOLS, Lab, need


@pytest.fixture(scope="session")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    need(*TOOLS, root=True)
    with Lab(tmp_path_factory.mktemp("lab") / "lab", 3) as lab:
        yield lab
