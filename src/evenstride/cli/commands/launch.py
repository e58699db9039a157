"""``evenstride launch``: torchrun with settings for elastic training."""

from __future__ import annotations

import json
import os
import shlex
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from evenstride.cli.terminal_text import say
from evenstride.errors import ConfigError

if TYPE_CHECKING:
    from evenstride.lab.processes.torchrun import StoreEndpoint, Torchrun


def launch(
    context: typer.Context,
    command: Annotated[
        list[str] | None,
        typer.Argument(
            help="Script and its arguments, or -- -m pkg.module and its arguments.",
            metavar="SCRIPT [ARGS]...",
        ),
    ] = None,
    nodes: Annotated[
        str, typer.Option(help="Number of machines, or a range.", metavar="N|MIN:MAX")
    ] = "1",
    per_node: Annotated[
        str,
        typer.Option(
            help="Workers per machine. gpu or cpu: one for each. auto: gpu if there are GPUs, else "
            "cpu.",
            metavar="N",
        ),
    ] = "auto",
    store: Annotated[
        str | None,
        typer.Option(
            help="Address of the rendezvous store. Default port: 29400.", metavar="HOST[:PORT]"
        ),
    ] = None,
    name: Annotated[
        str, typer.Option("--id", help="Name of the job, the same on all machines.", metavar="NAME")
    ] = "evenstride",
    spot: Annotated[
        bool,
        typer.Option("--spot", help="Machines may be preempted. None of them hosts the store."),
    ] = False,
    restarts: Annotated[
        int | None, typer.Option(min=0, help="Most restarts. Default: 3, with --spot 1000.")
    ] = None,
    address: Annotated[
        str | None,
        typer.Option(
            help="This machine's address for the others. Default: the one towards the store.",
            metavar="HOST",
        ),
    ] = None,
    store_only: Annotated[
        bool, typer.Option("--store-only", help="Only serve the store at --store.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only print the command.")] = False,
    as_json: Annotated[
        bool,
        typer.Option(
            "--json",
            help="Print one JSON object and start nothing, except the store of --store-only.",
        ),
    ] = False,
) -> None:
    """Start a script with torchrun and settings for elastic training.

    The command prints the torchrun command and becomes it. Run it on every
    machine. A lost machine costs the steps since the last checkpoint and
    about 10 s, instead of most of a minute.

    Each loss counts as a restart, including preemptions. The store must
    outlive all machines, because torchrun cannot continue without it. With
    --spot, start it with --store-only on a small machine that stays. Any
    process that reaches its port can run code on all machines of the job, so
    restrict access to it.

    On one machine, every port listens on loopback. On several machines, the
    store listens on the address of --store, all other ports on that of
    --address.

    Options of launch precede the script. Options after it go to the script.

    Examples:
        evenstride launch --per-node 2 train.py --lr 0.1

        evenstride launch --per-node 2 -- -m pkg.module --lr 0.1

        evenstride launch --store-only --store 10.0.0.5:29400

        evenstride launch --nodes 1:4 --store 10.0.0.5:29400 --spot train.py
    """
    from evenstride.lab.processes import torchrun

    endpoint = None if store is None else torchrun.parse_store(store)
    if store_only:
        _serve(endpoint, command, as_json, dry_run)
        return
    if not command:
        raise ConfigError(
            "no script given: expected one after the options, such as evenstride launch --per-node "
            "2 train.py; to serve only a store, add --store-only"
        )
    request = torchrun.Request(
        command=tuple(command),
        nodes=torchrun.parse_nodes(nodes),
        per_node=torchrun.parse_per_node(per_node),
        store=endpoint,
        name=name,
        spot=spot,
        restarts=restarts,
        address=address,
    )
    run = torchrun.torchrun(request, torchrun.offers_of_torch())
    run = replace(run, notes=(*run.notes, *_misplaced(context, command)))
    if not (dry_run or as_json):
        _refuse_if_missing(command[0])
    _become(run, as_json, dry_run or as_json)


def _misplaced(context: typer.Context, command: list[str]) -> list[str]:
    """Return a note for each option of launch that goes to the script."""
    own = {name for parameter in context.command.params for name in parameter.opts}
    ended = command.index("--") if "--" in command else len(command)
    given = dict.fromkeys(word.partition("=")[0] for word in command[1:ended])
    return [
        f"{name} after the script goes to the script; to give it to launch, put it before."
        for name in given
        if name.startswith("--") and name in own
    ]


def _refuse_if_missing(script: str) -> None:
    """Refuse a script that does not exist. A text with a leading dash is for torchrun."""
    path = Path(script)
    if script.startswith("-") or path.is_file() or (path / "__main__.py").is_file():
        return
    what = "a folder" if path.is_dir() else f"not a file in {Path.cwd()}"
    raise ConfigError(
        f"cannot launch {script}, which is {what}: expected a script, or a module as "
        "-- -m pkg.module; correct the name, or change the folder"
    )


def _become(run: Torchrun, as_json: bool, dry_run: bool) -> None:
    """Print a command and replace this process with it."""
    words = [sys.executable, "-m", "evenstride.lab.processes.rendezvous", *run.arguments]
    if as_json:
        typer.echo(json.dumps({"command": words, "notes": run.notes}))
    else:
        typer.echo(shlex.join(words))
        for note in run.notes:
            say(f"note: {note}", err=True)
    if not dry_run:
        sys.stdout.flush()
        os.execv(sys.executable, words)


def _serve(
    endpoint: StoreEndpoint | None, command: list[str] | None, as_json: bool, dry_run: bool
) -> None:
    """Serve a store until a signal ends the process."""
    if endpoint is None:
        raise ConfigError(
            "--store-only needs an address; add --store HOST:PORT, with an address of this machine "
            "that the workers can reach"
        )
    if command:
        raise ConfigError(
            f"--store-only runs no script, but {command[0]} is given; leave it out, and launch it "
            "on the other machines"
        )
    if dry_run:
        _print_store(str(endpoint), as_json)
        return
    from evenstride.runtime.store.store_server import serve_store

    with serve_store(endpoint.host, endpoint.port) as (host, port):
        _print_store(f"[{host}]:{port}" if ":" in host else f"{host}:{port}", as_json)
        while True:
            signal.pause()


def _print_store(at: str, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps({"store": at}))
    else:
        say(f"The store listens at {at}. It must run as long as the job.")
    sys.stdout.flush()
