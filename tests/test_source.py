"""Facts about the source itself: its types, its packages, and who imports whom."""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import limits
import pytest
from packages import PACKAGE_DIR, SETUPTOOLS
from paths import ROOT
from typed import look_at_types

from cometmq.shm.kernel import codec, layout

KERNEL = ("codec", "columns", "live", "store")  # its extensions

# Which folder may import which: imports run downward (docs/architecture.md, The floors).
FLOORS: dict[str, set[str]] = {
    "conf": {"protocol"},  # its errors alone, see test_settings_know_errors_and_nothing_else
    "protocol": set(),
    "shm": {"conf", "protocol"},
    "actors": {"conf", "protocol", "shm"},
    "client": {"protocol", "shm"},
    "spark": {"client", "conf", "protocol", "shm"},
    "front": {"actors", "client", "conf", "protocol", "shm", "spark"},
    "bench": {"actors", "client", "conf", "front", "protocol", "shm", "spark"},
}

# Within a floor: which wing may import which others.
_ABOVE_STATE = {"kernel", "os", "state", "live"}
_WING = {"tables", "runtime"}
WINGS: dict[str, dict[str, set[str]]] = {
    "shm": {
        "kernel": set(),
        "os": {"kernel"},
        "state": {"kernel", "os"},
        "live": {"kernel", "os"},
        "log": _ABOVE_STATE,
        "derived": _ABOVE_STATE | {"log"},
        "reading": _ABOVE_STATE | {"log", "derived"},
        "tools": _ABOVE_STATE | {"log", "derived", "reading"},
    },
    "actors": {
        "tables": set(),
        "runtime": {"tables"},
        "writer": _WING,
        "maintenance": _WING,
        "reading": _WING,
        "coordination": _WING,
        "scheduling": _WING,
        "replication": {*_WING, "writer", "coordination"},  # a slave's are theirs, but for changes
        "launch": {
            *_WING,
            "writer",
            "maintenance",
            "reading",
            "coordination",
            "scheduling",
            "replication",
        },
    },
    "actors/replication": {
        "core": set(),
        "engines": {"core"},
        "peers": {"core"},
        "slaves": {"core"},
        "group": {"core", "engines", "peers", "slaves"},
    },
    "client": {
        "administration": set(),
        "sending": set(),
        "receiving": set(),
        "handling": {"receiving"},
        "popping": {"receiving", "handling"},
    },
}


def sources(folder: str) -> list[Path]:
    return sorted((ROOT / folder).rglob("*.py"))


# What a user may mistype: strict mypy complains of each `ignore` that there was no need for.
WRONG_KEYWORDS = """
from cometmq import AsyncConsumer, AsyncProducer, Broker

async def wrong(broker: Broker, twin: AsyncProducer) -> None:
    broker.producer(linger=5)  # type: ignore[call-arg]
    broker.consumer("g", prefetch=1)  # type: ignore[call-arg]
    broker.consumer("g", start=1.5)  # type: ignore[arg-type]
    broker.async_producer(timeout="1")  # type: ignore[call-arg]
    broker.async_consumer("g", "t", wait_for_broker="1")  # type: ignore[arg-type]
    AsyncProducer("host", linger_ms="5")  # type: ignore[arg-type]
    AsyncConsumer("host", "g", spin=1)  # type: ignore[call-arg]
    await twin.send_many("t", [b"x"], tag="a")  # type: ignore[call-arg]
    await twin.send_oneway("t", b"x", wait=False)  # type: ignore[call-arg]
"""


def test_types(tmp_path: Path) -> None:
    (tmp_path / "wrong_keywords.py").write_text(WRONG_KEYWORDS)
    done = look_at_types(tmp_path, "wrong_keywords")
    assert done.returncode == 0, done.stdout + done.stderr
    checked = re.search(r"no issues found in (\d+) source files", done.stdout)
    assert checked is not None
    folders = [ROOT / folder for folder in PACKAGE_DIR.values()]
    packaged = [
        path for folder in folders for kind in ("*.py", "*.pyi") for path in folder.glob(kind)
    ]
    assert int(checked[1]) == len(packaged) + 1


