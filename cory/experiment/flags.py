"""From the command line to a `Config`: presets, flags over them, the settings of a resumed run."""
import sys
from argparse import ArgumentDefaultsHelpFormatter, ArgumentParser, ArgumentTypeError
from dataclasses import asdict, fields
from pathlib import Path
from typing import Literal, get_args, get_origin, get_type_hints

from cory.config import PER_AGENT, Config
from cory.errors import UserError
from cory.experiment.saved_config import load_config, read_config
from cory.names import guess, name_of

# These, and what concerns W&B, may differ in a continuation: none changes what an iteration computes. Of
# model and data the place may differ; the run then holds their content against what it was.
FREE_ON_RESUME = {"resume", "run_dir", "iterations", "save_every", "shard",
                  "model", "dataset", "reward_model"}


class OneLineParser(ArgumentParser):
    """argparse whose complaints are one line."""

    def error(self, message):
        raise UserError("command line", " ".join(sys.argv[1:]), message + " (--help lists every flag)")


class Parser(OneLineParser):
    """A flag for each setting of a dataclass: `--name VALUE`; of a bool `--name` alone means true.

    argparse itself, since importing a parser of a large library takes longer than its answer may.
    """

    def __init__(self, config_class: type[Config], defaults: dict, prog: str | None = None):
        super().__init__(prog, allow_abbrev=False, formatter_class=ArgumentDefaultsHelpFormatter)
        self.config_class, hints = config_class, get_type_hints(config_class)
        self.epilog = ("Settings of one agent: --NAME SETTING=VALUE ..., as in --llm2 model=DIR "
                       "learning_rate=3e-5.")
        self.agent_settings = defaults.get("agent_settings", {})
        for f in fields(config_class):
            if f.name == "agent_settings":
                continue
            hint, default = hints[f.name], defaults.get(f.name, f.default)
            if hint is bool:
                options = {"type": true_or_false, "nargs": "?", "const": True}
            elif get_origin(hint) is Literal:
                options = {"choices": get_args(hint)}
            elif hint in (int, float, str):
                options = {"type": hint}
            else:
                raise UserError("setting", f.name, f"is of type {hint}; make it a bool, int, float, str or "
                                "Literal of words, which a flag can give")
            self.add_argument(f"--{f.name}", default=default, help=f.metadata.get("help", " "), **options)

    def parse(self, argv: list[str]) -> Config:
        """The settings; for an unknown flag a `UserError` that names the nearest."""
        known, unknown = self.parse_known_args(argv)
        config = self.config_class(**vars(known), agent_settings=self.own_settings(unknown))
        defaults = {f.name: f.default for f in fields(config)}
        given = {name for name, x in vars(known).items() if x not in (defaults[name], self.get_default(name))}
        agents = {name: config.of_agent(name) for name in config.agent_settings}
        read = {name for name in given if any(name not in own.unread() for own in agents.values())}
        require_read(config, given - read)
        for name, own in config.agent_settings.items():
            before = self.agent_settings.get(name, {})
            require_read(agents[name], {key for key, x in own.items() if before.get(key) != x})
        return config

    def own_settings(self, words: list[str]) -> dict[str, dict]:
        """The words `--llm2 model=DIR` as {"llm2": {"model": "DIR"}}, over the defaults. Raises `UserError`.
        """
        agents, own = {name: dict(settings) for name, settings in self.agent_settings.items()}, None
        for word, following in zip(words, [*words, "--"][1:], strict=True):
            name, equals, value = word.partition("=")
            if word.startswith("--") and "=" in following and not following.startswith("--"):
                own = agents.setdefault(word.removeprefix("--"), {})
            elif own is not None and equals and name in PER_AGENT:
                own[name] = getattr(self.parse_known_args([f"--{name}={value}"])[0], name)
            elif own is not None and equals:
                choice = ", ".join(sorted(PER_AGENT))
                raise UserError("setting", word, f"is none of a single agent; choose from {choice}")
            else:
                near = guess(name, self._option_string_actions)
                raise UserError("flag", word, f"unknown; {near}--help lists every flag")
        return agents


def require_read(config: Config, given: set[str]) -> None:
    """Refuses a flag that changes a setting which nothing reads beside the others. Raises `UserError`."""
    for name, what in config.unread().items():
        config.require(name, name not in given, f"is read only with {what}; leave it out")


def true_or_false(word: str) -> bool:
    if word.lower() not in ("true", "false"):
        raise ArgumentTypeError(f"{word!r} is neither true nor false")
    return word.lower() == "true"


def parse(config_class: type[Config], presets: dict[str, dict], argv: list[str] | None = None,
          prog: str | None = None) -> Config:
    """The command line over a preset, or with --resume over the run's own settings. Raises `UserError`."""
    argv = sys.argv[1:] if argv is None else argv
    first = ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--preset", nargs="?", default=next(iter(presets)))
    first.add_argument("--run_dir", nargs="?", default="")
    first.add_argument("--resume", nargs="?", const="true", default="false")
    known = first.parse_known_args(argv)[0]
    if known.resume.lower() == "true":
        return continued(config_class, known.run_dir or "", argv)
    if known.preset not in presets:
        raise UserError("preset", known.preset, f"choose from {', '.join(presets)}")
    return Parser(config_class, {"preset": known.preset, **presets[known.preset]}, prog).parse(argv)


def fixed(settings: dict) -> dict:
    """What a continuation may not change of them."""
    kept = {name: value for name, value in settings.items()
            if name not in FREE_ON_RESUME and not name.startswith("wandb")}
    agents = settings.get("agent_settings", {})
    return kept | {"agent_settings": {name: fixed(own) for name, own in agents.items()}}


def continued(config_class: type[Config], run_dir: str, argv: list[str]) -> Config:
    """The settings of the run in run_dir, with what the command line may change of them."""
    if not run_dir:
        raise UserError("run_dir", run_dir, "names no run to resume; give the folder of one")
    saved = load_config(Path(run_dir))
    if name_of(type(saved)) != name_of(config_class):
        way_out = f"holds a run of {saved.task}; continue it with the script that started it"
        raise UserError("run_dir", run_dir, way_out)
    config = Parser(config_class, asdict(saved)).parse(argv)
    old, new = fixed(asdict(saved)), fixed(asdict(config))
    known = read_config(Path(run_dir))              # without settings that the run is older than
    changed = "; ".join(f"{name} was {old[name]!r}, now {new[name]!r}" for name in new
                        if name in known and new[name] != old[name])
    if changed:
        raise UserError("resume", run_dir, f"has other settings: {changed}; leave these out, or start anew")
    if config.iterations != saved.iterations and config.lr_schedule != "constant":
        raise UserError("iterations", config.iterations, f"the run was started with {saved.iterations}, over "
                        f"which its {config.lr_schedule} rate falls; leave it, or start a new run")
    return config
