"""What people are told, as tables, pages and plain data."""