# What has one place, and which place: a pattern of the source, and the only file that may have it.
ONE_PLACE: dict[str, tuple[str, str]] = {
    "ctypes": (r"^\s*(import|from) ctypes", "shm/os/libc.py"),
    "a durable small file": (r"\bos\.(fsync|replace)\(|\.replace\((path|self\._?path|mark)\)",
                             "shm/os/durable.py"),
}  # fmt: skip


@pytest.mark.parametrize("what", ONE_PLACE)
def test_one_place(what: str) -> None:
    pattern, place = ONE_PLACE[what]
    found = {
        str(path.relative_to(ROOT))
        for folder in FLOORS
        for path in sources(folder)
        if folder != "bench" and re.search(pattern, path.read_text(), re.MULTILINE)
    }
    assert found == {place}


def test_every_package_is_listed() -> None:
    """An unlisted sub-package works in the editable install and is missing from the wheel."""
    found = {
        str(init.parent.relative_to(ROOT))
        for folder in PACKAGE_DIR.values()
        for init in (ROOT / folder).rglob("__init__.py")
    }
    assert found == set(PACKAGE_DIR.values())
    assert set(SETUPTOOLS["packages"]) == set(PACKAGE_DIR)


def names_imported(path: Path) -> set[str]:
    """What a module imports: modules, and names with their modules before them."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno} imports relatively"
            module = node.module or ""
            found.update(f"{module}.{alias.name}" for alias in node.names)
    return found


def imported(path: Path) -> set[str]:
    """The project's folders that a module imports; `front` for the names of cometmq itself."""
    found = set()
    for name in names_imported(path):
        parts = name.split(".")
        if parts[0] == "cometmq":
            inner = parts[1] if len(parts) > 1 else ""
            found.add(inner if inner in FLOORS and inner != "front" else "front")
    return found


