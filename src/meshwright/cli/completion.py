"""The verb `completion`: a completion script for bash, zsh or tcsh, with all options, choices and recipes in it."""

import dataclasses
import importlib
from collections.abc import Callable, Mapping, Sequence

from meshwright.cli.flags import one_of
from meshwright.cli.main import VERBS
from meshwright.cli.output import write
from meshwright.runs.recipe import find_recipe, list_recipes

_RECIPE_VERBS = {
    "train": "TrainOptions", "show": "ShowOptions", "plan": "PlanOptions", "prove": "ProveOptions",
    "rehearse": "RehearseOptions", "parity": "ParityOptions",
}  # fmt: skip
_OTHER_VERBS = {
    "evaluate": "EvaluateOptions", "tokenize": "TokenizeOptions", "convert": "ConvertOptions", "bench": "BenchOptions",
    "launch": "LaunchOptions", "doctor": "DoctorOptions", "view": "ViewOptions", "atlas": "AtlasOptions",
}  # fmt: skip
_EXAMPLES = ("gemma3-270m", "nanogpt-cpu", "tiny", "tiny-moe")
"""A recipe of every built-in model family, whose options are completed."""


def main(args: Sequence[str]) -> int:
    """Prints the completion script of a shell."""
    scripts: dict[str, Callable[[Words], str]] = {"bash": bash_script, "zsh": zsh_script, "tcsh": tcsh_script}
    shell = one_of("completion", VERBS["completion"], args, tuple(scripts))
    write(scripts[shell](collect_words()))
    return 0


@dataclasses.dataclass(frozen=True)
class Words:
    """Words to complete."""

    options: Mapping[str, Sequence[str]]
    """Options of each verb."""
    choices: Mapping[str, Sequence[str]]
    """Legal values of each option that has a list of them."""
    recipes: Sequence[str]


def collect_words() -> Words:
    """Collects the words from the dataclasses of all verbs."""
    from meshwright.cli.options import options_of  # imports every verb, and with them JAX

    options: dict[str, list[str]] = {verb: ["--help"] for verb in VERBS}
    for verb in ("words", "recipes"):
        options[verb].append("--json")
    choices: dict[str, Sequence[str]] = {}
    for verb, kind in {**_RECIPE_VERBS, **_OTHER_VERBS}.items():
        owner = getattr(importlib.import_module(f"meshwright.cli.{verb}"), kind)
        required = {"on": ""} if verb == "plan" else {}
        runs = [find_recipe(name) for name in _EXAMPLES]
        defaults = [owner(run=run, **required) for run in runs] if verb in _RECIPE_VERBS else [None]
        for default in defaults:
            for option in options_of(owner, default):
                names = [name for name in option.names if name.startswith("--")]
                options[verb] += [name for name in names if name not in options[verb]]
                choices |= {name: option.values.choices for name in names if option.values.choices}
    return Words(options, choices, sorted(list_recipes()))


def bash_script(words: Words) -> str:
    """Returns a function for bash's `complete`. It completes file names where nothing else is known."""
    return f"""# Completion of meshwright: source it, or save it where your shell looks for completions.
{_functions(words, "_meshwright")}
complete -F _meshwright meshwright
"""


def zsh_script(words: Words) -> str:
    """Returns a file for zsh's fpath, named `_meshwright`, or to be sourced; it runs the function for bash."""
    return f"""#compdef meshwright
(( $+functions[compdef] )) || {{ autoload -Uz compinit && compinit; }}
autoload -Uz bashcompinit && bashcompinit
{_functions(words, "_meshwright_complete")}
if [[ $funcstack[1] == _meshwright ]]; then
  _bash_complete -F _meshwright_complete
else
  complete -F _meshwright_complete meshwright
fi
"""


def _functions(words: Words, name: str) -> str:
    choices = "\n".join(
        f"    {name}) _meshwright_words '{' '.join(v)}'; return ;;" for name, v in words.choices.items()
    )
    options = "\n".join(f"      {verb}) _meshwright_words '{' '.join(v)}' ;;" for verb, v in words.options.items())
    return f"""_meshwright_words() {{
  COMPREPLY=($(compgen -W "$1" -- "${{COMP_WORDS[COMP_CWORD]}}"))
}}

{name}() {{
  local word="${{COMP_WORDS[COMP_CWORD]}}"
  COMPREPLY=()
  if [[ $COMP_CWORD -eq 1 ]]; then
    _meshwright_words '{" ".join(VERBS)} --help --version'
    return
  fi
  case "${{COMP_WORDS[COMP_CWORD-1]}}" in
{choices}
  esac
  if [[ $word == -* ]]; then
    case "${{COMP_WORDS[1]}}" in
{options}
    esac
    return
  fi
  if [[ $COMP_CWORD -eq 2 ]]; then
    case "${{COMP_WORDS[1]}}" in
      {"|".join(_RECIPE_VERBS)}) _meshwright_words '{" ".join(words.recipes)}' ;;
      bench) _meshwright_words 'collectives matmul'; return ;;
      completion) _meshwright_words 'bash zsh tcsh'; return ;;
    esac
  fi
  COMPREPLY+=($(compgen -f -- "$word"))
}}
"""


def tcsh_script(words: Words) -> str:
    """Returns tcsh's `complete` command; after `--` it completes the options of all verbs."""
    options = sorted({name.removeprefix("--") for names in words.options.values() for name in names})
    rules = [
        *(f"'n/{name}/({' '.join(choices)})/'" for name, choices in words.choices.items()),
        f"'c/--/({' '.join(options)})/'",
        f"'p/1/({' '.join(VERBS)})/'",
        *(f"'n/{verb}/({' '.join(words.recipes)})/'" for verb in _RECIPE_VERBS),
        "'n/bench/(collectives matmul)/'",
        "'n/completion/(bash zsh tcsh)/'",
        "'p/*/f/'",
    ]
    return f"complete meshwright {' '.join(rules)}\n"
