"""The conformance kit for provider authors: `onebitctl provider check`. It needs no daemon."""
