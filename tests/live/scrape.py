"""Reads a metrics page as a dashboard does."""

import urllib.request

from prometheus_client.parser import text_string_to_metric_families

TIMEOUT_S = 10.0


class Scrape:
    """One page at one moment. A sample that is not there yet counts as 0, as it does in a dashboard's `sum`."""

    def __init__(self, url: str) -> None:
        with urllib.request.urlopen(f"{url}/metrics", timeout=TIMEOUT_S) as answer:  # noqa: S310  # our own, on loopback
            page = answer.read().decode()
        self._samples = [sample for family in text_string_to_metric_families(page) for sample in family.samples]

    def total(self, name: str, **labels: str) -> float:
        """The sum of all samples of this name that have these labels."""
        return sum(sample.value for sample in self._samples if sample.name == name and labels.items() <= sample.labels.items())
