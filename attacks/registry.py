"""Every attack by name. A new attack is added here, explicitly."""

from __future__ import annotations

from securevfl.attacks.contract import Attack

from securevfl.errors import AttackError
from securevfl.plan import nearest

_CLASSES: tuple[type[Attack], ...] = ()

ATTACKS: dict[str, type[Attack]] = {attack.name: attack for attack in _CLASSES}


def find_attack(name: str) -> type[Attack]:
    """The attack of that name.

    Raises:
        AttackError: There is none; the nearest name is suggested.
    """
    if name not in ATTACKS:
        raise AttackError(f"unknown attack {name!r}; {nearest(name, ATTACKS)}")
    return ATTACKS[name]
