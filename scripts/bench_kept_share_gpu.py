"""``python -m scripts.bench_kept_share_gpu [--tiny]``: how much of a young adapter the served bf16 weights have.

Needs one GPU, torch and triton; no vLLM, PEFT or transformers, no weights from anywhere. All 150 targets of
LFM2.5-2.6B's shapes with random weights N(0, 0.02), A as PEFT starts it, B of three sizes; the merge rounded to the
nearest (the control) and stochastically. ``--tiny`` runs the same on a CPU in seconds, to see that it runs.

Prints one line a number, and all of them as JSON at the end. Exit 1 if a check fails: a kept share of 0.95 with
stochastic rounding, the bits of the CPU's loop from the GPU's kernel, a merge with B = 0 that changes no bit.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from services.weight_sync import dither, merge, proof
from services.weight_sync.checksum import checksum
from services.weight_sync.copies import MergedCopies
from services.weight_sync.factors import Layout

SIZES = (1e-6, 1e-5, 1e-4)
"""Root mean square of B: after one step of learning rate 1e-6, after some, after hundred in one direction."""
ROUNDINGS: tuple[dither.Rounding, ...] = ("nearest", "stochastic")
SCALE = 2.0
SIGMA = 0.02
ENOUGH = 0.95
TOKENS = 256

Pairs = dict[str, tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True)
class Size:
    hidden: int = 2048
    feed_forward: int = 10752
    kv: int = 512
    blocks: int = 10
    """Of two convolutions and one attention layer each."""
    rank: int = 32
    repeats: int = 20

    def shapes(self) -> dict[str, tuple[int, int]]:
        """Target -> (out, in)."""
        found: dict[str, tuple[int, int]] = {}
        for layer in range(3 * self.blocks):
            name = f"model.layers.{layer}"
            if layer % 3 == 2:
                found |= {f"{name}.self_attn.{kind}_proj": (self.kv, self.hidden) for kind in "kv"}
                found |= {f"{name}.self_attn.{kind}_proj": (self.hidden, self.hidden) for kind in ("q", "out")}
            else:
                found[f"{name}.conv.out_proj"] = (self.hidden, self.hidden)
            found |= {f"{name}.feed_forward.{kind}": (self.feed_forward, self.hidden) for kind in ("w1", "w3")}
            found[f"{name}.feed_forward.w2"] = (self.hidden, self.feed_forward)
        return found


TINY = Size(hidden=256, feed_forward=704, kv=64, blocks=1, repeats=2)


class Results:
    """What was measured, printed as it comes."""

    def __init__(self) -> None:
        self.numbers: dict[str, float] = {}
        self.failed: list[str] = []

    def add(self, name: str, value: float, unit: str = "", passed: bool | None = None) -> None:
        self.numbers[name] = value
        if passed is False:
            self.failed.append(name)
        verdict = "" if passed is None else "  PASS" if passed else "  FAIL"
        print(f"{name:72} {value:.6g} {unit}{verdict}", flush=True)


class Model:
    """The base of all targets and an adapter in a buffer as it travels."""

    def __init__(self, size: Size, device: str) -> None:
        self.size, self.device = size, device
        self._generator = torch.Generator(device).manual_seed(0)
        self.base = {name: (self._normal(*shape) * SIGMA).bfloat16() for name, shape in size.shapes().items()}
        self._a = {
            name: ((torch.rand(size.rank, w0.shape[1], generator=self._generator, device=device) * 2 - 1)
                   / w0.shape[1] ** 0.5)
            for name, w0 in self.base.items()
        }  # fmt: skip
        self._b = {name: self._normal(w0.shape[0], size.rank) for name, w0 in self.base.items()}

    def _normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self._generator, device=self.device)

    def merged(self, b_size: float, rounding: dither.Rounding) -> MergedCopies:
        """All targets with a B of that size."""
        pairs = {name: (a, self._b[name] * b_size) for name, a in self._a.items()}
        copies = MergedCopies(Layout.of(pairs, torch.bfloat16, SCALE, rounding), self.base)
        copies.pack(pairs)
        copies.merge()
        return copies

    def sample(self) -> list[str]:
        """One target of each shape."""
        return list({tuple(w0.shape): name for name, w0 in self.base.items()}.values())


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts.bench_kept_share_gpu", description=__doc__.partition("\n")[0])
    parser.add_argument("--tiny", action="store_true", help="small shapes, on whatever device there is")
    options = parser.parse_args()
    size, device = (TINY if options.tiny else Size()), "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and not options.tiny:
        print("no CUDA device was found; the full size needs one, --tiny does not", file=sys.stderr)
        return 2
    results, model = Results(), Model(size, device)
    results.add("targets", len(model.base))
    results.add("parameters of the targets", sum(w0.numel() for w0 in model.base.values()) / 1e9, "B")
    zero(model, results)
    for b_size in SIZES:
        for rounding in ROUNDINGS:
            kept(model, b_size, rounding, results)
    versions(model, results)
    times(model, results)
    if device == "cuda":
        results.add("peak memory", torch.cuda.max_memory_allocated() / 2**30, "GiB")
    where = torch.cuda.get_device_name() if device == "cuda" else "cpu"
    print(json.dumps({"device": where, "torch": torch.__version__, "failed": results.failed, **results.numbers}))
    return 1 if results.failed else 0


def zero(model: Model, results: Results) -> None:
    for rounding in ROUNDINGS:
        served = model.merged(0.0, rounding).weights
        changed = sum(checksum(served[name]) != checksum(w0) for name, w0 in model.base.items())
        results.add(f"B = 0, {rounding}: matrices that the merge changes", changed, passed=changed == 0)


def kept(model: Model, b_size: float, rounding: dither.Rounding, results: Results) -> None:
    """Kept share, noise and bits of one rounding at one size of B."""
    copies = model.merged(b_size, rounding)
    layout, served = copies.layout, copies.weights
    found = proof.merged_again(layout, copies.buffer, model.base.__getitem__)
    label = f"|B| = {b_size:.0e}, {rounding}"
    share = float("nan") if found.kept_share is None else found.kept_share
    # So few elements as the tiny model has are no expectation.
    judged = rounding == "stochastic" and b_size < 1e-4 and model.size is not TINY
    results.add(f"{label}: kept share", share, passed=share >= ENOUGH if judged else None)
    unlike = sum(checksum(served[name]) != value for name, value in found.checksums.items())
    results.add(f"{label}: matrices unlike their checksum", unlike, passed=unlike == 0)
    moved = sum(int((served[name] != w0).sum()) for name, w0 in model.base.items())
    results.add(f"{label}: elements that moved", 100 * moved / sum(w0.numel() for w0 in model.base.values()), "%")
    factors = layout.unpack(copies.buffer)
    wrong, noise = 0, []
    for name in model.sample():
        w0, (a, b) = model.base[name], factors[name]
        expected = merge.reference(w0.cpu(), a.cpu(), b.cpu(), SCALE, layout.dither(name))
        wrong += int((served[name].cpu().view(torch.int16) != expected.view(torch.int16)).sum())
        noise.append(output_noise(w0, served[name], merge.change(a, b, SCALE)))
    results.add(f"{label}: elements unlike the CPU's, {len(noise)} matrices", wrong, passed=wrong == 0)
    results.add(f"{label}: output's noise over bf16's own rounding of it", statistics.mean(noise))


def output_noise(w0: torch.Tensor, served: torch.Tensor, change: torch.Tensor) -> float:
    """Root mean square of what rounding the merge does to a layer's output, over that of rounding the output."""
    generator = torch.Generator(w0.device).manual_seed(1)
    x = torch.randn(TOKENS, w0.shape[1], generator=generator, device=w0.device).double()
    output = x @ w0.double().T
    noise = x @ (served.double() - w0.double() - change.double()).T
    return float(noise.square().mean().sqrt() / (output.bfloat16().double() - output).square().mean().sqrt())


