"""The tree is the architecture: who imports whom, who touches which library, who calls a collective.

Everything is read from the sources. A test that fails here after a change asks a question: is the new arrow meant?
Then change the table in the same commit; the table of the rooms is in docs/inside/architecture.md.
"""

import ast
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from waiting import HANG_S

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "trl_multinode"
FILES = sorted(PACKAGE.rglob("*.py"))

ROOM_ROW = re.compile(r"^\| `([\w.]+?)(?:/|\.py)` \| [^|]* \| [^|]* \| ?([\w ]*)\|$", re.MULTILINE)


def rooms_of(page: str) -> dict[str, set[str]]:
    """Return room -> rooms that it imports besides `errors`, from the table of docs/inside/architecture.md."""
    return {room: set(row.split()) for room, row in ROOM_ROW.findall(page)}


PAGE = (ROOT / "docs" / "inside" / "architecture.md").read_text()
# From top to bottom: a room (a folder of the package, or a file beside them) imports exactly the rooms of its row, and
# these stand further down
ARROWS = rooms_of(PAGE)

# Rooms that may import a library; "lazily": only inside functions.
LIBRARIES = {
    "trl": {
        **dict.fromkeys(
            ("config", "trainer", "trainers", "batches", "rollouts", "experimental", "examples"), ""
        ),
        "__init__": "lazily",
    },
    "transformers": {
        **dict.fromkeys(
            (
                "config",
                "call_checks",
                "deepspeed_values",
                "model_outline",
                "must_agree",
                "saving",
                "batches",
                "rehearsal",
                "reporting",
            ),
            "",
        ),
        "tools": "lazily",
        "weights": "lazily",
    },
    "ray": {"agent": ""},
    "accelerate": {"tools": ""},  # elsewhere it is TRL's accelerator
    "vllm": {"engine_process": "lazily", "vllm_worker": ""},
    "deepspeed": {"weights": "lazily", "saving": "lazily"},
    "peft": {"model_outline": "lazily", "weights": "lazily", "saving": "lazily"},
}


COLLECTIVES = {
    "trainer": {"gather"},  # a flag per row and round, with a harness
    "images": {"gather"},  # a flag per round, of models with images and sharded weights
    "rollouts.text_logging": {"gather_object"},
    "rollouts.one_prompt": {"gather"},  # a number per row and round, where groups straddle ranks
    # sums of all rows for the log and the alarm, once per optimizer step, where TRL has five gathers per round
    "rollouts.loss_scores": {"all_reduce"},
    "weights.source": {"GatheredParameters", "full_tensor"},
    # of a tensor of few rows under FSDP2, in the world
    "weights.even_pieces": {"all_to_all_single"},
    # of the weights, in two groups
    "weights.gathering": {
        "all_gather_into_tensor",
        "all_reduce",
        "batch_isend_irecv",
        "new_subgroups_by_enumeration",
    },
    # with the node's workers, in a group that no other rank is in
    "transports.broadcast": {"broadcast"},
    "rollouts.generation": {"wait_for_everyone"},  # before a sync; `generate` has none
    "saving.checkpoints": {"gather", "wait_for_everyone"},  # which are whole; when one is
    # frozen parameters of a checkpoint of another number of ranks, once
    "saving.conversion": {"GatheredParameters"},
    "reporting.steps": {"gather"},  # of a few numbers per rank, once per log
    # lengths of all ranks; rows between nodes, then within a node; with sessions the most rows of a rank
    "batches.row_exchange": {
        "all_gather_into_tensor",
        "all_reduce",
        "all_to_all_single",
        "new_group",
    },
    "tools.doctor.ring": {"new_group"},  # one per GPU of a node, before a run
    # once per batch of an evaluation with sessions
    "batches.microbatches": {"reduce"},
    # once per optimizer step, instead of TRL's seven per micro-batch
    "batches.local_metrics": {"gather"},
}
COLLECTIVE_NAMES = {
    "GatheredParameters", "full_tensor", "wait_for_everyone", "gather", "gather_object", "all_gather_object",
    "gather_for_metrics", "all_gather", "all_gather_into_tensor", "all_reduce", "reduce", "reduce_scatter",
    "broadcast", "broadcast_object_list", "scatter_object_list", "barrier", "monitored_barrier", "all_to_all",
    "all_to_all_single", "batch_isend_irecv",
    "new_group", "new_subgroups_by_enumeration",
}  # fmt: skip


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts)


MODULES = {name_of(path): path for path in FILES}


