"""What a journal keeps, what it refuses, and what it survives."""

from __future__ import annotations

import json
import resource
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save

from compress.durable import write_tensors
from compress.errors import BrokenResultError, MismatchError, MissingResourceError, UsageError
from compress.journal import Journal, counted, finished, forget
from compress.records import LayerRecord
from compress.scheme import QuantizedWeight, Scheme

FINGERPRINT: dict[str, Any] = {
    "model": "m",
    "calibration": {"source": "default", "samples": 128},
    "steps": [{"quantize": {"target": "int4", "skip": ["a", "b"], "damping": 0.01}}],
    "model.sha256": "0123456789abcdef",
    "versions": {"torch": "2.13.0", "transformers": "5.24.0"},
    "threads": 2,
    "device": "cpu",
    "compute_dtype": "bfloat16",
    "cpu": {"instruction_sets": ["avx2", "avx512f"]},
}
SCHEME = Scheme(4, 32)


def weight(seed: int, dtype: torch.dtype = torch.bfloat16, *, zero_point: bool = False) -> QuantizedWeight:
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(-8, 8, (6, 64), generator=generator, dtype=torch.int8)
    scale = torch.rand(6, 2, generator=generator).to(dtype)
    zeros = torch.randint(-8, 8, (6, 2), generator=generator, dtype=torch.int8) if zero_point else None
    return QuantizedWeight(codes, scale, zeros, SCHEME)


def record(name: str, error: float = 1 / 3) -> LayerRecord:
    return LayerRecord(name, (6, 64), "int4", "gptq", 32, error_after=error, notes=("one", "two"), sha256="ab")


def state(seed: int, lengths: tuple[int, ...] = (5, 3)) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {f"hidden.{i}": torch.randn(1, n, 7, generator=generator).bfloat16() for i, n in enumerate(lengths)}


def save_blocks(journal: Journal, *numbers: int) -> None:
    for number in numbers:
        layers = {f"layer.{number}": weight(number)}
        journal.save(f"block-{number:05d}", layers, [record(f"layer.{number}")], {}, state(number))


def equal(left: QuantizedWeight, right: QuantizedWeight) -> bool:
    pairs = [(left.codes, right.codes), (left.scale, right.scale)]
    if left.zero_point is not None and right.zero_point is not None:
        pairs.append((left.zero_point, right.zero_point))
    same = all(a.dtype == b.dtype and torch.equal(a, b) for a, b in pairs)
    return same and left.scheme == right.scheme and (left.zero_point is None) == (right.zero_point is None)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_everything_comes_back_exactly(dtype: torch.dtype, tmp_path: Path) -> None:
    journal = Journal.start(tmp_path, FINGERPRINT)
    weights = {"a.b": weight(1, dtype), "c": weight(2, dtype, zero_point=True)}
    records = [record("a.b", 0.1 + 0.2), LayerRecord("norm", (), skipped="why", damping=1e-300)]
    norm = torch.randn(9).to(dtype)
    journal.save("block-00000", weights, records, {"norm.weight": norm}, state(0))
    journal.save("block-00001", {}, [], {}, state(1, (4, 6)))
    again = Journal.reopen(tmp_path, FINGERPRINT)
    assert again.parts == ("block-00000", "block-00001")
    assert again.lost == ()
    assert again.records() == records == journal.records()
    for name, expected in weights.items():
        assert equal(again.load(name), expected)
        assert equal(journal.load(name), expected)
    assert again.replaced().keys() == {"norm.weight"}
    assert torch.equal(again.replaced()["norm.weight"], norm)
    kept, expected_state = again.state(), state(1, (4, 6))
    assert kept is not None
    assert kept.keys() == expected_state.keys()
    assert all(torch.equal(kept[name], expected_state[name]) for name in kept)
    resumed = again.resumed()
    assert resumed is not None
    assert resumed.parts == again.parts
    assert resumed.records == tuple(records)
    assert equal(resumed.weights("c"), weights["c"])


def test_a_fresh_journal_has_nothing_to_resume(tmp_path: Path) -> None:
    journal = Journal.start(tmp_path, FINGERPRINT)
    assert journal.resumed() is None
    assert journal.state() is None
    assert finished(tmp_path) == ()
    assert Journal.reopen(tmp_path, FINGERPRINT).parts == ()


def test_a_tensor_that_is_replaced_twice_is_the_last_one(tmp_path: Path) -> None:
    journal = Journal.start(tmp_path, FINGERPRINT)
    for value in (1.0, 2.0):
        journal.save(f"block-{int(value):05d}", {}, [], {"norm": torch.full((3,), value)})
    assert torch.equal(journal.replaced()["norm"], torch.full((3,), 2.0))