def versions(model: Model, results: Results) -> None:
    """From one version to the next, 10 % larger: how far what is served moves beside what was asked for, with the
    thresholds fixed, and with others for each version."""
    name = max(model.sample(), key=lambda target: model.base[target].numel())
    w0 = model.base[name]
    for b_size in SIZES:
        copies = model.merged(b_size, "stochastic")
        change = merge.change(*copies.layout.unpack(copies.buffer)[name], SCALE)
        for label, second in (("fixed", name), ("other", "another")):
            before = merge.rounded(w0, change, dither.Dither(name)).float()
            after = merge.rounded(w0, change * 1.1, dither.Dither(second)).float()
            excess = (after - before - change * 0.1).norm() / (change * 0.1).norm()
            results.add(f"|B| = {b_size:.0e}, next version, {label} thresholds: noise over change", float(excess))


def times(model: Model, results: Results) -> None:
    """Merge and proof of all targets; the roundings in turn, so that both meet the same machine."""
    all_copies = {rounding: model.merged(1e-5, rounding) for rounding in ROUNDINGS}
    work: dict[str, Callable[[], object]] = {}
    for rounding, copies in all_copies.items():
        work[f"merge of all targets, {rounding}"] = copies.merge
        work[f"proof of all targets, {rounding}"] = functools.partial(
            proof.merged_again, copies.layout, copies.buffer, model.base.__getitem__
        )
    taken: dict[str, list[float]] = {name: [] for name in work}
    for _ in range(model.size.repeats + 1):
        for name, function in work.items():
            taken[name].append(seconds(function, model.device))
    for name, found in taken.items():
        results.add(name, 1000 * statistics.median(found[1:]), "ms")
    merges = [statistics.median(taken[f"merge of all targets, {rounding}"][1:]) for rounding in ROUNDINGS]
    results.add("merge, stochastic over nearest", merges[1] / merges[0])


def seconds(work: Callable[[], object], device: str) -> float:
    synchronize = torch.cuda.synchronize if device == "cuda" else lambda: None
    synchronize()
    started = time.perf_counter()
    work()
    synchronize()
    return time.perf_counter() - started


if __name__ == "__main__":
    sys.exit(main())
