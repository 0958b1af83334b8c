"""A fixture for pytest that measures."""
