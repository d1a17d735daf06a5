"""From the command line to a `Config`: presets, flags over them, the settings of a resumed run."""
import json
import sys
from argparse import ArgumentDefaultsHelpFormatter, ArgumentParser, ArgumentTypeError
from dataclasses import asdict, fields
from pathlib import Path
from typing import Literal, get_args, get_origin, get_type_hints

from cory.config import Config
from cory.errors import UserError
from cory.names import find, guess

# What may differ in a continuation, for none of it changes what an iteration computes.
# Models and data may have moved; whether they are the same, `Run.resume` asks.
FREE_ON_RESUME = {"resume", "run_dir", "iterations", "save_every", "shard", "wandb", "wandb_project",
                  "model", "dataset", "reward_model"}


class OneLineParser(ArgumentParser):
    """argparse whose complaints are one line."""

    def error(self, message):
        raise UserError("command line", " ".join(sys.argv[1:]), f"{message} (--help lists every flag)")


class Parser(OneLineParser):
    """A flag for each setting of a dataclass, `--name VALUE`; of a bool `--name` alone means true."""

    def __init__(self, config_class: type[Config], defaults: dict):
        super().__init__(allow_abbrev=False, formatter_class=ArgumentDefaultsHelpFormatter,
                         epilog="An agent's own settings: --llm2 model=DIR learning_rate=3e-5.")
        self.config_class, hints, group = config_class, get_type_hints(config_class), self
        self.agent_settings = defaults.get("agent_settings", {})
        for f in fields(config_class):
            if f.name in config_class.GROUPS:
                group = self.add_argument_group(config_class.GROUPS[f.name])
            if f.name == "agent_settings":
                continue
            hint, default = hints[f.name], defaults.get(f.name, f.default)
            if hint is bool:
                options = {"type": true_or_false, "nargs": "?", "const": True}
            elif get_origin(hint) is Literal:
                options = {"choices": get_args(hint)}
            else:
                options = {"type": hint}
            group.add_argument(f"--{f.name}", default=default, help=f.metadata.get("help", " "), **options)

    def parse(self, argv: list[str]) -> Config:
        """The settings. Raises `UserError` for an unknown flag, and for one that has no effect."""
        known, unknown = self.parse_known_args(argv)
        config = self.config_class(**vars(known), agent_settings=self.own_settings(unknown))
        given = {name for name, x in vars(known).items() if x != self.get_default(name)}
        agents = {name: config.of_agent(name) for name in config.agent_settings}
        given -= {name for name in given if any(name not in agent.unread() for agent in agents.values())}
        require_effect(config, given)
        for name, agent in agents.items():
            require_effect(agent, {*config.agent_settings[name]} - {*self.agent_settings.get(name, {})})
        return config

    def own_settings(self, words: list[str]) -> dict[str, dict]:
        """The words `--llm2 model=DIR` as {"llm2": {"model": "DIR"}}, over the defaults. Raises `UserError`."""
        agents, own = {name: dict(settings) for name, settings in self.agent_settings.items()}, None
        allowed = sorted(f.name for f in fields(self.config_class) if f.metadata.get("per_agent"))
        for word, following in zip(words, [*words, "--"][1:], strict=True):
            name, equals, value = word.partition("=")
            if word.startswith("--") and "=" in following and not following.startswith("--"):
                own = agents.setdefault(word.removeprefix("--"), {})
            elif own is not None and equals and name in allowed:
                own[name] = getattr(self.parse_known_args([f"--{name}={value}"])[0], name)
            elif own is not None and equals:
                raise UserError("setting", word, f"is not an agent's own; choose from {', '.join(allowed)}")
            else:
                near = guess(name, self._option_string_actions)
                raise UserError("flag", word, f"unknown; {near}--help lists every flag")
        return agents


def require_effect(config: Config, given: set[str]) -> None:
    """Refuses a flag that has no effect beside the other settings. Raises `UserError`."""
    for name, condition in config.unread().items():
        config.require(name, name not in given, f"has an effect only with {condition}; leave it out")


def true_or_false(word: str) -> bool:
    if word.lower() not in ("true", "false"):
        raise ArgumentTypeError(f"{word!r} is neither true nor false")
    return word.lower() == "true"


def parse(config_class: type[Config], presets: dict[str, dict], argv: list[str] | None = None) -> Config:
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
    return Parser(config_class, {"preset": known.preset, **presets[known.preset]}).parse(argv)


def continued(config_class: type[Config], run_dir: str, argv: list[str]) -> Config:
    """The settings of the run in run_dir, with what the command line may change of them. Raises `UserError`.
    """
    if not run_dir:
        raise UserError("run_dir", run_dir, "names no run to resume; give the folder of one")
    saved = load_config(Path(run_dir))
    if class_name(type(saved)) != class_name(config_class):
        hint = f"holds a run of {saved.task}; continue it with the script that started it"
        raise UserError("run_dir", run_dir, hint)
    old = asdict(saved)
    config = Parser(config_class, old).parse(argv)
    changed = "; ".join(f"{name} was {old[name]!r}, now {new!r}" for name, new in asdict(config).items()
                        if name not in FREE_ON_RESUME and new != old[name])
    if changed:
        raise UserError("resume", run_dir, f"has other settings: {changed}; leave these out, or start anew")
    if config.iterations != saved.iterations and config.lr_schedule != "constant":
        raise UserError("iterations", config.iterations, f"the run was started with {saved.iterations}, over "
                        f"which its {config.lr_schedule} rate falls; leave it, or start a new run")
    return config


# --- config.json ---
def class_name(config_class: type[Config]) -> str:
    """`module:Name`; of a script that runs, the module is the script's own name."""
    module = config_class.__module__
    return f"{Path(sys.argv[0]).stem if module == '__main__' else module}:{config_class.__name__}"


def config_json(cfg: Config, agents: list[str]) -> str:
    """What config.json holds: the settings, their class, and the agents in order."""
    return json.dumps({"config_class": class_name(type(cfg)), "agents": agents} | asdict(cfg), indent=1) + "\n"


def read_config(run_dir: Path) -> dict:
    """config.json of a run. Raises `UserError` for a folder that holds none."""
    path = run_dir / "config.json"
    if not path.exists():
        raise UserError("run_dir", str(run_dir), "holds no run (no config.json); name the folder of one")
    return json.loads(path.read_text())


def load_config(run_dir: Path) -> Config:
    """The settings a run was started with. Those added to the code since then have their defaults."""
    saved = read_config(run_dir)
    config_class = find("config_class", saved.pop("config_class"), {})
    del saved["agents"]
    return config_class(**saved)
