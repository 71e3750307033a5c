"""Pictures of a bundle: throughput against message size, and distributions of latency."""

from __future__ import annotations

import math
from collections import defaultdict
from pathlib import Path
from typing import Any, Final

from cometmq.bench import histograms
from cometmq.bench.extra import load
from cometmq.bench.results import CONTROL, Group, Results, grouped

COLOURS: Final = {
    "cometmq": "#c1121f", "rocketmq": "#e08e00", "rocketmq_store": "#e08e00",
    "kafka": "#333333", "redis": "#7b4fb5",
    "nats": "#1f77b4", CONTROL: "#8a8a8a",
}  # fmt: skip
DASHES: Final = ("-", "--", ":", "-.")
TICKS: Final = (0.5, 0.9, 0.99, 0.999, 0.9999)
KINDS: Final = ("end_to_end", "response", "service")  # what a case's plot shows: the first it has


def draw_all(results: Results, logs: Path, folder: Path) -> list[Path]:
    """Write the PNGs that these results are enough for; their paths."""
    pyplot = _pyplot()
    folder.mkdir(parents=True, exist_ok=True)
    groups = grouped(results.lines)
    found = []
    for case, of_case in _by(groups, lambda each: (each.workload, each.case)).items():
        sizes = {each.size for each in of_case}
        if case[0] == "sizes" and len(sizes) > 1:
            found.append(_sizes(pyplot, case[1], of_case, folder))
    latencies = [each for each in groups if each.good and any(each.good[0].hlogs.values())]
    controls = [each for each in latencies if each.system == CONTROL]
    for key, of_case in _by(latencies, lambda e: (e.workload, e.case, e.size)).items():
        if key[0] != CONTROL:
            beside = controls if key[1] in ("one in flight", "1 in flight") else []
            picture = _distribution(pyplot, key, [*of_case, *_fitting(beside, key)], logs, folder)
            found += [picture] if picture else []
    return found


def _fitting(controls: list[Group], key: tuple[str, str, int]) -> list[Group]:
    wanted = "pwrite and fdatasync" if key[0] == "sync-flush" else "pyzmq echo, one in flight"
    return [
        each._replace(lines=lines)
        for each in controls
        if each.case == wanted
        and each.size == key[2]
        and (lines := [line for line in each.lines if line.beside == key[0]])
    ]


def _by(groups: list[Group], key: Any) -> dict[Any, list[Group]]:
    found: dict[Any, list[Group]] = defaultdict(list)
    for group in groups:
        found[key(group)].append(group)
    return found


def _pyplot() -> Any:
    load("matplotlib").use("Agg")
    pyplot = load("matplotlib.pyplot")
    pyplot.rcParams.update({
        "figure.figsize": (8, 4.8), "figure.dpi": 120, "savefig.bbox": "tight", "font.size": 10,
        "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True,
        "grid.alpha": 0.3, "legend.frameon": False,
    })  # fmt: skip
    return pyplot


def _style(group: Group, clients: list[str]) -> dict[str, Any]:
    colour = COLOURS.get(group.system, "#2a9d8f")
    number = clients.index(group.client) if group.client in clients else 0
    return {"color": colour, "linestyle": DASHES[number % len(DASHES)],
            "label": f"{group.system}, {group.client}" if group.system != CONTROL else group.case,
            "linewidth": 2 if group.system == "cometmq" else 1.4}  # fmt: skip


def _clients(groups: list[Group], system: str) -> list[str]:
    return sorted({each.client for each in groups if each.system == system})


def _sizes(pyplot: Any, case: str, groups: list[Group], folder: Path) -> Path:
    """Messages and megabytes a second, against the size; bars reach from minimum to maximum."""
    figure, axes = pyplot.subplots(1, 2, figsize=(11, 4.6))
    for axis, metric, unit in ((axes[0], "messages_per_s", "messages/s"),
                               (axes[1], "mb_per_s", "MB/s")):  # fmt: skip
        for members in _by(groups, lambda each: (each.system, each.client)).values():
            points = sorted((each.size, each.spread(metric)) for each in members if each.good)
            known = [(size, spread) for size, spread in points if spread]
            if known:
                axis.errorbar(
                    [size for size, _ in known],
                    [spread.median for _, spread in known],
                    yerr=[[spread.median - spread.low for _, spread in known],
                          [spread.high - spread.median for _, spread in known]],
                    marker="o", markersize=4, capsize=3,
                    **_style(members[0], _clients(groups, members[0].system)),
                )  # fmt: skip
        axis.set(xscale="log", yscale="log", xlabel="bytes of a body", ylabel=unit)
        ticks = sorted({each.size for each in groups})
        axis.set_xticks(ticks, [_bytes(each) for each in ticks])
        axis.tick_params(axis="x", which="minor", bottom=False)
    axes[0].legend()
    figure.suptitle(f"Acknowledged sends, {case}: median of the rounds, minimum to maximum")
    return _save(pyplot, figure, folder / f"sizes-{_name(case)}.png")


def _distribution(
    pyplot: Any, key: tuple[str, str, int], groups: list[Group], logs: Path, folder: Path
) -> Path | None:
    """Latency against the share of messages that were as quick, with all rounds merged."""
    figure, axis = pyplot.subplots()
    kinds = set()
    for group in groups:
        kind = next((each for each in KINDS if group.good[0].hlogs.get(each)), None)
        paths = [logs / path for line in group.good for path in line.hlogs.get(kind or "", [])]
        paths = [path for path in paths if path.exists()]
        if not paths or kind is None:
            continue
        kinds.add(kind)
        curve = histograms.curve(histograms.merged(map(histograms.read, paths)))
        axis.plot(
            [_nines(1 - above) for _, above in curve], [us for us, _ in curve],
            drawstyle="steps-post", **_style(group, _clients(groups, group.system)),
        )  # fmt: skip
    if not kinds:
        pyplot.close(figure)
        return None
    workload, case, size = key
    axis.set(yscale="log", xlabel="share of the messages that were as quick",
             ylabel=f"{' or '.join(sorted(kinds)).replace('_', ' ')} latency, us",
             title=f"{workload}: {case}, {_bytes(size)}")  # fmt: skip
    axis.set_xticks([_nines(each) for each in TICKS], [f"{each * 100:g} %" for each in TICKS])
    axis.set_xlim(0, _nines(0.99999))
    axis.legend()
    return _save(pyplot, figure, folder / f"latency-{_name(workload)}-{_name(case)}-{size}.png")


def _nines(share: float) -> float:
    """0 for none, 1 for 90 %, 2 for 99 %: the tail gets the room."""
    return -math.log10(max(1e-7, 1 - share))


def _bytes(count: int) -> str:
    return f"{count} B" if count < 1024 else f"{count / 1024:g} KiB"


def _name(text: str) -> str:
    return "".join(each if each.isalnum() else "-" for each in text).strip("-")


def _save(pyplot: Any, figure: Any, path: Path) -> Path:
    figure.savefig(path)
    pyplot.close(figure)
    return path
