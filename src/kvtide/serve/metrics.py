"""What Prometheus scrapes: one family a figure, in base units, counters by cause."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Final

from prometheus_client import CollectorRegistry
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from kvtide import __version__
from kvtide.observe.snapshot import DeviceStatus, InstanceStatus
from kvtide.observe.tallies import Histogram
from kvtide.observe.watcher import Sample

__all__ = ["registry_of"]

_STATES: Final = ("starting", "running", "sleeping", "waiting", "dead")
# A kind of event, the counter of its times, the counter of its bytes, and what they say.
_COUNTERS: Final = (
    ("grow", "kvtide_grows", "kvtide_grown_bytes", "growths of a KV cache"),
    ("shrink", "kvtide_shrinks", "kvtide_shrunk_bytes", "times that memory was given back"),
    ("split", "kvtide_splits", "kvtide_split_bytes", "rounds in which extents were split"),
    ("refuse", "kvtide_refusals", "kvtide_refused_bytes", "growths that were refused"),
    ("miss", "kvtide_misses", "kvtide_missed_bytes", "needs of a step that could not be met"),
    ("wait", "kvtide_waits", "kvtide_waited_for_bytes", "waits for memory that others hold"),
    (
        "evict",
        "kvtide_evictions",
        "kvtide_evicted_bytes",
        "blocks that the prefix cache gave up",
    ),
    ("quarantine", "kvtide_quarantines", "kvtide_quarantined_bytes", "memory lost to its device"),
    ("preempt", "kvtide_preemptions", "kvtide_preempted_bytes", "preemptions to give memory back"),
)
# Bounds are 2^n microseconds.
_CALL_BOUNDS: Final = range(16)
_WAIT_BOUNDS: Final = range(10, 30)

_DEVICE_GAUGES: Final[tuple[tuple[str, str, Callable[[DeviceStatus], int]], ...]] = (
    ("kvtide_device_size_bytes", "Memory of the device.", lambda d: d.total_bytes),
    ("kvtide_device_margin_bytes", "What is never lent.", lambda d: d.margin_bytes),
    ("kvtide_device_budget_bytes", "What all charges may sum to.", lambda d: d.budget_bytes),
    ("kvtide_device_charged_bytes", "What all instances answer for.", lambda d: d.charged_bytes),
    ("kvtide_device_free_bytes", "What could be granted now.", lambda d: d.free_bytes),
    ("kvtide_device_lendable_bytes", "What idle caches would give.", lambda d: d.lendable_bytes),
    ("kvtide_device_outside_bytes", "Taken by all but KV caches.", lambda d: d.outside_bytes),
)
_INSTANCE_GAUGES: Final[tuple[tuple[str, str, Callable[[InstanceStatus], int | None]], ...]] = (
    ("kvtide_instance_charged_bytes", "What it answers for.", lambda i: i.charged_bytes),
    ("kvtide_instance_limit_bytes", "Its ceiling, where it has one.", lambda i: i.limit_bytes),
    ("kvtide_instance_waiting_bytes", "What it lacks now.", lambda i: i.waiting_bytes),
    ("kvtide_instance_min_bytes", "What it can always get back.", lambda i: i.min_bytes),
    ("kvtide_instance_backed_min_bytes", "As the budget backs it.", lambda i: i.backed_min_bytes),
    ("kvtide_instance_headroom_bytes", "What it wants left free.", lambda i: i.headroom_bytes),
    ("kvtide_instance_priority", "Who has less gives way first.", lambda i: i.priority),
    ("kvtide_instance_beside_bytes", "What it holds beside caches.", lambda i: i.non_kv_bytes),
    ("kvtide_instance_loading_bytes", "What it will yet take so.", lambda i: i.loading_bytes),
)


def registry_of(sample: Callable[[], Sample]) -> CollectorRegistry:
    """A registry whose every scrape shows a sample."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Samples(sample))
    return registry


class _Samples(Collector):
    def __init__(self, sample: Callable[[], Sample]) -> None:
        self._sample = sample

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterator[Metric]:
        sample = self._sample()
        yield InfoMetricFamily("kvtide_build", "The version.", {"version": __version__})
        unread = GaugeMetricFamily("kvtide_unreadable_ledgers", "Ledgers that cannot be read.")
        unread.add_metric([], len(sample.troubles))
        yield unread
        yield from _device_gauges(sample)
        yield from _instance_gauges(sample)
        yield from _counters(sample)
        yield from _histograms(sample)


