"""What may import what: a room of the package stands above all that it imports."""
import re
from pathlib import Path

# From the ground up; `cory/NAME.py` or the files of the folder `cory/NAME/`.
ROOMS = ["errors", "config", "machine", "ppo", "loading", "tasks", "run", "train", "__main__"]


def test_no_room_imports_one_above_it():
    package = Path(__file__).parents[1] / "cory"
    for path in package.rglob("*.py"):
        room = path.relative_to(package).with_suffix("").parts[0]
        if room in ROOMS:
            allowed = ROOMS[:ROOMS.index(room) + 1]
            imported = re.findall(r"^ *from cory[. ](?:import )?(\w+)", path.read_text(), re.MULTILINE)
            assert {*imported} <= {*allowed}, path
