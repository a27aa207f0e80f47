"""The command line: `python -m freescale <command>`. None of these modules imports torch until it is needed."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from freescale import __version__, doctor
from freescale.simulate import command as simulate_command
from freescale.views import commands as views


def main(argv: Sequence[str] | None = None) -> int:
    argv = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(prog="python -m freescale", description=f"freescale {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="command")

    check = commands.add_parser("doctor", help="show what is installed, what works and what is missing")
    check.add_argument("--json", action="store_true", help="the same facts as JSON")
    check.set_defaults(run=lambda args: doctor.main(args.json))

    report = commands.add_parser("report", help="show where the time of a recorded run went (FREESCALE_RECORD=DIR)")
    report.add_argument("folder", nargs="?", help="the folder with the records")
    report.add_argument("--run", dest="run_name", metavar="RUN", help="the run to show, if the folder has several")
    report.add_argument("--html", metavar="FILE", help="write a page with plots; it needs no network")
    report.add_argument("--json", metavar="FILE", help="write the figures as JSON; - for standard output")
    report.add_argument("--trace", metavar="STEP", help="write a trace of these steps for Perfetto: 7, or 5-9")
    report.add_argument("--out", metavar="FILE", default="trace.json", help="where --trace goes (trace.json)")
    report.add_argument("--profile", metavar="FILE", help="analyze a torch profiler trace")
    report.set_defaults(run=views.report)

    explain = commands.add_parser("explain", help="run a training command and show what the compiler did to its graphs")
    explain.add_argument("--html", metavar="FILE", help="write a page: diagram of two steps, changes of each pass")
    explain.add_argument("--json", metavar="FILE", help="write the graphs as JSON; - for standard output")
    explain.add_argument("--graphs", action="store_true", help="also print what each pass changed")
    explain.add_argument("command", nargs=argparse.REMAINDER, help="-- and the command")
    explain.set_defaults(run=views.explain)

    simulate = commands.add_parser("simulate", help="simulate a step at many ranks, with and without freescale")
    simulate_command.add_arguments(simulate)
    simulate.set_defaults(run=simulate_command.main)

    if not argv:
        parser.print_help()
        return 0
    if not argv[0].startswith("-") and argv[0] not in commands.choices:
        print(f"freescale has no command {argv[0]!r}. Known: {', '.join(commands.choices)}", file=sys.stderr)
        return 2
    args = parser.parse_args(argv)
    try:
        code = args.run(args)
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # the reader, such as `head`, closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # output flushed at exit goes there
        return 0


if __name__ == "__main__":
    sys.exit(main())
