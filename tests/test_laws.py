"""Laws of the house that ruff and import-linter cannot express, read from the syntax tree."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PRODUCT = sorted([*ROOT.glob("nsa/**/*.py"), *ROOT.glob("perfbench/**/*.py")])
TESTS = sorted(ROOT.glob("tests/**/*.py"))
MAY_READ_ENVIRONMENT = {"nsa/settings.py", "perfbench/machine/environment.py"}
OPERATORS = [path for path in PRODUCT if path.is_relative_to(ROOT / "nsa/ops")]
LAUNCH = "nsa/ops/kernels/launch.py"  # the one door to a Triton launch
MAY_READ_ADDRESSES = {
    LAUNCH,
    *(f"nsa/ops/kernels/{name}.py" for name in ("call_recorder", "launch_plan", "plans")),
}
MAX_LINES = 600  # a file is one idea; beyond this it is rarely one


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@cache
def tree_of(path: Path) -> ast.Module:
    """Shared by the laws, none of which changes it."""
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def imports(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Every imported dotted name with its line, ``from a import b`` as ``a.b``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((f"{node.module}.{alias.name}", node.lineno) for alias in node.names)


def is_causal_uses(tree: ast.AST) -> list[int]:
    """Lines that pass ``is_causal``, name a parameter so, or read an attribute of that name."""
    found = [
        node.value.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.keyword) and node.arg == "is_causal"
    ]
    found += [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.arg) and node.arg == "is_causal"
    ]
    found += [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Name) and node.id == "is_causal"
    ]
    found += [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and node.attr == "is_causal"
    ]
    # **{"is_causal": True}
    keys = [key for node in ast.walk(tree) if isinstance(node, ast.Dict) for key in node.keys]
    return found + [
        key.lineno for key in keys if isinstance(key, ast.Constant) and key.value == "is_causal"
    ]


def environment_uses(tree: ast.AST) -> list[int]:
    """Lines that reach the process's environment through os, whatever they call it."""
    names = ("environ", "environb", "getenv", "putenv", "unsetenv")
    found = [line for name, line in imports(tree) if name in {f"os.{n}" for n in names}]
    return found + [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and node.attr in names
    ]


def selected_paths(tree: ast.AST) -> list[int]:
    """Lines that import the registry of selected paths, or a path; what paths are made of is
    neither.
    """
    of_triton = "backward block_lists chunks dense_tiles forward list_calls tile_sizes"
    parts = (
        "nsa.ops.selected.gathered_rows",
        *(f"nsa.ops.selected.triton.{name}" for name in of_triton.split()),
    )
    return [
        line
        for name, line in imports(tree)
        if name.startswith("nsa.ops.selected") and not name.startswith(parts)
    ]


def broad_catches(tree: ast.AST) -> list[int]:
    """Handlers of everything, however spelled: a bare except, Exception, BaseException,
    contextlib.suppress(Exception).
    """
    broad = ("Exception", "BaseException")

    def is_broad(node: ast.expr | None) -> bool:
        if isinstance(node, ast.Tuple):
            return any(is_broad(element) for element in node.elts)
        return isinstance(node, ast.Name) and node.id in broad

    found = [
        n.lineno
        for n in ast.walk(tree)
        if isinstance(n, ast.ExceptHandler) and (n.type is None or is_broad(n.type))
    ]
    calls = [n for n in ast.walk(tree) if isinstance(n, ast.Call)]
    return found + [
        c.lineno
        for c in calls
        if ast.unparse(c.func).endswith("suppress") and any(is_broad(a) for a in c.args)
    ]


def hidden_skips(tree: ast.AST) -> list[int]:
    """Uses of skip, importorskip and xfail: a test that does not run must not look like one that
    passed.
    """
    names = ("skip", "importorskip", "xfail")
    return [
        n.lineno
        for n in ast.walk(tree)
        if isinstance(n, ast.Attribute) and n.attr in names and "pytest" in ast.unparse(n)
    ]


