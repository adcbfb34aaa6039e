"""Errors that end a process, each with the exit code that a supervisor or a person can act on.

0 done · 1 bug (traceback) · 2 bad recipe, tasks or usage · 3 a peer or the engine never became ready ·
4 stopped by the watchdog or a bound of the recipe · 5 this machine is not fit (disk, memory, port, CPU) ·
6 given up: resumed as often as the recipe allows, and it failed again.
"""

from __future__ import annotations

import errno
import sys
from collections.abc import Callable


class StackError(Exception):
    """A failure with one clear message: what was found, what is allowed, what to do."""

    exit_code = 1


class RecipeError(StackError):
    """The recipe, the tasks or the command line are wrong; nothing was started."""

    exit_code = 2


class NotReadyError(StackError):
    """A peer or the Docker engine is not there; nothing was trained."""

    exit_code = 3


class StoppedError(StackError):
    """The watchdog, or a bound of the recipe, stopped the run; what was trained is saved."""

    exit_code = 4


class MachineError(StackError):
    """Disk, memory, a port, the processor or an image does not fit; nothing was started."""

    exit_code = 5


class GaveUpError(StackError):
    """The run was resumed as often as the recipe allows, and failed again; what was trained is saved."""

    exit_code = 6


def run_main(main: Callable[[], int]) -> None:
    """Run ``main`` and exit with its code; a StackError becomes its message on stderr, without a traceback."""
    try:
        code = main()
    except StackError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        code = error.exit_code
    sys.exit(code)


def machine_error(error: OSError) -> MachineError:
    """One message for a disk that is full or a file that cannot be read or written."""
    where = error.filename2 or error.filename or "a file"  # a failed copy names its source first
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return MachineError(f"no space left while writing {where}; free some and run it again")
    return MachineError(f"{where} cannot be read or written: {error.strerror or error}")
