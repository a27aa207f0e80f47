"""The documentation site (mkdocs.yml) has CONTRIBUTING.md as a page; on GitHub, it lies beside docs/."""

from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

CONTRIBUTING = Path(__file__).resolve().parents[1] / "CONTRIBUTING.md"


def on_files(files: Files, config: Any) -> Files:
    files.append(File.generated(config, CONTRIBUTING.name, content=CONTRIBUTING.read_text()))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    if page.file.src_uri == CONTRIBUTING.name:
        return markdown.replace("](docs/", "](")
    return markdown.replace("](../CONTRIBUTING.md", "](CONTRIBUTING.md")
