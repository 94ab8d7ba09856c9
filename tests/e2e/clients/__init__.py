"""Programs that test_clients.py runs beside the tests: each asks with a client of its own."""
