"""What would wait for a GPU is found in work for the device that pretends to be one."""

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from trioengine.testing.fake_device import FakeDevice  # noqa: E402
from trioengine.testing.host_reads import NothingIsRead  # noqa: E402

X = torch.arange(6).view(2, 3)


@pytest.mark.parametrize(
    "read",
    [
        lambda: X.tolist(),
        lambda: X[0, 1].item(),
        lambda: bool((X > 1).all()),
        lambda: [1, 2, 3][X[0, 1]],
        lambda: X[X > 2],
        lambda: X.clone().__setitem__(X > 2, 0),
        lambda: X.nonzero(),
        lambda: torch.unique(X),
        lambda: X.cpu(),
    ],
)
def test_reading_is_an_error(read: Callable[[], Any]) -> None:
    device = FakeDevice()
    device.run(read)
    with pytest.raises(AssertionError, match="The host would wait for the device"):
        device.synchronize()


def test_computing_is_none() -> None:
    """And afterwards anybody may read. What references do, the runner's tests have."""
    index, mask = torch.tensor([1, 0]), X > 2
    with NothingIsRead():
        chosen = torch.where(mask, X, -X)[index, 1:].sum(1)
    assert chosen.tolist() == [9, -3]
