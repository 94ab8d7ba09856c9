"""One outside thing each: the decoder, a provider process, the lock file, the service manager."""
