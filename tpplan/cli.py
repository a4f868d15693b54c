"""The command line: ``tpplan dry-run | verify | check | explain | list | show``."""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tpplan.language import PlanError, suggest

if TYPE_CHECKING:
    import torch

FINE, FAILED, USAGE = 0, 1, 2


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code is 0 fine, 1 the plan or the check failed, 2 usage."""
    parser = _parser()
    try:
        args = parser.parse_args(argv)
    except SystemExit as stop:
        return int(stop.code or 0)
    try:
        command: Callable[[argparse.Namespace], int] = args.run
        return command(args)
    except PlanError as error:
        if args.debug:
            raise
        print(error, file=sys.stderr)
        return FAILED
    except BrokenPipeError:
        # the reader (head, less) has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FINE
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        if args.debug:
            raise
        kind = "" if isinstance(error, _UsageError | ValueError) else f"{type(error).__name__}: "
        print(f"error: {kind}{error}", file=sys.stderr)
        return USAGE if isinstance(error, _UsageError | ValueError | OSError) else FAILED


class _UsageError(Exception):
    """The command was asked for something that does not exist."""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tpplan", description="Compile a YAML sharding plan onto a PyTorch model."
    )
    commands = parser.add_subparsers(metavar="command", required=True)

    def command(
        name: str, run: Callable[[argparse.Namespace], int], help: str
    ) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=help, description=help)
        sub.add_argument("--debug", action="store_true", help="show tracebacks")
        sub.set_defaults(run=run)
        return sub

    dry_run = command("dry-run", _dry_run, "what a plan does to a model, without running it")
    _plan_and_model(dry_run, tp=None)
    dry_run.add_argument("--batch", type=_positive, default=1)
    dry_run.add_argument("--seq", type=_positive, default=2048, help="sequence length")
    dry_run.add_argument("--json", metavar="FILE", help="write the report as JSON ('-': stdout)")

    verify = command("verify", _verify, "prove a plan: simulated ranks against the whole model")
    _plan_and_model(verify)
    verify.add_argument(
        "--processes", action="store_true", help="real gloo processes instead of simulated ranks"
    )
    verify.add_argument(
        "--input",
        action="append",
        default=[],
        metavar="NAME:DTYPE[SHAPE]",
        help="an input of the model, as in input_ids:int64[2,13]; may be given several times",
    )

    check = command("check", _check, "what is wrong with a plan, on its own or for a model")
    _plan_and_model(check, model_required=False)

    explain = command("explain", _explain, "what becomes of one module, and why")
    _plan_and_model(explain)
    explain.add_argument("path", help="of a module or a parameter")

    command("list", _list, "the shipped plans")
    show = command("show", _show, "a plan's text")
    show.add_argument("plan")
    return parser


def _plan_and_model(
    sub: argparse.ArgumentParser, model_required: bool = True, tp: int | None = 2
) -> None:
    sub.add_argument("plan", help="a plan file, or a shipped plan's name")
    sub.add_argument(
        "--model",
        required=model_required,
        help="config.json, a folder with one, or package.module:factory",
    )
    sub.add_argument("--tp", type=_positive, default=tp, required=tp is None, help="ranks")
    sub.add_argument(
        "--sequence-parallel",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="override the plan's",
    )


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not a positive number")
    return value


def _dry_run(args: argparse.Namespace) -> int:
    from rich.console import Console

    from tpplan.api import dry_run
    from tpplan.models import build
    from tpplan.report.text import layout

    report = dry_run(
        build(args.model),
        args.plan,
        tp=args.tp,
        batch=args.batch,
        seq=args.seq,
        sequence_parallel=args.sequence_parallel,
    )
    if args.json:
        text = json.dumps(report.to_dict(), indent=1) + "\n"
        if args.json == "-":
            sys.stdout.write(text)
            return FINE
        Path(args.json).write_text(text, encoding="utf-8")
    if sys.stdout.isatty():
        Console().print(layout(report))
    else:
        print(report)
    return FINE


def _check(args: argparse.Namespace) -> int:
    from tpplan.api import check, load_plan
    from tpplan.models import build

    plan = load_plan(args.plan)
    if args.model is None:
        print(f"{plan.name}: fine, {len(plan.rules)} rules; give --model to check it against one")
        return FINE
    compiled = check(build(args.model), plan, args.tp, args.sequence_parallel)
    mode = "TP+SP" if compiled.sequence_parallel else "TP"
    print(f"{plan.name}: fits this model at tp {args.tp}, {mode}")
    return FINE


def _verify(args: argparse.Namespace) -> int:
    from tpplan.api import verify
    from tpplan.models import build, made_runnable
    from tpplan.proof import VerificationError, describe

    model, note = made_runnable(build(args.model))
    try:
        result = verify(
            model,
            args.plan,
            args.tp,
            sequence_parallel=args.sequence_parallel,
            inputs=_inputs(args.input) or None,
            processes=args.processes,
        )
    except VerificationError as error:
        if args.debug:
            raise
        print(f"error: {error}", file=sys.stderr)
        return FAILED
    if note:
        print(note)
    print(describe(result))
    return FINE


_INPUT = re.compile(r"(?P<name>[A-Za-z_]\w*):(?P<dtype>[a-z0-9]+)\[(?P<shape>[0-9, ]*)\]")


def _inputs(texts: Sequence[str]) -> dict[str, torch.Tensor]:
    """Example inputs as the command line states them; integers are small, and so valid ids."""
    import torch

    found = {}
    for text in texts:
        match = _INPUT.fullmatch(text)
        dtype = None if match is None else getattr(torch, match["dtype"], None)
        if match is None or not isinstance(dtype, torch.dtype):
            raise _UsageError(f"--input '{text}': write it as in input_ids:int64[2,13]")
        shape = [int(n) for n in match["shape"].split(",") if n.strip()]
        generator = torch.Generator().manual_seed(0)
        if dtype.is_floating_point:
            value = torch.randn(shape, generator=generator).to(dtype)
        elif dtype == torch.bool:
            value = torch.ones(shape, dtype=dtype)
        else:
            value = torch.randint(1, 100, shape, generator=generator).to(dtype)
        found[match["name"]] = value
    return found


def _explain(args: argparse.Namespace) -> int:
    from tpplan.api import load_plan
    from tpplan.models import build
    from tpplan.planner import compile_plan
    from tpplan.report import explain

    model = build(args.model)
    compiled = compile_plan(model, load_plan(args.plan, model), args.tp, args.sequence_parallel)
    try:
        print(explain(model, compiled, args.path))
    except KeyError:
        names = [n for n, _ in model.named_modules()] + [n for n, _ in model.named_parameters()]
        guess = suggest(args.path, names)
        hint = f"; did you mean '{guess}'?" if guess else ""
        raise _UsageError(f"the model has no module or parameter '{args.path}'{hint}") from None
    return FINE


def _list(args: argparse.Namespace) -> int:
    from tpplan.api import shipped_plans

    for plan in shipped_plans():
        print(f"{plan.name:<16} {plan.description}")
        print(f"{'':<16} {', '.join(plan.models)}")
    return FINE


def _show(args: argparse.Namespace) -> int:
    from tpplan.api import load_plan

    sys.stdout.write(load_plan(args.plan).text)
    return FINE


if __name__ == "__main__":
    sys.exit(main())
