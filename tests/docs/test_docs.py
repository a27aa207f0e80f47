"""What the README and the other pages show runs: every snippet, every command as far as it can be tried, every name.

The messages that docs/troubleshooting.md explains are freescale's, and the pages stay short."""

from __future__ import annotations

import ast
import contextlib
import io
import os
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import zoo
from ranks import HAS_TORCHREC, run_ranks, run_ranks_apart
from repo import ROOT

# In the order in which their snippets run.
USERS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
START, PIPELINE = ROOT / "docs" / "start.md", ROOT / "docs" / "from-train-pipeline.md"
CONTRIBUTING = ROOT / "CONTRIBUTING.md"
PAGES = [*USERS, CONTRIBUTING]
FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^ *```$", re.M | re.S)


def blocks(page: Path, language: str) -> list[str]:
    found = [m.groups() for m in FENCE.finditer(page.read_text())]
    return [re.sub(f"^{indent}", "", text, flags=re.M) for indent, lang, text in found if lang == language]


def commands() -> list[str]:
    """Lines of blocks and words between backticks that begin as a command does."""
    said = [line.split("  #")[0].strip() for page in PAGES for block in blocks(page, "") for line in block.splitlines()]
    said += [words for page in PAGES for words in re.findall(r"`([^`\n]+)`", page.read_text())]
    return [s for s in said if re.match(r"(sudo |[A-Z_]+=\S+ )*(make|python|bash|pip|torchrun) ", s)]


class MyModel(torch.nn.Module):
    """What the README calls so."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = zoo.ManyTasks()

    def forward(self, batch: Any) -> torch.Tensor:
        return self.inner(batch)


class MyTask(torch.nn.Module):
    """A model as TorchRec's pipelines expect it: of a KeyedJaggedTensor, which they can copy to a device."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = zoo.sequences()
        self.head = torch.nn.Linear(zoo.DIM, 1)

    def forward(self, features: Any) -> tuple[torch.Tensor, torch.Tensor]:
        loss = self.head(self.tables(features)["history"].values()).sum()
        return loss, loss.detach()


def sides(diff: str) -> tuple[str, str]:
    """The programs before and after."""
    lines = [(line[:1], line[1:]) for line in diff.splitlines()]
    before, after = ("\n".join(text for sign, text in lines if sign != other) for other in "+-")
    return before, after


def _run_snippets(texts: list[str]) -> None:
    """One after the other, as in a script that has a model, a device, a loader and an optimizer of its own."""
    from torchrec.distributed import DistributedModelParallel

    batches = [zoo.batch(step, dist.get_rank(), 4) for step in range(3)]
    names: dict[str, Any] = {"MyModel": MyModel, "device": torch.device("cpu"), "torch": torch}
    names |= {"DistributedModelParallel": DistributedModelParallel, "evaluation_loader": batches[:1]}
    names["optimizer"] = torch.optim.SGD([torch.zeros(1, requires_grad=True)])
    for text in texts:
        names["loader"] = batches
        with contextlib.redirect_stdout(io.StringIO()):
            exec(compile(text, "docs", "exec"), names)
        if names["loader"] is not batches:
            for batch in names["loader"]:
                names["model"](batch).backward()
    names["stop"]()


@pytest.mark.skipif(not HAS_TORCHREC, reason="torchrec or fbgemm_gpu is not installed")
def test_the_snippets_for_users_run():
    texts = [text for page in USERS if page != START for text in blocks(page, "python")]
    assert any("model.compile" in t for t in texts) and any("balance=True" in t for t in texts)
    run_ranks(_run_snippets, 2, texts, env={"FREESCALE_CODEGEN": "eager"})


def _run_pipeline(before: str, after: str) -> None:
    from torchrec.distributed import DistributedModelParallel, TrainPipelineSparseDist

    import freescale

    for text in (before, after):
        names: dict[str, Any] = {"MyTask": MyTask, "device": torch.device("cpu"), "freescale": freescale}
        names |= {"DistributedModelParallel": DistributedModelParallel}
        names |= {"TrainPipelineSparseDist": TrainPipelineSparseDist}
        names["loader"] = [zoo.batch(step, dist.get_rank(), 4).features for step in range(3)]
        names["optimizer"] = torch.optim.SGD([torch.zeros(1, requires_grad=True)])
        exec(compile(text, "from-train-pipeline", "exec"), names)
        assert names["output"].shape == ()


@pytest.mark.skipif(not HAS_TORCHREC, reason="torchrec or fbgemm_gpu is not installed")
def test_both_sides_of_the_pipeline_page_run():
    (diff,) = blocks(PIPELINE, "diff")
    run_ranks(_run_pipeline, 2, *sides(diff), env={"FREESCALE_CODEGEN": "eager"})


def _run_program(text: str) -> None:
    """As torchrun starts it, but in the process group that is there."""
    with mock.patch.object(dist, "init_process_group"), mock.patch.object(dist, "destroy_process_group"):
        exec(compile(text, "first.py", "exec"), {"__name__": "__main__"})


@pytest.mark.skipif(not HAS_TORCHREC, reason="torchrec or fbgemm_gpu is not installed")
def test_the_first_model_runs():
    """In full, on the CPU."""
    (text,) = blocks(START, "python")
    run_ranks(_run_program, 2, text, env={"FREESCALE_CODEGEN": "eager"})


def test_the_snippets_for_contributors_run():
    names: dict[str, Any] = {}
    for text in blocks(CONTRIBUTING, "python"):
        exec(compile(text, "CONTRIBUTING", "exec"), names)
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    graph.output(graph.call_function(torch.ops.aten.mm.default, (x, x)))
    assert names["count_matmuls"](torch.fx.GraphModule({}, graph), None) == 1
    from freescale import driver

    driver._observers.clear()


def _help(script: str) -> str:
    """What `script --help` prints."""
    sys.path.insert(0, str((ROOT / script).parent))
    said = io.StringIO()
    sys.argv = [script, "--help"]
    with contextlib.redirect_stdout(said), pytest.raises(SystemExit) as ended:
        runpy.run_path(str(ROOT / script), run_name="__main__")
    assert ended.value.code == 0, script
    return said.getvalue()


# The lab is no benchmark; what balance.py trains is a part of it that can be started alone.
TOOLS = ("benchmarks/netlab.py", "benchmarks/balance_train.py")


def _scripts() -> list[str]:
    """Programs that can be started."""
    started = [str(f.relative_to(ROOT)) for f in (ROOT / "benchmarks").glob("*.py") if "__main__" in f.read_text()]
    return sorted(set(started) - {"benchmarks/overlap_rank.py", "benchmarks/fidelity_rank.py"}) + ["examples/train_hstu.py"]


def test_every_program_says_what_it_takes():
    scripts = _scripts()
    helps = dict(zip(scripts, run_ranks_apart(_help, [(s,) for s in scripts]), strict=True))
    for script, words in helps.items():
        if script.startswith("benchmarks/") and script not in TOOLS:
            assert "--quick" in words and "--json" in words, script
    for command in commands():
        words = shlex.split(command)
        script = next((w for w in words if w in helps), None)
        for flag in (w for w in words if w.startswith("--") and script is not None):
            assert flag.split("=")[0] in helps[script], command


def test_commands():
    found = commands()
    assert len(found) > 10
    from freescale import config

    for command in found:
        words = [w for w in shlex.split(command) if w != "sudo"]
        while re.match(r"[A-Z_]+=", words[0]):
            flag = words.pop(0).split("=")[0]
            assert not flag.startswith(config.PREFIX) or flag.removeprefix(config.PREFIX).lower() in config.FIELDS, flag
        if words[0] == "make":
            subprocess.run(["make", "-n", *words[1:]], cwd=ROOT, check=True, capture_output=True)
        elif words[0] == "bash":
            subprocess.run(["bash", "-n", words[1]], cwd=ROOT, check=True)
        elif words[:3] == ["python", "-m", "freescale"]:
            from freescale.__main__ import main

            with pytest.raises(SystemExit) as ended, contextlib.redirect_stdout(io.StringIO()):
                main([*words[3:4], "--help"])
            assert ended.value.code == 0, command


FOLDERS = "fs_compile|passes|kernels|runtime|examples|benchmarks|tests|docs"


def test_files_and_links_that_pages_name_exist():
    for page in PAGES:
        text = page.read_text()
        for path in re.findall(rf"`((?:{FOLDERS})/[\w./-]*)`", text):
            assert (ROOT / path).exists() or "count_matmuls" in path, (page.name, path)  # what CONTRIBUTING has one write
        for link in re.findall(r"\]\((?!https:)([^)]+)\)", text):
            file, _, section = link.partition("#")
            target = page.parent / file if file else page
            assert target.exists(), (page.name, link)
            if section:
                headings = re.findall(r"^#+ (.*)$", target.read_text(), re.M)
                assert section in {re.sub(r"[^\w -]", "", h.lower()).replace(" ", "-") for h in headings}, (page.name, link)


def _messages() -> list[str]:
    """Each text of freescale's code; a NUL stands for what an f-string or % fills in."""
    found = []
    for folder in ("fs_compile", "passes", "kernels", "runtime"):
        for file in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, ast.JoinedStr):
                    found.append("".join(str(v.value) if isinstance(v, ast.Constant) else "\0" for v in node.values))
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    found.append(re.sub(r"%(\.\d)?[sdfg]", "\0", node.value))
    return found


def test_the_messages_of_troubleshooting_are_freescales():
    """A bullet begins with one or two messages, in which ... stands for what differs."""
    bullets = re.findall(r"^- ((?:`[^`]+`(?:, )?)+):", (ROOT / "docs" / "troubleshooting.md").read_text(), re.M)
    explained = [said for bullet in bullets for said in re.findall(r"`([^`]+)`", bullet)]
    assert len(explained) > 30
    code = "\n".join(_messages())
    for said in explained:
        assert re.search(r"[^\n]*".join(re.escape(part) for part in said.split("...")), code), said


def test_the_pages_are_short_and_in_the_site():
    assert len(" ".join(page.read_text() for page in PAGES).split()) < 12_000
    assert len((ROOT / "README.md").read_text().split()) <= 700
    site = (ROOT / "mkdocs.yml").read_text()
    for page in (ROOT / "docs").glob("*.md"):
        assert re.search(rf"[ :]{page.name}$", site, re.M), page.name


def test_flags_that_pages_name_exist():
    from freescale import config

    for page in PAGES:
        for flag in re.findall(r"FREESCALE_([A-Z_]+)", page.read_text()):
            assert flag.lower() in config.FIELDS, (page.name, flag)


def test_the_two_lines_that_install_torchrec():
    from freescale import doctor

    lines = [c for c in commands() if c.startswith("pip install") and "[" not in c]
    torchrec, fbgemm = doctor.TORCHREC_FOR[doctor.NEWEST]
    assert lines == [
        f'pip install . "torch=={doctor.NEWEST}.*" {doctor.TORCHREC_NEEDS}',
        f"pip install --no-deps torchrec=={torchrec} fbgemm-gpu-cpu=={fbgemm}",
    ]


@pytest.mark.thorough
def test_a_bad_flag_is_found_before_anything_is_trained():
    """The example's eager half takes as long as the other."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1"]
    done = subprocess.run(
        [*command, str(ROOT / "examples" / "train_hstu.py"), "--steps", "1000"],
        env={**os.environ, "FREESCALE_PASES": "all"}, capture_output=True, text=True, timeout=200, check=False
    )  # fmt: skip
    assert done.returncode != 0 and "FREESCALE_PASES is not a flag of freescale. Did you mean FREESCALE_PASSES?" in done.stderr
