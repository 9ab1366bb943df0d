"""Everything that the four papers number, read from their texts: theorems, equations, tables, figures.

The texts are their authors' and not part of this repository; what they number is, in ``numbered.json``. By it
a test checks that the page of coverage leaves nothing out.

python -m benchmarks.papers.numbered --papers FOLDER
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path

LIST = Path(__file__).with_name("numbered.json")
TEXTS = {"VAFL": "vafl.md", "FDML": "fdml.md", "AFSGD-VP": "afsgd-vp.txt", "Flex-VFL": "flex-vfl.md"}
KINDS = (
    "Algorithm",
    "Assumption",
    "Corollary",
    "Definition",
    "Figure",
    "Lemma",
    "Proposition",
    "Remark",
    "Table",
    "Theorem",
)
_NAMED = re.compile(
    rf"\b({'|'.join(KINDS)}|Fig\.)[\s*]+(\d+|[IVX]+)\b(?!\s+of\s+[A-Z])", re.IGNORECASE
)  # "Lemma 2 of Nesterov" is another paper's
_EQUATION = re.compile(r"\((\d{1,2})[a-g]?\)|\\tag\{(\d{1,2})[a-g]?\}")


def numbered(text: str) -> list[str]:
    """What a text numbers, each once, sorted by kind and number; equations as far as the last one."""
    found = {
        ("Figure" if kind.lower() == "fig." else kind.capitalize(), number)
        for kind, number in _NAMED.findall(text)
        if number.isdigit() or kind.upper() in ("TABLE", "FIG.")
    }
    last = max((int(first or second) for first, second in _EQUATION.findall(text)), default=0)
    found |= {("Equation", str(number)) for number in range(1, last + 1)}
    return [f"{kind} {number}" for kind, number in sorted(found, key=lambda each: (each[0], _place(each[1])))]


def _place(number: str) -> int:
    return int(number) if number.isdigit() else 1 + ("I", "II", "III", "IV", "V", "VI").index(number)


def read(folder: Path) -> dict[str, list[str]]:
    """Paper -> what it numbers."""
    return {paper: numbered((folder / name).read_text(encoding="utf-8")) for paper, name in TEXTS.items()}


def main() -> None:
    """Writes the list."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--papers", type=Path, required=True, help="folder with the papers' texts")
    found = read(parser.parse_args().papers)
    LIST.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
