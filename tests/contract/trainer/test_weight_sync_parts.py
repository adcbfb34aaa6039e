"""The parts of the weight sync on their own: merge, checksum, buffer, transport, adapters on disk."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from tiny_models import tiny_lfm2

from services.common.errors import RecipeError, StoppedError
from services.weight_sync import canary, factors, names, proof, transport
from services.weight_sync.adapter import Adapter, base_hashes, drifted, merged_weights
from services.weight_sync.checksum import checksum
from services.weight_sync.dither import Dither, thresholds
from services.weight_sync.errors import WeightSyncError
from services.weight_sync.merge import merged, rounded, sendable

DTYPES = [torch.float32, torch.bfloat16]


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


# -- merge -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_merge_is_the_formula_rounded_once(dtype):
    w0, a, b = random(48, 32, dtype=dtype), random(8, 32, seed=1), random(48, 8, seed=2)
    exact = w0.double() + 2.0 * (b.to(dtype).double() @ a.to(dtype).double())
    half_a_step = torch.finfo(dtype).eps / 2
    error = (merged(w0, a, b, 2.0).double() - exact).abs()
    assert torch.all(error <= half_a_step * exact.abs() + 1e-5 * half_a_step / torch.finfo(torch.float32).eps)


@pytest.mark.parametrize("dtype", DTYPES)
@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_merge_of_a_slice_is_the_slice_of_the_merge_bit_for_bit(dtype, data):
    rows, columns, rank = (data.draw(st.integers(1, 40)) for _ in range(3))
    top, left = data.draw(st.integers(0, rows - 1)), data.draw(st.integers(0, columns - 1))
    w0, a, b = random(rows, columns, dtype=dtype), random(rank, columns, seed=1), random(rows, rank, seed=2)
    whole = merged(w0, a, b, 1.7)
    assert torch.equal(merged(w0[top:, left:], a[:, left:], b[top:], 1.7), whole[top:, left:])


def test_merge_does_not_depend_on_the_number_of_threads():
    w0, a, b = random(700, 900), random(16, 900, seed=1), random(700, 16, seed=2)
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 4):
            torch.set_num_threads(threads)
            results.append(merged(w0, a, b, 1.7))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.parametrize("dtype", DTYPES)
def test_merge_of_zero_b_gives_back_every_bit_of_the_base(dtype):
    w0 = random(6, 5, dtype=dtype)
    w0[0, 0], w0[1, 1], w0[2, 2] = -0.0, 0.0, torch.finfo(dtype).tiny
    result = merged(w0, random(3, 5, seed=1), torch.zeros(6, 3), 2.0)
    assert checksum(result) == checksum(w0)
    assert result.data_ptr() != w0.data_ptr()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@given(
    magnitudes=st.lists(st.sampled_from([1e-30, 1e-19, 8.7e-19, 1e-9, 1.0, 1e4]), min_size=3, max_size=3),
    seed=st.integers(0, 99),
)
@settings(max_examples=40, deadline=None)
def test_a_fused_multiply_add_would_give_the_merges_bits_for_factors_of_16_bits(dtype, magnitudes, seed):
    """What lets the GPU's kernel fuse: products are exact in float32, so only the sum is rounded. float64 holds the
    product and the sum of one step exactly, for such magnitudes, and rounds once to float32: a fused multiply-add."""
    w0, a, b = (
        (random(6, 6, seed=seed + i) * magnitude).to(dtype)
        for i, magnitude in enumerate((1.0, magnitudes[0], magnitudes[1]))
    )
    sent = [sendable(factor) for factor in (a, b)]
    total = torch.zeros(6, 6)
    for k in range(6):
        product = sent[1][:, k, None].double() * sent[0][None, k].double()
        assert torch.equal(product.float().double(), product), "not exact in float32"
        total = (total.double() + product).float()
    total *= 1.7
    fused = torch.where(total == 0, w0.float(), w0.float() + total).to(dtype)
    assert checksum(merged(w0, a, b, 1.7)) == checksum(fused)


def test_numbers_too_small_to_matter_travel_as_0_and_the_rest_as_it_is():
    factor = torch.tensor([2.0**-60, 2.0**-61, -(2.0**-61), -0.5, 0.0, float("inf"), float("nan")])
    found = sendable(factor)
    assert found[:6].tolist() == [2.0**-60, 0.0, 0.0, -0.5, 0.0, float("inf")] and found[6].isnan()
    sent = {"m": (factor[:4].view(1, 4), torch.ones(2, 1))}
    layout = factors.Layout.of(sent, torch.float32, 1.0)
    buffer = layout.empty("cpu")
    layout.pack(sent, buffer)
    assert torch.equal(layout.unpack(buffer)["m"][0], found[:4].view(1, 4))


def test_merge_refuses_shapes_that_do_not_fit():
    with pytest.raises(ValueError, match=r"W0 is \(4, 6\), A \(2, 5\) and B \(4, 2\)"):
        merged(random(4, 6), random(2, 5), random(4, 2), 1.0)


# -- stochastic rounding ---------------------------------------------------------------------------------------

DITHER = Dither("model.layers.0.feed_forward.w1")


@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_a_slice_is_rounded_as_in_the_whole_bit_for_bit(data):
    rows, columns = (data.draw(st.integers(1, 40)) for _ in range(2))
    top, left = data.draw(st.integers(0, rows - 1)), data.draw(st.integers(0, columns - 1))
    w0, a, b = random(rows, columns, dtype=torch.bfloat16), random(4, columns, seed=1), random(rows, 4, seed=2) * 1e-3
    whole = merged(w0, a, b, 1.7, dither=DITHER)
    part = merged(w0[top:, left:], a[:, left:], b[top:], 1.7, dither=Dither(DITHER.target, top, left))
    assert torch.equal(part, whole[top:, left:])


def test_stochastic_rounding_of_zero_b_gives_back_every_bit_of_the_base():
    w0 = random(64, 50, dtype=torch.bfloat16)
    w0[0, :4] = torch.tensor([-0.0, 0.0, torch.finfo(torch.bfloat16).tiny, torch.inf])
    w0[1, 0], w0[1, 1] = 1e-40, -1e-40  # below the smallest normal number
    result = merged(w0, random(3, 50, seed=1), torch.zeros(64, 3), 2.0, dither=DITHER)
    assert checksum(result) == checksum(w0)


@pytest.mark.parametrize("shift", [1e-5, -3e-4, 0.4])
def test_stochastic_rounding_goes_to_a_neighbour_on_the_grid_and_keeps_the_mean(shift):
    w0 = random(700, 700, dtype=torch.bfloat16) * 0.02
    exact = w0.float() + shift
    found = rounded(w0, torch.full((700, 700), shift), DITHER).float()
    step = torch.ldexp(torch.ones_like(exact), torch.frexp(exact)[1] - 8)
    assert torch.all((found - exact).abs() <= step), "further than a neighbour"
    error = float((found - exact).double().mean())
    allowed = 4 * float(step.double().square().mean().sqrt()) / 2 / 700  # four standard deviations of the mean
    assert abs(error) < allowed


def test_an_element_only_moves_where_its_sum_crosses_its_threshold():
    """Ever larger changes of one sign, as of successive versions: no element ever goes back."""
    w0, last = random(300, 300, dtype=torch.bfloat16) * 0.02, None
    for size in (0.0, 1e-6, 1e-5, 2e-5, 1e-4, 1e-3):
        found = rounded(w0, torch.full((300, 300), size), DITHER)
        assert last is None or torch.all(found >= last)
        last = found


def test_thresholds_are_uniform_and_those_of_rows_columns_and_targets_are_unlike():
    found = thresholds(600, 500, DITHER).double()
    assert found.min() >= 0 and found.max() < 65536
    counts = torch.histc(found, bins=64, min=0, max=65536)
    expected = 600 * 500 / 64
    assert float(((counts - expected) ** 2 / expected).sum()) < 120  # chi-square with 63 degrees: p about 1e-5
    scaled = (found - found.mean()) / found.std()
    other = thresholds(600, 500, Dither("model.layers.1.feed_forward.w1")).double()
    other = (other - other.mean()) / other.std()
    pairs = {
        "rows": (scaled[1:], scaled[:-1]), "columns": (scaled[:, 1:], scaled[:, :-1]), "targets": (scaled, other),
        "diagonal": (scaled[1:, 1:], scaled[:-1, :-1]), "halves": (scaled[:300], scaled[300:]),
    }  # fmt: skip
    assert {name for name, (x, y) in pairs.items() if abs(float((x * y).mean())) > 5 / x.numel() ** 0.5} == set()


def test_only_bfloat16_is_rounded_stochastically_and_float32_not_at_all():
    w0, a, b = random(6, 5), random(3, 5, seed=1), random(6, 3, seed=2)
    assert torch.equal(merged(w0, a, b, 2.0, dither=DITHER), merged(w0, a, b, 2.0))
    with pytest.raises(ValueError, match=r"torch\.float16 cannot be rounded stochastically"):
        merged(w0.half(), a, b, 2.0, dither=DITHER)


def test_the_layout_tells_the_server_how_to_round():
    pairs = {"m": (torch.zeros(4, 6), torch.zeros(5, 4))}
    for rounding, dtype, expected in (
        ("stochastic", torch.bfloat16, Dither("m", 2, 3)), ("nearest", torch.bfloat16, None),
        ("stochastic", torch.float32, None),
    ):  # fmt: skip
        layout = factors.Layout.of(pairs, dtype, 2.0, rounding)
        arrived = factors.Layout.from_json(json.loads(json.dumps(layout.to_json())))
        assert arrived.dither("m", 2, 3) == expected and arrived.id == layout.id


# -- how much of a change is served ----------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1e-6, 1e-5])
def test_stochastic_rounding_serves_what_a_young_adapter_changes_and_the_nearest_does_not(size):
    stochastic, nearest = (
        proof.merged_again(layout, buffer, base.__getitem__).kept_share
        for layout, buffer, base in (packed(torch.bfloat16, size, rounding) for rounding in ("stochastic", "nearest"))
    )
    assert stochastic > 0.9, "0.95 and more in expectation; the deviation of so few elements is 0.02"
    assert nearest < 0.1


def packed(
    dtype: torch.dtype, size: float, rounding: str = "nearest"
) -> tuple[factors.Layout, torch.Tensor, dict[str, torch.Tensor]]:
    """Two targets of a real model's sizes: weights N(0, 0.02), A as PEFT starts it, B of the size that is asked for."""
    shapes = {"model.layers.0.feed_forward.w1": (1024, 512), "model.layers.1.self_attn.q_proj": (512, 512)}
    pairs = {
        name: ((torch.rand(32, columns, generator=generator(seed)) * 2 - 1) / columns**0.5,
               torch.randn(rows, 32, generator=generator(seed + 10)) * size)
        for seed, (name, (rows, columns)) in enumerate(shapes.items())
    }  # fmt: skip
    base = {name: (random(*shape, seed=7) * 0.02).to(dtype) for name, shape in shapes.items()}
    layout = factors.Layout.of(pairs, dtype, 2.0, rounding)
    buffer = layout.empty("cpu")
    layout.pack(pairs, buffer)
    return layout, buffer, base


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_the_kept_share_is_the_projection_of_what_was_served_on_what_was_asked_for():
    layout, buffer, base = packed(torch.bfloat16, 1e-4)
    along = whole = 0.0
    for name, (a, b) in layout.unpack(buffer).items():
        asked = 2.0 * (b.double() @ a.double())
        moved = merged(base[name], a, b, 2.0).double() - base[name].double()
        along, whole = along + float((moved * asked).sum()), whole + float((asked * asked).sum())
    found = proof.merged_again(layout, buffer, base.__getitem__)
    assert found.kept_share == pytest.approx(along / whole, rel=1e-4)
    assert 0.1 < found.kept_share < 0.9
    assert found.checksums == {
        name: checksum(merged(base[name], a, b, 2.0)) for name, (a, b) in layout.unpack(buffer).items()
    }


