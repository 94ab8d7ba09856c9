"""onebitd: prompt processing on one device, token generation on another, one HTTP API."""

__version__ = "0.1.0"
