"""Translation only: HTTP, the control socket, the command line, the daemon that wires it all."""
