"""A fleet's /metrics, read."""

from __future__ import annotations

import urllib.request

from prometheus_client.parser import text_string_to_metric_families


class Metrics:
    """One scrape."""

    def __init__(self, url: str, key: str) -> None:
        address = url.removesuffix("/v1") + "/metrics"
        request = urllib.request.Request(address, headers={"Authorization": f"Bearer {key}"})
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(request, timeout=10) as response:
            families = text_string_to_metric_families(response.read().decode())
            self._samples = [sample for family in families for sample in family.samples]

    def all(self, name: str, **labels: str) -> list[float]:
        """The samples of a name (a counter's ends in _total) with these labels, one a rank."""
        return [
            sample.value for sample in self._samples if sample.name == name and labels.items() <= sample.labels.items()
        ]

    def sum(self, name: str, **labels: str) -> float:
        """Over all ranks."""
        values = self.all(name, **labels)
        assert values, f"no metric {name} {labels}"
        return sum(values)
