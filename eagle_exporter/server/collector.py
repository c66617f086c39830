"""Registry snapshots as Prometheus metric families."""

from __future__ import annotations

import platform
from functools import lru_cache
from itertools import accumulate
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric as PrometheusMetric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample
from prometheus_client.utils import floatToGoString

from eagle_exporter import __version__, catalogue
from eagle_exporter.catalogue import COMMON_LABELS, Kind, Metric, Source
from eagle_exporter.server.view import Life, Liveness, RankView, RegistryView, View

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

    from eagle_exporter.registry.reader import Family

_SUFFIXES = {
    Kind.COUNTER: ("",),
    Kind.GAUGE: ("",),
    Kind.INFO: ("",),
    Kind.HISTOGRAM: ("", "_bucket", "_count", "_sum"),
}
_STAYS_AFTER_DEATH = (Kind.COUNTER, Kind.HISTOGRAM)


class Labels(dict[str, str]):
    """Labels of a sample, and their text as a page has it.

    Attributes:
        text: ``{name="value",...}``, names sorted, values escaped.
    """

    __slots__ = ("text",)

    def __init__(self, labels: Mapping[str, str]) -> None:
        """Take the labels, which must not change any more."""
        super().__init__(labels)
        self.text = "{" + ",".join(f'{name}="{_escape(self[name])}"' for name in sorted(self)) + "}"


def _escape(value: str) -> str:
    return value.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


_LabelCache = dict[tuple[str, tuple[str, ...]], list[Labels]]


class RegistryCollector(Collector):
    """Collects every rank of a registry; several ranks share one family."""

    def __init__(self, view: RegistryView) -> None:
        """Collect what `view` shows."""
        self._view = view
        # The labels of a series never change during the life of a file, and building them costs more than
        # everything else here.
        self._labels: dict[Life, _LabelCache] = {}

    def describe(self) -> Iterator[PrometheusMetric]:
        """Yield the families without samples, so that registering reads no file."""
        for metric in catalogue.METRICS:
            yield _family(metric)

    def collect(self, names: Collection[str] | None = None) -> Iterator[PrometheusMetric]:
        """Yield the families.

        Args:
            names: Only families with one of these names; the name of a sample (``..._bucket``) stands for its
                family.
        """
        wanted = [metric for metric in catalogue.METRICS if names is None or _is_named(metric, names)]
        try:
            view = self._view.read()
        except OSError:
            view = None
        ranks = view.ranks if view is not None else ()
        caches = {rank.life: self._labels.get(rank.life, {}) for rank in ranks}
        families = [
            (rank, caches[rank.life], {family.name: family for family in rank.snapshot.families}) for rank in ranks
        ]
        for metric in wanted:
            result = _family(metric)
            if metric.source is Source.RANK:
                for rank, cache, by_name in families:
                    family = by_name.get(metric.name)
                    if family is not None and _is_shown(metric, rank.liveness):
                        _add_samples(result, metric, family, rank, cache)
            elif metric.name == "eagle_rank_up":
                for rank, cache, _ in families:
                    (labels,) = cache.setdefault((metric.name, ()), [Labels(rank.snapshot.labels)])
                    result.samples.append(Sample(metric.name, labels, float(rank.liveness is Liveness.ALIVE)))
            else:
                result.samples.extend(_own_samples(metric.name, view))
            if result.samples:
                yield result
        self._labels = caches


class OneRead:
    """What the encoders of prometheus_client take for a registry: some families of one read."""

    def __init__(self, collector: RegistryCollector, names: Collection[str] | None) -> None:
        """Collect from `collector`, only the families in `names` when given."""
        self._collector = collector
        self._names = names

    def collect(self) -> Iterator[PrometheusMetric]:
        """Yield the families."""
        return self._collector.collect(self._names)


def make_registry(view: RegistryView) -> CollectorRegistry:
    """Return a registry of its own with the collector in it, for use in another application."""
    registry = CollectorRegistry()
    registry.register(RegistryCollector(view))
    return registry


def _is_named(metric: Metric, names: Collection[str]) -> bool:
    return any(metric.name + suffix in names for suffix in _SUFFIXES[metric.kind])


def _is_shown(metric: Metric, liveness: Liveness) -> bool:
    return liveness is Liveness.ALIVE or (liveness is Liveness.ENDED and metric.kind in _STAYS_AFTER_DEATH)


def _family(metric: Metric) -> PrometheusMetric:
    # OpenMetrics names a family without the suffix of its samples.
    name = metric.name
    if metric.kind is Kind.COUNTER:
        name = name.removesuffix("_total")
    elif metric.kind is Kind.INFO:
        name = name.removesuffix("_info")
    return PrometheusMetric(name, metric.help, metric.kind.value)


def _add_samples(result: PrometheusMetric, metric: Metric, family: Family, rank: RankView, cache: _LabelCache) -> None:
    samples = result.samples
    for series in family.series:
        key = (family.name, series.labels)
        labels = cache.get(key)
        if labels is None:
            labels = cache[key] = _labels_of(family, rank.snapshot.labels, series.labels)
        if metric.kind is not Kind.HISTOGRAM:
            samples.append(Sample(metric.name, labels[0], series.value))
            continue
        count = 0
        for bucket_labels, count in zip(labels[1:], accumulate(series.buckets), strict=True):
            samples.append(Sample(f"{metric.name}_bucket", bucket_labels, float(count)))
        samples.append(Sample(f"{metric.name}_count", labels[0], float(count)))
        samples.append(Sample(f"{metric.name}_sum", labels[0], series.value))


def _labels_of(family: Family, common: dict[str, str], values: tuple[str, ...]) -> list[Labels]:
    """Return the labels of a series; for a histogram followed by those of each bucket."""
    base = {name: common[name] for name in COMMON_LABELS}
    base.update(zip(family.labels, values, strict=True))
    if family.kind != Kind.HISTOGRAM.value:
        return [Labels(base)]
    bounds = (*family.bounds, float("inf"))
    return [Labels(base), *(Labels({**base, "le": number_text(bound)}) for bound in bounds)]


@lru_cache(maxsize=4096)
def number_text(value: float) -> str:
    """Return a number as a page has it."""
    return str(floatToGoString(value))  # type: ignore[no-untyped-call]


def _own_samples(name: str, view: View | None) -> list[Sample]:
    """Return the samples of the exporter itself; `view` is None when the registry could not be read."""
    if name == "eagle_registry_files_skipped":
        skipped = view.skipped if view is not None else dict.fromkeys(catalogue.SKIPPED_REASONS, 0)
        return [Sample(name, Labels({"reason": reason}), float(count)) for reason, count in skipped.items()]
    if name == "eagle_scrape_collector_duration_seconds":
        return [] if view is None else [Sample(name, Labels({"collector": "registry"}), view.duration)]
    if name == "eagle_scrape_collector_success":
        return [Sample(name, Labels({"collector": "registry"}), float(view is not None))]
    if name == "eagle_exporter_build_info":
        labels = {
            "version": __version__,
            "catalogue_version": catalogue.CATALOGUE_VERSION,
            "python_version": platform.python_version(),
        }
        return [Sample(name, Labels(labels), 1.0)]
    raise KeyError(name)