def test_settings_know_errors_and_nothing_else() -> None:
    """What cannot be set is an error like any other; commands and sockets are no matter of conf."""
    for path in sources("conf"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("cometmq."):
                module = str(node.module)
                assert module.startswith("cometmq.conf") or module == "cometmq.protocol.errors"


@pytest.mark.parametrize("folder", sorted(FLOORS))
def test_floors(folder: str) -> None:
    for path in sources(folder):
        upward = imported(path) - FLOORS[folder] - {folder}
        assert not upward, f"{path.relative_to(ROOT)} imports {sorted(upward)}"


@pytest.mark.parametrize(
    ("floor", "wing"), [(floor, wing) for floor, wings in WINGS.items() for wing in wings]
)
def test_wings(floor: str, wing: str) -> None:
    for path in sources(f"{floor}/{wing}"):
        for name in imports_of_file(path):
            package, _, inner = name.partition(f"cometmq.{floor.replace('/', '.')}.")
            other = inner.partition(".")[0]
            if not package and other in WINGS[floor] and other != wing:
                shown = f"{path.relative_to(ROOT)} imports {name}"
                assert other in WINGS[floor][wing], shown


def test_every_wing_has_its_rule() -> None:
    for floor, wings in WINGS.items():
        found = {path.parent.name for path in (ROOT / floor).glob("*/__init__.py")}
        assert found == set(wings)


def test_books_are_pure() -> None:
    """They know declarations alone, and the rules that the kernel has for them, so that whoever
    drives them decides on time and I/O."""
    rules = {f"cometmq.shm.kernel.store.{name}" for name in ("HalfEnds", "note_ended", "op_text")}
    for path in sources("actors/tables"):
        assert imported(path) <= {"protocol", "actors", "shm"}
        assert {each for each in names_imported(path) if each.startswith("cometmq.shm")} <= rules
        assert not imports_of_file(path) & {"os", "time", "socket", "threading", "zmq"}


@pytest.mark.parametrize("page", ["architecture", "contributing", "why"])
def test_pages_name_files_that_are_there(page: str) -> None:
    text = (ROOT / f"docs/{page}.md").read_text()
    named = set(re.findall(r"`((?:[a-z_]+/)+[a-z_]+(?:\.\w+)?)`", text))
    named = {each for each in named if each.partition("/")[0] in {*FLOORS, "tests", "docs"}}
    gone = {each for each in named if not list(ROOT.glob(f"{each}*"))}
    assert not gone, f"docs/{page}.md: {sorted(gone)}"


def test_every_limit_of_the_suite_is_patient() -> None:
    """Fault 40: every limit is written `patient(...)` or `exactly(...)`; see kit/patience.py."""
    found = sorted(map(str, limits.of_the_suite()))
    said = "write patient(60), or exactly(60), see tests/kit/patience.py:"
    assert not found, "\n".join([said, *found, "python tests/kit/limits.py --write does it"])


def test_no_default_of_the_product_is_patched() -> None:
    """Fault 40: tests change times by arguments or settings, never by patched defaults."""
    for path in [*sources("tests"), *sources("bench")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute):
                where = f"{path.relative_to(ROOT)}:{node.lineno}"
                assert node.attr not in ("__kwdefaults__", "__defaults__"), where


# --- structure ------------------------------------------------------------------------------------
#
# Each limit has a table of the names that exceed it, with their numbers. A number may only
# decrease; remove a name that meets the limit from its table.

FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef
PRODUCT = [folder for folder in FLOORS if folder != "bench"]
PARAMETERS_MAX = 8  # of a constructor
CALLABLES_MAX = 2  # of these parameters
SCREEN_LINES = 60  # of a function
FAN_OUT_MAX = 15  # modules of the project that a module imports

#: Options of the public clients are declarations: `help(Producer)` is documentation.
PARAMETERS = {
    "actors/coordination/coordinator.py:CoordinatorActor": 19,
    "actors/coordination/news_line.py:NewsLine": 10,
    "actors/replication/group/action_runner.py:ActionRunner": 13,
    "actors/replication/peers/peers.py:Peers": 9,
    "actors/writer/desk.py:Desk": 10,
    "client/consumer.py:Consumer": 16,
    "client/popping/consumer.py:PopConsumer": 11,
    "client/receiving/pulling.py:Puller": 10,
    "client/receiving/receiver.py:Receiver": 12,
    "client/sending/producer.py:Producer": 18,
    "client/sending/sender.py:Sender": 9,
}
CALLABLES = {
    "actors/coordination/coordinator.py:CoordinatorActor": 5,
    "actors/coordination/news_line.py:NewsLine": 3,
    "actors/maintenance/scrub.py:Scrub": 3,
    "actors/replication/group/backlog.py:Backlog": 3,
    "actors/replication/group/state_transfer.py:StateTransfer": 5,
    "actors/replication/group/state_transfer.py:StateReceiver": 5,
    "actors/replication/group/action_runner.py:ActionRunner": 4,
    "actors/replication/group/driver.py:Driver": 3,
    "actors/replication/group/engine_calls.py:EngineCalls": 4,
    "actors/replication/slaves/intake.py:Intake": 3,
    "actors/replication/slaves/master_connection.py:MasterConnection": 4,
    "actors/replication/group/terms.py:Runs": 3,
    "actors/writer/derived.py:DerivedWrites": 4,
    "client/receiving/pulling.py:Puller": 4,
}
# Modules that hold declarations alone, and import nothing: a vocabulary is no coupling.
DECLARATIONS = {"cometmq.actors.runtime.meters"}
FAN_OUT = {
    "actors/coordination/coordinator.py": 25,
    "actors/coordination/files.py": 17,
    "actors/coordination/members.py": 16,
    "actors/coordination/pops.py": 17,
    "actors/maintenance/cleaner.py": 18,
    "actors/launch/broker.py": 23,
    "actors/launch/supervisor.py": 18,
    "actors/replication/slaves/follower.py": 17,
    "actors/replication/group/member.py": 26,
    "actors/scheduling/scheduler.py": 21,
    "actors/scheduling/timers.py": 17,
    "actors/writer/commitlog.py": 23,
    "actors/writer/desk.py": 25,
    "client/aio.py": 18,
    "client/consumer.py": 17,
    "client/popping/consumer.py": 21,
    "client/receiving/member.py": 17,
    "client/sending/producer.py": 17,
    "client/sending/sender.py": 16,
    "front/broker.py": 17,
    "front/cli/stat.py": 19,
    "shm/tools/repair.py": 19,
}
ASSIGNED_FROM_OUTSIDE = {  # attributes, of each folder
    "actors": 133,
    "client": 200,
    "front": 15,
    "protocol": 7,
    "shm": 12,
    "spark": 4,
}
LONG_FUNCTIONS = {
    "actors/coordination/coordinator.py:__init__": 75,
    "actors/replication/group/member.py:on_start": 64,
    "actors/writer/desk.py:__init__": 63,
    "client/consumer.py:run": 78,
    "client/receiving/receiver.py:__init__": 61,
    "client/sending/producer.py:__init__": 64,
    "spark/jobs/dead_letters.py:dead_letters": 64,
}
HASATTR_OF_SELF = {
    "actors/coordination/books.py",
    "actors/coordination/coordinator.py",
    "actors/replication/slaves/coordinator.py",
}


def product_trees() -> Iterator[tuple[str, ast.Module]]:
    """Yield every module of the product: its path and its syntax tree."""
    for path in (each for folder in PRODUCT for each in sources(folder)):
        yield str(path.relative_to(ROOT)), ast.parse(path.read_text())


def constructors() -> Iterator[tuple[str, list[ast.arg], set[str]]]:
    """Yield every constructor: class, parameters, and the module's names for Callable types."""
    for name, tree in product_trees():
        callables = {
            target.id
            for node in tree.body
            if isinstance(node, ast.Assign) and "Callable[" in ast.unparse(node.value)
            for target in node.targets
            if isinstance(target, ast.Name)
        }
        for node in ast.walk(tree):
            for each in node.body if isinstance(node, ast.ClassDef) else []:
                if isinstance(each, FUNCTIONS) and each.name == "__init__":
                    found = [*each.args.posonlyargs, *each.args.args[1:], *each.args.kwonlyargs]
                    assert isinstance(node, ast.ClassDef)
                    yield f"{name}:{node.name}", found, callables


def check_ratchet(what: str, limit: int, known: dict[str, int], found: dict[str, int]) -> None:
    over = {name: count for name, count in found.items() if count > max(limit, known.get(name, 0))}
    assert not over, f"{what}, at most {limit}: {over}"
    met = {name for name in known if found.get(name, 0) <= limit}
    assert not met, f"{what}: take these out of the table: {sorted(met)}"


def test_constructors_take_few_parameters() -> None:
    found = {name: len(parameters) for name, parameters, _ in constructors()}
    check_ratchet("constructor parameters", PARAMETERS_MAX, PARAMETERS, found)


def test_constructors_take_few_callables() -> None:
    found = {}
    for name, parameters, callables in constructors():
        annotations = [each.annotation for each in parameters if each.annotation is not None]
        found[name] = sum(
            "Callable[" in ast.unparse(each)
            or any(isinstance(node, ast.Name) and node.id in callables for node in ast.walk(each))
            for each in annotations
        )
    check_ratchet("callables of a constructor", CALLABLES_MAX, CALLABLES, found)


def test_modules_import_few_others() -> None:
    known = modules()
    by_path = {str(path.relative_to(ROOT)): name for name, path in known.items()}
    found = {
        name: len(imports_of(by_path[name], known) - DECLARATIONS)
        for name, _ in product_trees()
        if name in by_path and not name.endswith("__init__.py")
    }
    check_ratchet("modules that a module imports", FAN_OUT_MAX, FAN_OUT, found)


def test_few_attributes_are_assigned_from_outside_their_object() -> None:
    found = dict.fromkeys(PRODUCT, 0)
    for name, tree in product_trees():
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                owner = node.value
                is_own = isinstance(owner, ast.Name) and owner.id in ("self", "cls")
                found[name.partition("/")[0]] += not is_own
    check_ratchet("attributes assigned from outside", 0, ASSIGNED_FROM_OUTSIDE, found)


def test_no_object_asks_for_its_own_attributes() -> None:
    found = {
        name
        for name, tree in product_trees()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node).startswith("hasattr(self,")
    }
    assert found == HASATTR_OF_SELF


