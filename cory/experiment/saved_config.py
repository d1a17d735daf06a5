"""config.json of a run: its settings, agents and fingerprints."""
from dataclasses import asdict
from pathlib import Path
from typing import Literal, get_args, get_origin, get_type_hints

from cory.config import ASSETS, EMBEDDED, Config
from cory.errors import UserError
from cory.names import find, name_of
from cory.system.files import read_json, readable

BESIDE_SETTINGS = {"config", "agents", "fingerprints"}      # what config.json holds beside the settings


def saved_config(cfg: Config, agents: list[str], fingerprints: dict[str, str]) -> dict:
    """What config.json holds: settings, their class, the agents in order, fingerprints of data and model."""
    class_name = name_of(type(cfg))
    return {"config": class_name, "agents": agents, "fingerprints": fingerprints, **portable(asdict(cfg))}


def portable(settings: dict) -> dict:
    """Settings with embedded assets by short name: a moved folder finds its own (`Config` reads that)."""
    return {name: EMBEDDED + Path(value).relative_to(ASSETS).as_posix()
            if isinstance(value, str) and value.startswith(f"{ASSETS}/") else value
            for name, value in settings.items()}


def load_config(run_dir: Path) -> Config:
    """The settings a run was started with. Raises `UserError`."""
    saved = read_config(run_dir)
    config_class = find("config", saved["config"], {})
    with readable(run_dir / "config.json"):
        return as_config(saved, config_class)


def as_config(saved: dict, config_class: type[Config]) -> Config:
    """The settings that config.json holds.

    Raises `UserError` for a value that no run may have, `TypeError` or `ValueError` for what `saved_config`
    does not write.
    """
    if not (isinstance(config_class, type) and issubclass(config_class, Config)):
        raise ValueError(f"{saved['config']} is no class of settings")
    settings = {name: value for name, value in saved.items() if name not in BESIDE_SETTINGS}
    hints = get_type_hints(config_class)
    for name, value in settings.items():
        if name in hints and not is_of_type(value, hints[name]):
            raise ValueError(f"its {name} is {str(value)[:60]!r}")
    return config_class(**settings)


def is_of_type(value, hint) -> bool:
    """Whether JSON's value can be a setting's: bool, int, float, str or one of a Literal's words."""
    if get_origin(hint) is Literal:
        return value in get_args(hint)
    return type(value) is hint or hint is float and type(value) is int


def read_config(run_dir: Path) -> dict:
    """config.json as it stands. Raises `UserError`."""
    path = run_dir / "config.json"
    if not path.exists():
        raise UserError("run_dir", str(run_dir), "holds no run (no config.json); name the folder of one")
    with readable(path):
        saved = read_json(path)
        agents, kinds = saved["agents"], {name: type(saved[name]) for name in BESIDE_SETTINGS}
        if kinds != {"config": str, "agents": list, "fingerprints": dict}:
            raise ValueError("its config, agents or fingerprints are not what a run writes")
        if not agents or not all(isinstance(name, str) and name.isidentifier() for name in agents):
            raise ValueError(f"its agents are {str(agents)[:60]}, no list of names")
    return saved
