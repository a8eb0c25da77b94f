"""What steps cost, in each setting."""

import json

from trioengine.cli.bench.core import CoreBench, CoreFigures, CoreReport

REPORT = CoreReport(
    256, 10, [CoreFigures(prefix_caching=True, async_scheduling=False, mean_us=100.04, p50_us=99.0, p99_us=150.0)]
)


def test_programs_get_one_object() -> None:
    assert json.loads(REPORT.to_json()) == {
        "num_seqs": 256,
        "num_steps": 10,
        "settings": [
            {"prefix_caching": True, "async_scheduling": False, "mean_us": 100.0, "p50_us": 99.0, "p99_us": 150.0}
        ],
    }


def test_people_get_a_line_for_each_setting() -> None:
    lines = REPORT.to_table().splitlines()
    assert len(lines) == 3
    assert lines[2].split() == ["on", "off", "100.0", "99.0", "150.0"]


async def test_every_setting_is_measured() -> None:
    """With a core that has to keep its promises for so many requests and steps."""
    report = await CoreBench(num_seqs=3, num_steps=20).run()
    settings = [(each.prefix_caching, each.async_scheduling) for each in report.settings]
    assert settings == [(False, False), (False, True), (True, False), (True, True)]
    assert all(0 <= each.p50_us <= each.p99_us for each in report.settings)
