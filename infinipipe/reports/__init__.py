"""What people are shown, as lines, tables, pages and plain data.

Nothing is imported here, so that a command waits only for what it shows: import the module itself.
"""
