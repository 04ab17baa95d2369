"""A hub id from the command line to a published folder, against a local stand-in of the hub."""

from __future__ import annotations

import json
from pathlib import Path

import tiny
from commandline import compress
from hub_stand_in import Hub, commit_of, serve


def test_hub_id_is_planned_from_headers_then_downloaded_and_recorded(tmp_path: Path) -> None:
    folder = tiny.tiny_llama(tmp_path / "m")
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        "version: 1\nmodel: org/tiny@main\noutput: out\ncalibration: {samples: 4, length: 64}\n"
        "steps:\n  - quantize: {target: int4}\nevaluate: {fidelity: {tokens: 256, length: 64}}\n"
    )
    with serve(Hub({"org/tiny": {"main": folder}})) as hub:
        online = {"HF_ENDPOINT": hub.endpoint, "HF_HUB_OFFLINE": "0", "HF_HOME": str(tmp_path / "hf")}
        done = compress("plan", recipe, cwd=tmp_path, **online)
        assert done.returncode == 0, done.stderr
        size = (folder / "model.safetensors").stat().st_size
        assert hub.sent("model.safetensors") < size / 2, "the plan reads headers, not weights"
        done = compress("run", recipe, cwd=tmp_path, **online)
        assert done.returncode == 0, done.stderr
    provenance = json.loads((tmp_path / "out" / "compress.json").read_text())
    assert provenance["model"]["revision"] == commit_of("org/tiny", "main")
    assert provenance["model"]["source"] == "org/tiny@main"


def test_chat_messages_are_rendered_with_the_models_template(tmp_path: Path) -> None:
    folder = tiny.tiny_llama(tmp_path / "m")
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}", encoding="utf-8"
    )
    rows = [
        {"messages": [{"role": "user", "content": f"Say {line}"}, {"role": "assistant", "content": line}]}
        for line in tiny.sentences(20)
    ]
    (tmp_path / "chat.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = compress(
        "quantize", folder, "--target", "int4", "--no-bench", "--samples", "4", "--length", "64",
        "--evaluation-tokens", "256", "--calibration", tmp_path / "chat.jsonl", "-o", tmp_path / "out",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out" / "chat_template.jinja").read_bytes() == (folder / "chat_template.jinja").read_bytes()
