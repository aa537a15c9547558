"""Write docs/api/ from the docstrings of public names, and the table of docs/use/settings.md.

`python docs/write_api.py` imports nothing of the package but `settings.py`, which declares the settings.
CONTRIBUTING.md lists the public names. docs/check_pages.py reports pages that are not those of the code.
"""

import ast
import inspect
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from trl_multinode import settings as declared  # noqa: E402

PACKAGE, PAGES = ROOT / "trl_multinode", ROOT / "docs" / "api"
SETTINGS = ROOT / "docs" / "use" / "settings.md"
TABLE_BEGINS = "<!-- Written by docs/write_api.py from trl_multinode/settings.py. -->"
TABLE_ENDS = "<!-- End of that table. -->"
HEADER = "<!-- Written by docs/write_api.py from docstrings. Change those, and run it again. -->\n"
WIDTH = 100  # of a line in a block of code
SECTION = re.compile(r"(Args|Parameters|Attributes|Returns|Yields|Raises):")
TITLES = {"Args": "Parameters"}
TWO_NAMES = "Each class has TRL's name, and the same with `MultiNode` before it."
# of a trainer; the others are TRL's
PUBLIC_METHODS = {
    "last_checkpoint",
    "weights_changed",
    "close",
}
Definition = ast.ClassDef | ast.FunctionDef


@dataclass(frozen=True)
class Entry:
    """A documented class, function or method."""

    name: str
    node: Definition

    @property
    def title(self) -> str:
        """Name under which scripts import it: TRL's."""
        return self.name.removeprefix("MultiNode")

    @property
    def document(self) -> str:
        own = ast.get_docstring(self.node, clean=False) or ""
        return (
            f"{inspect.cleandoc(own)}\n\n{declared.docstring()}"
            if self.name == "NodeFields"
            else own
        )


@dataclass(frozen=True)
class Page:
    """One file in docs/api/: sections with their entries."""

    file: str
    title: str
    about: str
    sections: dict[str, list[Entry]]  # title, empty for none -> entries

    @property
    def entries(self) -> Iterator[Entry]:
        for found in self.sections.values():
            yield from found

    @property
    def titles(self) -> list[str]:
        return [entry.title for entry in self.entries]


# ---- what is public


def entries(path: Path, pattern: str = r"[A-Z]\w*|[a-z]\w*") -> list[Entry]:
    """The documented names of a module that match, in the order of the code."""
    nodes = [node for node in ast.parse(path.read_text()).body if isinstance(node, Definition)]
    return [
        Entry(node.name, node)
        for node in nodes
        if re.fullmatch(pattern, node.name) and ast.get_docstring(node)
    ]


def methods(of: Entry, names: set[str] | None = None) -> list[Entry]:
    """The documented public methods of a class; with `names`, only those."""
    found = [
        node
        for node in of.node.body
        if isinstance(node, ast.FunctionDef) and ast.get_docstring(node)
    ]
    wanted = [
        node
        for node in found
        if not node.name.startswith("_") and (names is None or node.name in names)
    ]
    return [Entry(f"{of.name}.{node.name}", node) for node in wanted]


def trainer_files() -> list[Path]:
    return [
        *(PACKAGE / name for name in ("trainer.py", "trainers.py")),
        *sorted((PACKAGE / "experimental").glob("*.py")),
    ]


def with_methods(found: list[Entry], names: set[str] | None = None) -> list[Entry]:
    return [
        one
        for entry in found
        for one in (entry, *(methods(entry, names) if is_class(entry) else ()))
    ]


def is_class(entry: Entry) -> bool:
    return isinstance(entry.node, ast.ClassDef)


def pages() -> list[Page]:
    """All pages, from the code as it is."""
    configs = [
        one
        for path in [PACKAGE / "config.py", *trainer_files()]
        for one in entries(path, r"MultiNode\w+Config")
    ]
    fields = entries(PACKAGE / "config.py", "NodeFields")
    trainers = [one for path in trainer_files() for one in entries(path, r"MultiNode\w+Trainer")]
    of_node = with_methods(entries(PACKAGE / "node_trainer.py", "NodeTrainer"), PUBLIC_METHODS)
    agents = entries(PACKAGE / "sessions" / "harness.py", "Harness|Session")
    settings = (
        f"{TWO_NAMES} [settings.md](../use/settings.md) has them on one screen, with the defaults."
    )
    messages = "[errors.md](../operate/errors.md) has the causes and the cures."
    return [
        Page("configs.md", "Configs", settings, {"": [*configs, *fields]}),
        Page(
            "trainers.md",
            "Trainers",
            f"{TWO_NAMES} All other methods are TRL's.",
            {"": trainers + of_node + agents},
        ),
        Page("errors.md", "Errors", messages, {"": entries(PACKAGE / "errors.py")}),
    ]


# ---- from a docstring to Markdown


def signature(entry: Entry) -> str:
    """The call of a function or class; one line per argument if it is long."""
    node = entry.node
    of = node if isinstance(node, ast.FunctionDef) else next(filter(is_init, node.body), None)
    words = [word for word in arguments(of.args) if word != "self"] if of else []
    returns = f" -> {ast.unparse(node.returns)}" if getattr(node, "returns", None) else ""
    head = f"class {entry.name}" if is_class(entry) else entry.name
    bases = (
        f"  # a subclass of {', '.join(map(ast.unparse, node.bases))}"
        if getattr(node, "bases", None)
        else ""
    )
    if is_class(entry) and not words:
        return head + bases
    line = f"{head}({', '.join(words)}){returns}"
    if len(line + bases) > WIDTH:
        line = "\n".join([f"{head}(", *(f"    {word}," for word in words), f"){returns}"])
    return line + bases


