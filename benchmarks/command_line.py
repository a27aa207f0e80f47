"""What every benchmark takes: --quick, to finish within a minute, and --json FILE for its figures."""

from __future__ import annotations

import argparse


def parser(description: str | None, quick: str) -> argparse.ArgumentParser:
    """`quick` says what --quick leaves out."""
    p = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--quick", action="store_true", help=quick)
    p.add_argument("--json", metavar="FILE", help="write the figures there")
    return p
