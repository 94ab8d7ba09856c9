"""Pure decisions and formats: no I/O, no async, no clock."""
