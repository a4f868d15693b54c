"""What a shell completes of the command line."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Mapping

_OPTION = re.compile(r"--[a-z][a-z-]*")
_BASH = """\
_tpplan() {{
    local word=${{COMP_WORDS[COMP_CWORD]}} words=
    if ((COMP_CWORD == 1)); then
        words='{commands}'
    elif [[ $word == -* ]]; then
        case ${{COMP_WORDS[1]}} in
{options}
        esac
    elif [[ ${{COMP_WORDS[COMP_CWORD - 1]}} != -* ]]; then
        words="{plans} $(compgen -f -- "$word")"
    fi
    COMPREPLY=($(compgen -W "$words" -- "$word"))
}}
complete -o default -o filenames -F _tpplan tpplan
"""  # default: files, where there are no words


def bash(commands: Mapping[str, argparse.ArgumentParser], plans: Iterable[str]) -> str:
    """A script for bash: commands, their options, and shipped plans or files."""
    options = {name: _OPTION.findall(sub.format_usage()) for name, sub in commands.items()}
    cases = [f"            {name}) words='{' '.join(found)}' ;;" for name, found in options.items()]
    return _BASH.format(
        commands=" ".join(commands), plans=" ".join(plans), options="\n".join(cases)
    )
