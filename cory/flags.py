"""From the command line to a `Config`: presets, flags over them, the settings of a resumed run."""
import json
import os
import re
import sys
from argparse import ArgumentDefaultsHelpFormatter, ArgumentParser, ArgumentTypeError
from dataclasses import asdict, fields
from pathlib import Path
from typing import Literal, get_args, get_origin, get_type_hints

from cory.config import Config
from cory.errors import UserError
from cory.names import find, guess

# What may differ in a resumed run, since none of it changes what an iteration computes.
# Models and data may have moved.
FREE_ON_RESUME = {"resume", "run_dir", "iterations", "save_every", "shard", "wandb", "wandb_project",
                  "model", "dataset", "reward_model"}


class OneLineParser(ArgumentParser):
    """argparse with one-line errors."""

    def error(self, message):
        raise UserError(f"{message} (--help lists every flag)")

    def parse_known_args(self, args=None, namespace=None):
        """Reads `--partner_reward -1e-1` as a flag with its value, and expands `--run_dir=~/runs`."""
        words = []
        for word in sys.argv[1:] if args is None else args:
            flag, equals, value = word.partition("=")
            if words and re.match(r"-\.?\d", word):
                words[-1] += f"={word}"
            else:
                words.append(flag + equals + os.path.expanduser(value))
        return super().parse_known_args(words, namespace)


def parse(config_class: type[Config], presets: dict[str, dict], argv: list[str] | None = None) -> Config:
    """The command line over a preset, or with --resume over the run's own settings. Raises `UserError`."""
    argv = sys.argv[1:] if argv is None else argv
    parser = parser_of(config_class, {"preset": next(iter(presets))})
    given, _ = parser.parse_known_args([word for word in argv if word not in ("-h", "--help")])
    if given.resume:
        return continued(config_class, given.run_dir, argv)
    if given.preset not in presets:
        raise UserError("preset", given.preset, f"choose from {', '.join(presets)}")
    return with_flags(config_class, {"preset": given.preset, **presets[given.preset]}, argv)


def parser_of(config_class: type[Config], defaults: dict) -> OneLineParser:
    """A flag for each setting of a dataclass, `--name VALUE`; for a bool `--name` alone means true."""
    parser = group = OneLineParser(allow_abbrev=False, formatter_class=ArgumentDefaultsHelpFormatter,
                                   epilog="An agent's own settings: --llm2 model=DIR learning_rate=3e-5.")
    hints = get_type_hints(config_class)
    for f in fields(config_class):
        if f.name in config_class.GROUPS:
            group = parser.add_argument_group(config_class.GROUPS[f.name])
        if hints[f.name] is bool:
            options = {"type": true_or_false, "nargs": "?", "const": True}
        elif get_origin(hints[f.name]) is Literal:
            options = {"choices": get_args(hints[f.name])}
        else:
            options = {"type": hints[f.name]}
        if f.name != "agent_settings":
            group.add_argument(f"--{f.name}", default=defaults.get(f.name, f.default),
                               help=f.metadata.get("help", " "), **options)
    return parser


def true_or_false(word: str) -> bool:
    if word.lower() not in ("true", "false"):
        raise ArgumentTypeError(f"{word!r} is neither true nor false")
    return word.lower() == "true"


def with_flags(config_class: type[Config], defaults: dict, argv: list[str]) -> Config:
    """The command line over `defaults`. Raises `UserError` for a flag that is unknown or has no effect given
    the other settings.
    """
    parser = parser_of(config_class, defaults)
    known, words = parser.parse_known_args(argv)
    config = config_class(**vars(known), agent_settings=agent_settings(parser, defaults, words))
    readers = [config, *map(config.of_agent, config.agent_settings)]
    for name, value in vars(known).items():
        if value != parser.get_default(name) and all(name in reader.without_effect() for reader in readers):
            needs = config.without_effect()[name]
            raise UserError(name, value, f"has an effect only with {needs}; leave it out")
    return config


def agent_settings(parser: OneLineParser, defaults: dict, words: list[str]) -> dict[str, dict]:
    """The words `--llm2 model=DIR` as {"llm2": {"model": "DIR"}}, over the defaults. Raises `UserError`."""
    agents, agent = {name: dict(own) for name, own in defaults.get("agent_settings", {}).items()}, ""
    for word, following in zip(words, [*words, ""][1:], strict=True):
        name, equals, value = word.partition("=")
        if word.startswith("--") and "=" in following and not following.startswith("--"):
            agent = word.removeprefix("--")
        elif agent and equals:
            read = vars(parser.parse_known_args([f"--{name}={value}"])[0])
            agents.setdefault(agent, {})[name] = read.get(name, value)
        else:
            near = guess(name, parser._option_string_actions)
            raise UserError("flag", word, f"unknown; {near}--help lists every flag")
    return agents


def continued(config_class: type[Config], run_dir: str, argv: list[str]) -> Config:
    """The settings of a run, with the changes that the command line may make. Raises `UserError`."""
    if not run_dir:
        raise UserError("run_dir", run_dir, "names no run to resume; give the folder of one")
    saved = load_config(Path(run_dir))
    if class_name(type(saved)) != class_name(config_class):
        raise UserError("run_dir", run_dir, f"holds a run of {saved.task}; use its own script")
    old, config = asdict(saved), with_flags(config_class, asdict(saved), argv)
    agents = [saved, *map(saved.of_agent, saved.agent_settings)]
    schedules = {agent.lr_schedule for agent in agents} - {"constant"}      # over the configured iterations
    free = FREE_ON_RESUME - {"iterations"} if schedules else FREE_ON_RESUME
    changed = {name: f"{name} was {old[name]!r}, now {new!r}" for name, new in asdict(config).items()
               if name not in free and new != old[name]}
    if "iterations" in changed:
        changed["iterations"] += f" (over which --lr_schedule {', '.join(schedules)} falls)"
    if changed:
        hint = f"has other settings: {'; '.join(changed.values())}; leave these out, or start afresh"
        raise UserError("resume", run_dir, hint)
    return config


# --- config.json ---
def class_name(config_class: type[Config]) -> str:
    """`module:Name`; for the script being run, the module is the script's own name."""
    module = config_class.__module__
    return f"{Path(sys.argv[0]).stem if module == '__main__' else module}:{config_class.__name__}"


def config_json(cfg: Config, agents: list[str]) -> str:
    """What config.json holds: the settings, their class, and each agent, in order, with its base's column."""
    about = {"config_class": class_name(type(cfg)), "agents": cfg.base_names(agents)}
    return json.dumps(about | asdict(cfg), indent=1) + "\n"


def read_config(run_dir: Path) -> dict:
    """config.json of a run. Settings added to the code since then have their defaults. Raises `UserError` for
    a folder that holds none.
    """
    path = run_dir / "config.json"
    if not path.exists():
        raise UserError("run_dir", str(run_dir), "holds no run (no config.json); name the folder of one")
    saved = json.loads(path.read_text())
    config_class = find("config_class", saved["config_class"], {})
    return asdict(config_class()) | saved


def load_config(run_dir: Path) -> Config:
    """The settings a run was started with."""
    saved = read_config(run_dir)
    config_class = find("config_class", saved.pop("config_class"), {})
    del saved["agents"]
    return config_class(**saved)
