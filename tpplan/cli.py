"""The command line: ``tpplan dry-run``, ``advise``, ``verify``, ``check`` and others.

What needs torch, which takes seconds to import, is imported by the commands that need it.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tpplan.completion import bash
from tpplan.language import PlanError, suggest
from tpplan.language.styles import KERNEL_CHOICES, SAVE_CHOICES
from tpplan.progress import Progress
from tpplan.shipped import load_plan, plan_directories, shipped_plans
from tpplan.version import __version__

if TYPE_CHECKING:
    import torch

FINE, FAILED, USAGE = 0, 1, 2
_EITHER = argparse.BooleanOptionalAction  # --x and --no-x


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


class _Defaults(argparse.HelpFormatter):
    """Says what is taken where an option is left out, where that says something."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        says = isinstance(action.default, str | int | float) and action.default is not False
        told = says and action.option_strings and action.default != argparse.SUPPRESS
        return f"{action.help or ''} (default: %(default)s)".strip() if told else action.help


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
            name, help=help, description=help, formatter_class=_Defaults, epilog=parser.epilog
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
    _plan_and_model(dry_run, tp=None, spread=True)
    _how_trained(dry_run)
    dry_run.add_argument("--batch", type=_positive, default=1)
    dry_run.add_argument("--json", metavar="FILE", help="write the report as JSON ('-': stdout)")
    page = "write the report as a page, with other sizes beside it"
    dry_run.add_argument("--html", metavar="FILE", help=page)

    advise = command("advise", _advise, "how to share out GPUs: tensor, data, pipeline parallelism")
    _plan_and_model(advise, tp=None, sized=False)
    _how_trained(advise)
    advise.add_argument("--gpus", type=_positive, help="how many there are (a node)")
    advise.add_argument("--batch", type=_positive, default=64, help="sequences in a step, in all")
    advise.add_argument("--micro-batch", type=_positive, default=1, help="sequences at a time")
    advise.add_argument("--json", metavar="FILE", help="write it as JSON ('-': stdout)")

    diff = command("diff", _diff, "what another plan changes")
    _plan_and_model(diff, tp=None)
    diff.add_argument("other", help="the plan that changes it")
    _how_trained(diff)
    diff.add_argument("--batch", type=_positive, default=1)
    diff.add_argument("--json", metavar="FILE", help="write it as JSON ('-': stdout)")


def _checks(command: Command) -> None:
    verify = command("verify", _verify, "prove a plan: simulated ranks against the whole model")
    _plan_and_model(verify, spread=True)
    real = "real gloo processes instead of simulated ranks"
    verify.add_argument("--processes", action="store_true", help=real)
    _example_inputs(verify)
    _overriding(verify)

    check = command("check", _check, "what is wrong with a plan, on its own or for a model")
    _plan_and_model(check, model_required=False, spread=True)
    _example_inputs(check)

    explain = command("explain", _explain, "what becomes of one module, and why")
    _plan_and_model(explain)
    _example_inputs(explain)
    explain.add_argument("path", help="of a module or a parameter")

    command("list", _list, "the shipped plans")
    show = command("show", _show, "a plan's text")
    show.add_argument("plan")


def _plan_and_model(
    sub: argparse.ArgumentParser,
    model_required: bool = True,
    tp: int | None = 2,
    sized: bool = True,
    spread: bool = False,
) -> None:
    sub.add_argument("plan", help="a plan file, or a shipped plan's name")
    kinds = "config.json, a folder with one, or package.module:factory"
    sub.add_argument("--model", required=model_required, help=kinds)
    if sized:
        sub.add_argument("--tp", type=_positive, default=tp, required=tp is None, help="ranks")
        if spread:
            sub.add_argument("--ep", type=_positive, default=1, help="groups that share experts")
        sub.add_argument("--sequence-parallel", action=_EITHER, help="override the plan's")


def _example_inputs(sub: argparse.ArgumentParser) -> None:
    said = "an input of the model, as in input_ids:int64[2,13]; may be given several times"
    form = "NAME:DTYPE[SHAPE]"
    sub.add_argument("--input", action="append", default=[], metavar=form, help=said)


def _how_trained(sub: argparse.ArgumentParser) -> None:
    add, labels = sub.add_argument, "give the token ids as labels too, for the model's loss"
    copies = "float32 copies of 16-bit parameters for the optimizer"
    add("--seq", type=_positive, default=2048, help="sequence length")
    _example_inputs(sub)
    add("--loss", action="store_true", help=labels)
    add("--optimizer", default="adamw", help="its name, or none")
    add("--clip", type=float, default=1.0, metavar="NORM", help="of gradients; 0 for none")
    add("--master-weights", action=_EITHER, default=True, help=copies)
    add("--checkpointing", action="store_true", help="recompute every layer in backward")
    add("--hardware", help="a profile's name, or a YAML file of your own")
    _overriding(sub)


