"""One server with the real default model for all end-to-end tests that leave it running."""

from collections.abc import Iterator

import pytest

from trioengine.testing.served_process import ServedProcess, served_process


@pytest.fixture(scope="session")
def server() -> Iterator[ServedProcess]:
    pytest.importorskip("torch")
    with served_process() as served:
        yield served
