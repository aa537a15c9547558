"""docs/api/ is what docs/write_api.py writes from the docstrings, and has every public name."""

import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SPEC = importlib.util.spec_from_file_location("write_api", ROOT / "docs" / "write_api.py")
write_api = importlib.util.module_from_spec(SPEC)


@pytest.fixture(scope="module", autouse=True)
def tool():
    import sys

    sys.modules["write_api"] = write_api  # dataclasses look for their module
    SPEC.loader.exec_module(write_api)
    yield write_api
    del sys.modules["write_api"]


def test_the_pages_are_current(tool):
    pages = {path.name: path.read_text() for path in tool.PAGES.glob("*.md")}
    made = tool.render()
    old = [name for name in made.keys() | pages.keys() if made.get(name) != pages.get(name)]
    assert not old, f"run `python docs/write_api.py`: {old}"


def test_every_public_name_has_an_entry(tool):
    page = (ROOT / "docs" / "public-names.md").read_text()
    (row,) = re.findall(r"^\| `trl_multinode` \| (.*) \|$", page, re.MULTILINE)
    public = {name for name in re.findall(r"`(\w+)`", row) if name.endswith(("Config", "Trainer"))}
    found = {title for one in tool.pages() for title in one.titles}
    assert len(public) == 18 and public <= found
    assert {"NodeTrainer", "NodeFields", "NodeTrainer.last_checkpoint", "NodeTrainer.close"} <= found
    assert {"ConfigurationError", "EngineError", "Nodes", "Faults"} <= found


def test_a_docstring_becomes_markdown(tool):
    document = """Send it.

    See [`Nodes`] and docs/running.md.

    ```python
    with Nodes() as nodes:  # docs/running.md
        pass
    ```

    Args:
        first (`int`, *optional*):
            The first,
            of two.
        second: The other.
        **more (`str`):
            More.

    Returns:
        `tuple[int, int]`: both. They are
        equal.

    Raises:
        `ValueError`: if not
            positive.
        `OSError`: else.
    """
    text = tool.linked(tool.markdown(document), {"Nodes": "testing.md#nodes"})
    assert text == "\n".join(
        [
            "Send it.",
            "",
            "See [`Nodes`](testing.md#nodes) and [running.md](../running.md).",
            "",
            "```python",
            "with Nodes() as nodes:  # docs/running.md",
            "    pass",
            "```",
            "",
            "**Parameters**",
            "",
            "- **first** (`int`, *optional*): The first, of two.",
            "- **second**: The other.",
            "- **\\*\\*more** (`str`): More.",
            "",
            "**Returns**",
            "",
            "- `tuple[int, int]`: both. They are equal.",
            "",
            "**Raises**",
            "",
            "- `ValueError`: if not positive.",
            "- `OSError`: else.",
        ]
    )


def test_a_signature_is_that_of_the_code(tool):
    (node,) = tool.ast.parse("def f(a, b: int = 2, *, c=None, **d: str) -> int:\n  pass").body
    assert tool.signature(tool.Entry("f", node)) == "f(a, b: int = 2, *, c=None, **d: str) -> int"
    node.args.args[0].arg = "a" * 90
    assert tool.signature(tool.Entry("f", node)).splitlines()[:3] == ["f(", f"    {'a' * 90},", "    b: int = 2,"]


def test_no_line_of_a_docstring_is_lost(tool):
    """Every word of the docstrings stands in the pages."""
    text = " ".join(re.sub(r"[^\w ]", " ", " ".join(tool.render().values())).split())
    for page in tool.pages():
        for entry in page.entries:
            for line in entry.document.splitlines():
                words = " ".join(re.sub(r"[^\w ]", " ", line.replace("docs/", "")).split())
                special = re.search(r"\.md|\]|^\s*(Args):", line)  # links, and a heading with another name
                assert special or words in text, (entry.name, line)
