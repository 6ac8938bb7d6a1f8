"""Bench: this toolkit and mlx-lm side by side, in one run. `toolkit bench`, or `python -m toolkit.bench`.

`suite` runs what `options` ask for: groups of figures from `rows` (the engine's speed), `draws` and `bits`
(batch invariance, and agreement with mlx-lm). `ours` and `peers` do the work that is timed, `measure` times
it, `workloads` says what it is, `report` prints. Nothing here needs pandas, so a bare GPU machine can run it.
"""
