"""The rooms of the library: the direction of their imports, the size of their files, and unique class names."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "paceline"

#: What each room may import of paceline besides itself.
MAY_IMPORT: dict[str, set[str]] = {
    "extras": set(),
    "policies": set(),
    "job": {"policies"},
    "model": {"policies"},
    "observe": {"policies", "job"},
    "metrics": {"policies", "job", "observe"},
    "workloads": set(),
    "simulate": {"policies", "job", "model", "observe", "workloads"},
    "rlp": {"policies", "simulate", "workloads"},
    "serve": {"policies", "job", "model", "observe"},
    "collectives": {"simulate"},
    "train": {"model", "serve", "collectives"},
    "arrays": {"model", "serve"},
    "federated": {"policies", "model", "observe", "workloads", "simulate", "serve", "train"},
    "launch": {"policies", "model", "observe", "serve"},
    "page": {"policies", "job", "observe", "serve"},
    "flower": {"extras", "policies", "job", "model", "observe"},
    "huggingface": {"extras", "serve", "train"},
    "lightning": {"extras", "train"},
    "ray": {"extras", "policies", "model", "observe", "serve", "train"},
    "lab": {"policies", "model", "observe", "simulate", "serve", "collectives", "launch"},
    "advise": {"policies", "model", "observe", "simulate", "serve", "launch", "lab"},
    "reproduce": {
        *("policies", "model", "observe", "simulate", "federated", "workloads", "collectives", "rlp", "launch", "lab"),
    },
    "cli": {
        *("policies", "model", "observe", "metrics", "simulate", "serve", "federated", "launch", "lab", "advise"),
        *("reproduce", "workloads", "collectives", "rlp", "page"),
    },
    "__main__": {"cli"},
}
#: What each room may import from outside the standard library.
OUTSIDE: dict[str, set[str]] = {
    "extras": set(),
    "policies": set(),
    "job": set(),
    "model": {"msgspec", "torch", "numpy", "safetensors"},
    "observe": {"rich", "matplotlib"},
    "metrics": {"mlflow", "prometheus_client", "tensorboardX", "wandb"},
    "workloads": {"numpy", "torch", "transformers"},
    "simulate": {"numpy", "torch"},
    "rlp": {"gymnasium", "numpy", "safetensors", "torch"},
    "serve": {"cryptography", "msgspec", "numpy", "safetensors", "torch", "uvloop"},
    "collectives": {"numpy", "torch", "matplotlib"},
    "train": {"torch"},
    "arrays": {"numpy"},
    "federated": {"torch"},
    "launch": {"msgspec"},
    "page": {"msgspec", "starlette", "uvicorn"},
    "flower": {"flwr", "numpy"},
    "huggingface": {"torch"},  # it imports transformers by name, once its version is checked
    "lightning": {"torch"},  # likewise pytorch_lightning or lightning
    "ray": {"msgspec", "numpy", "pandas", "pyarrow", "ray", "torch"},
    "lab": {"numpy", "pyroute2", "torch"},
    "advise": set(),
    "reproduce": {"matplotlib", "msgspec", "numpy", "torch"},
    "cli": {"typer", "rich"},
    "__main__": set(),
}


#: The parts of a room, each with the other parts of the same room that it may import. Files at the top of the room
#: (key: "") may import all parts, unless they are named here themselves.
PARTS: dict[str, dict[str, set[str]]] = {
    "serve": {
        "environment": set(),
        "wire": {"environment"},
        "coordinator": {"wire", "environment"},
        "shard": {"wire", "environment"},
        "worker": {"wire", "environment"},
    },
    "simulate": {"transfer": {"clock", "machine", "network"}, "protocol": {"clock"}},
    "reproduce": {
        "shared": set(),
        "r2sp": {"shared"},
        "fl_r2sp": {"shared"},
        "dssp": {"shared"},
        "rlp": {"shared"},
        "hips": {"shared"},
    },
}


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def statements(body: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """All statements, also those inside others. Imports and classes are statements, so no expression is looked at."""
    for node in body:
        yield node
        for inside in ("body", "orelse", "finalbody", "handlers", "cases"):
            yield from statements(getattr(node, inside, ()))


def imports(path: Path, for_types: bool = True) -> set[str]:
    """The full names of the modules that a file imports. for_types: also those under `if TYPE_CHECKING`."""
    tree = parsed(path)
    skipped: set[ast.AST] = set()
    if not for_types:
        for node in statements(tree.body):
            if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
                skipped |= set(statements(node.body))
    found = set()
    for node in statements(tree.body):
        if node in skipped:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} has a relative import"
            found.add(str(node.module))
            found |= {f"{node.module}.{alias.name}" for alias in node.names if is_module(f"{node.module}.{alias.name}")}
    return found


def is_module(name: str) -> bool:
    """Is this the name of a module of paceline?"""
    path = SOURCE.parent.joinpath(*name.split("."))
    return path.with_suffix(".py").exists() or (path / "__init__.py").exists()


def room_of(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


FILES = sorted(SOURCE.rglob("*.py"))  # one test looks at all of them: a test for each file would cost more than it does
rooms = pytest.mark.parametrize("room", sorted({room_of(path) for path in FILES} - {"__init__"}))


@rooms
def test_imports_between_rooms_go_one_way(room: str) -> None:
    assert room in MAY_IMPORT, f"say in this test what the room {room!r} may import"
    allowed = sys.stdlib_module_names | OUTSIDE[room]
    wrong = []
    for path, name in [(file, name) for file in FILES if room_of(file) == room for name in imports(file)]:
        parts = name.split(".")
        if parts[0] == "paceline":
            fine = len(parts) == 1 or parts[1] == room or parts[1] in MAY_IMPORT[room]
        else:
            fine = parts[0] in allowed
        wrong += [] if fine else [f"{path.relative_to(SOURCE)} imports {name}"]
    assert wrong == []


def test_the_table_of_rooms_has_all_of_them_in_the_order_of_their_imports() -> None:
    contributing = (SOURCE.parents[1] / "CONTRIBUTING.md").read_text()
    table = re.findall(r"^\| `(\w+)/` \|", contributing, re.MULTILINE)
    assert sorted(table) == sorted(path.parent.name for path in SOURCE.glob("*/__init__.py"))
    for number, room in enumerate(table):
        assert MAY_IMPORT[room] - {"extras"} <= set(table[:number]), room


@pytest.mark.parametrize("room", PARTS)
def test_imports_between_the_parts_of_a_room_go_one_way(room: str) -> None:
    wrong, parts = [], PARTS[room]
    for path in FILES:
        inside, *rest = path.relative_to(SOURCE).with_suffix("").parts
        if inside != room or not rest or rest[0] not in parts:
            continue
        for name in imports(path, for_types=False):
            imported = name.split(".")
            if imported[:2] == ["paceline", room] and len(imported) > 2:
                fine = imported[2] == rest[0] or imported[2] in parts[rest[0]]
                wrong += [] if fine else [f"{path.relative_to(SOURCE)} imports {name}"]
    assert wrong == []


def test_no_class_name_occurs_twice() -> None:
    """A name is unique in the library, so a reader who meets it knows which class is meant."""
    places: dict[str, list[str]] = {}
    for path in SOURCE.rglob("*.py"):
        for node in statements(parsed(path).body):
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(str(path.relative_to(SOURCE)))
    assert {name: where for name, where in places.items() if len(where) > 1} == {}


def test_policies_do_not_know_the_learned_policy() -> None:
    for path in (SOURCE / "policies").rglob("*.py"):
        assert "rlp" not in path.read_text().lower(), f"{path} names a policy that lives in another room"


MAX_LINES = 400
SHELL_LINES = 350  # of the coordinator, which only translates between messages and the job


def test_files_are_small() -> None:
    lines = {str(path.relative_to(SOURCE)): len(path.read_text().splitlines()) for path in FILES}
    assert {name: count for name, count in lines.items() if count > MAX_LINES} == {}
    assert lines["serve/coordinator/coordinator.py"] <= SHELL_LINES


def loaded_by(code: str) -> set[str]:
    """The packages that are loaded after this code has run in a new Python process."""
    code += "; import sys; print(*{name.split('.')[0] for name in sys.modules})"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return set(run.stdout.split())


def test_policies_load_nothing_heavy() -> None:
    """A policy runs wherever Python runs: importing the policies loads only the standard library."""
    loaded = loaded_by("import paceline.policies as p; [p.make(name) for name in p.names() if name != 'rlp']")
    assert not loaded & {"numpy", "torch", "rich", "typer", "matplotlib"}


def test_the_job_loads_nothing_but_the_standard_library_and_policies() -> None:
    code = (
        "import paceline.job, paceline.job.snapshot, sys; print(*{n for n in sys.modules if n.startswith('paceline.')})"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert {name.split(".")[1] for name in run.stdout.split()} == {"job", "policies"}
    loaded = loaded_by("import paceline.job, paceline.job.snapshot")
    assert not loaded & {"asyncio", "socket", "selectors", "ssl", "numpy", "torch", "msgspec", "rich", "typer"}


def test_the_learned_policy_needs_numpy_alone() -> None:
    loaded = loaded_by("import paceline.policies as p; p.make('rlp')")
    assert "numpy" in loaded
    assert not loaded & {"torch", "gymnasium", "rich", "typer", "matplotlib"}


def test_timing_alone_needs_no_torch() -> None:
    """`paceline simulate` works with the core install."""
    assert "torch" not in loaded_by("import paceline.cli, paceline.simulate, paceline.simulate.update_schedule")


def test_the_coordinator_and_the_client_need_no_torch() -> None:
    """Other frameworks can use the client, and a coordinator can run on a small machine."""
    code = "import paceline; paceline.coordinate; import paceline.serve.worker.client, paceline.serve.server"
    assert "torch" not in loaded_by(code)


#: Modules whose purpose is to gather names of other modules.
FACADES = {"paceline.serve.wire.messages"}


@cache
def defined_names(path: Path) -> set[str]:
    """The names that a module defines itself, rather than imports."""
    names: set[str] = set()
    for node in parsed(path).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {inner.id for each in targets for inner in ast.walk(each) if isinstance(inner, ast.Name)}
    return names


def test_a_name_has_one_import_path() -> None:
    """A module imports a name from the module that defines it, or from a package that exports it."""
    found = []
    repository = SOURCE.parents[1]
    for path in sorted(
        path for room in ("src", "tests", "benchmarks", "examples") for path in (repository / room).rglob("*.py")
    ):
        for node in statements(ast.parse(path.read_text()).body):
            if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith("paceline."):
                continue
            source = SOURCE.parent.joinpath(*str(node.module).split(".")).with_suffix(".py")
            if not source.exists() or node.module in FACADES:
                continue
            missing = {alias.name for alias in node.names} - defined_names(source)
            found += [f"{path.relative_to(repository)}: {node.module}.{name}" for name in sorted(missing)]
    assert found == []
