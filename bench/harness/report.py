"""The report of a bundle: tables in Markdown, plots, and one HTML page that needs no other file."""

from __future__ import annotations

import base64
import html
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from cometmq.bench import targets
from cometmq.bench.plots import draw_all
from cometmq.bench.results import Results, rows

RESULTS: Final = "results.json"
LOGS: Final = "raw"
PLOTS: Final = "plots"
OMB_FIELDS: Final = (
    "workload", "driver", "publishRateMean", "consumeRateMean", "backlogMax",
    "aggregatedPublishLatency50pct", "aggregatedPublishLatency99pct",
    "aggregatedPublishLatency999pct", "aggregatedEndToEndLatency50pct",
    "aggregatedEndToEndLatency99pct", "aggregatedEndToEndLatency999pct", "checked",
)  # fmt: skip
METHOD: Final = """\
Open loop: latencies count from the intended send time. Throughput and latency are separate runs;
systems take turns within a round, each on a store of its own; medians over the rounds, with minimum
and maximum; CPU seconds are those of servers and clients for a million messages. A ratio above 1
says that CometMQ is better, whatever is measured. Every run ended with a check of count, order and
CRC of all that was acknowledged. A busy machine is one where other processes used more than 5 % of
a core."""


def write_report(results: Results, folder: Path) -> Path:
    """Write results.json, tables.md, plots/ and report.html; the page's path."""
    text = msgspec.json.format(msgspec.json.encode(results))
    (folder / RESULTS).write_bytes(text + b"\n")
    plots = draw_all(results, folder / LOGS, folder / PLOTS)
    (folder / "tables.md").write_text(markdown(results))
    page = folder / "report.html"
    page.write_text(html_page(results, plots))
    return page


def sections(results: Results) -> list[tuple[str, list[dict[str, Any]]]]:
    """Title and rows of each table; empty ones are left out."""
    found: list[tuple[str, list[dict[str, Any]]]] = [
        ("Against floor and aim", list(targets.table(results))),
        ("Every case", rows(results.lines)),
        ("Latencies, medians over the rounds, us", latency_rows(results)),
        ("OpenMessaging Benchmark workloads, ms", omb_rows(results.omb)),
        ("Failed checks", [{"what": fault} for fault in results.faults]),
        ("Not measured", [{"system": k, "why": v} for k, v in results.missing.items()]),
        ("Machine", [_pair(*item) for item in results.machine.items()]),
        ("Run", [_pair(*item) for item in results.run.items()]),
        ("Versions", [_pair(*item) for item in results.versions.items()]),
    ]
    return [(title, content) for title, content in found if content]


def _pair(name: str, value: object) -> dict[str, Any]:
    return {"name": name.replace("_", " "), "value": value}


def latency_rows(results: Results) -> list[dict[str, Any]]:
    from cometmq.bench.results import grouped, rounded

    found = []
    metrics = ("p50_us", "p90_us", "p99_us", "p99.9_us", "p99.99_us", "max_us", "count")
    for group in grouped(results.lines):
        spreads = {metric: group.spread(metric) for metric in metrics}
        if spreads["p50_us"] is None:
            continue
        found.append(
            {"workload": group.workload, "case": group.case, "size": group.size,
             "system": group.system, "client": group.client}
            | {metric.removesuffix("_us"): spread and rounded(spread.median)
               for metric, spread in spreads.items()}
        )  # fmt: skip
    return found


def omb_rows(reports: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    found = []
    for report in reports:
        row: dict[str, Any] = dict(report)
        for name in ("publishRate", "consumeRate"):
            row[f"{name}Mean"] = round(targets._mean(report[name]))
        row["backlogMax"] = max(report["backlog"], default=0)
        row["checked"] = "; ".join(report.get("faults") or []) or "all received"
        found.append({name: _short(row.get(name)) for name in OMB_FIELDS})
    return found


def _short(value: object) -> object:
    return round(value, 3) if isinstance(value, float) else value


# --- Markdown -------------------------------------------------------------------------------------


def markdown(results: Results) -> str:
    parts = [f"# CometMQ, measured {results.run.get('began', '')}\n", METHOD, ""]
    for title, content in sections(results):
        parts += [f"## {title}\n", markdown_table(content), ""]
    return "\n".join(parts)


def markdown_table(content: Sequence[Mapping[str, Any]]) -> str:
    names = list(content[0])
    lines = [
        "| " + " | ".join(name.replace("_", " ") for name in names) + " |",
        "|" + " --- |" * len(names),
    ]
    for row in content:
        cells = (plain(row.get(name)).replace("|", "\\|") for name in names)
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def plain(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,}" if isinstance(value, int | float) else str(value)


# --- HTML -----------------------------------------------------------------------------------------

_STYLE: Final = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2em auto; max-width: 75em; padding: 0 1em;
       color: #222; background: #fff }
table { border-collapse: collapse; font-size: 13px; margin: 1em 0; display: block;
        overflow-x: auto }
th, td { padding: .25em .7em; border-bottom: 1px solid #ddd; text-align: left;
         vertical-align: top }
th { border-bottom: 2px solid #888; white-space: nowrap }
td.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap }
tr.ours td { background: #fdf0f0 } tr.bad td { background: #ffe0d0 }
td.missed { color: #b00; font-weight: 600 } td.aim, td.floor { color: #060 }
img { max-width: 100%; display: block; margin: 1em 0 }
p.method { max-width: 50em }
"""


def html_page(results: Results, plots: Sequence[Path]) -> str:
    parts = [
        '<!doctype html><html lang="en"><head><meta charset="utf-8">',
        f"<title>CometMQ, measured</title><style>{_STYLE}</style></head><body>",
        f"<h1>CometMQ, measured {html.escape(str(results.run.get('began', '')))}</h1>",
        f'<p class="method">{html.escape(METHOD)}</p>',
    ]
    tables = sections(results)
    parts += [_html_section(*tables[0])] if tables else []
    parts += [_image(path) for path in plots]
    parts += [_html_section(title, content) for title, content in tables[1:]]
    return "\n".join([*parts, "</body></html>\n"])


def _html_section(title: str, content: Sequence[Mapping[str, Any]]) -> str:
    names = list(content[0])
    head = "".join(f"<th>{html.escape(name.replace('_', ' '))}</th>" for name in names)
    body = "\n".join(_html_row(row, names) for row in content)
    return f"<h2>{html.escape(title)}</h2><table><tr>{head}</tr>\n{body}</table>"


def _html_row(row: Mapping[str, Any], names: Sequence[str]) -> str:
    kind = "ours" if row.get("system") == "cometmq" else ""
    kind = "bad" if "FAILED" in str(row.get("remarks", "")) else kind
    cells = "".join(_html_cell(name, row.get(name)) for name in names)
    return f'<tr class="{kind}">{cells}</tr>'


def _html_cell(name: str, value: object) -> str:
    kind = "number" if isinstance(value, int | float) else ""
    kind = str(value) if name == "reached" and value in ("missed", "floor", "aim") else kind
    return f'<td class="{kind}">{html.escape(plain(value))}</td>'


def _image(path: Path) -> str:
    data = base64.b64encode(path.read_bytes()).decode()
    return f'<img alt="{html.escape(path.stem)}" src="data:image/png;base64,{data}">'
