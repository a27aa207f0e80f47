"""The command line: `python -m freescale <command>`. A command is a subparser here and a module elsewhere."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from freescale import __version__
from freescale.simulate import command as simulate_command


def main(argv: Sequence[str] | None = None) -> int:
    argv = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(prog="python -m freescale", description=f"freescale {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="command")

    doctor = commands.add_parser("doctor", help="say what is installed, what works here and what is missing")
    doctor.add_argument("--json", action="store_true", help="the same facts as JSON")
    doctor.set_defaults(run=_doctor)

    simulate = commands.add_parser("simulate", help="the step at many ranks, simulated: what would freescale bring?")
    simulate_command.add_arguments(simulate)
    simulate.set_defaults(run=simulate_command.main)

    if not argv:
        parser.print_help()
        return 0
    if not argv[0].startswith("-") and argv[0] not in commands.choices:
        print(f"freescale has no command {argv[0]!r}. Known: {', '.join(commands.choices)}", file=sys.stderr)
        return 2
    args = parser.parse_args(argv)
    return args.run(args)


def _doctor(args: argparse.Namespace) -> int:
    from freescale import doctor

    return doctor.main(as_json=args.json)


if __name__ == "__main__":
    sys.exit(main())
