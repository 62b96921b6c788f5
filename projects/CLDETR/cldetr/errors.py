"""The one exception for what a user can fix: bad input, bad settings, a missing file."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Sequence


class InputError(ValueError):
    """Something the user gave is wrong; the message says what, where and how to fix it.

    Commands print the message without a traceback and exit with status 2.
    """

    @classmethod
    def listing(cls, headline: str, problems: Sequence[str], limit: int = 20) -> InputError:
        """Builds one error that lists all problems, the first `limit` of them in full."""
        lines = [headline, *(f"  - {problem}" for problem in problems[:limit])]
        if len(problems) > limit:
            lines.append(f"  … and {len(problems) - limit} more")
        return cls("\n".join(lines))


def blame(error: BaseException) -> str:
    """Says in which class and line of the user's own code an error was raised; empty if in none.

    That is the outermost call on its way that is not of this project or of what it stands on.
    """
    known = {"cldetr", "detectron2", "torch", "fvcore", "iopath", *sys.stdlib_module_names}
    known.discard("__main__")
    for frame, line in traceback.walk_tb(error.__traceback__):
        if str(frame.f_globals.get("__name__")).partition(".")[0] not in known:
            owner = frame.f_locals.get("self", frame.f_locals.get("cls"))
            cls = owner if isinstance(owner, type) else type(owner)
            name = (
                frame.f_code.co_name if owner is None else f"{cls.__name__}.{frame.f_code.co_name}"
            )
            return f"{name} ({frame.f_code.co_filename}:{line})"
    return ""
