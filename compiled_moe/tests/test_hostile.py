"""Files made to break a reader: always a sentence, never an allocation, a path outside, a traceback or a pickle.

Every input goes through what ``inspect`` does: open, headers, layers, scales, checks, the document.
"""

import json
import pickle
import resource
import struct
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save

import compiled_moe
import nvfp4
from compiled_moe.checkpoint import Checkpoint
from compiled_moe.survey import survey

from . import checkpoints as c

SENTENCES = (compiled_moe.CheckpointError, nvfp4.NVFP4Error)
GROWTH = 200e6
EXAMPLES = 2500
"""Of each of the four tests: 10,000 in all."""
GROWN: list[int] = []
FUZZ = settings(
    max_examples=EXAMPLES, deadline=None, database=None, derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large],
)  # fmt: skip
X = "model.layers.0.mlp.experts"
SMALL = c.modelopt(c.experts(count=2, h=32, i=16))
CONFIG = {"model_type": "qwen3_moe", "quantization_config": c.MODELOPT}
GOOD = save({k: v.contiguous() for k, v in SMALL.items()})


def split(blob):
    (size,) = struct.unpack("<Q", blob[:8])
    return json.loads(blob[8 : 8 + size]), blob[8 + size :]


HEADER, BODY = split(GOOD)


def join(header, body=BODY):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + body


def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@pytest.fixture(scope="module")
def arena(tmp_path_factory):
    """A folder to write into; afterwards all growth inside the reader is judged (hypothesis' own is not ours)."""
    folder = tmp_path_factory.mktemp("hostile")
    attempt(folder, GOOD)  # libraries are loaded
    GROWN.clear()
    yield folder
    assert sum(GROWN) < GROWTH, f"{len(GROWN)} inputs grew the process by {sum(GROWN) / 1e6:.0f} MB"


def attempt(folder, blob=GOOD, config=CONFIG, index=None):
    """Inspect what is written; True where it was taken, False where it was refused with a sentence."""
    (folder / "model.safetensors").write_bytes(blob)
    (folder / "config.json").write_bytes(config if isinstance(config, bytes) else json.dumps(config).encode())
    path = folder / "model.safetensors.index.json"
    path.unlink(missing_ok=True)
    if index is not None:
        path.write_bytes(index if isinstance(index, bytes) else json.dumps(index).encode())
    before = peak()
    try:
        json.dumps(survey(Checkpoint.open(folder)).to_dict(), allow_nan=False)
    except SENTENCES as error:
        text = str(error)
        assert len(text) > 20 and "Traceback" not in text, text
        return False
    finally:
        GROWN.append(peak() - before)
    return True


@FUZZ
@given(data=st.data())
def test_bytes_cut_flipped_and_inserted(data, arena):
    blob = bytearray(GOOD)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(blob)))
        kind = data.draw(st.sampled_from(["cut", "flip", "insert", "remove"]))
        if kind == "cut":
            del blob[at:]
        elif kind == "flip" and at < len(blob):
            blob[at] ^= data.draw(st.integers(1, 255))
        elif kind == "insert":
            blob[at:at] = data.draw(st.binary(max_size=9))
        else:
            del blob[at : at + data.draw(st.integers(1, 64))]
    attempt(arena, bytes(blob))


DTYPES = st.sampled_from(
    ["U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F4", "F32", "F16", "BF16", "F64", "I64", "BOOL", "C64", "", "X"]
)
SIZES = st.one_of(st.integers(0, 70), st.sampled_from([2**31, 2**40, 10**12, 2**63 - 1, 2**64 - 1, -1]))
JUNK = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(max_size=6)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=5), inner, max_size=3)),
    max_leaves=6,
)
SUFFIXES = ["weight", "weight_packed", "weight_scale", "weight_scale_2", "weight_global_scale", "input_scale",
            "input_global_scale", "bias", "scale", "pre_quant_scale", "k_scale", ""]  # fmt: skip
KEYS = st.one_of(
    st.builds(
        lambda layer, e, p, s: f"{layer}.{e}.{p}.{s}",
        st.sampled_from([X, "experts", "layers.0.ffn.experts", "m.mixer.experts"]),
        st.one_of(st.integers(0, 3), st.sampled_from([9, 10**5, 10**6, "x", "01"])),
        st.sampled_from(["gate_proj", "up_proj", "down_proj", "w1", "w2", "w3"]),
        st.sampled_from(SUFFIXES),
    ),
    st.builds(
        lambda p, s: f"{X}.{p}{s}",
        st.sampled_from(["gate_up_proj", "up_proj", "down_proj"]),
        st.sampled_from(["", "_weight_scale", "_weight_scale_2", "_input_scale", "_bias", "_blocks", "_scales"]),
    ),
    st.builds(lambda s: f"model.layers.0.self_attn.q_proj.{s}", st.sampled_from(SUFFIXES)),
    st.text(max_size=8),
)


@FUZZ
@given(data=st.data())
def test_headers_with_other_keys_dtypes_shapes_and_offsets(data, arena):
    """Valid JSON, lying content: entries are renamed, retyped, reshaped, moved, dropped and replaced by junk."""
    header = json.loads(json.dumps(HEADER))
    for _ in range(data.draw(st.integers(1, 4))):
        key = data.draw(st.sampled_from(sorted(header) or ["none"]))
        entry = header.get(key)
        kind = data.draw(st.sampled_from(["rename", "dtype", "shape", "offsets", "drop", "junk"]))
        if kind == "drop" or not isinstance(entry, dict) or "shape" not in entry:
            header.pop(key, None)
        elif kind == "rename":
            header[data.draw(KEYS)] = header.pop(key)
        elif kind == "dtype":
            entry["dtype"] = data.draw(DTYPES)
        elif kind == "shape":
            entry["shape"] = data.draw(st.lists(SIZES, max_size=4))
        elif kind == "offsets":
            entry["data_offsets"] = data.draw(st.lists(SIZES, max_size=3))
        else:
            header[key] = data.draw(JUNK)
    attempt(arena, join(header))


