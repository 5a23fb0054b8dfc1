"""Tables for notebooks: what ``_repr_html_`` returns."""

from collections.abc import Iterable, Sequence
from html import escape


def table(header: Sequence[str], rows: Iterable[Sequence[str | float]]) -> str:
    """An HTML table; numbers are aligned right."""
    head = "".join(f"<th>{escape(str(name))}</th>" for name in header)
    body = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _cell(value: str | float) -> str:
    if isinstance(value, str):
        return f'<td style="text-align:left">{escape(value)}</td>'
    text = f"{value:,.4g}" if isinstance(value, float) else f"{value:,}"
    return f'<td style="text-align:right">{text}</td>'
