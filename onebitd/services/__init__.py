"""State that lives long: the supervisor, the queue, the pipeline, the history."""
