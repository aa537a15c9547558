"""Hook of mkdocs: in the site, a relative link out of docs/ leads to the file in the repository."""

import re
from pathlib import Path

DOCS = Path(__file__).resolve().parent
LINK = re.compile(r"\]\(((?:\.\./)+[^)#\s]+)")


def on_page_markdown(markdown: str, page, config, files) -> str:
    folder = (DOCS / page.file.src_uri).parent

    def absolute(match: re.Match) -> str:
        target = (folder / match[1]).resolve()
        if target.is_relative_to(DOCS):
            return match[0]
        kind = "tree" if target.is_dir() else "blob"
        return f"]({config.extra['repository']}/{kind}/main/{target.relative_to(DOCS.parent)}"

    return LINK.sub(absolute, markdown)