def is_init(node: ast.AST) -> bool:
    return getattr(node, "name", "") == "__init__"


def arguments(of: ast.arguments) -> list[str]:
    """Each argument as in the code, with `*` before those that are given by name only."""
    plain = [*of.posonlyargs, *of.args]
    defaults = [None] * (len(plain) - len(of.defaults)) + of.defaults
    words = [argument(one, default) for one, default in zip(plain, defaults, strict=True)]
    words += [f"*{ast.unparse(of.vararg)}"] if of.vararg else ["*"] if of.kwonlyargs else []
    words += [
        argument(one, default) for one, default in zip(of.kwonlyargs, of.kw_defaults, strict=True)
    ]
    return words + ([f"**{ast.unparse(of.kwarg)}"] if of.kwarg else [])


def argument(one: ast.arg, default: ast.expr | None) -> str:
    if default is None:
        return ast.unparse(one)
    return f"{ast.unparse(one)}{' = ' if one.annotation else '='}{ast.unparse(default)}"


def markdown(document: str) -> str:
    """Docstring in the format of Hugging Face -> Markdown: sections become lists."""
    parts, kind, items = [], "", []

    def end_section() -> None:
        if kind:
            parts.append(
                f"**{TITLES.get(kind, kind)}**\n\n"
                + "\n".join(f"- {' '.join(item)}" for item in items)
            )

    for line in inspect.cleandoc(document).splitlines():
        if match := SECTION.fullmatch(line):
            end_section()
            kind, items = match[1], []
        elif kind and line.startswith("    "):
            if not line.startswith("     ") and (kind not in ("Returns", "Yields") or not items):
                items.append(
                    [
                        bold(line.strip())
                        if kind not in ("Returns", "Yields", "Raises")
                        else line.strip()
                    ]
                )
            else:
                items[-1].append(line.strip())
        elif line.strip() or not kind:
            end_section()
            kind = kind if kind and not line else ""
            parts.append(line)
    end_section()
    text = "\n".join(part if not part.startswith("**") else f"\n{part}\n" for part in parts)
    return re.sub(r"\n{3,}", "\n\n", text).strip()


def bold(item: str) -> str:
    """The first line of an argument, its name in bold: `**name** (type):`."""
    name, rest = re.fullmatch(r"([*\w]+)(.*)", item).groups()
    return f"**{name.replace('*', chr(92) + '*')}**{rest}"


def linked(text: str, where: dict[str, str]) -> str:
    """Turn references into links: names of the API pages, and pages of docs/."""
    code = re.split(r"(```.*?```)", text, flags=re.DOTALL)
    for at in range(0, len(code), 2):
        part = re.sub(
            r"\[`~?([\w.]+)`\](?:\(\w+\.py\))?", lambda match: reference(match[1], where), code[at]
        )
        code[at] = with_page_links(part, PAGES)
    return "".join(code)


def with_page_links(text: str, folder: Path) -> str:
    """Link each page of docs/ that a text names by its path, for a page in `folder`."""

    def link(match: re.Match) -> str:
        return f"[{Path(match[0]).name}]({os.path.relpath(ROOT / match[0], folder)})"

    return re.sub(r"(?<![/\w(])docs/[\w/-]+\.md", link, text)


def reference(name: str, where: dict[str, str]) -> str:
    return f"[`{name}`]({where[name]})" if name in where else f"`{name}`"


def anchor(name: str) -> str:
    return re.sub(r"[^\w\- ]", "", name.lower())


def written(page: Page, where: dict[str, str]) -> str:
    lines = [HEADER, f"# {page.title}\n", f"{page.about}\n"]
    for title, found in page.sections.items():
        lines += [f"## `testing.{title}`\n"] if title else []
        for entry in found:
            lines += [
                f"{'###' if title else '##'} `{entry.title}`\n",
                f"```python\n{signature(entry)}\n```\n",
            ]
            lines += [linked(markdown(entry.document), where) + "\n"]
    return "\n".join(lines)


def index(all_pages: list[Page]) -> str:
    rows = [
        f"| [{page.title}]({page.file}) | {', '.join(f'`{title}`' for title in page.titles)} |"
        for page in all_pages
    ]
    about = "From the docstrings of the [public names](../../CONTRIBUTING.md#public-names). Commands have `--help`."
    return "\n".join([HEADER, "# API\n", f"{about}\n", "| page | names |", "|---|---|", *rows, ""])


def settings_page() -> str:
    """Text of docs/use/settings.md with the table of the settings as they are declared."""
    before, _, rest = SETTINGS.read_text().partition(TABLE_BEGINS)
    _, _, after = rest.partition(TABLE_ENDS)
    rows = ["| setting | type | default | range | meaning |", "|---|---|---|---|---|"]
    for one in declared.DESCRIBED:
        meaning = with_page_links(one.text, SETTINGS.parent).replace("|", "\\|")
        rows.append(f"| `{one.name}` | {one.kind} | {one.default} | {one.range} | {meaning} |")
    return f"{before}{TABLE_BEGINS}\n" + "\n".join(rows) + f"\n{TABLE_ENDS}{after}"


def render() -> dict[str, str]:
    """File name -> text of each page."""
    made = pages()
    where = {
        name: f"{page.file}#{anchor(entry.title)}" for page in made for entry in page.entries
        for name in (entry.name, entry.title)
    }  # fmt: skip
    return {"index.md": index(made)} | {page.file: written(page, where) for page in made}


def main() -> None:
    """Write all pages."""
    PAGES.mkdir(exist_ok=True)
    for name, text in render().items():
        (PAGES / name).write_text(text)
    SETTINGS.write_text(settings_page())


if __name__ == "__main__":
    main()