def _device_gauges(sample: Sample) -> Iterator[Metric]:
    for name, text, figure in _DEVICE_GAUGES:
        family = GaugeMetricFamily(name, text, labels=["device"])
        for device in sample.status.devices:
            family.add_metric([device.device], figure(device))
        yield family


def _instance_gauges(sample: Sample) -> Iterator[Metric]:
    found = [(d.device, i) for d in sample.status.devices for i in d.instances]
    labels = ["device", "instance"]
    for name, text, figure in _INSTANCE_GAUGES:
        family = GaugeMetricFamily(name, text, labels=labels)
        for device, instance in found:
            value = figure(instance)
            if value is not None:
                family.add_metric([device, instance.name], value)
        yield family
    memory = GaugeMetricFamily(
        "kvtide_instance_memory_bytes", "Mapped memory, by what it does.", labels=[*labels, "use"]
    )
    state = GaugeMetricFamily(
        "kvtide_instance_state", "1 for the state that it is in.", labels=[*labels, "state"]
    )
    blocks = GaugeMetricFamily(
        "kvtide_instance_blocks", "Blocks of its largest rank, by what they do.",
        labels=[*labels, "use"],
    )  # fmt: skip
    for device, instance in found:
        of = [device, instance.name]
        for use in ("used", "cached", "idle", "quarantined"):
            memory.add_metric([*of, use], getattr(instance, f"{use}_bytes"))
        for name in _STATES:
            state.add_metric([*of, name], float(instance.state == name))
        for use in ("total", "mapped", "used", "cached"):
            count = max((getattr(p, f"blocks_{use}") for p in instance.pools), default=0)
            blocks.add_metric([*of, use], count)
    yield from (memory, state, blocks)


def _counters(sample: Sample) -> Iterator[Metric]:
    labels = ["device", "instance", "cause"]
    # Summed over an instance's processes.
    sums: dict[tuple[str, str, str, str], list[int]] = {}
    for counter in sample.counters:
        for (kind, cause), counted in counter.reading.counts.items():
            entry = sums.setdefault((kind, counter.device, counter.instance, cause), [0, 0])
            entry[0] += counted.times
            entry[1] += counted.size_bytes
    for kind, times_name, bytes_name, text in _COUNTERS:
        times = CounterMetricFamily(times_name, f"How many {text}.", labels=labels)
        size = CounterMetricFamily(bytes_name, f"Bytes of {text}.", labels=labels)
        for (of_kind, *of), (count, size_bytes) in sorted(sums.items()):
            if of_kind == kind:
                times.add_metric(of, count)
                size.add_metric(of, size_bytes)
        yield from (times, size)


def _histograms(sample: Sample) -> Iterator[Metric]:
    calls = HistogramMetricFamily(
        "kvtide_device_call_duration_seconds",
        "Time in calls of the device.",
        labels=["device", "instance", "rank", "call"],
    )
    waits = HistogramMetricFamily(
        "kvtide_wait_duration_seconds",
        "How long memory was waited for, at the start and while serving.",
        labels=["device", "instance", "phase"],
    )
    waited: dict[tuple[str, str, str], list[Histogram]] = {}
    for counter in sample.counters:
        of = (counter.device, counter.instance)
        times: Mapping[str, Histogram] = counter.reading.times
        for call, histogram in sorted(times.items()):
            if call == "wait":
                phase = "serving" if counter.rank is None else "start"
                waited.setdefault((*of, phase), []).append(histogram)
            else:
                buckets, sum_seconds = _cumulated([histogram], _CALL_BOUNDS)
                calls.add_metric([*of, str(counter.rank or 0), call], buckets, sum_seconds)
    for labels, histograms in sorted(waited.items()):
        waits.add_metric(labels, *_cumulated(histograms, _WAIT_BOUNDS))
    yield from (calls, waits)


def _cumulated(histograms: list[Histogram], bounds: range) -> tuple[list[tuple[str, float]], float]:
    buckets: list[tuple[str, float]] = [
        (repr(2**bound / 1e6), sum(sum(h.buckets[: bound + 1]) for h in histograms))
        for bound in bounds
    ]
    buckets.append(("+Inf", sum(h.total for h in histograms)))
    return buckets, sum(h.sum_ns for h in histograms) / 1e9