def test_functions_fit_on_a_screen() -> None:
    found: dict[str, int] = {}
    for name, tree in product_trees():
        for node in ast.walk(tree):
            if isinstance(node, FUNCTIONS) and node.end_lineno is not None:
                key = f"{name}:{node.name}"
                found[key] = max(found.get(key, 0), node.end_lineno - node.lineno + 1)
    check_ratchet("lines of a function", SCREEN_LINES, LONG_FUNCTIONS, found)


def modules() -> dict[str, Path]:
    """Every module by the name that it is imported by."""
    found = {}
    for package, folder in PACKAGE_DIR.items():
        for path in (ROOT / folder).glob("*.py"):
            found[package if path.stem == "__init__" else f"{package}.{path.stem}"] = path
    return found


def imports_of_file(path: Path) -> set[str]:
    """What is imported, by full names: modules, and names out of modules."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found


def imports_of(name: str, known: dict[str, Path]) -> set[str]:
    """The modules that one imports, wherever in it: also within functions, and for types alone."""
    found = {
        each if each in known else each.rpartition(".")[0] for each in imports_of_file(known[name])
    }
    # A package may name what is in it.
    return {each for each in found & set(known) if not f"{name}.".startswith(f"{each}.")}


def test_no_modules_import_each_other() -> None:
    known = modules()
    sorter = TopologicalSorter({name: imports_of(name, known) for name in known})
    try:
        sorter.prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def test_the_kernels_layouts_are_printed_from_the_declarations() -> None:
    text = (ROOT / "shm/kernel/layout.pxi").read_text()
    assert text == layout.as_pxi(), (
        "print it again: python -m cometmq.shm.kernel.layout > shm/kernel/layout.pxi"
    )
    by_name = {found.name: found.size for found in layout.LAYOUTS}
    for name, size in codec.layout_sizes().items():
        assert by_name[name] == size


@pytest.mark.parametrize("name", KERNEL)
def test_the_kernels_types_name_what_is_there(name: str) -> None:
    """Every name in a stub exists, and every public name of its extension is in it."""
    native = importlib.import_module(f"cometmq.shm.kernel.{name}")
    tree = ast.parse((ROOT / f"shm/kernel/{name}.pyi").read_text())
    declared = {
        node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)
    } | {
        node.target.id
        for node in tree.body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }
    public = {
        each
        for each, value in vars(native).items()
        if not each.startswith("_")
        and getattr(value, "__module__", native.__name__) == native.__name__
    }
    assert declared - {"Buffer"} <= set(vars(native))
    assert public - declared <= {"Holder", "REASONS"}  # used in each other


def test_each_part_of_the_kernel_is_in_one_extension() -> None:
    kernel = ROOT / "shm/kernel"
    included = [
        name
        for path in (*(kernel / f"{each}.pyx" for each in KERNEL), kernel / "base.pxd")
        for name in re.findall(r'^include "(.*)"$', path.read_text(), re.MULTILINE)
    ]
    assert sorted(included) == sorted(path.name for path in kernel.glob("*.pxi"))
    assert {path.stem for path in kernel.glob("*.pyx")} == set(KERNEL)


def kernel_functions(path: Path) -> dict[str, int]:
    """Functions of a Cython file, and how many lines each has: to the last one that is indented
    deeper than its `def`."""
    found: dict[str, int] = {}
    name, start, last, depth = "", 0, 0, 0
    begins = re.compile(
        r"( *)(?:def|cp?def(?! (?:class|struct|enum|extern|packed)\b)[^=(]*?) ?(\w+)\("
    )
    for number, line in enumerate(path.read_text().splitlines(), 1):
        indent = len(line) - len(line.lstrip())
        match = begins.match(line)
        if match and (line.endswith((":", "(", ",")) or ("(" in line and ")" not in line)):
            name, start, last, depth = match[2], number, number, indent
        elif name and line.strip() and (indent > depth or line.lstrip().startswith(")")):
            last = number
        elif name and line.strip():
            name = ""
        if name:
            found[f"{path.name}:{start} {name}"] = last - start + 1
    return found


def test_kernel_functions_fit_on_a_screen() -> None:
    kernel = ROOT / "shm/kernel"
    found: dict[str, int] = {}
    for path in kernel.glob("*.p[xy][dix]"):
        found |= kernel_functions(path)
    assert len(found) > 250  # it finds functions at all
    assert {name: n for name, n in found.items() if n > SCREEN_LINES} == {}
