"""The one exception for what a user can fix: bad input, bad settings, a missing file."""

from __future__ import annotations

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
