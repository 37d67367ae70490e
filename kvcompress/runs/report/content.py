"""What a report is made of; the same sections become HTML and Markdown."""

from __future__ import annotations

import base64
from dataclasses import dataclass, field


@dataclass
class Figure:
    """A PNG with what a reader who cannot see it needs to know."""

    name: str
    alt: str
    caption: str
    png: bytes

    @property
    def data_url(self) -> str:
        """The picture as part of the page."""
        return f"data:image/png;base64,{base64.b64encode(self.png).decode()}"


@dataclass
class Cell:
    """What a cell shows, and the number by which its column is sorted."""

    text: str
    value: float | None = None


@dataclass
class Table:
    """The first column is the head of each row. `code` sets the first column as code."""

    caption: str
    head: list[str]
    rows: list[list[Cell]]
    code: bool = True


@dataclass
class Listing:
    """A file or a command as it is."""

    caption: str
    text: str
    language: str = ""


@dataclass
class Section:
    """A heading with what stands under it, in this order."""

    title: str
    text: list[str] = field(default_factory=list)
    points: list[str] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    figures: list[Figure] = field(default_factory=list)
    listings: list[Listing] = field(default_factory=list)
    sections: list[Section] = field(default_factory=list)

    @property
    def anchor(self) -> str:
        """The id of its heading."""
        return "-".join("".join(letter if letter.isalnum() else " " for letter in self.title.lower()).split())
