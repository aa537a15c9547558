"""Names in the source of TRL's tests: the hub's models and data, and what they import from TRL."""

import ast
import re

OTHERS = "Qwen|HuggingFaceTB|openai|meta-llama|google"  # whose models TRL's tests name
HUB_ID = re.compile(rf"\b(trl-internal-testing/[\w.-]+)|[\"']((?:{OTHERS})/[\w.-]+)[\"']")


def hub_ids(source: str) -> set[str]:
    """Return the ids of models and datasets that a source names."""
    return {first or second for first, second in HUB_ID.findall(source)}


def trl_imports(source: str) -> set[tuple[str, str]]:
    """Return what a source imports from the modules of TRL, as pairs of module and name."""
    imports = [
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ImportFrom) and node.module
    ]
    return {
        (node.module, name.name)
        for node in imports
        if node.module.startswith("trl.")
        for name in node.names
    }