def kernels_of(tree: ast.AST) -> set[str]:
    """Functions that are decorated with `triton.jit`, `gluon.jit`, or a call of one."""
    return {
        node.name
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef)
        and any(re.search(r"\bjit\b", ast.unparse(one)) for one in node.decorator_list)
    }


KERNELS = frozenset().union(*(kernels_of(tree_of(path)) for path in OPERATORS))


def launches(tree: ast.AST) -> list[int]:
    """Lines that launch a kernel as Triton does, and not by `launch`: a call with arguments of
    something with a subscript, a kernel with one, `run` with a grid, `warmup`.
    """
    named = [n for n in ast.walk(tree) if isinstance(n, ast.alias) and n.name in KERNELS]
    own = kernels_of(tree) | {n.asname or n.name for n in named}

    def is_launch(node: ast.AST) -> bool:
        if isinstance(node, ast.Subscript):
            of = node.value
            if isinstance(of, ast.Attribute):
                return of.attr in KERNELS
            return isinstance(of, ast.Name) and of.id in own
        if not isinstance(node, ast.Call):
            return False
        if isinstance(node.func, ast.Attribute):
            with_grid = "grid" in {one.arg for one in node.keywords}
            return node.func.attr == "warmup" or (node.func.attr == "run" and with_grid)
        return isinstance(node.func, ast.Subscript) and bool(node.args or node.keywords)

    return [node.lineno for node in ast.walk(tree) if is_launch(node)]


def addresses(tree: ast.AST) -> list[int]:
    """Lines that read the address of a tensor for more than `x.data_ptr() % 16`, which alone is in
    the key of a launch plan: a number made of an address is repeated for other tensors.
    """
    allowed = {
        node.left.func
        for node in ast.walk(tree)
        if isinstance(node, ast.BinOp)
        and isinstance(node.op, ast.Mod)
        and isinstance(node.left, ast.Call)
        and isinstance(node.right, ast.Constant)
        and node.right.value == 16
    }
    names = ("data_ptr", "__cuda_array_interface__", "__dlpack__", "to_dlpack")
    return [
        node.lineno
        for node in ast.walk(tree)
        if (isinstance(node, ast.Attribute) and node.attr in names and node not in allowed)
        or (isinstance(node, ast.Constant) and node.value in names)
    ]


CLOCKS = ("perf_counter", "process_time", "thread_time", "monotonic", "getrusage")
SECONDS = re.compile(r"_(s|ms|us|ns)$|(^|_)(secs?|seconds|elapsed|ru_[us]time)$")
RATES = re.compile(r"_per_(s|ms|us|ns|second)$")


def _reads_a_clock(node: ast.AST, tainted: set[str]) -> bool:
    """Whether the value is time: of a clock, of a name that holds such, or of one that says so.

    Time divided by time is not.
    """
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
        return _reads_a_clock(node.left, tainted) and not _reads_a_clock(node.right, tainted)
    for part in ast.walk(node):
        name = part.attr if isinstance(part, ast.Attribute) else getattr(part, "id", "")
        if name in tainted or name.removesuffix("_ns") in CLOCKS:
            return True
        if SECONDS.search(name) and not RATES.search(name):
            return True
    return False


def _is_a_number(node: ast.AST) -> bool:
    """A number that is written out, arithmetic included; 0 only states the sign."""
    if not all(
        isinstance(part, (ast.Constant, ast.BinOp, ast.UnaryOp, ast.operator, ast.unaryop))
        for part in ast.walk(node)
    ):
        return False
    found = [part.value for part in ast.walk(node) if isinstance(part, ast.Constant)]
    return found != [0] and all(isinstance(value, int | float) for value in found)


