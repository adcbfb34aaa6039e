"""``images/digests.json``: which images `make push` put where, by digest. Jobs run exactly these."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

from scripts.stack import ROOT
from services.common import run_dir
from services.common.errors import RecipeError

PATH = ROOT / "images" / "digests.json"
NAMES = ("policy", "trainer", "env", "tools", "sandbox", "job")
REFERENCE = re.compile(r"^[\w.-]+(?::\d+)?(?:/[\w.-]+)+@sha256:[0-9a-f]{64}$")


@dataclass(frozen=True, slots=True)
class Digests:
    variant: str
    revision: str
    """git revision of the tree that they were built from; ``-dirty`` at its end: with changes that nobody has."""
    images: dict[str, str]
    """Name -> ``registry/opencode-rl-<name>@sha256:...``."""

    def write(self, path: Path = PATH) -> None:
        run_dir.write_json(path, {"variant": self.variant, "revision": self.revision, "images": self.images})


def load(path: Path = PATH) -> Digests:
    """Raises: RecipeError: nothing was pushed yet, or the file is not what `make push` writes."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
        found = Digests(value["variant"], value["revision"], dict(value["images"]))
    except FileNotFoundError:
        raise RecipeError(f"{path} is not there; `make push REGISTRY=...` pushes the images and writes it") from None
    except (ValueError, KeyError, TypeError) as error:
        raise RecipeError(f"{path} is not what `make push` writes ({error!r}); push again") from None
    wrong = [f"{name}: {image}" for name, image in found.images.items() if not REFERENCE.match(image)]
    if missing := sorted(set(NAMES) - set(found.images)):
        raise RecipeError(f"{path} has no image {', '.join(missing)}; push again")
    if wrong:
        raise RecipeError(f"{path} names images that are not by digest ({'; '.join(wrong)}); push again")
    return found
