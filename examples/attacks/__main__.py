"""Ten attacks on training between organisations, each in front of your eyes.

    python examples/attacks 7                    # honest processes, and one that lies
    python examples/attacks 7 --without-defence  # the same, with one defence out of the victim's process
    python examples/attacks                      # the list

Honest organisations run `securevfl serve` and `securevfl join` as they are. What victims' terminals say is
shown; the last line says whether the attack has gained anything, and so does the exit code: 0 if not, else 1.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from lies import ATTACKS, Attack
from scene import Scene

SELF = str(Path(__file__).parent)


def show(number: int, *, defended: bool) -> int:
    """Plays one attack, and says what came of it."""
    attack = ATTACKS[number]
    folder = Path(tempfile.mkdtemp(prefix="securevfl-attack-"))
    scene = Scene(folder, **attack.scene)
    try:
        scene.build()
        ways = {} if defended else {name: way("disarm", number) for name in attack.victims}
        if attack.liar in scene.parties or attack.liar == "bank":
            ways[attack.liar] = way("lie", number)
        print(f"attack {number}: {attack.title}")
        print("all honest processes are unmodified" if defended else f"taken out: {attack.defence}")
        with_outsider(scene, number, attack, ways)
    finally:
        shutil.rmtree(folder)
    for name in attack.victims:
        print(f"--- {name}'s terminal (exit code {scene.codes[name]})")
        print(scene.said[name] if defended else ascii(scene.said[name])[1:-1].replace("\\n", "\n"), end="")
    gained = scene.gained
    print("---")
    print(f"the attack SUCCEEDS: {gained}" if gained else "the attack fails: it has gained nothing")
    return 1 if gained else 0


def with_outsider(scene: Scene, number: int, attack: Attack, ways: dict[str, list[str]]) -> None:
    """Plays the scene, beside whoever is no part of it."""
    outsider = None
    if attack.instead is not None:
        (scene.folder / "port").write_text(str(scene.port))
        outsider = subprocess.Popen([*way("outside", number), str(scene.folder)])
    try:
        scene.play(ways)
    finally:
        (scene.folder / "over").touch()
        if outsider is not None:
            outsider.wait()
    scene.gained = attack.gained(scene)


def way(role: str, number: int) -> list[str]:
    """How a process is started that plays a role in an attack."""
    return [sys.executable, SELF, role, str(number)]


def main() -> int:
    """Reads the command line: a number for readers, a role for the processes that they start."""
    words = [word for word in sys.argv[1:] if word != "--without-defence"]
    if not words:
        for number, attack in ATTACKS.items():
            print(f"{number:2}  {attack.title}")
        return 0
    if words[0] in ("lie", "disarm", "outside"):
        attack = ATTACKS[int(words[1])]
        if words[0] == "outside" and attack.instead is not None:
            attack.instead(Path(words[2]))
            return 0
        (attack.lie if words[0] == "lie" else attack.disarm)()
        from securevfl.cli import main as command

        sys.argv = ["securevfl", *words[2:]]
        command()
        return 0
    if not words[0].isdigit() or int(words[0]) not in ATTACKS:
        print(f"there is no attack {words[0]!r}; there are 1 to {len(ATTACKS)}", file=sys.stderr)
        return 2
    return show(int(words[0]), defended="--without-defence" not in sys.argv)


if __name__ == "__main__":
    sys.exit(main())