def asserted_seconds(tree: ast.AST) -> list[int]:
    """Lines of assertions that hold time against a number that is written out: it depends on the
    machine and on what else runs. Time against time, in one run, is a ratio and passes.
    """
    tainted: set[str] = set()
    assigned = [node for node in ast.walk(tree) if isinstance(node, ast.Assign)]
    before = -1
    while before < len(tainted):  # a name that holds time makes another one hold it
        before = len(tainted)
        for node in assigned:
            called = [part for part in ast.walk(node.value) if isinstance(part, ast.Attribute)]
            called += [part for part in ast.walk(node.value) if isinstance(part, ast.Name)]
            names = {getattr(part, "attr", getattr(part, "id", "")) for part in called}
            if names & tainted or {name.removesuffix("_ns") for name in names} & set(CLOCKS):
                targets = [one for target in node.targets for one in ast.walk(target)]
                tainted |= {one.id for one in targets if isinstance(one, ast.Name)}
    order = (ast.Lt, ast.LtE, ast.Gt, ast.GtE)
    return [
        compared.lineno
        for claim in ast.walk(tree)
        if isinstance(claim, ast.Assert)
        for compared in ast.walk(claim.test)
        if isinstance(compared, ast.Compare)
        for left, how, right in zip(
            [compared.left, *compared.comparators], compared.ops, compared.comparators, strict=False
        )
        if isinstance(how, order)
        and any(
            _reads_a_clock(one, tainted) and _is_a_number(other)
            for one, other in ((left, right), (right, left))
        )
    ]


@pytest.mark.parametrize("path", [*PRODUCT, *TESTS], ids=name_of)
def test_is_causal_is_banned(path: Path) -> None:
    """Its corner depends on the library when T != S; ops/sdpa.py is the one place that knows
    which.
    """
    if name_of(path) != "nsa/ops/sdpa.py":
        assert is_causal_uses(tree_of(path)) == []


@pytest.mark.parametrize("path", PRODUCT, ids=name_of)
def test_environment_is_read_in_two_files(path: Path) -> None:
    if name_of(path) not in MAY_READ_ENVIRONMENT:
        assert environment_uses(tree_of(path)) == []


@pytest.mark.parametrize("path", PRODUCT, ids=name_of)
def test_no_broad_catch(path: Path) -> None:
    assert broad_catches(tree_of(path)) == []


@pytest.mark.parametrize("path", TESTS, ids=name_of)
def test_no_hidden_skip(path: Path) -> None:
    assert hidden_skips(tree_of(path)) == []


@pytest.mark.parametrize("path", TESTS, ids=name_of)
def test_no_seconds_are_asserted(path: Path) -> None:
    """What must be fast is a benchmark, or a ratio of one run (tests/effort.py)."""
    assert asserted_seconds(tree_of(path)) == []


@pytest.mark.parametrize("path", PRODUCT, ids=name_of)
def test_files_stay_small(path: Path) -> None:
    if path.stem != "kernels":
        assert len(path.read_text(encoding="utf-8").splitlines()) <= MAX_LINES


@pytest.mark.parametrize("path", PRODUCT, ids=name_of)
def test_one_door(path: Path) -> None:
    """Only dispatch reaches the registry of selected paths, and only dispatch records
    engagement; that of a peer its one caller.
    """
    if name_of(path) == "nsa/dispatch.py" or "selected" in path.parts:
        return
    tree = tree_of(path)
    assert selected_paths(tree) == []
    if name_of(path) == "perfbench/worker/peers/call.py":
        return
    records = [
        n.lineno
        for n in ast.walk(tree)
        if isinstance(n, ast.Call) and ast.unparse(n.func) == "engagement.record"
    ]
    assert records == []


@pytest.mark.parametrize("path", OPERATORS, ids=name_of)
def test_kernels_are_launched_by_one_door(path: Path) -> None:
    """A launch plan repeats the launches that went through `launch`: one that goes past it would
    be left out of every later call.
    """
    if name_of(path) != LAUNCH:
        assert launches(tree_of(path)) == []


@pytest.mark.parametrize("path", OPERATORS, ids=name_of)
def test_addresses_are_no_numbers(path: Path) -> None:
    """A launch plan repeats numbers as they were, and puts addresses in the places of tensors."""
    if name_of(path) not in MAY_READ_ADDRESSES:
        assert addresses(tree_of(path)) == []


def test_the_door_itself_launches_and_reads_addresses() -> None:
    """So that the laws do not stay green where it is renamed."""
    assert launches(tree_of(ROOT / LAUNCH)) != []
    assert all(addresses(tree_of(ROOT / name)) != [] for name in MAY_READ_ADDRESSES)
    assert {"nsa_interval_forward", "nsa_append_pages"} <= KERNELS