def test_float32_serves_the_whole_change_and_b_of_0_has_none():
    layout, buffer, base = packed(torch.float32, 1e-4)
    assert proof.merged_again(layout, buffer, base.__getitem__).kept_share == pytest.approx(1, abs=1e-3)
    layout, buffer, base = packed(torch.bfloat16, 0.0)
    assert proof.merged_again(layout, buffer, base.__getitem__).kept_share is None
    assert proof.b_rms(layout, buffer) == 0


def test_b_rms_is_that_of_all_b_together():
    layout, buffer, _ = packed(torch.float32, 3e-4)
    together = torch.cat([b.flatten() for _, b in layout.unpack(buffer).values()])
    assert proof.b_rms(layout, buffer) == pytest.approx(float(together.square().mean().sqrt()), rel=1e-5)


# -- checksum --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [*DTYPES, torch.uint8])
@given(rows=st.integers(1, 20), columns=st.integers(1, 20), cut=st.integers(0, 20), seed=st.integers(0, 99))
@settings(max_examples=40, deadline=None)
def test_checksums_of_slices_add_up(dtype, rows, columns, cut, seed):
    matrix = (random(rows, columns, seed=seed) * 50).to(dtype)
    cut = min(cut, rows, columns)
    by_rows = checksum(matrix[:cut]) + checksum(matrix[cut:], first_row=cut)
    by_columns = checksum(matrix[:, :cut]) + checksum(matrix[:, cut:], first_column=cut)
    assert by_rows % 2**64 == checksum(matrix) == by_columns % 2**64