def test_only_the_newest_state_is_kept(tmp_path: Path) -> None:
    journal = Journal.start(tmp_path, FINGERPRINT)
    for number in range(4):
        save_blocks(journal, number)
        assert [path.name for path in (tmp_path / "state").iterdir()] == [f"{number % 2}.safetensors"]
    (tmp_path / "state" / "0.safetensors.new").write_bytes(b"half")
    (tmp_path / "parts" / "block-00004.safetensors").write_bytes(b"whole, but the journal does not name it")
    again = Journal.reopen(tmp_path, FINGERPRINT)
    assert len(again.parts) == 4
    assert sorted(path.name for path in tmp_path.rglob("*.*safetensors*")) == [
        "1.safetensors",
        *(f"block-{number:05d}.safetensors" for number in range(4)),
    ]


def test_a_kill_between_state_and_journal_leaves_the_state_before(tmp_path: Path) -> None:
    """The listing as it was before the last part, with the files of after it: what a kill in between leaves."""
    journal = Journal.start(tmp_path, FINGERPRINT)
    save_blocks(journal, 0, 1)
    before = {name: (tmp_path / name).read_bytes() for name in ("journal.json", "state/1.safetensors")}
    save_blocks(journal, 2)
    for name, data in before.items():
        (tmp_path / name).write_bytes(data)
    again = Journal.reopen(tmp_path, FINGERPRINT)
    assert again.parts == ("block-00000", "block-00001")
    assert again.lost == ()
    kept = again.state()
    assert kept is not None
    assert torch.equal(kept["hidden.0"], state(1)["hidden.0"])
    save_blocks(again, 2)
    assert Journal.reopen(tmp_path, FINGERPRINT).parts[-1] == "block-00002"


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("damage", [flip, Path.unlink, lambda path: path.write_bytes(b"")])
def test_layers_after_a_damaged_one_are_dropped(damage: Any, tmp_path: Path) -> None:
    journal = Journal.start(tmp_path, FINGERPRINT)
    for name in ("a", "b", "c"):
        journal.save(name, {name: weight(1)}, [record(name)])
    damage(tmp_path / "parts" / "b.safetensors")
    again = Journal.reopen(tmp_path, FINGERPRINT)
    assert again.parts == ("a",)
    assert again.lost == ("b", "c")
    assert [found.name for found in again.records()] == ["a"]
    assert finished(tmp_path) == ("a",)


@pytest.mark.parametrize("name", ["parts/block-00001.safetensors", "state/0.safetensors"])
def test_blocks_without_their_state_are_worth_nothing(name: str, tmp_path: Path) -> None:
    journal = Journal.start(tmp_path, FINGERPRINT)
    save_blocks(journal, 0, 1, 2)
    flip(tmp_path / name)
    again = Journal.reopen(tmp_path, FINGERPRINT)
    assert again.parts == ()
    assert len(again.lost) == 3
    assert again.resumed() is None
    assert not list((tmp_path / "parts").iterdir())
    assert not list((tmp_path / "state").iterdir())


def test_a_damaged_last_block_is_done_again_from_the_state_before_it(tmp_path: Path) -> None:
    journal = Journal.start(tmp_path, FINGERPRINT)
    save_blocks(journal, 0, 1)
    journal.save("block-00002", {"last": weight(3)}, [record("last")])
    whole = Journal.reopen(tmp_path, FINGERPRINT)
    assert len(whole.parts) == 3
    assert whole.state() is None
    flip(tmp_path / "parts" / "block-00002.safetensors")
    again = Journal.reopen(tmp_path, FINGERPRINT)
    assert again.parts == ("block-00000", "block-00001")
    assert again.state() is not None


def test_what_changes_on_disk_while_it_is_used_is_refused(tmp_path: Path) -> None:
    journal = Journal.start(tmp_path, FINGERPRINT)
    save_blocks(journal, 0)
    flip(tmp_path / "parts" / "block-00000.safetensors")
    flip(tmp_path / "state" / "0.safetensors")
    with pytest.raises(BrokenResultError, match="block-00000"):
        journal.load("layer.0")
    with pytest.raises(BrokenResultError, match=r"0\.safetensors"):
        journal.state()


