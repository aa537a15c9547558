"""The tree is the architecture: who imports whom, who touches which library, who calls a collective, how long it is.

Everything is read from the sources. A test that fails here after a change asks a question: is the new arrow meant?
Then change the table in the same commit.
"""

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from itertools import groupby
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "trl_multinode"
FILES = sorted(PACKAGE.rglob("*.py"))
MAX_FILE_LINES, MAX_FUNCTION_LINES = 400, 60

# From top to bottom: a module may import what stands in its row, and only rows further down can stand there.
ARROWS = {
    # the test kit
    "testing.architectures": "testing.models testing.pil_idefics3",
    "testing.engines":
        "engine.node_engines engine.process engine.protocol engine.settings faults testing.faults testing.models "
        "weights.source weights.sync weights.transports",
    "testing.replay": "trainer",
    "testing.fake_engine": "engine.main engine.process_group engine.protocol engine.receiving engine.server faults",
    "testing.nodes": "testing.launch_files testing.namespaces",
    "testing.faults": "faults",
    "testing.hub": "",
    "testing.models": "",
    "testing.pil_idefics3": "",
    "testing.sources": "",
    "testing.launch_files": "",
    "testing.namespaces": "",
    "testing.__init__": "",
    # a launch that has not begun: accelerate's code, and none of ours from outside the folder
    "check.__main__": "check.report",
    "check.__init__": "check.launch check.report",
    "check.report": "check.launch check.reading check.rules check.rules_batch check.rules_keys",
    "check.rules": "check.launch check.reading",
    "check.rules_keys": "check.launch check.reading",
    "check.rules_batch": "check.launch",
    "check.reading": "check.launch",
    "check.launch": "",
    # for type checkers; loaded lazily
    "__init__": "config trainer trainers",
    "trainer":
        "batches.microbatches config host node_trainer pictures rollouts.generation rollouts.look_ahead "
        "rollouts.monitor",
    "trainers": "config host node_trainer rollouts.monitor",
    "experimental.sdft": "experimental.self_distillation",
    "experimental.sdpo": "experimental.self_distillation",
    "experimental.gold": "config experimental.buffered host rollouts.text_logging",
    "experimental.iw_opd": "config experimental.buffered",
    "experimental.self_distillation": "config errors node_trainer",
    "experimental.buffered": "host node_trainer rollouts.generation",
    "experimental.__init__": "",
    "node_trainer":
        "call_checks config host reporting rollouts.generation rollouts.staleness rollouts.text_logging "
        "saving.checkpoints saving.hub saving.resume",
    "call_checks": "config errors saving.hub",
    "saving.hub": "config errors host saving.model_card saving.pushing saving.saved_weights",
    "saving.pushing": "errors",
    "saving.model_card": "topology",
    "saving.saved_weights": "errors weights.source",
    "saving.resume": "errors rollouts.look_ahead saving.checkpoints",
    "saving.checkpoints": "errors",
    "saving.__init__": "",
    "batches.microbatches":
        "batches.batching batches.layouts batches.local_metrics batches.row_exchange config errors topology",
    "batches.batching": "",
    "batches.layouts": "",
    "batches.local_metrics": "",
    "batches.row_exchange": "topology",
    "batches.__init__": "",
    "reporting": "config phases rollouts.staleness weights.sync",
    "rollouts.monitor": "config errors rollouts.look_ahead weights.probe",
    "rollouts.staleness": "",
    "rollouts.generation":
        "engine.node_engines engine.protocol errors rollouts.look_ahead rollouts.rows weights.sync",
    "rollouts.look_ahead": "engine.node_engines engine.protocol",
    "rollouts.rows": "engine.protocol",
    "rollouts.text_logging": "",
    "rollouts.__init__": "",
    "host":
        "blackboard config engine.node_engines engine.process engine.protocol engine.settings errors faults phases "
        "topology watch weights.peft_source weights.probe weights.shards weights.source weights.sync "
        "weights.transports",
    "weights.probe": "engine.node_engines errors topology",
    "weights.sync":
        "engine.node_engines engine.protocol errors weights.shards weights.slots weights.source weights.transports",
    "weights.transports": "engine.node_engines engine.process_group engine.protocol errors topology weights.slots",
    "weights.slots": "engine.page_lock engine.process_group engine.protocol errors weights.shards",
    "weights.peft_source": "engine.protocol errors weights.shards weights.source",
    "weights.source": "engine.protocol weights.shards",
    "weights.shards": "",
    "weights.__init__": "",
    "engine.settings": "config errors faults topology",
    "engine.node_engines": "engine.protocol errors",
    "engine.process": "engine.protocol engine.server engine.supervisor errors",
    "engine.main": "engine.plugin engine.protocol engine.server engine.supervisor",
    "engine.server": "engine.protocol",
    "engine.worker": "engine.process_group engine.protocol engine.receiving engine.reloading faults",
    "engine.reloading": "",
    "engine.receiving": "engine.page_lock engine.process_group engine.protocol",
    "engine.page_lock": "",
    "engine.process_group": "",
    "engine.plugin": "",
    "engine.protocol": "errors",
    "engine.supervisor": "",
    "engine.__init__": "",
    "watch": "blackboard errors topology",
    "blackboard": "topology",
    "pictures": "errors",
    "config": "errors",
    "topology": "errors",
    "phases": "",
    "faults": "",
    "errors": "",
}  # fmt: skip

