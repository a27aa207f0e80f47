"""freescale.config: who beats whom, what is refused and in which words, and the table of docs/flags.md."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest

from freescale import config
from freescale.config import Config, ConfigError, load
from repo import ROOT

FLAGS = ROOT / "docs" / "flags.md"


def test_defaults_without_environment_or_options():
    assert load(environ={}) == Config()


def test_option_beats_environment_beats_default():
    environ = {"FREESCALE_TIMEOUT": "7", "FREESCALE_STRICT": "1"}
    assert load(environ={}).timeout == Config.timeout
    assert load(environ=environ).timeout == 7.0
    assert load({"timeout": 3}, environ).timeout == 3.0
    assert load({"timeout": 3}, environ).strict is True  # no option names it


def test_environment_of_the_process_is_read(monkeypatch):
    monkeypatch.setenv("FREESCALE_CODEGEN", "eager")
    assert load().codegen == "eager"


def test_other_variables_are_left_alone():
    assert load(environ={"FREE": "1", "FREESCAL": "x", "PATH": ""}) == Config()


def test_unknown_flag_is_refused_with_a_suggestion():
    with pytest.raises(ConfigError) as error:
        load(environ={"FREESCALE_CODGEN": "eager"})
    said = str(error.value)
    assert said.startswith("FREESCALE_CODGEN is not a flag of freescale. Did you mean FREESCALE_CODEGEN?")
    assert all(f"FREESCALE_{name.upper()}" in said for name in config.FIELDS)


def test_unknown_option_is_refused_with_a_suggestion():
    with pytest.raises(ConfigError) as error:
        load({"strct": True}, environ={})
    assert str(error.value).startswith("strct is not an option of freescale. Did you mean strict? Known: ")


def test_unknown_option_unlike_any_other_gets_no_suggestion():
    with pytest.raises(ConfigError) as error:
        load({"qqqqqq": 1}, environ={})
    assert "Did you mean" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "value"),
    [("1", True), ("true", True), ("ON", True), ("0", False), ("False", False), ("off", False)],
)
def test_switch_values(text: str, value: bool):
    assert load(environ={"FREESCALE_STRICT": text}).strict is value


@pytest.mark.parametrize(
    ("environ", "sentence"),
    [
        ({"FREESCALE_STRICT": "maybe"}, "FREESCALE_STRICT must be 1 or 0, found 'maybe'"),
        ({"FREESCALE_TIMEOUT": "soon"}, "FREESCALE_TIMEOUT must be a number, found 'soon'"),
        ({"FREESCALE_TIMEOUT": "0"}, "FREESCALE_TIMEOUT must be more than 0 seconds, found 0.0"),
        ({"FREESCALE_TIMEOUT": "nan"}, "FREESCALE_TIMEOUT must be more than 0 seconds, found nan"),
        ({"FREESCALE_CODEGEN": "foo"}, "FREESCALE_CODEGEN must be one of inductor, eager, found 'foo'"),
    ],
)
def test_bad_flag_is_refused(environ: dict[str, str], sentence: str):
    with pytest.raises(ConfigError) as error:
        load(environ=environ)
    assert str(error.value) == sentence


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"strict": 2}, "option 'strict' must be 1 or 0, found 2"),
        ({"timeout": None}, "option 'timeout' must be a number, found None"),
        ({"codegen": "foo"}, "option 'codegen' must be one of inductor, eager, found 'foo'"),
        ({"codegen": 3}, "option 'codegen' must be text, found 3"),
    ],
)
def test_bad_option_is_refused(options: dict[str, Any], sentence: str):
    with pytest.raises(ConfigError) as error:
        load(options, environ={})
    assert str(error.value) == sentence


@pytest.fixture
def abc(monkeypatch):
    """Three passes and a lossy one, so that these tests do not change with the list of passes."""
    monkeypatch.setattr(config, "PASS_ORDER", ("a", "b", "x", "c"))
    monkeypatch.setattr(config, "LOSSY_PASSES", ("x",))
    monkeypatch.setattr(config, "PASS_NAMES", ("a", "b", "c"))


@pytest.mark.parametrize(
    ("text", "enabled"),
    [
        ("all", "abc"),
        ("none", ""),
        ("", ""),
        ("b", "b"),
        ("c, a", "ac"),  # the order is ours, not the user's
        ("-b", "ac"),
        ("-a,-c", "b"),
        ("all,x", "abxc"),
        ("x", "x"),
        ("c,x", "xc"),
        ("-x", "abc"),
    ],
)
def test_passes_are_toggled(abc, text: str, enabled: str):
    assert load(environ={"FREESCALE_PASSES": text}).enabled_passes() == tuple(enabled)


def test_passes_as_a_list_in_options(abc):
    assert load({"passes": ["c", "a"]}, environ={}).enabled_passes() == ("a", "c")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("a,-b", "FREESCALE_PASSES mixes passes to run and passes to omit: 'a,-b'"),
        ("d", "FREESCALE_PASSES names an unknown pass 'd'; the passes are a, b, x, c"),
        ("-d", "FREESCALE_PASSES names an unknown pass 'd'; the passes are a, b, x, c"),
        ("all,a", "FREESCALE_PASSES: all combines only with x: 'all,a'"),
        ("-all", "FREESCALE_PASSES: all combines only with x: '-all'"),
    ],
)
def test_bad_list_of_passes_is_refused(abc, text: str, sentence: str):
    with pytest.raises(ConfigError) as error:
        load(environ={"FREESCALE_PASSES": text})
    assert str(error.value) == sentence


LOSSY = {"FREESCALE_PASSES": "all,compress_exchange"}
WIRES = "FREESCALE_WIRE must be one of fp32, fp16, bf16, fp8"
FORM = "FREESCALE_COMPRESS must be rows:SHARE, dense:SHARE or both, then which=background or which=all"
NAME_IT = "is for the pass compress_exchange, which is opt-in: set FREESCALE_PASSES="


def test_all_leaves_the_lossy_pass_out():
    assert "compress_exchange" not in Config().enabled_passes() == config.PASS_NAMES
    enabled = load(environ={**LOSSY, "FREESCALE_COMPRESS": "rows:0.1"}).enabled_passes()
    assert enabled == config.PASS_ORDER and set(enabled) - set(config.PASS_NAMES) == {"compress_exchange"}
    place = enabled.index("compress_exchange")
    assert enabled.index("bucket_gradients") < place < enabled.index("overlap_attention")


@pytest.mark.parametrize(
    ("text", "wire", "asked"),
    [
        ("rows:0.05", "fp32", config.Compression(rows=Fraction(1, 20))),
        ("rows:1,which=all", "fp32", config.Compression(rows=Fraction(1), which="all")),
        ("dense:0.01, which=background", "bf16", config.Compression(dense=Fraction(1, 100), wire="bf16")),
        ("which=all", "fp8", config.Compression(which="all", wire="fp8")),
        ("", "fp32", config.Compression()),
    ],
)
def test_what_compression_is_asked_for(text: str, wire: str, asked: config.Compression):
    flags = {"FREESCALE_COMPRESS": text, "FREESCALE_WIRE": wire, "FREESCALE_DENSE": "allreduce"}
    assert load(environ={**LOSSY, **flags}).compression() == asked


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ({"COMPRESS": "rows:0"}, "FREESCALE_COMPRESS: the share in 'rows:0' must be more than 0 and at most 1"),
        ({"COMPRESS": "rows:-1"}, "FREESCALE_COMPRESS: the share in 'rows:-1' must be more than 0 and at most 1"),
        ({"COMPRESS": "dense:1.5"}, "FREESCALE_COMPRESS: the share in 'dense:1.5' must be more than 0 and at most 1"),
        ({"COMPRESS": "rows:few"}, "FREESCALE_COMPRESS: the share in 'rows:few' must be a number"),
        ({"COMPRESS": "rows:nan"}, "FREESCALE_COMPRESS: the share in 'rows:nan' must be a number"),
        ({"COMPRESS": "columns:0.1"}, f"{FORM}, found 'columns:0.1'"),
        ({"COMPRESS": "rows"}, f"{FORM}, found 'rows'"),
        ({"COMPRESS": "rows=0.1"}, f"{FORM}, found 'rows=0.1'"),
        ({"COMPRESS": "rows:0.1,which=urgent"}, f"{FORM}, found 'which=urgent'"),
        ({"COMPRESS": "rows:0.1,rows:0.2"}, "FREESCALE_COMPRESS sets rows twice: 'rows:0.1,rows:0.2'"),
        ({"WIRE": "fp4"}, f"{WIRES}, found 'fp4'"),
        ({"COMPRESS": "rows:lossless,rows:0.1"}, "FREESCALE_COMPRESS sets rows twice: 'rows:lossless,rows:0.1'"),
        ({"COMPRESS": "dense:lossless"}, "FREESCALE_COMPRESS: the share in 'dense:lossless' must be a number"),
        ({"COMPRESS": "rows:lossless", "WIRE": "fp8"}, "FREESCALE_COMPRESS=rows:lossless selects values of rows and "
         "FREESCALE_WIRE=fp8 rounds them; use only one of the two"),
        ({"WIRE": "stochastic"}, f"{WIRES}, found 'stochastic'"),
        ({"COMPRESS": "rows:0.1", "WIRE": "bf16,stochastic"}, "FREESCALE_COMPRESS=rows:0.1 selects values of rows and "
         "FREESCALE_WIRE=bf16,stochastic rounds them; use only one of the two"),
        ({"COMPRESS": "rows:0.1", "PASSES": "all"}, f"FREESCALE_COMPRESS {NAME_IT}all,compress_exchange"),
        ({"WIRE": "fp16", "PASSES": "all"}, f"FREESCALE_WIRE {NAME_IT}all,compress_exchange"),
        ({"WIRE": "fp16", "PASSES": "split_exchanges"}, f"FREESCALE_WIRE {NAME_IT}...,compress_exchange"),
        ({"COMPRESS": "rows:0.1", "WIRE": "fp16"}, "FREESCALE_COMPRESS=rows:0.1 selects values of rows and "
         "FREESCALE_WIRE=fp16 rounds them; use only one of the two"),
        ({"COMPRESS": "dense:0.1"}, "FREESCALE_COMPRESS=dense:0.1: dense gradients are only compressed if the "
         "graph averages them; set FREESCALE_DENSE=allreduce"),
        ({"STRICT": "1"}, "strict requires an explicit ratio for a lossy pass: set FREESCALE_COMPRESS or "
         "FREESCALE_WIRE, or remove compress_exchange from FREESCALE_PASSES"),
    ],
)  # fmt: skip
def test_compression_that_is_refused(flags: dict[str, str], sentence: str):
    with pytest.raises(ConfigError) as error:
        load(environ={**LOSSY, **{f"FREESCALE_{k}": v for k, v in flags.items()}})
    assert str(error.value) == sentence


@pytest.mark.parametrize(
    ("given", "instead", "words"),
    [
        ({"WIRE": "fp16,stochastic"}, {"WIRE": "fp16"}, "WIRE=fp16,stochastic|fp16, rounded to nearest"),
        ({"WIRE": "bf16,stochastic", "COMPRESS": "which=all"}, {"WIRE": "bf16", "COMPRESS": "which=all"},
         "WIRE=bf16,stochastic|bf16, rounded to nearest"),
        ({"COMPRESS": "rows:lossless"}, {"PASSES": "all"}, "COMPRESS=rows:lossless|no compression of rows"),
        ({"COMPRESS": "which=all, rows:lossless", "STRICT": "1"}, {"PASSES": "all", "STRICT": "1"},
         "COMPRESS=rows:lossless|no compression of rows"),
        ({"COMPRESS": "rows:lossless", "PASSES": "compress_exchange"}, {"PASSES": "none"},
         "COMPRESS=rows:lossless|no compression of rows"),
        ({"COMPRESS": "rows:lossless,dense:0.1", "DENSE": "allreduce"}, {"COMPRESS": "dense:0.1", "DENSE": "allreduce"},
         "COMPRESS=rows:lossless|no compression of rows"),
        ({"TRANSPORT": "peer"}, {"TRANSPORT": "auto"}, "TRANSPORT=peer|auto"),
    ],
)  # fmt: skip
def test_a_deprecated_value_is_replaced_with_one_warning(caplog, given: dict[str, str], instead: dict[str, str], words: str):
    """In all that is made of the settings: graphs, the keys of caches, what ranks compare."""
    config._say_deprecated.cache_clear()
    old, new = ({**LOSSY, **{f"FREESCALE_{k}": v for k, v in flags.items()}} for flags in (given, instead))
    for _ in range(2):
        assert load(environ=old) == load(environ=new)
    assert load({k.removeprefix("FREESCALE_").lower(): v for k, v in old.items()}, {}) == load(environ=new)
    value, used = words.split("|")
    said = f"FREESCALE_{value} is deprecated and will be an error in the next release; using {used}"
    assert caplog.messages == [said]


def test_table_names_every_flag_once():
    rows = config.markdown_table().splitlines()[2:]
    assert [row.split("`")[1] for row in rows] == [f"FREESCALE_{name.upper()}" for name in config.FIELDS]


def test_the_page_of_flags_holds_the_table():
    lines = FLAGS.read_text().splitlines()
    table = lines[lines.index("<!-- flags -->") + 1 : lines.index("<!-- /flags -->")]
    assert "\n".join(table).strip() == config.markdown_table()
