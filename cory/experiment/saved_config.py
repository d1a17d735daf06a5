"""config.json of a run: its settings, agents and fingerprints."""
from dataclasses import asdict
from pathlib import Path

from cory.config import ASSETS, EMBEDDED, Config
from cory.errors import UserError
from cory.names import find, name_of
from cory.system.files import read_json, readable

# In config.json, with types.
BESIDE_SETTINGS = {"config": str, "run": str, "agents": list, "fingerprints": dict}


def saved_config(cfg: Config, agents: list[str], fingerprints: dict[str, str], mark: str) -> dict:
    """What config.json holds: settings, their class, the agents in order, fingerprints of data and model, and
    the mark of the run, which its checkpoints have too.
    """
    beside = {"config": name_of(type(cfg)), "run": mark, "agents": agents, "fingerprints": fingerprints}
    return beside | portable(asdict(cfg))


def portable(value):
    """Settings with embedded assets by short name: a moved folder finds its own (`Config` reads that)."""
    if isinstance(value, dict):
        return {name: portable(setting) for name, setting in value.items()}
    embedded = isinstance(value, str) and value.startswith(f"{ASSETS}/")
    return EMBEDDED + Path(value).relative_to(ASSETS).as_posix() if embedded else value


def load_config(run_dir: Path) -> Config:
    """The settings a run was started with. Raises `UserError`."""
    saved = read_config(run_dir)
    config_class = find("config", saved["config"], {})
    settings = {name: value for name, value in saved.items() if name not in BESIDE_SETTINGS}
    with readable(run_dir / "config.json"):
        if not (isinstance(config_class, type) and issubclass(config_class, Config)):
            raise ValueError(f"{saved['config']} is no class of settings")
        return config_class(**settings)


def read_config(run_dir: Path) -> dict:
    """config.json as it stands. Raises `UserError`."""
    path = run_dir / "config.json"
    if not path.exists():
        raise UserError("run_dir", str(run_dir), "holds no run (no config.json); name the folder of one")
    with readable(path):
        saved = read_json(path)
        if {name: type(saved[name]) for name in BESIDE_SETTINGS} != BESIDE_SETTINGS:
            raise ValueError("its config, agents or fingerprints are not what a run writes")
        if not saved["agents"] or not all(map(str.isidentifier, saved["agents"])):
            raise ValueError(f"its agents are {str(saved['agents'])[:60]}, no list of names")
    return saved
