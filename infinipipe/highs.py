"""HiGHS, the solver of linear programs: silent, and the same everywhere."""

from __future__ import annotations

import highspy


class QuietHighs(highspy.Highs):
    """Does not even greet: the constructor would print to stdout before an option can be set.

    All have one thread. A process has one pool of them, and refuses to solve with another number later.
    """

    def enableCallbacks(self) -> None:
        """Set options on the way: the constructor calls this before it prints."""
        self.setOptionValue("output_flag", False)
        self.setOptionValue("threads", 1)
        super().enableCallbacks()  # type: ignore[no-untyped-call]
