"""The command line: ``tpplan dry-run``, ``advise``, ``verify``, ``check`` and others.

What needs torch, which takes seconds to import, is imported by the commands that need it.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tpplan.completion import bash
from tpplan.language import PlanError, suggest
from tpplan.options import (
    Defaults,
    example_inputs,
    how_trained,
    inputs_of,
    overriding,
    plan_and_model,
    positive,
    takes_model,
    weighed_for,
)
from tpplan.progress import Progress
from tpplan.shipped import described, load_plan, plan_directories
from tpplan.version import __version__

FINE, FAILED, USAGE = 0, 1, 2


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code is 0 fine, 1 the plan or the check failed, 2 usage."""
    parser = _parser()
    try:
        args = parser.parse_args(argv)
    except SystemExit as stop:
        return int(stop.code or 0)
    try:
        args.typed = ["tpplan", *(sys.argv[1:] if argv is None else argv)]
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
        plain = isinstance(error, ValueError) or type(error).__module__.startswith("tpplan.")
        kind = "" if plain else f"{type(error).__name__}: "
        print(f"error: {kind}{error}", file=sys.stderr)
        return USAGE if isinstance(error, _UsageError | ValueError | OSError) else FAILED


class _UsageError(Exception):
    """The command was asked for something that does not exist."""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tpplan",
        description="Compile a YAML sharding plan onto a PyTorch model.",
        epilog="exit codes: 0 fine, 1 the plan or the check failed, 2 usage",
    )
    parser.add_argument("--version", action="version", version=f"tpplan {__version__}")
    commands = parser.add_subparsers(metavar="command", required=True)

    def command(
        name: str, run: Callable[[argparse.Namespace], int], help: str
    ) -> argparse.ArgumentParser:
        sub = commands.add_parser(
            name, help=help, description=help, formatter_class=Defaults, epilog=parser.epilog
        )
        sub.add_argument("--debug", action="store_true", help="show tracebacks")
        sub.set_defaults(run=run)
        return sub

    _reports(command)
    _checks(command)
    completion = command("completion", _completion, 'for bash: eval "$(tpplan completion)"')
    completion.set_defaults(commands=commands.choices)
    return parser


Command = Callable[[str, Callable[[argparse.Namespace], int], str], argparse.ArgumentParser]


def _reports(command: Command) -> None:
    dry_run = command("dry-run", _dry_run, "what a plan does to a model, without running it")
    plan_and_model(dry_run, tp=None, spread=True)
    how_trained(dry_run)
    dry_run.add_argument("--batch", type=positive, default=1)
    dry_run.add_argument("--json", metavar="FILE", help="write the report as JSON ('-': stdout)")
    page = "write the report as a page, with other sizes beside it"
    dry_run.add_argument("--html", metavar="FILE", help=page)

    advise = command("advise", _advise, "how to share out GPUs: tensor, data, pipeline parallelism")
    plan_and_model(advise, tp=None, sized=False)
    how_trained(advise)
    advise.add_argument("--gpus", type=positive, help="how many there are (a node)")
    advise.add_argument("--batch", type=positive, default=64, help="sequences in a step, in all")
    advise.add_argument("--micro-batch", type=positive, default=1, help="sequences at a time")
    advise.add_argument("--json", metavar="FILE", help="write it as JSON ('-': stdout)")

    diff = command("diff", _diff, "what another plan changes")
    plan_and_model(diff, tp=None)
    diff.add_argument("other", help="the plan that changes it")
    how_trained(diff)
    diff.add_argument("--batch", type=positive, default=1)
    diff.add_argument("--json", metavar="FILE", help="write it as JSON ('-': stdout)")