def test_a_part_that_was_read_is_looked_at_again_once_it_has_changed(tmp_path: Path) -> None:
    journal = Journal.start(tmp_path, FINGERPRINT)
    save_blocks(journal, 0)
    assert equal(journal.load("layer.0"), weight(0))
    flip(tmp_path / "parts" / "block-00000.safetensors")
    with pytest.raises(BrokenResultError, match="block-00000"):
        journal.load("layer.0")


@pytest.mark.parametrize("text", ["", "{", "[]", '{"version": 99}', '{"version": 1, "parts": 3}'])
def test_a_listing_that_cannot_be_read_is_none(text: str, tmp_path: Path) -> None:
    save_blocks(Journal.start(tmp_path, FINGERPRINT), 0)
    (tmp_path / "journal.json").write_text(text)
    assert finished(tmp_path) == ()
    assert Journal.reopen(tmp_path, FINGERPRINT).parts == ()


@pytest.mark.parametrize(
    ("old", "new"),
    [('"error_after": 0.3', '"error_after": 0.2'), ('"m"', '"n"'), ('"bits": 4', '"bits": 8'), ("1,", "1, ")],
)
def test_a_listing_that_was_edited_is_none(old: str, new: str, tmp_path: Path) -> None:
    save_blocks(Journal.start(tmp_path, FINGERPRINT), 0)
    listing = tmp_path / "journal.json"
    text = listing.read_text()
    assert old in text
    listing.write_text(text.replace(old, new, 1))
    same = json.loads(text) == json.loads(listing.read_text())  # spaces are no edit
    assert finished(tmp_path) == (("block-00000",) if same else ())
    assert Journal.reopen(tmp_path, FINGERPRINT).parts == (("block-00000",) if same else ())


@pytest.mark.parametrize("name", ["parts", "state"])
@pytest.mark.parametrize("again", [False, True], ids=["started", "reopened"])
def test_a_link_in_place_of_a_folder_is_not_followed(name: str, again: bool, tmp_path: Path) -> None:
    save_blocks(Journal.start(tmp_path / "run", FINGERPRINT), 0)
    elsewhere = (tmp_path / "run" / name).rename(tmp_path / "elsewhere")
    (elsewhere / "mine").write_bytes(b"not the journal's")
    before = {path.name: path.read_bytes() for path in elsewhere.iterdir()}
    (tmp_path / "run" / name).symlink_to(elsewhere)
    journal = (Journal.reopen if again else Journal.start)(tmp_path / "run", FINGERPRINT)
    assert journal.parts == ()
    save_blocks(journal, 0)
    assert {path.name: path.read_bytes() for path in elsewhere.iterdir()} == before
    assert equal(journal.load("layer.0"), weight(0))
    assert not (tmp_path / "run" / name).is_symlink()


def test_what_stands_in_the_way_goes(tmp_path: Path) -> None:
    save_blocks(Journal.start(tmp_path, FINGERPRINT), 0)
    (tmp_path / "parts" / "folder" / "deeper").mkdir(parents=True)
    (tmp_path / "parts" / "link").symlink_to(tmp_path)
    (tmp_path / "state" / "0.safetensors").unlink()
    (tmp_path / "state").rmdir()
    (tmp_path / "state").write_bytes(b"a file")
    journal = Journal.reopen(tmp_path, FINGERPRINT)
    assert journal.lost == ("block-00000",)
    save_blocks(journal, 0)
    assert [path.name for path in (tmp_path / "parts").iterdir()] == ["block-00000.safetensors"]
    assert (tmp_path / "journal.json").is_file()


DIFFERENCES = {
    "model": ("n", "model: the interrupted run had m, this one has n"),
    "calibration": (
        {"source": "default", "samples": 64},
        "calibration.samples: the interrupted run had 128, this one has 64",
    ),
    "steps": (
        [{"quantize": {"target": "int4", "skip": ["a"], "damping": 0.01}}],
        "steps[0].quantize.skip: the interrupted run had a, b, this one has a",
    ),
    "model.sha256": (
        "fedcba9876543210",
        "model.sha256: the interrupted run had 0123456789ab, this one has fedcba987654",
    ),
    "versions": (
        {"torch": "2.14.0", "transformers": "5.24.0"},
        "versions.torch: the interrupted run had 2.13.0, this one has 2.14.0",
    ),
    "threads": (1, "threads: the interrupted run had 2, this one has 1"),
    "device": ("NVIDIA H200", "device: the interrupted run had cpu, this one has NVIDIA H200"),
    "compute_dtype": ("float32", "compute_dtype: the interrupted run had bfloat16, this one has float32"),
    "cpu": (
        {"instruction_sets": ["avx2"]},
        "cpu.instruction_sets: the interrupted run had avx2, avx512f, this one has avx2",
    ),
}