@pytest.mark.parametrize(
    ("checker", "violation"),
    [
        (is_causal_uses, "sdpa(q, k, v, is_causal=True)"),
        (is_causal_uses, "sdpa(q, k, v, **{'is_causal': True})"),
        (is_causal_uses, "def f(q, is_causal): ..."),
        (environment_uses, "import os\nos.environ['A']"),
        (environment_uses, "from os import environ as e"),
        (environment_uses, "from os import getenv"),
        (environment_uses, "import os as o\no.getenv('A')"),
        (broad_catches, "try: f()\nexcept Exception: pass"),
        (broad_catches, "try: f()\nexcept: raise"),
        (broad_catches, "try: f()\nexcept (ValueError, Exception): pass"),
        (broad_catches, "with contextlib.suppress(BaseException): f()"),
        (selected_paths, "from nsa.ops.selected import PATHS"),
        (selected_paths, "from nsa.ops import selected"),
        (selected_paths, "from nsa.ops.selected.triton import attend"),
        (selected_paths, "import nsa.ops.selected.v2"),
        (hidden_skips, "pytest.importorskip('flash_attn')"),
        (hidden_skips, "@pytest.mark.xfail\ndef test(): ..."),
        (launches, "nsa_own[(B * T, G)](x, out, 3, num_warps=4)"),
        (launches, "run = append_kernels.nsa_append_pages[grid]\nrun(x, out)"),
        (launches, "@gluon.jit(do_not_specialize=['n'])\ndef own(X): ...\nf = own[1,]"),
        (launches, "nsa_own.run(x, out, grid=(1,), warmup=False)"),
        (launches, "nsa_own.warmup(x, out, grid=(1,))"),
        (addresses, "launch(nsa_own, (1,), out, x.data_ptr(), 64)"),
        (addresses, "at = x.data_ptr() + 4 * n\nlaunch(nsa_own, (1,), out, at)"),
        (addresses, "launch(nsa_own, (1,), out, x.data_ptr() % 64)"),
        (addresses, "launch(nsa_own, (1,), out, *map(Tensor.data_ptr, xs))"),
        (addresses, "launch(nsa_own, (1,), out, getattr(x, 'data_ptr')())"),
        (addresses, "launch(nsa_own, (1,), out, x.__cuda_array_interface__['data'][0])"),
        (asserted_seconds, "assert time.process_time() - begin < 2.0 and ok"),
        (asserted_seconds, "begin = monotonic()\nwork()\nx = monotonic() - begin\nassert x <= 5"),
        (asserted_seconds, "start = perf_counter_ns()\nassert perf_counter_ns() - start < 10**9"),
        (asserted_seconds, "assert 0.1 < row.wall_s"),
        (asserted_seconds, "assert all(0 < seconds < 5 for seconds in row.samples_s)"),
        (asserted_seconds, "assert not elapsed >= 2 * 60"),
        (asserted_seconds, "a = getrusage(SELF)\nassert a.ru_utime - b.ru_utime < 0.2"),
    ],
)
def test_checkers_see_what_they_ban(checker, violation: str) -> None:
    assert checker(ast.parse(violation)) != []


@pytest.mark.parametrize(
    "ratio",
    [
        "a = process_time()\nwork()\nb = process_time()\nassert b - a < 3 * loop_s",
        "assert 0 < row.cold_start_s <= row.wall_s <= whole_s",
        "assert slow.wall_s / fast.wall_s > 1.8",
        "assert effort.growth(judging, 1000) < 8",
        "assert row.tok_per_s > 1 and clock.now() == 3.0 and row.num_samples >= 3",
    ],
)
def test_ratios_are_no_seconds(ratio: str) -> None:
    assert asserted_seconds(ast.parse(ratio)) == []


def loaded_by(module: str) -> set[str]:
    """Top-level packages in sys.modules after importing ``module`` in a fresh interpreter."""
    code = f"import sys, {module}; print(*{{name.split('.')[0] for name in sys.modules}})"
    return set(
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
        ).stdout.split()
    )