def _checks(command: Command) -> None:
    verify = command("verify", _verify, "prove a plan: simulated ranks against the whole model")
    plan_and_model(verify, spread=True)
    real = "real gloo processes instead of simulated ranks"
    verify.add_argument("--processes", action="store_true", help=real)
    example_inputs(verify)
    overriding(verify)

    check = command("check", _check, "what is wrong with a plan, on its own or for a model")
    plan_and_model(check, model_required=False, spread=True)
    example_inputs(check)

    suggested = command("suggest", _suggest, "a plan for a model that has none: found and proved")
    takes_model(suggested)
    suggested.add_argument("--tp", type=positive, required=True, help="ranks")
    suggested.add_argument("--batch", type=positive, default=1)
    weighed_for(suggested)
    example_inputs(suggested)
    suggested.add_argument("-o", "--output", metavar="FILE", help="write it there")
    costs = "also what was tried, what that costs, and why this one was taken"
    suggested.add_argument("--explain", action="store_true", help=costs)

    explain = command("explain", _explain, "what becomes of one module, and why")
    plan_and_model(explain)
    example_inputs(explain)
    explain.add_argument("path", help="of a module or a parameter")

    command("list", _list, "the shipped plans")
    show = command("show", _show, "a plan's text")
    show.add_argument("plan")


def _dry_run(args: argparse.Namespace) -> int:
    with _building(args) as progress:
        from tpplan.api import dry_run
        from tpplan.models import build
        from tpplan.render.text import layout

        model = build(args.model)
        progress.say(f"executing a step of it at tp {args.tp}")
        report = dry_run(
            model,
            args.plan,
            args.tp,
            args.batch,
            ep=args.ep,
            sequence_parallel=args.sequence_parallel,
            compare=args.html is not None,
            **_training(args, model),
        )
    if args.html:
        page = report.to_html(shlex.join(args.typed))
        Path(args.html).write_text(page, encoding="utf-8")
    return _shown(report, layout, args.json)


def _advise(args: argparse.Namespace) -> int:
    with _building(args) as progress:
        from tpplan.api import advise
        from tpplan.models import build
        from tpplan.render.advice_text import layout

        model = build(args.model)
        advice = advise(
            model,
            args.plan,
            gpus=args.gpus,
            batch=args.batch,
            micro_batch=args.micro_batch,
            told=lambda size: progress.say(f"executing a step of it at {size}"),
            **_training(args, model),
        )
    return _shown(advice, layout, args.json)


def _diff(args: argparse.Namespace) -> int:
    options = {"tp": args.tp, "batch": args.batch, "sequence_parallel": args.sequence_parallel}
    with _building(args) as progress:
        from tpplan.api import dry_run
        from tpplan.models import build
        from tpplan.render.diff import compare, layout

        model, reports = build(args.model), []
        options |= _training(args, model)
        for plan in (args.plan, args.other):
            progress.say(f"executing a step of it with {plan}")
            reports.append(dry_run(model, plan, **options))
    change = compare(*reports)
    return _shown(change, layout, args.json)


def _training(args: argparse.Namespace, model: Any) -> dict[str, Any]:
    """The options of a dry run that say how the model is trained, and on what."""
    return {
        "seq": args.seq,
        "inputs": _inputs(args, model),
        "loss": args.loss,
        "optimizer": args.optimizer,
        "max_norm": args.clip or None,
        "master_weights": args.master_weights,
        "checkpointing": args.checkpointing,
        "kernels": args.kernels,
        "save": args.save,
        "recompute": args.recompute,
        "overlap": args.overlap,
        **({"hardware": args.hardware} if args.hardware else {}),
    }


def _building(args: argparse.Namespace) -> Progress:
    """Says what a command does; the import of torch, which takes long too, belongs to it."""
    return Progress(f"building {args.model}")


def _shown(result: Any, layout: Callable[[Any], Any], file: str | None) -> int:
    """Print a result, and write it as JSON where that was asked for."""
    from rich.console import Console

    if file:
        text = json.dumps(result.to_dict(), indent=1) + "\n"
        if file == "-":
            sys.stdout.write(text)
            return FINE
        Path(file).write_text(text, encoding="utf-8")
    if sys.stdout.isatty():
        Console().print(layout(result))
    else:
        print(result)
    return FINE


