"""What each folder may import, from rematplan and from other packages; the table is that of the architecture."""

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import cache
from pathlib import Path

import pytest
import torch

from rematplan.runtime.graph import compat

ROOT = Path(__file__).parent.parent


@dataclass(frozen=True)
class Wall:
    """``inside``: the parts of rematplan that a folder may import. ``outside``: the third-party packages."""

    inside: tuple[str, ...]
    outside: tuple[str, ...]


WALLS = {
    "ir": Wall(("rematplan.ir",), ("numpy", "networkx", "onnx", "onnx_ir", "platformdirs")),
    "planner": Wall(("rematplan.ir", "rematplan.planner"), ("numpy", "numba", "networkx", "ortools")),
    "runtime": Wall(
        ("rematplan.ir", "rematplan.runtime", "rematplan.planner.core"),
        ("ml_dtypes", "networkx", "numpy", "torch"),
    ),
    "models": Wall(("rematplan.models",), ("torch",)),
    "rematplan": Wall(
        ("rematplan",),
        (
            "matplotlib",
            "numpy",
            "onnx",
            "plotly",
            "pytorch_lightning",
            "rich",
            "torch",
            "torchtitan",
            "transformers",
        ),
    ),
}

LAYERS = {
    "ir": ("errors training_graph recoverable files problem_json cache_folder", "onnx"),
    "planner": (
        "core",
        "family",
        "caches",
        "arrays",
        "blocks",
        "ilp",
        "annealing",
        "overlap",
        "bounds",
        "least",
        "strategies",
        "auto",
        "registry peak_report search_job worker background knapsack",
        "pipeline",
    ),
    "runtime": (
        "graph",
        "costs",
        "symbols",
        "guards",
        "capture/patches",
        "capture",
        "problem",
        "inversion",
        "split",
        "fuse",
        "execute",
        "statistics",
        "onnx/ops",
        "onnx",
        "pipeline",
    ),
    "rematplan": (
        "plans",
        "plan_report",
        "module",
        "parts",
        "optim",
        "step_loading",
        "fitting",
        "step_measurement",
        "knapsack_solver api plan_any_module plan_in_place inductor_peaks symbolic_halves compile_for_sizes "
        "compile_backend "
        "onnx_backend",
        "integrations",
        "pipeline",
        "auditing",
        "report",
        "cli",
        "__main__",
    ),
}
"""The rooms of each folder, lowest first: a file imports files of its own room and of lower ones. An entry names a
subfolder, or files of the folder itself. A file in another subfolder belongs to the nearest folder with an entry."""

ONLY_IN = {
    "onnx": ("ir/onnx/*.py", "rematplan/onnx_backend.py"),
    "onnx_ir": ("ir/onnx/*.py",),
    "platformdirs": ("ir/cache_folder.py",),
    "pytorch_lightning": ("rematplan/integrations/lightning.py",),
    "torchtitan": ("rematplan/integrations/torchtitan*.py",),
    "transformers": ("rematplan/integrations/transformers.py",),
    "ortools": (
        "planner/ilp/solver.py",
        "planner/ilp/highs_process.py",
        "planner/bounds/max_flow.py",
        "planner/ilp/step_program.py",
    ),
    "matplotlib": ("rematplan/report/plot*.py",),
    "plotly": ("rematplan/plan_report/page.py",),
}
"""Third-party packages that stay behind one or a few doors."""

COMPAT = Path("runtime/graph/compat.py")
"""The one file that may say a private name of PyTorch's."""

FILES = sorted(
    path.relative_to(ROOT)
    for folder in WALLS
    for path in (ROOT / folder).rglob("*.py")
    if not any(parent.is_symlink() for parent in path.parents)
)


@cache
def imported(path: Path) -> tuple[tuple[int, str], ...]:
    """Line and full name of every import of a file, wherever it stands in it."""
    return tuple(_imported(path))


def _imported(path: Path) -> Iterator[tuple[int, str]]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: a relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            # `from rematplan.ir.onnx import graph` names a module; `from rematplan.ir import Op` a thing in one.
            ours = str(node.module).split(".")[0] == "rematplan"
            inner = [name if ours and module_file(name) else node.module for name in names]
            yield from ((node.lineno, str(name)) for name in inner)


def module_file(name: str) -> Path | None:
    """The file of a module or package of rematplan, relative to the root; None if there is none of that name."""
    parts = name.split(".")
    folders = parts[1:] if len(parts) > 1 and parts[1] in WALLS else parts
    path = Path(*folders) if folders else Path("rematplan")
    for candidate in (path.with_suffix(".py"), path / "__init__.py"):
        if (ROOT / candidate).is_file():
            return candidate
    return None


def layer(file: Path) -> int | None:
    """The place of a file among its folder's layers; None for a folder's front, which may know all of them."""
    inside = file.relative_to(file.parts[0]).with_suffix("").as_posix()
    if inside == "__init__":
        return None
    rooms = {room: at for at, rooms in enumerate(LAYERS[file.parts[0]]) for room in rooms.split()}
    while inside not in rooms:
        inside, cut, _ = inside.rpartition("/")
        assert cut, f"{file} is in no room of LAYERS"
    return rooms[inside]


