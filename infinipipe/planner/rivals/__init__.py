"""Published systems whose plans no layout can express: they are priced, and cannot run."""
