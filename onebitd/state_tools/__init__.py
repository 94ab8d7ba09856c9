"""What `onebitctl state` does: numpy is imported here, so that the other commands start without."""
