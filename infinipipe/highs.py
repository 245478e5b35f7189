"""HiGHS, the solver of linear programs: silent, and the same everywhere."""

from __future__ import annotations

import highspy


class QuietHighs(highspy.Highs):
    """A solver that does not even greet, and that gives the same answer on every machine.

    The constructor would print to stdout before an option can be set. A process has one pool of
    threads and refuses to solve with another number of them later, so all solvers have one.
    """

    def enableCallbacks(self) -> None:
        """Set options on the way: the constructor calls this before it prints."""
        self.setOptionValue("output_flag", False)
        self.setOptionValue("threads", 1)
        super().enableCallbacks()  # type: ignore[no-untyped-call]