def _overriding(sub: argparse.ArgumentParser) -> None:
    kinds = "of all kinds: triton, torch, or auto: Triton's where it runs on a GPU"
    sub.add_argument("--kernels", choices=KERNEL_CHOICES, help=kinds)
    sub.add_argument("--save", choices=SAVE_CHOICES, help="of gathered inputs, for backward")


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not a positive number")
    return value


def _dry_run(args: argparse.Namespace) -> int:
    with _building(args) as progress:
        from tpplan.api import dry_run
        from tpplan.models import build
        from tpplan.render.text import layout

        model = build(args.model)
        progress.say(f"executing a step at tp {args.tp}")
        report = dry_run(
            model,
            args.plan,
            args.tp,
            args.batch,
            ep=args.ep,
            sequence_parallel=args.sequence_parallel,
            compare=args.html is not None,
            **_training(args),
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

        advice = advise(
            build(args.model),
            args.plan,
            gpus=args.gpus,
            batch=args.batch,
            micro_batch=args.micro_batch,
            told=lambda size: progress.say(f"executing a step of it at {size}"),
            **_training(args),
        )
    return _shown(advice, layout, args.json)


def _diff(args: argparse.Namespace) -> int:
    options = _training(args)
    options |= {"tp": args.tp, "batch": args.batch, "sequence_parallel": args.sequence_parallel}
    with _building(args) as progress:
        from tpplan.api import dry_run
        from tpplan.models import build
        from tpplan.render.diff import compare, layout

        model, reports = build(args.model), []
        for plan in (args.plan, args.other):
            progress.say(f"executing a step of it with {plan}")
            reports.append(dry_run(model, plan, **options))
    change = compare(*reports)
    return _shown(change, layout, args.json)


def _training(args: argparse.Namespace) -> dict[str, Any]:
    """The options of a dry run that say how the model is trained, and on what."""
    return {
        "seq": args.seq,
        "inputs": _inputs(args.input) or None,
        "loss": args.loss,
        "optimizer": args.optimizer,
        "max_norm": args.clip or None,
        "master_weights": args.master_weights,
        "checkpointing": args.checkpointing,
        "kernels": args.kernels,
        "save": args.save,
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


def _check(args: argparse.Namespace) -> int:
    if args.model is None:
        plan = load_plan(args.plan)
        print(f"{plan.name}: fine, {len(plan.rules)} rules; give --model to check it against one")
        return FINE
    with _building(args) as progress:
        from tpplan.api import check
        from tpplan.models import build

        model, inputs = build(args.model), _inputs(args.input) or None
        progress.say(f"proving {args.plan} on it at tp {args.tp}")
        how = args.plan, args.tp, args.sequence_parallel
        compiled = check(model, *how, ep=args.ep, inputs=inputs)
    mode = "TP+SP" if compiled.sequence_parallel else "TP"
    print(f"{compiled.plan.name}: fits this model at tp {args.tp}, {mode}")
    return FINE


def _verify(args: argparse.Namespace) -> int:
    with _building(args) as progress:
        from tpplan.api import verify
        from tpplan.models import build, made_runnable
        from tpplan.proof import describe

        model, note = made_runnable(build(args.model))
        progress.say(f"comparing {args.tp * args.ep} ranks with the whole model")
        result = verify(
            model,
            args.plan,
            args.tp,
            ep=args.ep,
            sequence_parallel=args.sequence_parallel,
            kernels=args.kernels,
            save=args.save,
            inputs=_inputs(args.input) or None,
            processes=args.processes,
        )
    print(*filter(None, (note, describe(result))), sep="\n")
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
    with _building(args) as progress:
        from tpplan.models import build
        from tpplan.planner import compile_plan
        from tpplan.render import explain

        model = build(args.model)
        progress.say(f"compiling {args.plan} onto it")
        plan, inputs = load_plan(args.plan, model), _inputs(args.input) or None
        compiled = compile_plan(model, plan, args.tp, args.sequence_parallel, inputs=inputs)
    try:
        print(explain(model, compiled, args.path))
    except KeyError:
        names = [n for n, _ in model.named_modules()] + [n for n, _ in model.named_parameters()]
        guess = suggest(args.path, names)
        hint = f"; did you mean '{guess}'?" if guess else ""
        raise _UsageError(f"the model has no module or parameter '{args.path}'{hint}") from None
    return FINE


def _list(args: argparse.Namespace) -> int:
    for plan in shipped_plans():
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
