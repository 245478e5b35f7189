"""HiGHS, the solver of linear programs, without its greeting."""

from __future__ import annotations

import highspy


class QuietHighs(highspy.Highs):
    """Does not even greet: the constructor would print to stdout before an option can be set."""

    def enableCallbacks(self) -> None:
        """Turn the output off on the way, which the constructor calls before it prints."""
        self.setOptionValue("output_flag", False)
        super().enableCallbacks()  # type: ignore[no-untyped-call]
