"""Compact taps: what e4m3 with a scale per row keeps, and a store of them beside a plain one."""

import hashlib

import pytest
import torch
from conftest import refused, store_manifest
from safetensors.torch import load_file

from data.manifest import plan_bytes
from data.states import finite, kinds, pack, unpack
from data.store import Store, StoreWriter

TAPS, D = (2, 5, 9), 64


def read_back(taps_TLD):
    return unpack(list(pack(taps_TLD, "fp8").values()), "fp8")


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
    packed = pack(random_taps(30), "fp8")
    taps_TLD, scale_TL = packed.values()
    assert torch.equal(read_back(random_taps(30)).double(), taps_TLD.double() * scale_TL[..., None].double())
    assert float(taps_TLD.float().abs().amax(-1).min()) > 224 - 16 and float(taps_TLD.float().abs().max()) <= 448
    once = unpack([taps_TLD, scale_TL], "fp8")
    assert torch.equal(read_back(once), once)


@pytest.mark.parametrize("value", [0.0, 1e-42, 1e-30, 448.0, 449.0, 3e38, -3e38])
def test_the_ends_of_the_range(value):
    x_TLD = torch.zeros(1, 1, D)
    x_TLD[0, 0, 3] = value
    packed = pack(x_TLD, "fp8")
    assert finite(packed)
    expected = 0.0 if abs(value) < 1e-35 else value
    torch.testing.assert_close(read_back(x_TLD)[0, 0, 3].float(), torch.tensor(expected), rtol=2**-4, atol=1e-40)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_nan_and_inf_are_not_hidden(bad, tmp_path):
    x_TLD = random_taps(5)
    x_TLD[2, 1, 3] = bad
    assert not finite(pack(x_TLD, "fp8"))
    with StoreWriter(tmp_path, manifest("fp8")) as writer:
        assert not writer.add("a", *tokens(5), x_TLD, torch.zeros(5, D))
    assert "NaN or Inf in taps" in (tmp_path / "quarantine.jsonl").read_text()


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
        assert all(torch.equal(mine[key], theirs[key]) for key in ("token_ids", "loss_mask", "last"))  # last is kept whole
        assert torch.equal(compact.get(i, TAPS)["taps"], read_back(plain.get(i, TAPS)["taps"]))
    counts = compact.manifest["tokens"], compact.manifest["supervised_tokens"]
    sizes = {}
    for name, store in (("fp8", compact), ("bfloat16", plain)):
        sizes[name] = sum(path.stat().st_size for path in store.folder.glob("shard-*"))
        planned = plan_bytes(*counts, len(TAPS), D, "supervised", name)
        assert planned <= sizes[name] <= 1.05 * planned  # shards of 500 tokens: their headers count here
    assert plan_bytes(1000, 0, 1, 4096, "none", "fp8") == 1000 * (5 + 4096 + 4)


def test_a_plain_and_a_compact_capture_do_not_mix(tmp_path):
    for mine, other in (("fp8", "bfloat16"), ("bfloat16", "fp8")):
        write(tmp_path / mine, mine, n=1)
        refused(lambda m=mine, o=other: StoreWriter(tmp_path / m, manifest(o)), "dtype", repr(mine), repr(other), "data.store")
    refused(lambda: kinds("fp4"), "data.states_dtype='fp4'", "fp8")


def test_the_plain_layout_is_what_it_always_was(tmp_path):
    states = ((torch.arange(20 * 4 * D) % 255 - 127) / 16).view(20, 4, D).to(torch.bfloat16)
    with StoreWriter(tmp_path, manifest("bfloat16")) as writer:
        writer.add("a", *tokens(20), states[:, :3], states[:, 3])
    shard = tmp_path / "shard-00000.safetensors"
    assert set(load_file(shard)) == {"token_ids", "loss_mask", "offsets", "taps", "last"}
    assert hashlib.sha256(shard.read_bytes()).hexdigest() == "9fdb9e0a52d742233e3db36b1b8dc6e008667dc868c2496cc70f8e155e4a6951"
