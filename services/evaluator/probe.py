"""Does ``policy-eval`` apply an adapter to every kind of layer that the adapter has?

vLLM leaves out, without a word, an adapter's modules that it finds under another name in its own model, and a
canary cannot see that while others still take effect. So a server is asked once, with adapters in which one kind
of layer alone has a B other than zero: each of them must change the canary's log-probabilities.
"""

from __future__ import annotations

import hashlib
import logging
import re
import shutil
from dataclasses import replace

from services.common.errors import NotReadyError
from services.common.run_dir import CONFIG, WEIGHTS
from services.evaluator.adapters import Adapter, NotInEffectError, PolicyEval
from services.evaluator.tensors import TensorFile

HALF = {"F32": b"\x00\x00\x00\x3f", "BF16": b"\x00\x3f", "F16": b"\x00\x38"}
"""0.5: large enough to be seen through any rounding, whatever the adapter has learnt."""
_B = re.compile(r"^(?P<module>.+)\.lora_B\.(?:default\.)?weight$")
logger = logging.getLogger(__name__)


def kinds(weights: TensorFile) -> dict[str, list[str]]:
    """Kind of layer -> names of its B; a kind is a module's path without the numbers in it."""
    found: dict[str, list[str]] = {}
    for name in sorted(weights.header):
        if match := _B.match(name):
            found.setdefault(re.sub(r"\.\d+\.", ".*.", match["module"]), []).append(name)
    return found


def check_every_kind(policy: PolicyEval, adapter: Adapter) -> None:
    """Load and unload one probe a kind, made from the adapter.

    Raises: NotReadyError: a kind has no effect, so no result of this server would be one of the adapter's.
        AdapterNotReadyError: the server refuses the adapter.
    """
    weights = TensorFile.open(adapter.path / WEIGHTS)
    for kind in (found := kinds(weights)):
        probe = _make(adapter, weights, kind, found[kind])
        try:
            policy.load(probe)
        except NotInEffectError as error:
            raise NotReadyError(
                f"{policy.url} does not apply adapters to {kind} ({error}); its vLLM and this adapter name layers "
                "differently, and no adapter can be evaluated with it"
            ) from None
        else:
            policy.unload(probe.name)
        finally:
            shutil.rmtree(probe.path, ignore_errors=True)
    logger.info("every kind of layer takes effect", extra={"kinds": list(found)})


def _make(adapter: Adapter, weights: TensorFile, kind: str, names: list[str]) -> Adapter:
    name = f"probe-{adapter.name}-{hashlib.sha256(kind.encode()).hexdigest()[:8]}"
    path = adapter.path.with_name(name)
    path.mkdir(exist_ok=True)
    shutil.copyfile(adapter.path / CONFIG, path / CONFIG)
    replaced = {}
    for b in (b for b in weights.header if _B.match(b)):
        start, end = weights.header[b]["data_offsets"]
        half = HALF[weights.header[b]["dtype"]]
        replaced[b] = half * ((end - start) // len(half)) if b in names else bytes(end - start)
    weights.copy(path / WEIGHTS, replaced)
    return replace(adapter, label=f"probe of {kind}", name=name, path=path, zero=False)
