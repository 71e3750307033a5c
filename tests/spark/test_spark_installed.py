"""The wheel in an environment of its own, used from elsewhere and without register()."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import jvm
import pytest
from patience import patient

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def run(
    python: Path, cwd: Path, *arguments: str, **variables: str
) -> subprocess.CompletedProcess[str]:
    kept = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    environ = {**kept, "PYSPARK_PYTHON": str(python), **variables}
    return subprocess.run(
        [python, *arguments], cwd=cwd, env=environ, capture_output=True, text=True,
        timeout=patient(200), check=False,
    )  # fmt: skip


DOCTOR = ("-m", "cometmq", "spark", "doctor", "-o", "json", "--master", "local[1]")


def test_the_doctor_finds_all_well(installed_python: Path, tmp_path: Path) -> None:
    quick = f"spark.driver.extraJavaOptions={' '.join(jvm.SPARK)}"
    done = run(installed_python, tmp_path, *DOCTOR, "--driver-memory", "512m", "--conf", quick)
    assert done.returncode == 0, done.stdout + done.stderr
    assert {each["check"]: each["state"] for each in json.loads(done.stdout)} == dict.fromkeys(
        ("java", "worker", "pyspark", "pyarrow", "cometmq", "format", "round trip"), "ok"
    )


def test_the_doctor_finds_what_is_wrong(installed_python: Path, tmp_path: Path) -> None:
    """A neighbour that fails hides all formats; it is named. Nothing is tried without Java."""
    (tmp_path / "pyspark_neighbour.py").write_text("raise ValueError('I am broken')")
    (tmp_path / "pyarrow.py").write_text("raise ImportError('no such library')")
    variables = {"PYTHONPATH": str(tmp_path), "JAVA_HOME": str(tmp_path)}
    done = run(installed_python, tmp_path, *DOCTOR, **variables)
    assert done.returncode == 1, done.stdout + done.stderr
    found = {each["check"]: (each["state"], each["says"]) for each in json.loads(done.stdout)}
    assert {check for check, (state, _) in found.items() if state == "wrong"} == {"java", "pyarrow"}
    assert "set JAVA_HOME" in found["java"][1]
    assert "no such library; pip install '.[spark]'" in found["pyarrow"][1]
    assert "pyspark_neighbour (ValueError: I am broken)" in found["format"][1]
    assert found["round trip"] == ("note", "not tried")
    done = run(installed_python, tmp_path, *DOCTOR, PYSPARK_PYTHON="/nowhere/python")
    assert done.returncode == 1
    (worker,) = [each for each in json.loads(done.stdout) if each["check"] == "worker"]
    assert "PYSPARK_PYTHON, /nowhere/python, does not run" in worker["says"]


METADATA = """
import importlib.metadata as metadata, json
found = metadata.metadata("cometmq")
print(json.dumps([found.get_all("Project-URL"), found["Description-Content-Type"],
                  found.get_payload() or found["Description"]]))
"""


def test_what_a_package_index_shows(installed_python: Path, tmp_path: Path) -> None:
    """Its page has no files beside it: no link of README may be relative there."""
    done = run(installed_python, tmp_path, "-c", METADATA)
    urls, kind, text = json.loads(done.stdout)
    assert {url.partition(", ")[0] for url in urls} == {
        "Homepage", "Documentation", "Changelog", "Issues",
    }  # fmt: skip
    assert kind == "text/markdown"
    links = re.findall(r"\]\(([^)]*)\)", text)
    assert len(links) > 10
    assert [link for link in links if not link.startswith(("https://", "#"))] == []
