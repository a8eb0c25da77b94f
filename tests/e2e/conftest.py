"""One server with the real default model for all tests of a module that leave it running.

Not for the whole session: other tests count the processes that are left.
"""

from collections.abc import Iterator

import pytest

from trioengine.testing.served_process import ServedProcess, served_process


@pytest.fixture(scope="module")
def server() -> Iterator[ServedProcess]:
    pytest.importorskip("torch")
    with served_process() as served:
        yield served