def test_help_loads_nothing_heavy() -> None:
    """What keeps `perfbench --help` under half a second, without a stopwatch."""
    assert (
        loaded_by("perfbench.commands.app")
        & {"torch", "numpy", "pandas", "matplotlib", "scipy", "pydantic", "ruamel", "rich"}
        == set()
    )


@pytest.mark.parametrize(
    "module",
    [
        "nsa.routing",
        "nsa.config",
        "nsa.blocks",
        "nsa.settings",
        "nsa.capability",
        "perfbench.matrix",
        "perfbench.matrix.plan",
    ],
)
def test_deciding_needs_no_torch(module: str) -> None:
    assert loaded_by(module) & {"torch", "numpy", "pandas", "matplotlib"} == set()


@pytest.mark.parametrize(
    "module",
    ["perfbench.gate", "perfbench.records", "perfbench.report"],
)
def test_judging_needs_no_torch(module: str) -> None:
    assert "torch" not in loaded_by(module)


# Rooms of perfbench: a package is entered by its façade, the `__init__` that names what others use.

Trees = dict[str, ast.Module]  # dotted module name -> its syntax tree; a package is its `__init__`
MAX_FACADE_LINES = 40
MAX_PARAMETERS = 8
MAX_AT_THE_TOP = 6


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def trees_under(*folders: str) -> Trees:
    paths = (path for folder in folders for path in sorted(ROOT.glob(f"{folder}/**/*.py")))
    return {module_of(path): tree_of(path) for path in paths}


def room_of(module: str) -> str:
    return ".".join(module.split(".")[:2])


def packages_of(trees: Trees) -> set[str]:
    return {name.rpartition(".")[0] for name in trees} - {""}


