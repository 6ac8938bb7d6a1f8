"""Engine: a request's life, from `submit` to its last token."""
