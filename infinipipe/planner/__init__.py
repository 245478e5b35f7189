"""The planner: from lengths to a schedule, in pure passes from value to new value. It knows no torch."""
