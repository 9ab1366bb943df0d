"""`securevfl certificates`: a small certificate authority for organisations that train together."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from securevfl.cli.show import print_json

if TYPE_CHECKING:
    from securevfl.network.identity import Certified

Folder = Annotated[Path, typer.Option("--folder", help="Folder of the authority.")]
Out = Annotated[Path, typer.Option("--out", help="Where each organisation's folder goes.")]
Hosts = Annotated[
    list[str] | None, typer.Option("--host", help="A host name or address to certify too; repeatable.")
]
Days = Annotated[int, typer.Option("--days", help="How long it lasts.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


def certificates_init(
    name: Annotated[str, typer.Option("--name", help="What to call the authority.")],
    folder: Folder = Path("ca"),
    key: Annotated[str, typer.Option("--key", help="Its own key: p256 or ed25519.")] = "p256",
    days: Days = 365,
    json: Json = False,
) -> None:
    """Make the consortium's authority: a key that stays here, and a certificate for everybody."""
    from securevfl.network.authority import create_authority

    made = create_authority(folder, name=name, key=key, days=days)
    _report([_row(folder, made.certificate)], json, f"Keep {folder}/ca.key secret.")


def certificates_issue(
    names: Annotated[list[str], typer.Argument(help="The organisations.")],
    folder: Folder = Path("ca"),
    out: Out = Path(),
    host: Hosts = None,
    days: Days = 90,
    json: Json = False,
) -> None:
    """Make a key and a certificate for each organisation, in a folder to hand over to it."""
    from securevfl.network.authority import issue, load_authority

    made = issue(load_authority(folder), names, out=out, hosts=host or (), days=days)
    _report([_row(out / name, each) for name, each in zip(names, made, strict=True)], json)


def certificates_revoke(
    files: Annotated[list[Path] | None, typer.Argument(help="Certificates; none renews the list.")] = None,
    folder: Folder = Path("ca"),
    days: Annotated[int, typer.Option("--days", help="How long the list is good for.")] = 30,
    json: Json = False,
) -> None:
    """Revoke certificates: a signed list that every organisation puts beside ca.pem."""
    from securevfl.network.authority import load_authority, revoke

    count = revoke(load_authority(folder), files or (), folder=folder, days=days)
    path = folder / "ca.crl"
    if json:
        print_json({"list": str(path), "revoked": count})
    else:
        typer.echo(f"{count} certificates are revoked; send {path} to everybody within {days} days")


def certificates_request(
    name: Annotated[str, typer.Argument(help="The organisation that asks.")],
    out: Out = Path(),
    host: Hosts = None,
    json: Json = False,
) -> None:
    """Make an organisation's own key, and a request for the authority that does not contain it."""
    from securevfl.network.authority import request

    made = request(name, out=out, hosts=host or ())
    note = f"Send {out / name / name}.csr to the authority, and the fingerprint by another channel."
    _report([_row(out / name, made)], json, note)


def certificates_sign(
    name: Annotated[str, typer.Argument(help="The organisation that sent the request.")],
    csr: Annotated[Path, typer.Option("--csr", help="The request.")],
    folder: Folder = Path("ca"),
    out: Out = Path(),
    days: Days = 90,
    json: Json = False,
) -> None:
    """Certify the key that an organisation made itself; only name and hosts are taken from its request."""
    from securevfl.network.authority import load_authority, sign

    made = sign(load_authority(folder), name, csr, out=out, days=days)
    note = f"Compare the fingerprint with {name} by another channel before you hand {out / name} over."
    _report([_row(out / name, made)], json, note)


def certificates_show(
    files: Annotated[list[Path], typer.Argument(help="Certificates or requests.")],
    json: Json = False,
) -> None:
    """Show whom certificates and requests name, who issued them, and how many days they have left."""
    from securevfl.network.identity import describe_file

    _report([{"at": str(path), **describe_file(path)} for path in files], json)


def _row(place: Path, certified: Certified) -> dict[str, Any]:
    from securevfl.network.identity import describe

    return {"at": str(place), **describe(certified)}


def _report(rows: list[dict[str, Any]], json: bool, note: str = "") -> None:
    if json:
        print_json({"certificates": rows})
        return
    for row in rows:
        typer.echo(f"{row['at']}: {_headline(row)}")
        if row["hosts"]:
            typer.echo(f"  hosts        {', '.join(row['hosts'])}")
        typer.echo(f"  fingerprint  {row['fingerprint']}")
    if note:
        typer.echo(note)


def _headline(row: dict[str, Any]) -> str:
    if row["days"] is None:
        return f"request of {row['name']}"
    ended = row["days"] < 0
    end = f"expired on {row['expires']}" if ended else f"{row['days']} days left, to {row['expires']}"
    return f"{row['name']}, issued by {row['issuer']}, {end}"