# Who may import a library, and whether only inside functions ("lazily").
LIBRARIES = {
    "trl": {
        "config": "",
        "trainer": "",
        "trainers": "",
        "batches.microbatches": "",
        "__init__": "lazily",
        "experimental.sdft": "",
        "experimental.sdpo": "",
        "experimental.gold": "",
        "experimental.iw_opd": "",
        "experimental.self_distillation": "",
    },
    "transformers": {
        "config": "",
        "call_checks": "",
        "saving.hub": "",
        "saving.saved_weights": "",
        "batches.microbatches": "",
        "testing.models": "",
        "testing.architectures": "",
        "testing.pil_idefics3": "",
        "testing.fake_engine": "",
    },
    "accelerate": {"check.reading": "", "check.rules": "", "check.report": ""},  # else it is TRL's accelerator
    "vllm": {"engine.main": "lazily", "engine.plugin": "lazily", "engine.worker": "", "engine.reloading": ""},
    "deepspeed": {"weights.source": "lazily", "testing.sources": "lazily"},
    "peft": {"weights.peft_source": "lazily", "saving.saved_weights": "lazily"},
    "torch.distributed": {
        "blackboard": "",
        "watch": "",
        "rollouts.text_logging": "",
        "batches.row_exchange": "",
        "weights.shards": "",
        "engine.process_group": "",
        "testing.sources": "",
        "check.reading": "",
    },  # torchrun's parser
}
COLLECTIVES = {
    "pictures": {"gather"},  # a flag per round, of models with pictures and sharded weights
    "rollouts.text_logging": {"gather_object"},
    "weights.source": {"GatheredParameters", "full_tensor"},
    "weights.shards": {
        "all_gather_into_tensor",
        "all_reduce",
        "batch_isend_irecv",
        "new_group",
    },  # of the weights, in two groups
    "weights.slots": {"broadcast"},  # with the node's workers, in a group that no other rank is in
    "engine.receiving": {"broadcast"},
    "rollouts.generation": {"wait_for_everyone"},  # before a sync; `generate` has none
    "saving.checkpoints": {"gather", "wait_for_everyone"},  # which are whole; when one is
    "reporting": {"gather"},  # of the phases' seconds, once per log
    "batches.row_exchange": {
        "all_gather",
        "all_to_all_single",
        "new_group",
    },  # lengths of all ranks, rows within a node
    "batches.local_metrics": {"gather"},  # once per optimizer step, instead of TRL's seven per micro-batch
}
COLLECTIVE_NAMES = {
    "GatheredParameters", "full_tensor", "wait_for_everyone", "gather", "gather_object", "all_gather_object",
    "gather_for_metrics", "all_gather", "all_gather_into_tensor", "all_reduce", "reduce", "reduce_scatter",
    "broadcast", "broadcast_object_list", "scatter_object_list", "barrier", "monitored_barrier", "all_to_all",
    "all_to_all_single", "batch_isend_irecv",
    "new_group",
}  # fmt: skip


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts)


MODULES = {name_of(path): path for path in FILES}


@cache
def tree(module: str) -> ast.Module:
    return ast.parse(MODULES[module].read_text())


def imports(node: ast.AST, package: tuple[str, ...], inside: bool = False) -> Iterator[tuple[str, bool]]:
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


def own_module(name: str) -> str | None:
    """`trl_multinode.engine.protocol.frame` -> `engine.protocol`."""
    parts = name.split(".")
    if parts[0] != "trl_multinode":
        return None
    for end in (3, 2):
        found = ".".join(parts[1:end])
        if found in MODULES:
            return found
        if (folder := f"{found}.__init__") in MODULES:
            return folder
    return "__init__"


def belongs(name: str, library: str) -> bool:
    return name == library or name.startswith(library + ".")


@pytest.mark.parametrize("module", MODULES)
def test_a_module_imports_exactly_its_row(module):
    assert module in ARROWS, f"{module} has no row in ARROWS: what may it import, and who imports it?"
    arrows = {target for name, _ in imported(module) if (target := own_module(name))}
    row = set(ARROWS[module].split())
    assert arrows == row, f"new {arrows - row}, gone {row - arrows}"


