"""Studies: questions asked of an engine, answered as tables."""