@cache
def tree(module: str) -> ast.Module:
    return ast.parse(MODULES[module].read_text())


def imports(
    node: ast.AST, package: tuple[str, ...], inside: bool = False
) -> Iterator[tuple[str, bool]]:
    """Absolute names that are imported below `node`, and whether inside a function."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from ((alias.name, inside) for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            base = list(package[: len(package) - child.level + 1]) if child.level else []
            source = ".".join([*base, *([child.module] if child.module else [])])
            yield from ((f"{source}.{alias.name}", inside) for alias in child.names)
        else:
            lazily = inside or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)
            yield from imports(child, package, lazily)


@cache
def imported(module: str) -> frozenset[tuple[str, bool]]:
    parts = ("trl_multinode", *module.split(".")[:-1])
    return frozenset(imports(tree(module), parts))


def room(module: str) -> str:
    """Return the folder of a module, or the module itself if it stands beside the folders."""
    return module.split(".")[0]


ROOMS = {room(module) for module in MODULES}


def imported_room(name: str) -> str | None:
    """Return the room of an imported name: `trl_multinode.wire.messages.Done` is in `wire`."""
    parts = name.split(".")
    if parts[0] != "trl_multinode":
        return None
    return parts[1] if parts[1] in ROOMS else "__init__"


def belongs(name: str, library: str) -> bool:
    return name == library or name.startswith(library + ".")


def test_each_room_imports_exactly_its_row():
    """Every room may import `errors`, so the table leaves it out."""
    assert set(ARROWS) == ROOMS, "docs/inside/architecture.md has one row for each room"
    differing = {}
    for name in ROOMS:
        modules = [module for module in MODULES if room(module) == name]
        found = {imported_room(target) for module in modules for target, _ in imported(module)}
        found -= {None, name, "errors"}
        if found != ARROWS[name]:
            differing[name] = {"new": found - ARROWS[name], "gone": ARROWS[name] - found}
    assert not differing


def test_arrows_point_downwards():
    order = list(ARROWS)
    assert not [(a, b) for a in order for b in ARROWS[a] if order.index(b) <= order.index(a)]


def test_a_library_is_imported_only_where_it_may():
    wrong = []
    for library, allowed in LIBRARIES.items():
        for module in MODULES:
            uses = {inside for name, inside in imported(module) if belongs(name, library)}
            how = allowed.get(room(module))
            if uses and how is None:
                wrong.append(f"{module} imports {library}")
            elif uses and how == "lazily" and uses != {True}:
                wrong.append(f"{module} imports {library} outside functions")
    assert not wrong


def test_ray_is_imported_by_one_file_and_only_when_it_is_asked_for():
    chain = ("ray", "agent.ray_cluster"), ("trl_multinode.agent.ray_cluster", "agent.ray_engines")
    for name, user in chain:
        assert [m for m in MODULES if any(belongs(n, name) for n, _ in imported(m))] == [user]
    driver = "trl_multinode.agent.ray_engines"
    uses = {(m, how) for m in MODULES for name, how in imported(m) if belongs(name, driver)}
    assert uses == {("tools.engines", True)}


def test_collectives_are_called_where_the_table_says():
    found: dict[str, set[str]] = {}
    for module in MODULES:
        for node in ast.walk(tree(module)):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                of = ast.unparse(node.func)
                on_a_tensor = (
                    node.func.attr == "gather"
                    and "accelerator" not in of
                    and not of.startswith("dist.")
                )
                if node.func.attr in COLLECTIVE_NAMES and not on_a_tensor:
                    found.setdefault(module, set()).add(node.func.attr)
    assert found == COLLECTIVES


# Rooms of a command or of an engine's process, which has a log
OWN_OUTPUT = {
    "tools", "examples", "engine_process", "vllm_worker", "transports",
}  # fmt: skip


def test_a_rank_speaks_through_the_reporter_only():
    for module in MODULES:
        # the latter logs nothing
        if room(module) in OWN_OUTPUT or module in (
            "run.reporter",
            "run.warn_once",
        ):
            continue
        calls = [n for n in ast.walk(tree(module)) if isinstance(n, ast.Call)]
        prints = [n.lineno for n in calls if ast.unparse(n.func) == "print"]
        loggers = {name for name, _ in imported(module) if belongs(name, "logging")}
        assert not prints and not loggers, f"{module}: {prints or loggers}; use run/reporter.py"


def test_nothing_is_pickled():
    for module, path in MODULES.items():
        bad = {n for n, _ in imported(module) if n.split(".")[0] in PICKLES}
        bad |= {c for n in ast.walk(tree(module)) if isinstance(n, ast.Call) and (c := ast.unparse(n.func)) in
                ("torch.load", "torch.save", "eval", "exec") and not makes_tensors_only(n)}  # fmt: skip
        assert not bad, (module, bad)
        if module != "engine.environment":  # which refuses it
            assert "VLLM_ALLOW_INSECURE_SERIALIZATION" not in path.read_text(), module


def makes_tensors_only(call: ast.Call) -> bool:
    """`weights_only=True` calls nothing that a file names, but for tensors and listed classes."""
    keywords = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
    return ast.unparse(call.func) == "torch.load" and keywords.get("weights_only") == "True"


PICKLES = {"pickle", "cloudpickle", "dill", "marshal", "shelve"}
HEAVY = ("torch", "trl", "transformers", "vllm", "deepspeed", "accelerate")
LIGHT = ["trl_multinode", *(f"trl_multinode.{m}" for m in (
    "tools", "tools.config", "tools.grpo",
    "engine.client", "engine.node_engines", "engine.process", "engine.remote_rows", "engine_process.main",
    "engine_process.server", "errors", "run.phases", "run.topology", "vllm_worker.plugin", "wire.connection",
    "wire.port", "wire.supervisor",
))]  # fmt: skip


@pytest.mark.real
def test_the_package_and_the_engines_own_modules_load_nothing_heavy():
    # tools ask for the first two, imports for modules
    probes = (
        "_no_name",
        "__wrapped__",
        "engine",
        "vllm_worker",
    )
    code = f"import sys\nfor name in {LIGHT!r}:\n    __import__(name)\n"
    code += f"    [getattr(sys.modules['trl_multinode'], probe, None) for probe in {probes!r}]\n"
    code += f"    print(name, [heavy for heavy in {HEAVY!r} if heavy in sys.modules])"
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=HANG_S
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines() == [f"{name} []" for name in LIGHT]


VLLMS_OWN = {"init_weight_transfer_engine", "update_weights"}


def test_what_the_engine_calls_in_every_worker_is_a_method_of_the_extension():
    """A merge once left one inside another function, and every self test of a transport fell back to host memory."""
    (extension,) = [
        n for n in tree("vllm_worker.worker").body if getattr(n, "name", "") == "WorkerExtension"
    ]
    methods = {node.name for node in extension.body if isinstance(node, ast.FunctionDef)}
    methods |= {node.targets[0].id for node in extension.body if isinstance(node, ast.Assign)}
    calls = [
        node for node in ast.walk(tree("engine_process.vllm_backend")) if isinstance(node, ast.Call)
    ]
    by = {
        name: [c.args[0] for c in calls if getattr(c.func, "attr", "") == name]
        for name in ("collective_rpc", "_call_everywhere")
    }
    called = {arg.value for arg in by["collective_rpc"] if isinstance(arg, ast.Constant)}
    called |= {arg.id for arg in by["_call_everywhere"]}
    assert called - VLLMS_OWN == methods


# ---- threads and hooks


def section(title: str) -> str:
    return PAGE.partition(f"## {title}\n")[2].partition("\n## ")[0]


def nodes_of_runs() -> Iterator[tuple[str, ast.AST]]:
    """Yield the nodes of all files that a rank, an engine or a worker runs."""
    for file in FILES:
        place = file.relative_to(PACKAGE)
        if place.parts[0] != "tools":
            yield from ((str(place), node) for node in ast.walk(ast.parse(file.read_text())))


def test_each_thread_is_in_the_table_of_threads():
    kinds = {"Thread", "Timer", "ThreadPoolExecutor"}
    started = Counter(
        place
        for place, node in nodes_of_runs()
        if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in kinds
    )
    assert (
        Counter(re.findall(r"^\| `(\S+\.py)`, ", section("Threads and hooks"), re.MULTILINE))
        == started
    )


def test_each_attribute_that_holds_another_objects_function_is_in_the_table_of_hooks():
    held = {
        (place, node.target.attr)
        for place, node in nodes_of_runs()
        if isinstance(node, ast.AnnAssign)
        and isinstance(node.target, ast.Attribute)
        and not node.target.attr.startswith("_")
        and "Callable" in ast.unparse(node.annotation)
    }
    listed = set(re.findall(r"`(\S+\.py): (\w+)`", section("Threads and hooks")))
    defined = {
        (place, node.name) for place, node in nodes_of_runs() if isinstance(node, ast.FunctionDef)
    }
    assert held <= listed and listed <= held | defined