def within(name: str, allowed: tuple[str, ...]) -> bool:
    return any(name == a or name.startswith(a + ".") for a in allowed)


def test_there_is_something_to_check() -> None:
    assert len(FILES) > 40
    assert {f.parts[0] for f in FILES} == set(WALLS)


def imports() -> Iterator[tuple[Path, int, str]]:
    """File, line and full name of every import of the tree."""
    yield from ((file, line, name) for file in FILES for line, name in imported(ROOT / file))


def test_imports_stay_within_the_walls() -> None:
    for file, line, name in imports():
        wall = WALLS[file.parts[0]]
        if within(name, ("rematplan",)):
            assert within(name, wall.inside), f"{file}:{line} imports {name}"
        elif name.split(".")[0] not in sys.stdlib_module_names:
            assert within(name, wall.outside), f"{file}:{line} imports {name}"


def test_third_party_doors() -> None:
    for file, line, name in imports():
        doors = ONLY_IN.get(name.split(".")[0])
        allowed = doors is None or any(fnmatch(file.as_posix(), pattern) for pattern in doors)
        assert allowed, f"{file}:{line} imports {name}, which belongs in {doors}"


def test_every_package_that_is_imported_is_a_dependency() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    needed = [
        *project["dependencies"],
        *extras["transformers"],
        *extras["lightning"],
        *extras["report"],
        *extras["torchtitan"],
    ]
    declared = {re.split(r"[<>=!~;\[ ]", text)[0].replace("-", "_") for text in needed}
    used = {name.split(".")[0] for file in FILES for _, name in imported(ROOT / file)}
    assert used - set(sys.stdlib_module_names) - {"rematplan"} <= declared


def test_a_file_imports_only_its_own_room_and_lower_ones() -> None:
    for file, line, name in imports():
        mine = layer(file) if file.parts[0] in LAYERS else None
        other = module_file(name) if within(name, ("rematplan",)) else None
        if mine is None or other is None or other.parts[0] != file.parts[0] or other == file:
            continue
        yours = layer(other)
        front = yours is None and file.parts[0] != "ir"  # the types of `ir` are imported from its front
        assert not front, f"{file}:{line} imports {name}, the front of its own folder"
        assert yours is None or yours <= mine, f"{file}:{line} imports {name}, which is in a higher room"


@pytest.mark.parametrize("folder", LAYERS)
def test_the_architecture_page_has_all_rooms_in_their_order(folder: str) -> None:
    page = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    table = page.split(f"## `{folder}/`")[1].split("\n## ")[0]
    rooms = [room for entry in LAYERS[folder] for room in entry.split() if (ROOT / folder / room).is_dir()]
    assert re.findall(r"^\| `([\w/]+)` \|", table, re.MULTILINE) == rooms


def test_no_file_imports_itself_in_a_circle() -> None:
    edges = {
        file: {module_file(name) for _, name in imported(ROOT / file) if within(name, ("rematplan",))}
        for file in FILES
    }
    done: set[Path] = set()

    def visit(file: Path, path: tuple[Path, ...]) -> None:
        assert file not in path, " -> ".join(map(str, (*path[path.index(file) :], file)))
        if file not in done:
            for other in edges.get(file, ()):
                if other is not None and other.name != "__init__.py":
                    visit(other, (*path, file))
            done.add(file)

    for file in FILES:
        visit(file, ())


def test_scripts_import_names_that_exist_from_scripts_of_their_folder() -> None:
    for folder in ("benchmarks", "examples"):
        trees = {path.stem: ast.parse(path.read_text()) for path in (ROOT / folder).glob("*.py")}
        assert trees
        for name, tree in trees.items():
            for node in ast.walk(tree):
                if isinstance(node, ast.ImportFrom) and node.module in trees:
                    there = set(symbols(trees[node.module]))
                    missing = {one.name for one in node.names} - there
                    assert not missing, f"{folder}/{name}.py imports {missing} from {node.module}.py"