_BYTES = {"U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E8M0": 1, "F32": 4, "BF16": 2, "F16": 2}


@FUZZ
@given(
    tensors=st.dictionaries(
        KEYS,
        st.tuples(st.sampled_from(sorted(_BYTES)), st.lists(st.sampled_from([0, 1, 2, 3, 8, 16, 32]), max_size=4)),
        min_size=1, max_size=8,
    ),
    fill=st.integers(0, 255),
    model_type=st.sampled_from(["qwen3_moe", "gpt_oss"]),
)  # fmt: skip
def test_sound_files_that_are_no_sound_checkpoint(tensors, fill, model_type, arena):
    """Every file is valid safetensors; the names, dtypes and shapes are any."""
    header, at = {}, 0
    for key, (dtype, shape) in tensors.items():
        size = _BYTES[dtype]
        for n in shape:
            size *= n
        header[key] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + size]}
        at += size
    attempt(arena, join(header, bytes([fill]) * at), CONFIG | {"model_type": model_type})


PATHS = st.sampled_from(
    ["model.safetensors", "../x.safetensors", "/etc/passwd", "a/b.safetensors", "..", ".", "", "config.json",
     "x\0.safetensors", "model.safetensors/..", "~/x.safetensors", "missing.safetensors", "\u202e.safetensors"]
)  # fmt: skip


@FUZZ
@given(data=st.data())
def test_configurations_and_indexes(data, arena):
    config, index = CONFIG, None
    if data.draw(st.booleans()):
        names = data.draw(st.lists(PATHS, min_size=1, max_size=3))
        weight_map = {key: names[i % len(names)] for i, key in enumerate(HEADER)}
        if data.draw(st.booleans()):
            weight_map[data.draw(KEYS)] = data.draw(PATHS)
        index = data.draw(st.one_of(st.just({"weight_map": weight_map}), JUNK, st.binary(max_size=20)))
    else:
        quantization = dict(data.draw(st.sampled_from([c.MODELOPT, c.COMPRESSED, {"quant_method": "mxfp4"}])))
        fields = st.sampled_from(["quant_method", "quant_algo", "ignore", "exclude_modules", "group_size", "format",
                                  "config_groups", "quantized_layers", "modules_to_not_convert"])  # fmt: skip
        for _ in range(data.draw(st.integers(1, 3))):
            quantization[data.draw(fields)] = data.draw(
                st.one_of(JUNK, st.sampled_from(["MIXED_PRECISION", "NVFP4_AWQ", ["re:("], ["re:" + "(" * 200]]))
            )
        config = data.draw(
            st.one_of(
                st.just(CONFIG | {"quantization_config": quantization}),
                st.builds(lambda j: CONFIG | {"quantization_config": j, "text_config": j}, JUNK),
                JUNK.map(lambda j: json.dumps(j).encode()),
                st.binary(max_size=20),
            )
        )
    attempt(arena, GOOD, config, index)


TRILLION = {"dtype": "U8", "shape": [10**6, 10**6], "data_offsets": [0, 10**12]}
CASES = {
    "no safetensors": b"PK\x03\x04 not a tensor file at all",
    "empty": b"",
    "pickle": pickle.dumps(print),
    "header size": struct.pack("<Q", 2**62) + b"{}",
    "trillion elements": join({f"{X}.0.up_proj.weight": TRILLION}),
    "deep json": join(b"[" * 100_000),
    "overlap": join({"a": {"dtype": "U8", "shape": [8], "data_offsets": [0, 8]},
                     "b": {"dtype": "U8", "shape": [8], "data_offsets": [4, 12]}}, bytes(12)),
    "ids to a million": join({f"{X}.999999.up_proj.weight": {"dtype": "U8", "shape": [16, 8], "data_offsets": [0, 128]},
                              f"{X}.0.up_proj.weight_scale": {"dtype": "U8", "shape": [16, 1],
                                                              "data_offsets": [128, 144]}}, bytes(144)),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_known_attacks_are_refused_at_once(name, tmp_path):
    before = peak()
    assert not attempt(tmp_path, CASES[name])
    assert peak() - before < 50e6


@pytest.mark.parametrize("shard", ["../secret.safetensors", "/etc/hostname", "sub/x.safetensors", "model.bin"])
def test_an_index_never_leaves_its_folder_nor_reads_other_kinds_of_files(shard, tmp_path, monkeypatch):
    folder = tmp_path / "model"
    folder.mkdir()
    (tmp_path / "secret.safetensors").write_bytes(GOOD)
    opened: list[Path] = []
    from compiled_moe import shards

    real = shards.safe_open

    def watched(path, **kwargs):
        opened.append(Path(path))
        return real(path, **kwargs)

    monkeypatch.setattr(shards, "safe_open", watched)
    assert not attempt(folder, GOOD, index={"weight_map": dict.fromkeys(HEADER, shard)})
    assert not opened


def test_pickles_beside_the_shards_are_never_opened(tmp_path):
    class Bomb:
        def __reduce__(self):
            return (exec, ("raise SystemExit('executed')",))

    c.write(tmp_path, SMALL)
    torch.save(Bomb(), tmp_path / "pytorch_model.bin")
    (tmp_path / "model.pt").write_bytes((tmp_path / "pytorch_model.bin").read_bytes())
    assert survey(Checkpoint.open(tmp_path)).report.ok
