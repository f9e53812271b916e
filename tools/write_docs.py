"""Writes the generated part of docs/recipe.md: the table of keys, between its two marks. `make docs` runs it."""

from __future__ import annotations

from pathlib import Path

from grpo_dist.recipe_keys import keys_as_markdown

FILE = Path(__file__).parent.parent / "docs" / "recipe.md"
BEGIN, END = "<!-- keys: written by `make docs` -->", "<!-- end of keys -->"


def with_keys(text: str) -> str:
    """The page with today's table of keys."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{keys_as_markdown()}\n{END}{after}"


if __name__ == "__main__":
    FILE.write_text(with_keys(FILE.read_text(encoding="utf-8")), encoding="utf-8")
    print(f"wrote {FILE}")
