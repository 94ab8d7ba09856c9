"""`onebitctl doctor`: looks for what keeps an instance from working, as its service sees it."""
