"""Compact states: what e4m3 with a scale per row and int8 with one per 32 keep, and a store of them beside a plain one."""

import hashlib

import pytest
import torch
from conftest import refused, store_manifest
from safetensors.torch import load_file

from data.manifest import plan_bytes
from data.states import finite, pack_last, pack_taps, read_dtype, unpack_last, unpack_taps
from data.store import Store, StoreWriter

TAPS, D = (2, 5, 9), 64


def read_back(taps_TLD):
    return unpack_taps(list(pack_taps(taps_TLD, "fp8").values()), "fp8")


def last_back(last_RD):
    return unpack_last(list(pack_last(last_RD, "fp8").values()), "fp8")


def random_taps(n, seed=0, D=D):
    generator = torch.Generator().manual_seed(seed)
    size_TL = torch.logspace(-3, 3, n * len(TAPS)).view(n, len(TAPS), 1)  # a token is not of one size, nor a tap
    return torch.randn(n, len(TAPS), D, generator=generator) * size_TL


def test_a_row_of_any_size_loses_a_fortieth():
    x_TLD = random_taps(50, D=512)
    error_TL = (read_back(x_TLD).float() - x_TLD).norm(dim=-1) / x_TLD.norm(dim=-1)
    assert 0.022 < float(error_TL.mean()) < 0.029 and float(error_TL.max()) < 0.032
    worst = ((read_back(x_TLD).float() - x_TLD).abs() / x_TLD.abs())[x_TLD.abs() > 2**-14 * x_TLD.abs().amax(-1, keepdim=True)]
    assert float(worst.max()) <= 2**-4 + 2**-9


def test_a_huge_element_leaves_the_others_their_precision():
    """Some tokens of many targets have single elements a thousand times the rest."""
    x_TLD = random_taps(20)
    x_TLD[:, :, 7] = 1000 * x_TLD.abs().amax(-1)
    others = [i for i in range(D) if i != 7]
    error_TL = (read_back(x_TLD).float() - x_TLD)[..., others].norm(dim=-1) / x_TLD[..., others].norm(dim=-1)
    assert float(error_TL.max()) < 0.05


def test_what_is_read_is_exactly_what_was_written_and_loses_nothing_again():
    packed = pack_taps(random_taps(30), "fp8")
    taps_TLD, scale_TL = packed.values()
    assert torch.equal(read_back(random_taps(30)).double(), taps_TLD.double() * scale_TL[..., None].double())
    assert float(taps_TLD.float().abs().amax(-1).min()) > 224 - 16 and float(taps_TLD.float().abs().max()) <= 448
    once = unpack_taps([taps_TLD, scale_TL], "fp8")
    assert torch.equal(read_back(once), once)


def test_last_is_ten_bits_below_the_largest_of_32():
    x_RD = random_taps(50, D=512)[:, 0]
    high_RD, low_RD4, exponent_RB = pack_last(x_RD, "fp8").values()
    low_RD = torch.stack([low_RD4 >> shift & 3 for shift in (0, 2, 4, 6)], -1).view(50, 512)
    exact_RD = ((4 * high_RD.double() + low_RD).view(50, -1, 32) * 2.0 ** exponent_RB.double()[..., None]).view(50, 512)
    assert torch.equal(last_back(x_RD), exact_RD.to(torch.bfloat16))
    error_R = (exact_RD - x_RD).norm(dim=-1) / x_RD.norm(dim=-1)
    assert 0.0015 < float(error_R.mean()) < 0.0025 and float(error_R.max()) < 0.003
    largest_RB = x_RD.abs().view(50, -1, 32).amax(-1)
    assert float(((exact_RD - x_RD).abs().view(50, -1, 32).amax(-1) / largest_RB).max()) <= 2**-9