@pytest.mark.parametrize("key", DIFFERENCES)
def test_another_run_is_refused_and_the_difference_named(key: str, tmp_path: Path) -> None:
    save_blocks(Journal.start(tmp_path, FINGERPRINT), 0)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    value, sentence = DIFFERENCES[key]
    with pytest.raises(MismatchError) as caught:
        Journal.reopen(tmp_path, FINGERPRINT | {key: value})
    assert caught.value.exit_code == 7
    assert [line.strip() for line in caught.value.message.splitlines()[1:]] == [sentence]
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_all_differences_are_named_at_once(tmp_path: Path) -> None:
    save_blocks(Journal.start(tmp_path, FINGERPRINT), 0)
    other = FINGERPRINT | {key: value for key, (value, _) in DIFFERENCES.items()}
    del other["threads"]
    other["seed"] = 1
    with pytest.raises(MismatchError) as caught:
        Journal.reopen(tmp_path, other)
    lines = {line.strip() for line in caught.value.message.splitlines()[1:]}
    assert {sentence for key, (_, sentence) in DIFFERENCES.items() if key != "threads"} < lines
    assert "threads: the interrupted run had 2, this one has none" in lines
    assert "seed: the interrupted run had none, this one has 1" in lines


def test_worthless_after_the_errors_that_would_come_again(tmp_path: Path) -> None:
    for error, kept in ((UsageError("x"), ()), (KeyboardInterrupt(), ("block-00000",))):
        journal = Journal.start(tmp_path, FINGERPRINT)
        save_blocks(journal, 0)
        with pytest.raises(type(error)), journal.worthless_after(UsageError, BrokenResultError):
            raise error
        assert finished(tmp_path) == kept
    forget(tmp_path)
    forget(tmp_path)
    assert finished(tmp_path) == ()


def test_a_full_disk_names_file_and_bytes_and_changes_nothing(small_disk: Path) -> None:
    journal = Journal.start(small_disk, FINGERPRINT)
    save_blocks(journal, 0)
    large = {"hidden": torch.zeros(300_000, dtype=torch.uint8)}
    with pytest.raises(MissingResourceError, match=r"state/1\.safetensors.*needs 300,\d+ bytes, \d+,\d+ are free") as e:
        journal.save("block-00001", {"b": weight(1)}, [], {}, large)
    assert e.value.exit_code == 9
    assert journal.parts == Journal.reopen(small_disk, FINGERPRINT).parts == ("block-00000",)
    save_blocks(journal, 1)
    assert len(Journal.reopen(small_disk, FINGERPRINT).parts) == 2


def test_a_limit_on_the_size_of_files_is_a_full_disk(tmp_path: Path) -> None:
    journal = Journal.start(tmp_path, FINGERPRINT)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    try:
        with pytest.raises(MissingResourceError, match=r"state/0\.safetensors"):
            journal.save("block-00000", {"a": weight(0)}, [], {}, {"hidden": torch.zeros(200_000, dtype=torch.uint8)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert journal.parts == Journal.reopen(tmp_path, FINGERPRINT).parts == ()


def test_the_file_is_one_that_the_library_reads_and_would_write(tmp_path: Path) -> None:
    """Odd sizes, so that alignment matters; the same dtypes in another order."""
    tensors = {
        "b": torch.arange(5, dtype=torch.int8),
        "a": torch.arange(3).bfloat16(),
        "strided": torch.arange(12.0).reshape(3, 4).T,
        "empty": torch.zeros(0, 4),
        "scalar": torch.tensor(7),
        "flag": torch.tensor([True, False]),
    }
    write_tensors(tmp_path / "t.safetensors", tensors)
    found = load_file(tmp_path / "t.safetensors")
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)
    same = {name: tensor.contiguous() for name, tensor in tensors.items()}
    assert len(save(same)) == (tmp_path / "t.safetensors").stat().st_size


def test_counted() -> None:
    assert counted(["block-00000"]) == "1 finished block"
    assert counted(["block-00000", "block-00001"]) == "2 finished blocks"
    assert counted(["model.layers.0.q_proj", "b"]) == "2 finished layers"


def test_the_listing_is_plain_json(tmp_path: Path) -> None:
    save_blocks(Journal.start(tmp_path, FINGERPRINT), 0)
    listing = json.loads((tmp_path / "journal.json").read_text())
    assert listing["fingerprint"]["calibration.samples"] == 128
    assert listing["parts"][0]["records"][0]["error_after"] == 1 / 3