def test_arrows_point_downwards():
    order = list(ARROWS)
    upwards = [(a, b) for a in order for b in ARROWS[a].split() if order.index(b) <= order.index(a)]
    assert not upwards and set(order) == set(MODULES)


def test_folders_import_each_other_in_one_direction():
    """Rows of a folder stand together, so what holds for modules holds for folders."""
    folders = [folder for folder, _ in groupby(ARROWS, lambda module: module.rpartition(".")[0]) if folder]
    assert len(folders) == len(set(folders)), folders


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_library_is_imported_only_where_it_may(library):
    found: dict[str, str] = {}
    for module in MODULES:
        uses = {inside for name, inside in imported(module) if belongs(name, library)}
        if uses:
            found[module] = "lazily" if uses == {True} else ""
    strangers = {module for module in found if module not in LIBRARIES[library]}
    assert not strangers, f"{strangers} import {library}"
    early = {module for module, how in found.items() if LIBRARIES[library][module] == "lazily" and how != "lazily"}
    assert not early, f"{early} import {library} outside functions"


def test_torch_distributed_is_not_reached_through_torch():
    users = {m for m in MODULES for n in ast.walk(tree(m)) if isinstance(n, ast.Attribute) and
             ast.unparse(n) == "torch.distributed"}  # fmt: skip
    assert not users


def test_collectives_are_called_where_the_table_says():
    found: dict[str, set[str]] = {}
    for module in MODULES:
        for node in ast.walk(tree(module)):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                of = ast.unparse(node.func)
                on_a_tensor = node.func.attr == "gather" and "accelerator" not in of and not of.startswith("dist.")
                if node.func.attr in COLLECTIVE_NAMES and not on_a_tensor:
                    found.setdefault(module, set()).add(node.func.attr)
    assert found == COLLECTIVES


def test_what_is_experimental_in_trl_is_imported_by_one_module_each():
    """And those only by name, through `__getattr__`: a broken one must not take the others along."""
    for module in MODULES:
        own = f"trl.{module}" if module.startswith("experimental.") else None
        strangers = {
            n for n, _ in imported(module) if belongs(n, "trl.experimental") and not (own and belongs(n, own))
        }
        assert not strangers, (module, strangers)


def test_nothing_is_pickled():
    for module, path in MODULES.items():
        bad = {n for n, _ in imported(module) if n.split(".")[0] in PICKLES}
        bad |= {c for n in ast.walk(tree(module)) if isinstance(n, ast.Call) and (c := ast.unparse(n.func)) in
                ("torch.load", "torch.save", "eval", "exec")}  # fmt: skip
        assert not bad, (module, bad)
        assert "VLLM_ALLOW_INSECURE_SERIALIZATION" not in path.read_text(), module


PICKLES = {"pickle", "cloudpickle", "dill", "marshal", "shelve"}
HEAVY = ("torch", "trl", "transformers", "vllm", "deepspeed", "accelerate")
LIGHT = ["trl_multinode", *(f"trl_multinode.{m}" for m in (
    "engine.main", "engine.node_engines", "engine.plugin", "engine.process", "engine.protocol", "engine.server",
    "engine.supervisor", "errors", "faults", "phases", "topology",
))]  # fmt: skip


def test_the_package_and_the_engines_own_modules_load_nothing_heavy():
    code = f"import sys\nfor name in {LIGHT!r}:\n    __import__(name)\n"
    code += f"    print(name, [heavy for heavy in {HEAVY!r} if heavy in sys.modules])"
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines() == [f"{name} []" for name in LIGHT]


def test_every_test_file_has_a_name_of_its_own():
    """pytest imports them without packages: two of one name could not be collected in one run."""
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py")]
    assert sorted(names) == sorted(set(names))


@pytest.mark.parametrize("module", MODULES)
def test_files_and_functions_are_short(module):
    assert len(MODULES[module].read_text().splitlines()) <= MAX_FILE_LINES
    for node in ast.walk(tree(module)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = node.end_lineno - node.lineno + 1
            assert lines <= MAX_FUNCTION_LINES, f"{node.name} has {lines} lines"


VLLMS_OWN = {"init_weight_transfer_engine", "update_weights"}


def test_what_the_engine_calls_in_every_worker_is_a_method_of_the_extension():
    """A merge once left one inside another function, and every self test of a transport fell back to host memory."""
    (extension,) = [n for n in tree("engine.worker").body if getattr(n, "name", "") == "WorkerExtension"]
    methods = {node.name for node in extension.body if isinstance(node, ast.FunctionDef)}
    calls = [node for node in ast.walk(tree("engine.main")) if isinstance(node, ast.Call)]
    called = {c.args[0].value for c in calls if isinstance(c.func, ast.Attribute) and c.func.attr == "collective_rpc"}
    assert called - VLLMS_OWN == methods