def _inputs(args: argparse.Namespace, model: Any) -> Any:
    from tpplan.proof.calls import vocabulary_of

    return inputs_of(args.input, vocabulary_of(model))


def _check(args: argparse.Namespace) -> int:
    if args.model is None:
        plan = load_plan(args.plan)
        print(f"{plan.name}: fine, {len(plan.rules)} rules; give --model to check it against one")
        return FINE
    with _building(args) as progress:
        from tpplan.api import check
        from tpplan.models import build

        model = build(args.model)
        inputs = _inputs(args, model)
        progress.say(f"proving {args.plan} on it at tp {args.tp}")
        how = args.plan, args.tp, args.sequence_parallel
        compiled = check(model, *how, ep=args.ep, inputs=inputs, propose=True, told=progress.say)
    mode = "TP+SP" if compiled.sequence_parallel else "TP"
    print(f"{compiled.plan.name}: fits this model at tp {args.tp}, {mode}")
    return FINE


def _verify(args: argparse.Namespace) -> int:
    with _building(args) as progress:
        from tpplan.api import verify
        from tpplan.models import build, made_runnable
        from tpplan.proof import describe

        model, note = made_runnable(build(args.model))
        progress.say(f"comparing {args.tp * args.ep} ranks with the whole model, every gradient")
        result = verify(
            model,
            args.plan,
            args.tp,
            ep=args.ep,
            sequence_parallel=args.sequence_parallel,
            kernels=args.kernels,
            save=args.save,
            recompute=args.recompute,
            overlap=args.overlap,
            inputs=_inputs(args, model),
            processes=args.processes,
        )
    print(*filter(None, (note, describe(result))), sep="\n")
    return FINE


def _suggest(args: argparse.Namespace) -> int:
    with _building(args) as progress:
        from tpplan.models import build
        from tpplan.suggestion import explained, find

        model = build(args.model)
        found = find(
            model,
            args.tp,
            _inputs(args, model),
            batch=args.batch,
            seq=args.seq,
            hardware=args.hardware,
            told=progress.say,
        )
    if args.explain:
        print(explained(found), file=sys.stderr)
    if args.output:
        Path(args.output).write_text(found.plan.text, encoding="utf-8")
        print(f"{args.output}: {len(found.plan.rules)} rules, proved at tp {args.tp}")
    else:
        sys.stdout.write(found.plan.text)
    return FINE


def _explain(args: argparse.Namespace) -> int:
    with _building(args) as progress:
        from tpplan.models import build
        from tpplan.observe.examples import with_other_inputs
        from tpplan.planner import compile_plan
        from tpplan.render import explain

        model = build(args.model)
        progress.say(f"compiling {args.plan} onto it")
        plan, inputs = load_plan(args.plan, model), _inputs(args, model)
        how = args.tp, args.sequence_parallel
        compiled = with_other_inputs(compile_plan)(model, plan, *how, inputs=inputs)
    try:
        print(explain(model, compiled, args.path))
    except KeyError:
        names = [n for n, _ in model.named_modules()] + [n for n, _ in model.named_parameters()]
        guess = suggest(args.path, names)
        hint = f"; did you mean '{guess}'?" if guess else ""
        raise _UsageError(f"the model has no module or parameter '{args.path}'{hint}") from None
    return FINE


def _list(args: argparse.Namespace) -> int:
    for plan in described():
        print(f"{plan.name:<16} {plan.description}")
        print(f"{'':<16} {', '.join(plan.models)}")
    return FINE


def _show(args: argparse.Namespace) -> int:
    sys.stdout.write(load_plan(args.plan).text)
    return FINE


def _completion(args: argparse.Namespace) -> int:
    names = [file.name for folder in plan_directories() for file in folder.glob("*.yaml")]
    sys.stdout.write(bash(args.commands, sorted(names)))
    return FINE


if __name__ == "__main__":
    sys.exit(main())