@pytest.mark.parametrize("value", [0.0, 1e-42, 1e-30, 448.0, 449.0, 3e38, -3e38])
def test_the_ends_of_the_range(value):
    x_TLD = torch.zeros(1, 1, D)
    x_TLD[0, 0, 3] = value
    assert finite(pack_taps(x_TLD, "fp8"), "taps") and finite(pack_last(x_TLD[0], "fp8"), "last")
    expected = torch.tensor(0.0 if abs(value) < 1e-35 else value)
    torch.testing.assert_close(read_back(x_TLD)[0, 0, 3].float(), expected, rtol=2**-4, atol=1e-40)
    torch.testing.assert_close(last_back(x_TLD[0])[0, 3].float(), expected, rtol=2**-7, atol=1e-30)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_nan_and_inf_are_not_hidden(bad, tmp_path):
    x_TLD = random_taps(5)
    x_TLD[2, 1, 3] = bad
    with StoreWriter(tmp_path, manifest("fp8")) as writer:
        assert not writer.add("a", *tokens(5), x_TLD, torch.zeros(5, D))
        assert not writer.add("b", *tokens(5), torch.zeros(5, 3, D), x_TLD[:, 1])
        assert writer.add("c", *tokens(5), torch.zeros(5, 3, D), torch.zeros(5, D))
    first, second = (tmp_path / "quarantine.jsonl").read_text().splitlines()
    assert "NaN or Inf in taps" in first and "NaN or Inf in last" in second


def manifest(dtype):
    return store_manifest(TAPS, D) | {"dtype": dtype}


def tokens(n):
    return torch.arange(n), torch.arange(n) >= n // 3


def write(folder, dtype, n=12):
    with StoreWriter(folder, manifest(dtype), shard_tokens=500) as writer:
        for i in range(n):
            x = random_taps(60 + i, seed=i).to(torch.bfloat16)
            writer.add(f"s{i}", *tokens(60 + i), x, x[:, 0])
    return Store(folder, verify=True)


def test_a_compact_store_reads_as_bfloat16_at_half_the_bytes(tmp_path):
    compact, plain = write(tmp_path / "compact", "fp8"), write(tmp_path / "plain", "bfloat16")
    assert len(compact.manifest["shards"]) > 1
    for i in range(12):
        mine, theirs = compact.get(i, (9, 2), stop=50), plain.get(i, (9, 2), stop=50)
        assert mine["taps"].dtype == torch.bfloat16 and torch.equal(mine["taps"], read_back(theirs["taps"]))
        assert all(torch.equal(mine[key], theirs[key]) for key in ("token_ids", "loss_mask"))
        assert mine["last"].dtype == torch.bfloat16 and torch.equal(mine["last"], last_back(theirs["last"]))
        assert torch.equal(compact.get(i, TAPS)["taps"], read_back(plain.get(i, TAPS)["taps"]))
    counts = compact.manifest["tokens"], compact.manifest["supervised_tokens"]
    sizes = {}
    for name, store in (("fp8", compact), ("bfloat16", plain)):
        sizes[name] = sum(path.stat().st_size for path in store.folder.glob("shard-*"))
        planned = plan_bytes(*counts, len(TAPS), D, "supervised", name)
        assert planned <= sizes[name] <= 1.05 * planned  # shards of 500 tokens: their headers count here
    assert plan_bytes(1000, 0, 1, 4096, "none", "fp8") == 1000 * (5 + 4096 + 4)
    for width in (576, 4096):  # EAGLE-3 at 70 % supervised, and at all
        for counts in ((1000, 700, 3, width, "supervised"), (1000, 1000, 3, width, "supervised")):
            assert plan_bytes(*counts, "fp8") < 0.54 * plan_bytes(*counts, "bfloat16")


def test_a_plain_and_a_compact_capture_do_not_mix(tmp_path):
    for mine, other in (("fp8", "bfloat16"), ("bfloat16", "fp8")):
        write(tmp_path / mine, mine, n=1)
        refused(lambda m=mine, o=other: StoreWriter(tmp_path / m, manifest(o)), "dtype", repr(mine), repr(other), "data.store")
    refused(lambda: read_dtype("fp4"), "data.states_dtype='fp4'", "fp8")


def test_the_plain_layout_is_what_it_always_was(tmp_path):
    states = ((torch.arange(20 * 4 * D) % 255 - 127) / 16).view(20, 4, D).to(torch.bfloat16)
    with StoreWriter(tmp_path, manifest("bfloat16")) as writer:
        writer.add("a", *tokens(20), states[:, :3], states[:, 3])
    shard = tmp_path / "shard-00000.safetensors"
    assert set(load_file(shard)) == {"token_ids", "loss_mask", "offsets", "taps", "last"}
    assert hashlib.sha256(shard.read_bytes()).hexdigest() == "9fdb9e0a52d742233e3db36b1b8dc6e008667dc868c2496cc70f8e155e4a6951"
