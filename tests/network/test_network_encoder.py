"""An organisation's own encoder: trained over the network as in one process, and told to nobody."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from crashes import Process, finish, models, processes
from federation import Federation, together

from securevfl import train
from securevfl.errors import InputError
from securevfl.models.seeds import torch_generator
from securevfl.network.config import build_own, load_builder
from securevfl.network.member import Member
from securevfl.settings.plan import Plan

CODE = """
from torch import nn

def build(columns, width):
    return nn.Sequential(nn.Linear(columns, 5), nn.Tanh(), nn.Linear(5, width))

def broken(columns, width):
    raise ValueError("no")

def nothing(columns, width):
    return None

text = "no function"
"""
PLAN = Plan(algorithm="vafl-sync", epochs=2, batch=16, embedding=4, seed=3, unprotected=True)


def federation(folder: Path) -> Federation:
    (folder / "own.py").write_text(CODE)
    given = Federation(folder, PLAN)
    given.members["clinic"] = replace(given.members["clinic"], encoder="own.py:build")
    return given


@pytest.mark.parametrize("killed", [False, True], ids=["undisturbed", "restarted"])
def test_the_model_is_the_one_of_a_single_process(tmp_path, killed):
    (tmp_path / "net").mkdir()
    given = federation(tmp_path / "net")

    async def play() -> None:
        found = processes(given)
        for each in found.values():
            each.start()
        if killed:
            victim: Process = found["clinic"]
            victim.crash_in_phase("epoch", 3)
            async with asyncio.timeout(240):
                await victim.crashed.wait()
            await victim.crash()
            victim.start()
        await finish(found)

    asyncio.run(play())
    builder = load_builder(tmp_path / "net", "own.py:build")
    own = build_own(builder, 3, 4, generator=torch_generator(PLAN.seed, "encoder", 1))
    train(together(given.tables, PLAN), PLAN, tmp_path / "local", encoders={"clinic": own})
    got, expected = models(tmp_path / "net"), models(tmp_path / "local")
    found = {key.split("/", 1)[-1]: value for key, value in got.items()}
    clinic = [key for key in found if "clinic" in key]
    assert len(clinic) == 4  # two layers
    for key, value in expected.items():
        name = "/".join(key.split("/")[-2:])
        (mine,) = [each for other, each in got.items() if other.endswith(name)]
        np.testing.assert_allclose(mine, value, rtol=0, atol=2e-6, err_msg=key)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("own.py", "write file.py:function"),
        ("own.txt:build", "write file.py:function"),
        ("own.py:no name", "write file.py:function"),
        ("missing.py:build", "does not exist"),
        ("own.py:missing", "has no function 'missing'"),
        ("own.py:text", "has no function 'text'"),
        ("bad.py:build", "fails: ZeroDivisionError: division by zero"),
    ],
)
def test_a_wrong_encoder_is_named_before_anything_is_sent(tmp_path, text, says):
    given = federation(tmp_path)
    (tmp_path / "bad.py").write_text("1 / 0\n")
    with pytest.raises(InputError, match=says):
        Member(replace(given.members["clinic"], encoder=text))


@pytest.mark.parametrize(
    ("name", "says"), [("broken", "fails: ValueError: no"), ("nothing", "NoneType, not a torch.nn.Module")]
)
def test_a_function_must_make_a_module(tmp_path, name, says):
    federation(tmp_path)
    with pytest.raises(InputError, match=says):
        build_own(load_builder(tmp_path, f"own.py:{name}"), 3, 4, generator=torch_generator(0, "encoder"))
