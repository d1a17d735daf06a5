"""config.json of a run: its settings, agents and fingerprints."""
from dataclasses import asdict, fields
from pathlib import Path
from typing import Literal, get_args, get_origin, get_type_hints

from cory.config import ASSETS, EMBEDDED, Config
from cory.errors import UserError
from cory.names import find, name_of
from cory.system.files import read_json

BESIDE_SETTINGS = {"config", "agents", "fingerprints"}      # what config.json holds beside the settings


def saved_config(cfg: Config, agents: list[str], fingerprints: dict[str, str]) -> dict:
    """What config.json holds: settings, their class, the agents in order, fingerprints of data and model."""
    class_name = name_of(type(cfg))
    return {"config": class_name, "agents": agents, "fingerprints": fingerprints, **portable(asdict(cfg))}


def portable(settings: dict) -> dict:
    """Settings with embedded assets by short name: a moved folder finds its own."""
    return {name: EMBEDDED + Path(value).relative_to(ASSETS).as_posix()
            if isinstance(value, str) and value.startswith(f"{ASSETS}/") else value
            for name, value in settings.items()}


def load_config(run_dir: Path) -> Config:
    """The settings a run was started with. Raises `UserError`."""
    saved = read_config(run_dir)
    try:
        return as_config(saved)
    except (TypeError, ValueError) as error:
        raise not_this_version(run_dir, error) from error


def as_config(saved: dict) -> Config:
    """The settings that config.json holds.

    Raises `UserError` for a value that no run may have, `TypeError` or `ValueError` for what this version
    does not write.
    """
    config_class = find("config", saved["config"], {})
    if not (isinstance(config_class, type) and issubclass(config_class, Config)):
        raise ValueError(f"{saved['config']} is no class of settings")
    settings = {name: value for name, value in saved.items() if name not in BESIDE_SETTINGS}
    of_class = get_type_hints(config_class)
    hints = {f.name: of_class[f.name] for f in fields(config_class) if f.init}
    for name, value in settings.items():
        if name not in hints:
            raise ValueError(f"there is no setting {name}")
        if not is_of_type(value, hints[name]):
            raise ValueError(f"its {name} is {str(value)[:60]!r}")
    return config_class(**settings)


def is_of_type(value, hint) -> bool:
    """Whether JSON's value can be a setting's: bool, int, float, str or one of a Literal's words."""
    if get_origin(hint) is Literal:
        return value in get_args(hint)
    return type(value) is hint or hint is float and type(value) is int


def read_config(run_dir: Path) -> dict:
    """config.json as it stands, with the paths of embedded assets. Raises `UserError`."""
    path = run_dir / "config.json"
    if not path.exists():
        raise UserError("run_dir", str(run_dir), "holds no run (no config.json); name the folder of one")
    saved = read_json(path)
    if not isinstance(saved, dict):
        raise not_this_version(run_dir, "it is no JSON object")
    for missing in sorted(BESIDE_SETTINGS - saved.keys()):
        raise not_this_version(run_dir, f"it lacks {missing}")
    agents, fingerprints = saved["agents"], saved["fingerprints"]
    names_are_texts = isinstance(agents, list) and all(isinstance(name, str) for name in agents)
    if not (names_are_texts and agents and all(name.isidentifier() for name in agents)):
        raise not_this_version(run_dir, "its agents are no list of names")
    if not (isinstance(saved["config"], str) and isinstance(fingerprints, dict)):
        raise not_this_version(run_dir, "its config or fingerprints are not what this version writes")
    return {name: embedded_path(value) for name, value in saved.items()}


def embedded_path(value):
    """The path of an embedded asset from its short name; other values as they are."""
    if isinstance(value, str) and value.startswith(EMBEDDED):
        return str(ASSETS / value.removeprefix(EMBEDDED))
    return value


def not_this_version(run_dir: Path, why) -> UserError:
    way_out = f"its config.json is not this version's ({why}); start a new run"
    return UserError("run_dir", str(run_dir), way_out)
