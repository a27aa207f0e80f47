"""Cluster files: what is read, and the sentence for what cannot be."""

from __future__ import annotations

import sys
from dataclasses import asdict, replace

import pytest

from freescale.__main__ import main
from freescale.simulate import cluster

pytestmark = pytest.mark.skipif(sys.version_info < (3, 11), reason="tomllib came with Python 3.11")


def written(tmp_path, **changes) -> str:
    """The text of a file with fields changed, or left out where they are None."""
    values = {k: v for k, v in (asdict(cluster.PRESETS["h100"]) | changes).items() if v is not None}
    path = tmp_path / "mine.toml"
    path.write_text("\n".join(f"{k} = {v!r}".replace("True", "true") for k, v in values.items()))
    return str(path)


def test_what_is_written_is_read(tmp_path):
    path = tmp_path / "c.toml"
    for preset in cluster.PRESETS.values():
        path.write_text(cluster.to_toml(preset, ["measured"]))
        assert cluster.find(str(path)) == preset


def test_a_file_inherits_from_a_preset(tmp_path, capsys):
    path = tmp_path / "c.toml"
    path.write_text('preset = "h200"\nname = "mine"\nbetween_gb_per_s = 12.5')
    assert cluster.find(str(path)) == replace(cluster.PRESETS["h200"], name="mine", between_gb_per_s=12.5)
    assert main(["simulate", "--cluster", str(path), "--dump-preset"]) == 0
    text = capsys.readouterr().out
    path.write_text(text)
    assert cluster.find(str(path)).between_gb_per_s == 12.5 and "preset" not in text


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"between_gb_per_s": -1.0}, "between_gb_per_s must be more than 0 and at most 100000, found -1.0"),
        ({"between_gb_per_s": 0}, "between_gb_per_s must be more than 0"),
        ({"inside_gb_per_s": "fast"}, "inside_gb_per_s must be a number, found 'fast'"),
        ({"ranks_per_host": 1.5}, "ranks_per_host must be an integer, found 1.5"),
        ({"sm_tax": 1.5}, "sm_tax must be at least 0 and at most 0.9, found 1.5"),
        ({"jitter": True}, "jitter must be a number, found True"),
        (
            {"seconds_per_token": None, "dim": None},
            "missing: dim, seconds_per_token. Add them, or inherit them: preset = \"h100\" (presets: h100, h200, nvlink)",
        ),
        ({"preset": "b200"}, "preset must be one of h100, h200, nvlink, found 'b200'"),
        ({"sm_tac": 0.1}, "sm_tac is not a field of a cluster. Did you mean sm_tax?"),
        ({"name": 3}, "name must be text, found 3"),
    ],
)
def test_a_bad_field_is_named(tmp_path, capsys, changes, sentence):
    path = written(tmp_path, **changes)
    assert main(["simulate", "--cluster", path]) == 2
    said = capsys.readouterr().err
    assert f"freescale: {path}: {sentence}" in said and len(said.splitlines()) == 1


def test_a_file_that_is_not_toml(tmp_path, capsys):
    path = tmp_path / "c.toml"
    path.write_text("ranks = = 3")
    assert main(["simulate", "--cluster", str(path)]) == 2
    assert f"{path}: the cluster file is not TOML" in capsys.readouterr().err
    assert main(["simulate", "--cluster", str(tmp_path / "none.toml")]) == 2
    assert "cannot read the cluster file: No such file" in capsys.readouterr().err
    assert main(["simulate", "--cluster", "b200"]) == 2
    assert "no preset and no file 'b200'; presets: h100, h200" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--ranks", "1"], "--ranks must be at least 2 and at most 4096, found 1"),
        (["--ranks", "5000"], "--ranks must be at least 2"),
        (["--collision", "1.5"], "--collision must be at least 0 and at most 1, found 1.5"),
        (["--steps", "0"], "--steps must be at least 1"),
        (["--json", "/no/such/folder/x.json"], "--json /no/such/folder/x.json: cannot write there: No such file"),
        (["--json", "/"], "--json /: cannot write there: Is a directory"),
        (["--plots", "/proc/x"], "--plots /proc/x: cannot write there: No such file"),
        (["--calibrate", "/proc/x.toml"], "--calibrate /proc/x.toml: cannot write there: No such file"),
        (["--histories", "x.npz", "--sweep", "cap"], "remove --histories"),
        (["--histories", "nowhere.npz"], "nowhere.npz: cannot read the histories"),
        (["--calibrate", "x.toml", "--block", "nowhere.py:Block"], "nowhere.py: no such file"),
    ],
)
def test_bad_arguments(capsys, words, sentence):
    assert main(["simulate", *words]) == 2
    assert sentence in capsys.readouterr().err
