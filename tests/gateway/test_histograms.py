"""Our histogram is exposed as prometheus_client's own is."""

import math
import random

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client import Histogram as OfficialHistogram

from pegahpc.gateway.histograms import Histogram

BOUNDS = (0.001, 0.01, 0.25, 1, 2.5, 80)


def text_of(registry: CollectorRegistry) -> list[str]:
    lines = generate_latest(registry).decode().splitlines()
    return [line for line in lines if "_created" not in line]  # when a child was made: nobody reads it


def test_what_is_scraped_is_what_the_official_histogram_gives() -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    made = Histogram("vllm:x_seconds", "What.", ("model_name", "engine"), bounds=BOUNDS)
    ours.register(made)
    official = OfficialHistogram("vllm:x_seconds", "What.", ("model_name", "engine"), buckets=BOUNDS, registry=theirs)
    draw = random.Random(1)
    values = [*BOUNDS, 0.0, -1.0, 81, math.nextafter(0.25, 1), *(draw.expovariate(1) for _ in range(200))]
    for engine in ("0", "1"):
        for value in values if engine == "0" else []:
            made.labels("m", engine).observe(value)
            official.labels("m", engine).observe(value)
        made.labels("m", engine)
        official.labels("m", engine)
    assert text_of(ours) == text_of(theirs)
    assert any('le="+Inf"' in line and line.endswith(f" {len(values)}.0") for line in text_of(ours))


def test_a_child_is_the_same_each_time() -> None:
    made = Histogram("x", "What.", ("engine",), bounds=BOUNDS)
    assert made.labels("0") is made.labels("0") is not made.labels("1")
