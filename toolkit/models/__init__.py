"""Models: a name becomes a model and its tokenizer."""
