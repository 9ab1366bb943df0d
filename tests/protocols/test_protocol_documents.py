"""The Python examples of the protocol documents run, and give what their comments say."""

import re
from pathlib import Path

import numpy as np
import pytest

DOCS = Path(__file__).parents[2] / "docs"


def run(name):
    namespace = {}
    for block in re.findall(r"```python\n(.*?)```", (DOCS / name).read_text(encoding="utf-8"), re.DOTALL):
        exec(compile(block, name, "exec"), namespace)
    return namespace


def test_homomorphic():
    names = run("protocols-homomorphic.md")
    np.testing.assert_array_equal(names["total"], [4.75, 3.0])
    assert 0 < names["protocol"].flooding_std < 1e-5


def test_noise():
    noise = run("protocols-noise.md")["noise"]
    assert noise.honest_sigma == pytest.approx(2.0)
    assert noise.total_sigma == pytest.approx(2.31, rel=1e-3)


def test_alignment():
    results = run("align.md")["results"]
    assert results[0].rows.tolist() == [1, 2]
    assert results[1].rows.tolist() == [1, 0]
    found = [machine.alignment().rows.tolist() for machine in run("protocols-alignment.md")["parties"]]
    assert sorted(zip(*found, strict=True)) == [(1, 1), (2, 0)]


def test_figures_of_the_homomorphic_document():
    from securevfl.protocols import CKKSSum
    from securevfl.protocols.sums import Flooding

    text = (DOCS / "protocols-homomorphic.md").read_text(encoding="utf-8")
    assert f"{CKKSSum(workers=8).error_bound:.1e}".replace("e-0", "e-") in text
    flooding = Flooding(bits=20, decryptions=100, values=1000)
    std = CKKSSum(workers=8, announce=True, flooding=flooding).flooding_std
    assert f"standard deviation of {std:.0f};" in text
