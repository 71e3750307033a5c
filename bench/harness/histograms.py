"""Latencies: HdrHistogram from 1 ns to 60 s with three digits, and its log files (`.hlog`)."""

from __future__ import annotations

import time
from array import array
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final

from cometmq.bench.extra import BenchError, load

LOWEST_NS: Final = 1
HIGHEST_NS: Final = 60_000_000_000
DIGITS: Final = 3
PERCENTILES: Final = (50.0, 90.0, 99.0, 99.9, 99.99)
_SUB_BUCKET_BITS: Final = 11  # 2048 sub-buckets are what three digits take

Histogram = Any  # hdrh has no types


def new() -> Histogram:
    return load("hdrh.histogram").HdrHistogram(LOWEST_NS, HIGHEST_NS, DIGITS)


def of(values_ns: Sequence[int] | array[int]) -> Histogram:
    """A histogram of raw values. What is outside counts as the nearest it can hold."""
    histogram = new()
    add(histogram, values_ns)
    return histogram


def add(histogram: Histogram, values_ns: Sequence[int] | array[int]) -> None:
    """Record many values: those of one bucket in one call, since hdrh takes a microsecond each."""
    if not len(values_ns):
        return
    numpy = load("numpy")
    values = numpy.clip(numpy.asarray(values_ns, dtype=numpy.int64), LOWEST_NS, HIGHEST_NS)
    _, exponents = numpy.frexp(values.astype(numpy.float64))  # the number of bits of each
    shifts = numpy.maximum(0, exponents - _SUB_BUCKET_BITS)
    found, counts = numpy.unique((values >> shifts) << shifts, return_counts=True)
    for value, count in zip(found.tolist(), counts.tolist(), strict=True):
        histogram.record_value(value, count)


def merged(histograms: Iterable[Histogram]) -> Histogram:
    total = new()
    for each in histograms:
        total.add(each)
    return total


def write(path: Path, *parts: Histogram, seconds: float = 0.0) -> Path:
    """Histograms of `seconds` that end now, in equal intervals, as HistogramLogWriter does it."""
    log = load("hdrh.log")
    step = seconds / max(1, len(parts))
    begin = time.time() - seconds
    with path.open("w", encoding="ascii") as file:
        writer = log.HistogramLogWriter(file)
        writer.output_log_format_version()
        writer.output_comment("[Values: nanoseconds]")
        writer.output_legend()
        for number, part in enumerate(parts):
            writer.output_interval_histogram(
                part, begin + number * step, begin + (number + 1) * step
            )
    return path


def read(path: Path) -> Histogram:
    """All intervals of a log, together. Raises BenchError for a file that is none."""
    return merged(intervals(path))


def intervals(path: Path) -> list[Histogram]:
    log = load("hdrh.log")
    found = []
    try:
        reader = log.HistogramLogReader(str(path), new())
        try:
            while (interval := reader.get_next_interval_histogram()) is not None:
                found.append(interval)
        finally:
            reader.input_file.close()
    except OSError as error:
        raise BenchError(f"{path}: {error.strerror}") from None
    except Exception as error:  # hdrh raises what its parts raise
        raise BenchError(f"{path}: not a histogram log: {error}") from None
    if not found:
        raise BenchError(f"{path}: no histogram in it")
    return found


def summary(histogram: Histogram) -> dict[str, float | int]:
    """Percentiles in microseconds, and how many samples they are of."""
    count = histogram.get_total_count()
    if not count:
        return {"count": 0}
    found: dict[str, float | int] = {
        f"p{percentile:g}": histogram.get_value_at_percentile(percentile) / 1000
        for percentile in PERCENTILES
    }
    found["max"] = histogram.get_max_value() / 1000
    found["mean"] = histogram.get_mean_value() / 1000
    found["count"] = count
    return found


def curve(histogram: Histogram) -> list[tuple[float, float]]:
    """(microseconds, share of the samples above), for a plot of the distribution."""
    total = histogram.get_total_count()
    points, below = [], 0
    for item in histogram.get_recorded_iterator():
        below += item.count_added_in_this_iter_step
        points.append((item.value_iterated_to / 1000, 1 - below / total))
    return points