def symbols(tree: ast.Module) -> Iterator[str]:
    """The names that a file defines at its top level."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        for target in getattr(node, "targets", [getattr(node, "target", None)]):
            if isinstance(target, ast.Name):
                yield target.id


def test_a_front_only_hands_names_on() -> None:
    for file in (f for f in FILES if f.name == "__init__.py"):
        tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
        functions = [n.name for n in tree.body if isinstance(n, (ast.FunctionDef, ast.ClassDef))]
        assert functions in ([], ["__getattr__"], ["main"]), f"{file} defines {functions}"


def private_names_of_torch(path: Path) -> Iterator[tuple[int, str]]:
    """Line and full name of all that a file imports of torch, or reads of a name of torch's, with a private part."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    names = {"torch": "torch"}  # what stands for what of torch's
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield from _if_private(node, alias.name)
                names |= {alias.asname: alias.name} if alias.asname and within(alias.name, ("torch",)) else {}
        elif isinstance(node, ast.ImportFrom) and within(str(node.module), ("torch",)):
            for alias in node.names:
                yield from _if_private(node, f"{node.module}.{alias.name}")
                names[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            root, _, rest = ast.unparse(node).partition(".")
            if root in names:
                yield from _if_private(node, f"{names[root]}.{rest}")


def _if_private(node: ast.stmt | ast.expr, name: str) -> Iterator[tuple[int, str]]:
    # Ops have the names that they have in graphs, with or without an underscore.
    if within(name, ("torch",)) and not within(name, ("torch.ops",)) and re.search(r"\._(?!_)", name):
        yield node.lineno, name


def test_private_names_of_torch_stay_behind_one_door() -> None:
    for file in (f for f in FILES if f.parts[0] in ("runtime", "rematplan") and f != COMPAT):
        found = list(private_names_of_torch(ROOT / file))
        assert not found, f"{file}: {found}; import what {COMPAT} has of it"


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("import torch._dynamo", "torch._dynamo"),
        ("from torch.utils import _pytree as pytree", "torch.utils._pytree"),
        ("x = torch._C._get_cudnn_enabled()", "torch._C._get_cudnn_enabled"),
        ("from torch.nn.utils import parametrize as p; p._cache", "torch.nn.utils.parametrize._cache"),
        ("import torch.compiler as c; c._is_compiling_flag = True", "torch.compiler._is_compiling_flag"),
        ("torch.ops.aten._softmax, torch.__version__, x._version", None),
    ],
)
def test_the_door_knows_private_names(line: str, name: str | None, tmp_path: Path) -> None:
    file = tmp_path / "some.py"
    file.write_text(line)
    found = [private for _, private in private_names_of_torch(file)]
    assert name in found if name else not found


def test_the_door_says_which_torch_it_is_for() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert compat.TORCH in project["dependencies"]


def test_all_names_that_the_door_gives_later_are_there() -> None:
    for name in compat.LATER.keys() - {"clear_cublas_workspaces"}:
        assert getattr(compat, name) is not None, name


def test_a_private_name_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(compat.LATER, "no_such_name", ("torch._C", "_no_such_name"))
    with pytest.raises(
        ImportError, match=f"torch {re.escape(torch.__version__)} .*_no_such_name.*pip install"
    ):
        compat.no_such_name  # noqa: B018


def test_a_private_name_that_is_missing_at_once_is_named() -> None:
    program = "import torch; del torch._C._get_mkldnn_enabled; import rematplan.runtime.graph.compat"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT)
    last = done.stderr.splitlines()[-1]
    assert re.match(r"ImportError: torch .*_get_mkldnn_enabled.*pip install", last), last


REPORTS = frozenset({"onnx", "onnx_ir", "matplotlib", "rich"})
SEARCHES = frozenset({"numba", "ortools", "rematplan.planner.registry"})
COMPILERS = frozenset({"torch._dynamo", "torch._inductor", "torch._functorch.aot_autograd"})
INDUCTOR = "torch._inductor.compile_fx"
"""Takes a second to load, and only fused kernels need it."""
LEFT_OUT = {
    "import rematplan": REPORTS | SEARCHES | COMPILERS | {"torch"},
    "import rematplan.runtime.execute.compile": REPORTS | SEARCHES | COMPILERS,
    "import rematplan.module.planned_module": REPORTS | {INDUCTOR},
    "from rematplan import plan_module": REPORTS | {INDUCTOR},
}
"""What each of these lines, one after another in a fresh interpreter, does not load."""


@pytest.fixture(scope="module")
def loaded() -> dict[str, set[str]]:
    """The modules that the interpreter has loaded after each of the lines."""
    program = "\n".join(["import sys", *(f"{line}\nprint(*sys.modules)" for line in LEFT_OUT)])
    done = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True, cwd=ROOT
    )
    return dict(zip(LEFT_OUT, map(set, map(str.split, done.stdout.splitlines())), strict=True))


@pytest.mark.parametrize("line", LEFT_OUT)
def test_what_is_not_needed_is_not_loaded(line: str, loaded: dict[str, set[str]]) -> None:
    assert "rematplan" in loaded[line]
    assert not loaded[line] & LEFT_OUT[line]


SIMPLE = (
    "--help",
    "plan missing.onnx --budget 60%",
    "plan lenet --budget 60%",
    "export lenet -o lenet.onnx",
    "plan unet --budget 60% --costs abacus",
    "plan unet --budget 60% --device tpu",
)


def test_help_and_simple_mistakes_need_no_torch() -> None:
    program = (
        "import sys\n"
        "from rematplan.cli import main\n"
        f"for argv in {SIMPLE!r}:\n"
        "    try: main(argv.split())\n"
        "    except SystemExit: pass\n"
        "    print(f'\\n{argv}:', 'torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True, cwd=ROOT
    )
    lines = done.stdout.splitlines()
    assert [f"{argv}: False" in lines for argv in SIMPLE] == [True] * len(SIMPLE), lines
