"""Explorers: controls around pictures. Logic is in `study`, pictures are in `view.charts`."""
