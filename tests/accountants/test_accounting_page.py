"""The code on docs/accounting.md runs, top to bottom, and its asserts hold."""

import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "accounting.md"


def test_examples_run():
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) >= 6
    names: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), names)
