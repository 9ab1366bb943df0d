"""The attacks as a reader tries them: real processes, honest ones unmodified; and with a defence out."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from test_network_page import environment

ATTACKS = Path(__file__).parents[3] / "examples" / "attacks"
SEEN = {
    1: "not in order, or holds one twice",
    2: "were aligned 2 times and may be 2 times",
    3: "0.90 of the records would test; at most 0.2 is accepted",
    4: "names delay_trace, which every organisation decides for itself",
    5: "does not accept the invitation",
    6: "has not signed this agreement: it may have been shown another one",
    7: "epoch of epoch 3 was not agreed on",
    8: "[accept] does not say epsilon; to accept what is proposed add: epsilon = inf",
    9: "",
    10: "clinic floods: ",
}
"""What a victim's terminal says."""


def attack(*words: str) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, str(ATTACKS), *words], env=environment(), capture_output=True, text=True, timeout=300
    )
    assert done.returncode in (0, 1), done.stderr
    return done.returncode, done.stdout


@pytest.mark.slow  # the same attacks are played in one process by the other files here
@pytest.mark.parametrize("number", SEEN)
def test_the_attack_fails_in_front_of_the_reader(number):
    code, said = attack(str(number))
    assert code == 0 and "the attack fails" in said.splitlines()[-1], said
    assert SEEN[number] in said and "Traceback" not in said
    assert "\x1b" not in said


@pytest.mark.slow
@pytest.mark.parametrize("number", SEEN)
def test_without_that_one_defence_it_succeeds(number):
    """So the defence is what stops it, and the test above can fail."""
    code, said = attack(str(number), "--without-defence")
    assert code == 1 and "the attack SUCCEEDS" in said.splitlines()[-1], said
