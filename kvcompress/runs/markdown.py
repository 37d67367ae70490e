"""Tables of methods as Markdown."""

from collections.abc import Iterable, Sequence


def markdown_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table whose first column holds methods in text form, the others numbers."""
    lines = [f"| {' | '.join(columns)} |", f"|---|{'---:|' * (len(columns) - 1)}"]
    for method, *rest in rows:
        escaped = method.replace("|", "\\|")  # a bar would end the cell
        lines.append(f"| {' | '.join([f'`{escaped}`', *rest])} |")
    return "\n".join(lines) + "\n"
