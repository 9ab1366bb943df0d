"""A person at a terminal is asked: an answer counts, and so does every way not to answer."""

from __future__ import annotations

import asyncio
import os
import pty
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from securevfl.cli import network

QUESTION = "Take part as agreed (d1)?"


@pytest.fixture
def terminal(monkeypatch):
    """The other end of a terminal that standard input reads from."""
    ours, theirs = pty.openpty()
    with os.fdopen(theirs, encoding="utf-8") as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        yield ours
    os.close(ours)


def asked(act: Callable[[], None]) -> bool:
    """What the question gives when somebody does something while it is open."""

    async def play() -> bool:
        asyncio.get_running_loop().call_later(0.05, act)
        async with asyncio.timeout(240):
            return await network._ask(QUESTION)

    return asyncio.run(play())


@pytest.mark.parametrize(
    ("typed", "answer"),
    [
        ("y\n", True),
        ("Yes\n", True),
        ("n\n", False),
        ("\n", False),
        ("what?\ny\n", True),
        ("\x04", False),
    ],
)
def test_an_answer(terminal, typed, answer):
    assert asked(lambda: os.write(terminal, typed.encode())) is answer


def test_what_was_typed_before_is_no_answer(terminal):
    """A second y after the first question would take part in what nobody has read."""
    os.write(terminal, b"y\ny\n")
    assert not asked(lambda: os.write(terminal, b"n\n"))


def test_an_interrupt_ends_the_question(terminal):
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # tests in the background ignore it
    try:
        with pytest.raises(KeyboardInterrupt):
            asked(lambda: signal.raise_signal(signal.SIGINT))
    finally:
        signal.signal(signal.SIGINT, before)


def test_nobody_is_there(monkeypatch, capsys):
    with Path(os.devnull).open(encoding="utf-8") as nothing:
        monkeypatch.setattr(sys, "stdin", nothing)
        assert not asked(lambda: None)
    assert "write rules under [accept]" in capsys.readouterr().err