@pytest.mark.parametrize("length", [1, 4095, 4096, 4097, 10_000])
def test_checksum_of_a_vector_is_that_of_its_rows_of_4096(length):
    vector = random(length)
    whole = length // 4096 * 4096
    parts = checksum(vector[:whole].view(-1, 4096)), checksum(vector[None, whole:], first_row=whole // 4096)
    assert checksum(vector) == sum(parts) % 2**64


def test_checksum_of_a_vector_needs_no_work_space_of_a_multiple_of_its_size(monkeypatch):
    """The factors of a large adapter are one vector; its checksum once took all memory that NCCL needed."""
    largest = 0
    original = torch.Tensor.to

    def watched(tensor, *arguments, **keywords):
        nonlocal largest
        result = original(tensor, *arguments, **keywords)
        largest = max(largest, result.numel() * result.element_size())
        return result

    monkeypatch.setattr("services.weight_sync.checksum._CHUNK_ELEMENTS", 1 << 14)
    monkeypatch.setattr(torch.Tensor, "to", watched)
    checksum(torch.zeros(1 << 20, dtype=torch.bfloat16))
    assert 0 < largest <= 8 << 14


def test_checksum_of_a_large_matrix_is_that_of_its_chunks(monkeypatch):
    matrix = random(33, 65)
    whole = checksum(matrix)
    monkeypatch.setattr("services.weight_sync.checksum._CHUNK_ELEMENTS", 130)
    assert checksum(matrix) == whole


@given(row=st.integers(0, 6), column=st.integers(0, 8), bit=st.integers(0, 31))
@settings(max_examples=60, deadline=None)
def test_checksum_sees_any_single_flipped_bit(row, column, bit):
    matrix = random(7, 9)
    before = checksum(matrix)
    mask = 1 << bit if bit < 31 else -(1 << 31)
    matrix.view(torch.int32)[row, column] ^= mask
    assert checksum(matrix) != before


def test_checksum_sees_swapped_elements_and_swapped_rows():
    matrix = random(7, 9)
    swapped = matrix.clone()
    swapped[2, 3], swapped[4, 5] = matrix[4, 5], matrix[2, 3]
    assert len({checksum(matrix), checksum(swapped), checksum(matrix.flip(0)), checksum(matrix.flip(1))}) == 4


# -- buffer ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_factors_come_out_of_the_buffer_as_they_went_in(dtype):
    model = tiny_lfm2(kernel_size=3)
    for seed, (_, tensor) in enumerate(names.lora_factors(model)):
        tensor.copy_(random(*tensor.shape, seed=seed))
    sent = factors.collect(names.lora_factors(model))
    layout = factors.Layout.of(sent, dtype, 2.0)
    buffer = layout.empty("cpu")
    layout.pack(sent, buffer)
    received = factors.Layout.from_json(json.loads(json.dumps(layout.to_json())))
    assert received == layout and received.id == layout.id
    found = received.unpack(buffer.clone())
    assert found.keys() == sent.keys()
    for name, (a, b) in found.items():
        assert torch.equal(a, sent[name][0].to(dtype)) and torch.equal(b, sent[name][1].to(dtype))
    assert buffer.numel() == sum(a.numel() + b.numel() for a, b in sent.values())


@pytest.mark.parametrize(
    ("named", "message"),
    [
        ([], "no LoRA factor was given"),
        ([("model.layers.0.feed_forward.w1.weight", random(2, 2))], "is not a LoRA factor of a linear layer"),
        ([("base_model.model.m.w1.lora_A.default.weight", random(2, 4))], "m.w1 has only LoRA A; it needs A and B"),
        (
            [("base_model.model.m.lora_A.weight", random(2, 4)), ("base_model.model.m.lora_B.weight", random(4, 3))],
            r"target m has A \(2, 4\) and B \(4, 3\)",
        ),
    ],
)
def test_what_is_no_pair_of_factors_is_refused(named, message):
    with pytest.raises(ValueError, match=message):
        factors.collect(named)


# -- transport -------------------------------------------------------------------------------------------------


RECEIVER = """
import os, sys, torch
from services.weight_sync import transport
from services.weight_sync.checksum import checksum
port, world_size, rank, die = map(int, sys.argv[1:])
group = transport.join(
    "gloo", host="127.0.0.1", port=port, rank=rank, world_size=world_size, device=torch.device("cpu"),
    init_timeout_s=120, transfer_timeout_s=30,
)
if die:
    sys.stdin.readline()  # the group is there on the other side too
    os.kill(os.getpid(), 9)
buffer = torch.empty(1 << 20)
group.broadcast(buffer)
print(checksum(buffer))
"""


@contextlib.contextmanager
def group_of(workers: int, die: bool = False):
    """Rank 0 here, the others in processes of their own, as vLLM's workers are."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    command = [sys.executable, "-c", RECEIVER, str(port), str(workers + 1)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    processes = [
        subprocess.Popen(
            [*command, str(rank), str(int(die))],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(1, workers + 1)
    ]
    store = transport.open_store("127.0.0.1", port, workers + 1, 120)
    group = transport.join(
        "gloo", host="127.0.0.1", port=port, rank=0, world_size=workers + 1, device=torch.device("cpu"),
        init_timeout_s=120, transfer_timeout_s=5, store=store,
    )  # fmt: skip
    try:
        yield group, processes
    finally:
        group.close()
        for process in processes:
            process.kill()
            process.wait()


def test_a_buffer_reaches_every_worker():
    buffer = random(1 << 20)
    with group_of(workers=2) as (group, processes):
        group.broadcast(buffer)
        assert [int(process.communicate(timeout=60)[0]) for process in processes] == [checksum(buffer)] * 2


def test_a_worker_that_died_is_an_error_and_no_hang():
    with group_of(workers=1, die=True) as (group, processes):
        processes[0].stdin.write("\n")
        processes[0].stdin.flush()
        assert processes[0].wait(60) == -signal.SIGKILL
        started = time.monotonic()
        with pytest.raises(transport.TransportError, match="gloo broadcast broke off"):
            for _ in range(3):  # the first may fit into the socket's buffer
                group.broadcast(random(1 << 22))
        assert time.monotonic() - started < 20


def test_a_group_whose_other_side_never_comes_is_an_error_in_time():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    store = transport.open_store("127.0.0.1", port, 2, 2)
    started = time.monotonic()
    with pytest.raises(transport.TransportError, match=f"the gloo group at 127.0.0.1:{port} was not formed"):
        transport.join(
            "gloo", host="127.0.0.1", port=port, rank=0, world_size=2, device=torch.device("cpu"),
            init_timeout_s=2, transfer_timeout_s=2, store=store,
        )  # fmt: skip
    assert time.monotonic() - started < 20


# -- proofs ----------------------------------------------------------------------------------------------------


def test_slices_of_several_workers_make_the_whole_and_replicas_count_once():
    matrix = random(6, 4)
    top = [0, 3, 0, 4, f"{checksum(matrix[:3]):016x}"]
    bottom = [3, 6, 0, 4, f"{checksum(matrix[3:], first_row=3):016x}"]
    reports = [{"targets": {"m": part}} for part in (top, bottom, bottom)]
    assert proof.whole_checksums(reports, "targets") == {"m": checksum(matrix)}
    reports.append({"targets": {"m": [3, 6, 0, 4, "0" * 16]}})
    with pytest.raises(StoppedError, match="workers serve different values of m"):
        proof.whole_checksums(reports, "targets")


def test_a_worker_that_serves_another_version_or_other_factors_stops_the_run():
    good = {"version": 3, "factors": "ab"}
    proof.received([good, good], 3, "ab", "http://policy")
    for bad in ({"version": 2, "factors": "ab"}, {"version": 3, "factors": "ac"}, {"version": None, "factors": None}):
        with pytest.raises(StoppedError, match=r"worker 1 serves adapter version .*version 3 with ab was sent"):
            proof.received([good, bad], 3, "ab", "http://policy")
    with pytest.raises(StoppedError, match="no worker reported"):
        proof.received([], 3, "ab", "http://policy")


def test_the_scorer_gives_what_the_trained_forward_gives():
    """The canary scores through the model that TRL trains: packed attention, fused head, checkpointing."""
    model = tiny_lfm2()
    token_ids = torch.randint(3, 500, (40,), generator=torch.Generator().manual_seed(1)).tolist()
    ids = torch.tensor([token_ids])
    with torch.no_grad():
        trained = model(
            input_ids=ids, position_ids=torch.arange(40)[None], labels=ids, fused_lm_head=True, use_cache=False
        ).log_probs.flatten()[:39]
    scored = torch.tensor(canary.model_score(model)(token_ids))
    assert (scored - trained).abs().max() < 1e-4


# -- adapters on disk ------------------------------------------------------------------------------------------


def test_an_adapter_saved_by_peft_is_read_with_its_scale_and_merged_as_peft_merges(tmp_path):
    model = tiny_lfm2()
    for seed, (_, tensor) in enumerate(names.lora_factors(model)):
        tensor.copy_(random(*tensor.shape, seed=seed) * 0.1)
    model.save_pretrained(tmp_path / "adapter")
    before = base_hashes(model)
    base = {name: tensor.clone() for name, tensor in bare_weights(model).items()}
    save_file(base, tmp_path / "model.safetensors")

    adapter = Adapter.load(tmp_path / "adapter")
    assert adapter.scale == 2.0
    ours = dict(merged_weights(tmp_path, adapter, torch.float32, "stochastic"))
    assert drifted(before, base_hashes(model)) == []
    theirs = bare_weights(model.merge_and_unload())
    assert ours.keys() == base.keys()
    for name, weight in ours.items():
        assert torch.allclose(weight, theirs[name], atol=1e-6), name
    changed = {name for name in ours if not torch.equal(ours[name], base[name])}
    assert changed == {f"{target}.weight" for target in adapter.factors}


def bare_weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {base: parameter.detach() for name, parameter in model.named_parameters() if (base := names.base_name(name))}


def test_a_base_weight_that_moved_is_named():
    model = tiny_lfm2()
    before = base_hashes(model)
    assert all(".lora_" not in name and "base_layer" not in name for name in before)
    with torch.no_grad():
        names.base_weight(model, "model.layers.0.feed_forward.w1")[3, 4] += 1e-7
    assert drifted(before, base_hashes(model)) == ["model.layers.0.feed_forward.w1.weight"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"use_dora": True}, "use_dora = True; only plain LoRA"),
        ({"use_rslora": True}, "use_rslora = True"),
        ({"rank_pattern": {"w1": 2}}, "rank_pattern"),
        ({"bias": "all"}, "bias = 'all'"),
    ],
)
def test_an_adapter_that_is_not_plain_lora_is_refused(tmp_path, change, message):
    model = tiny_lfm2()
    model.save_pretrained(tmp_path)
    config = tmp_path / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | change))
    with pytest.raises(RecipeError, match=message):
        Adapter.load(tmp_path)


def test_a_folder_without_an_adapter_and_a_base_without_a_target_are_refused(tmp_path):
    with pytest.raises(RecipeError, match=r"is not a PEFT checkpoint: .*adapter_config\.json is missing"):
        Adapter.load(tmp_path)
    save_file({"model.w1.weight": random(2, 2)}, tmp_path / "model.safetensors")
    adapter = Adapter(1.0, {"model.w9": (random(1, 2), random(2, 1))})
    with pytest.raises(RecipeError, match=r"has no model\.w9\.weight, a target of the adapter"):
        list(merged_weights(tmp_path, adapter, torch.float32, "stochastic"))


def test_a_sync_error_names_the_peer_and_the_phase_and_has_its_own_exit_code():
    error = WeightSyncError("http://policy:8000", "merge", "no answer")
    assert str(error) == "weight sync with http://policy:8000 failed in phase 'merge': no answer"
    assert error.exit_code == 3
