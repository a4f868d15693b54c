"""HTML that is escaped by construction: text becomes markup only as the content of a tag."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from html import escape
from typing import Any, Literal

_VOID = frozenset({"br", "col", "input", "link", "meta", "wbr"})
Certainty = Literal["exact", "tracked", "modelled"]
# what stands behind a number, in a line; the page's last section says it at length
NOTES: dict[Certainty, str] = {
    "exact": "counted: what the rewritten model does, or what its tensors hold",
    "tracked": "from an abstract execution of the step; within 5 % of what a real run allocates",
    "modelled": "predicted by a cost model from FLOPs, bytes and the hardware's peak rates",
}


class Html(str):
    """Text that is markup already."""

    __slots__ = ()


def text(content: object) -> Html:
    """Anything as markup; what is markup already stays as it is."""
    return content if isinstance(content, Html) else Html(escape(str(content), quote=True))


def join(parts: Iterable[object], separator: str = "") -> Html:
    """Several contents as one."""
    return Html(separator.join(text(part) for part in parts))


def tag(name: str, *content: object, **attributes: str | float | bool | None) -> Html:
    """One element. Attributes that are None or False are left out.

    ``class_`` is the attribute class; other underscores are hyphens.
    """
    shown = ""
    for key, value in attributes.items():
        if value is None or value is False:
            continue
        attribute = key.rstrip("_").replace("_", "-")
        shown += f" {attribute}" if value is True else f' {attribute}="{escape(str(value))}"'
    if name in _VOID:
        return Html(f"<{name}{shown}>")
    return Html(f"<{name}{shown}>{join(content)}</{name}>")


def breakable(path: str) -> Html:
    """A dotted path that may be broken after its dots."""
    return join(path.split("."), f".{tag('wbr')}")


def badge(kind: Certainty) -> Html:
    """How far a number is to be trusted, with a link to what that means."""
    return tag("a", kind, class_=f"badge {kind}", href=f"#about-{kind}", title=NOTES[kind])


@dataclass(frozen=True)
class Column:
    """A column of a table.

    Attributes:
        cell: what stands in a row, of what the row is of; certainty: of all its numbers.
    """

    title: str
    cell: Callable[[Any], object]
    numeric: bool = False
    code: bool = False
    certainty: Certainty | None = None

    @property
    def said(self) -> str:
        """What stands beside a single value of it."""
        return f"{self.title} · {self.certainty}" if self.certainty else self.title


numeric = partial(Column, numeric=True)
exact = partial(numeric, certainty="exact")
tracked = partial(numeric, certainty="tracked")
modelled = partial(numeric, certainty="modelled")


def table(
    caption: str,
    columns: Sequence[Column],
    rows: Iterable[Any],
    footer: Sequence[object] = (),
    stacked: bool = False,
    class_: str = "",
) -> Html:
    """A table.

    Args:
        rows: what each row is of, as the columns take it.
        footer: a last row, of sums.
        stacked: whether on a narrow page each row becomes a block with its columns' titles, for
            which the roles that this takes away are stated.
    """

    def row(cells: Sequence[object], heading: bool = False) -> Html:
        made = []
        for column, cell in zip(columns, cells, strict=True):
            first = column is columns[0]
            content = breakable(cell) if column.code and isinstance(cell, str) else cell
            classes = " ".join(n for n in ("numeric", "code") if getattr(column, n))
            made.append(
                tag(
                    "th" if first else "td",
                    tag("span", content, class_="value") if stacked else content,
                    class_=classes or None,
                    scope="row" if first else None,
                    role=("rowheader" if first else "cell") if stacked else None,
                    data_title=column.said if stacked and not first else None,
                )
            )
        return tag("tr", *made, role=role("row"), class_="sum" if heading else None)

    def role(name: str) -> str | None:
        return name if stacked else None

    head = [
        tag(
            "th",
            column.title,
            join([" ", badge(column.certainty)]) if column.certainty else "",
            scope="col",
            role=role("columnheader"),
            class_="numeric" if column.numeric else None,
        )
        for column in columns
    ]
    body = [row([column.cell(of) for column in columns]) for of in rows]
    content = [
        tag("caption", caption),
        tag("thead", tag("tr", *head, role=role("row")), role=role("rowgroup")),
        tag("tbody", *body, role=role("rowgroup")),
    ]
    if footer:
        content.append(tag("tfoot", row(footer, heading=True), role=role("rowgroup")))
    classes = " ".join(c for c in ("stacked" if stacked else "", class_) if c)
    made = tag("table", *content, role=role("table"), class_=classes or None)
    return tag("div", made, class_="scroll") if stacked else scrolling(caption, made)


def scrolling(name: str, *content: object) -> Html:
    """What scrolls by itself where it is wider than the page, with the keyboard too."""
    return tag("div", *content, class_="scroll", role="region", aria_label=name, tabindex=0)


def section(name: str, title: str, *content: object) -> Html:
    """A section of the page that links can go to."""
    heading = tag("h2", title, id=f"{name}-title")
    return tag("section", heading, *content, id=name, aria_labelledby=f"{name}-title")


def details(title: object, *content: object, open: bool = False, class_: str | None = None) -> Html:
    """Content behind a title that opens it."""
    return tag("details", tag("summary", title), *content, open=open, class_=class_)


def share(part: float, whole: float, of: str = "") -> str:
    """A part in per cent, or as a multiple where it is far more than the whole.

    ``of``: what the whole is, to be named as well.
    """
    if part >= 2 * whole > 0:
        return f"{part / whole:.1f} times {of}".rstrip()
    percent = f"{100 * part / whole:.1f} %" if whole else "0 %"
    return f"{percent} of {of}" if of else percent


def times(shape: Iterable[int]) -> str:
    """A shape, short."""
    return "×".join(map(str, shape)) or "scalar"
