"""Coverage-guided fuzzing with atheris, where it is installed."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from securevfl.network.frames import Frame, Greeting, Kind, refusal
from securevfl.privacy.messages import Head, Packet
from securevfl.protocols.wire import pack

RUNS = 100_000


def seeds() -> list[bytes]:
    """Well-formed bytes of each kind, to start from."""
    head = Head("bank", 3, "0" * 64)
    fields = {"a": np.ones((2, 3)), "b": [1, 2], "c": ["x", "y"], "d": None, "e": True, "f": 1.5, "g": b"raw"}
    hello = Greeting(sender="clinic", receiver="bank", run="r", incarnation=bytes(16), known=b"", received=0)
    return [
        Packet(kind="x", sender="clinic", receiver="server", fields=fields, head=head).to_bytes(),
        pack("done", {"phase": bytes(16)}),
        pack("begin", {"phase": bytes(16), "part": "epoch", "epoch": 1, "restore": -2, "signature": b""}),
        pack("aborted", {"phase": bytes(16), "checkpoints": [1, 2]}),
        Frame(kind=Kind.DATA, payload=b"content", number=1).to_bytes(),
        hello.to_bytes(Kind.HELLO),
        refusal("no"),
    ]


@pytest.mark.slow
def test_guided_fuzzing_finds_no_other_error(tmp_path):
    pytest.importorskip("atheris", reason="needs atheris: pip install 'securevfl[fuzz]'")
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    for number, raw in enumerate(seeds()):
        (corpus / f"seed{number}").write_bytes(raw)
    target = Path(__file__).with_name("atheris_target.py")
    # The peak that libFuzzer looks at begins with that of the process which starts it.
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    options = [f"-runs={RUNS}", "-seed=1", "-max_len=400", f"-rss_limit_mb={peak + 1024}", "-timeout=20"]
    done = subprocess.run(
        [sys.executable, str(target), *options, str(corpus)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=1200,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert f"Done {RUNS} runs" in done.stderr
