"""What strangers can cause at will is logged a few times, then counted."""

import logging

import pytest

from pegahpc.quiet_log import RareWarning


def test_of_a_flood_a_few_lines_and_then_a_count_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    warn = RareWarning(logging.getLogger("test"), most=3, every_s=0.2)
    for number in range(1000):
        warn("refused %d", number)
    assert [record.getMessage() for record in caplog.records] == ["refused 0", "refused 1", "refused 2"]
    warn._since_s -= 1  # the window is over
    warn("refused %d", 1000)
    said = [record.getMessage() for record in caplog.records[3:]]
    assert said == ["997 more like the last one were not logged", "refused 1000"]
