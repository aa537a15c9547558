"""Figures and tables of benchmarks/RESULTS.md as Markdown."""


def text(value) -> str:
    if isinstance(value, dict):
        low, high = (value[key] for key in (("low", "high") if "low" in value else ("min", "max")))
        return f"{value['median']:.2f} ({low:.2f} to {high:.2f})"
    return f"{value:.2f}" if isinstance(value, float) else str(value)


def table(columns: list[str], rows: list[list]) -> str:
    lines = [columns, ["---"] * len(columns), *([text(cell) for cell in row] for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"