def imported_names(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """(module, name) of every ``from`` import, below TYPE_CHECKING and in functions too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            yield from ((node.module or "", alias.name) for alias in node.names)


def import_graph(trees: Trees) -> dict[str, set[str]]:
    """Module -> the modules of ``trees`` that it imports, wherever the statement stands."""
    graph: dict[str, set[str]] = {}
    for module, tree in trees.items():
        named = {name for name, _ in imports(tree)} | {home for home, _ in imported_names(tree)}
        graph[module] = (named & set(trees)) - {module}
        for home, name in imported_names(tree):  # a submodule by name is no use of its package
            if f"{home}.{name}" in trees:
                others = (other for h, other in imported_names(tree) if h == home)
                if all(f"{home}.{other}" in trees for other in others):
                    graph[module].discard(home)
    return graph


def import_circles(trees: Trees) -> list[list[str]]:
    """Modules that import one another, directly or by others (Tarjan's components of two and
    more).
    """
    graph, order, low, stack, found = import_graph(trees), {}, {}, [], []

    def visit(module: str) -> None:
        order[module] = low[module] = len(order)
        stack.append(module)
        for other in sorted(graph[module]):
            if other not in order:
                visit(other)
            if other in stack:
                low[module] = min(low[module], low[other])
        if low[module] == order[module]:
            circle = stack[stack.index(module) :]
            del stack[stack.index(module) :]
            if len(circle) > 1:
                found.append(sorted(circle))

    for module in trees:
        if module not in order:
            visit(module)
    return found


def exports_of(facade: ast.Module) -> dict[str, tuple[str, str]]:
    """Exported name -> (module, the name there)."""
    return {
        alias.asname or alias.name: (node.module or "", alias.name)
        for node in facade.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }


def windows(trees: Trees) -> list[str]:
    """Imports from another room that pass its façade, and imports of a private name."""
    packages = packages_of(trees)
    found = []
    for module, tree in trees.items():
        for home, name in imported_names(tree):
            if not home.startswith("perfbench"):
                continue
            if name.startswith("_"):
                found.append(f"{module} imports the private {home}.{name}")
            target = f"{home}.{name}" if f"{home}.{name}" in trees else home
            exported = home in packages and name in exports_of(trees[home])
            inside = target not in packages and not exported and target.count(".") > 1
            if room_of(module) != room_of(target) and inside:
                found.append(f"{module} imports {home}.{name} past the façade")
        for name, _ in imports(tree):
            inside = name in trees and name not in packages and name.count(".") > 1
            if isinstance(tree, ast.Module) and inside and room_of(name) != room_of(module):
                home, _, last = name.rpartition(".")
                if (home, last) not in set(imported_names(tree)):
                    found.append(f"{module} imports {name} past the façade")
    return found


def uses_of_packages(module: str, tree: ast.Module, packages: set[str]) -> set[tuple[str, str]]:
    """(package, name) of what ``tree`` takes from façades: imported, or read from the imported
    package as an attribute.
    """
    found = {(home, name) for home, name in imported_names(tree) if home in packages}
    bound: dict[str, set[str]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                if (package := f"{node.module}.{alias.name}") in packages:
                    bound.setdefault(alias.asname or alias.name, set()).add(package)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            found |= {(package, node.attr) for package in bound.get(node.value.id, ())}
    return {(package, name) for package, name in found if not module.startswith(f"{package}.")}


def unwanted_exports(trees: Trees, users: Trees) -> list[str]:
    """Exports that no other room or tool uses, and those that share a submodule's name."""
    packages = {name for name in packages_of(trees) if name != "perfbench"}
    used: set[tuple[str, str]] = set()
    for module, tree in users.items():
        used |= uses_of_packages(module, tree, packages)
    found = []
    for package in sorted(packages):
        for name, (home, _) in exports_of(trees[package]).items():
            if (package, name) not in used:
                found.append(f"{package} exports {name}, which nobody else uses")
            if f"{package}.{name}" in trees and home != package:
                found.append(f"{package} exports {name}, which is a submodule's name too")
    return found


def broad_facades(trees: Trees) -> list[str]:
    """Façades of more than 40 lines, with statements of their own, or without a docstring of one
    sentence.
    """
    found = []
    for package in sorted(packages_of(trees)):
        tree, words = trees[package], (ast.get_docstring(trees[package]) or "").strip()
        if package == "perfbench":
            continue
        last = max((node.end_lineno or 0 for node in tree.body), default=0)
        if last > MAX_FACADE_LINES:
            found.append(f"{package} has {last} lines")
        if not words.endswith(".") or ". " in words or "\n\n" in words:
            found.append(f"{package} wants a docstring of one sentence")
        if any(not isinstance(node, ast.ImportFrom) for node in tree.body[1:]):
            found.append(f"{package} does more than import")
    return found


def classes_twice(trees: Trees) -> dict[str, list[str]]:
    """Class name -> the modules that define it, where there are several."""
    homes: dict[str, list[str]] = {}
    for module, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                homes.setdefault(node.name, []).append(module)
    return {name: where for name, where in homes.items() if len(where) > 1}


def typer_commands(trees: Trees) -> set[str]:
    """Functions that are decorated with ``.command()``, or passed to it."""
    found = set()
    for node in (node for tree in trees.values() for node in ast.walk(tree)):
        if isinstance(node, ast.Call) and ".command(" in ast.unparse(node.func) and node.args:
            found.add(ast.unparse(node.args[0]).rpartition(".")[2])
        if isinstance(node, ast.FunctionDef) and any(
            ".command(" in ast.unparse(one) for one in node.decorator_list
        ):
            found.add(node.name)
    return found


def many_parameters(trees: Trees) -> list[str]:
    """Functions of more than 8 parameters; self and cls are none, and a typer command's are the
    options of its command line.
    """
    found, commands = [], typer_commands(trees)
    for module, tree in trees.items():
        for node in ast.walk(tree):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            every = (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
            names = [one.arg for one in every]
            own = names[1:] if names[:1] in (["self"], ["cls"]) else names
            command = module.startswith("perfbench.commands.") and node.name in commands
            if len(own) > MAX_PARAMETERS and not command:
                found.append(f"{module}.{node.name} has {len(own)}")
    return found


def test_no_import_circle() -> None:
    """TYPE_CHECKING included: types that need each other belong to one module."""
    assert import_circles(trees_under("perfbench")) == []


def test_rooms_are_entered_by_their_facade() -> None:
    trees, tools = trees_under("perfbench"), trees_under("tools")
    assert windows(trees | tools) == []
    assert broad_facades(trees) == []
    assert unwanted_exports(trees, trees | tools) == []


def test_at_most_six_modules_at_the_top() -> None:
    top = [path.stem for path in (ROOT / "perfbench").glob("*.py")]
    assert len(top) <= MAX_AT_THE_TOP


def test_no_class_name_twice() -> None:
    assert classes_twice(trees_under("nsa", "perfbench", "tools")) == {}


def test_no_more_than_eight_parameters() -> None:
    """In perfbench; nsa's operators and kernels take each tensor and number by itself."""
    assert many_parameters(trees_under("perfbench", "tools")) == []


def planted(**modules: str) -> Trees:
    """``gate__stats="..."`` is perfbench.gate.stats; every room has an empty façade."""
    named = {f"perfbench.{name.replace('__', '.')}": text for name, text in modules.items()}
    rooms = {room_of(name): '"""A room."""' for name in named} | {"perfbench": '"""All."""'}
    return {name: ast.parse(text) for name, text in (rooms | named).items()}


CIRCLE = planted(
    gate__a="if TYPE_CHECKING:\n    from perfbench.gate.b import B",
    gate__b="def f():\n    from perfbench.gate.c import C",
    gate__c="from perfbench.gate import a",
)


@pytest.mark.parametrize(
    ("checker", "trees"),
    [
        (import_circles, CIRCLE),
        (windows, planted(gate__a="", report__b="from perfbench.gate.a import f")),
        (windows, planted(gate__a="", report__b="from perfbench.gate import a")),
        (windows, planted(gate__a="", report__b="import perfbench.gate.a")),
        (windows, planted(gate__a="", gate__b="from perfbench.gate.a import _f")),
        (broad_facades, planted(gate='"""A room."""\nX = 1', gate__a="")),
        (broad_facades, planted(gate='"""A room. And a second."""', gate__a="")),
        (broad_facades, planted(gate="from perfbench.gate.a import f", gate__a="")),
        (broad_facades, planted(gate='"""A room."""' + "\n" * 40 + "from a import b", gate__a="")),
        (
            lambda trees: unwanted_exports(trees, trees),
            planted(gate='"""A room."""\nfrom perfbench.gate.a import f', gate__a="def f(): ..."),
        ),
        (
            lambda trees: unwanted_exports(trees, trees),
            planted(
                gate='"""A room."""\nfrom perfbench.gate.a import a',
                gate__a="def a(): ...",
                report__b="from perfbench.gate import a",
            ),
        ),
        (classes_twice, planted(gate__a="class Side: ...", report__b="class Side: ...")),
        (many_parameters, planted(gate__a="def f(a, b, c, d, e, *, g, h, i, j): ...")),
    ],
)
def test_laws_of_rooms_see_what_they_ban(checker, trees: Trees) -> None:
    assert checker(trees)


@pytest.mark.parametrize(
    ("checker", "trees"),
    [
        (import_circles, planted(gate__a="from perfbench.gate.b import f", gate__b="")),
        (
            windows,
            planted(
                gate='"""A."""\nfrom perfbench.gate.a import f',
                gate__a="",
                report__b=("from perfbench.gate import f\nfrom perfbench import gate"),
            ),
        ),
        (
            lambda trees: unwanted_exports(trees, trees),
            planted(
                gate='"""A room."""\nfrom perfbench.gate import stats',
                gate__stats="",
                report__b="from perfbench.gate import stats",
            ),
        ),
        (many_parameters, planted(gate__a="class A:\n  def f(self, a, b, c, d, e, g, h, i): ...")),
        (
            many_parameters,
            planted(commands__a=("@app.command()\ndef f(a, b, c, d, e, g, h, i, j, k): ...")),
        ),
    ],
)
def test_laws_of_rooms_allow_what_is_right(checker, trees: Trees) -> None:
    assert not checker(trees)
