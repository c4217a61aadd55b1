"""`terrazzo demo`: a training run that is killed while it saves, and what becomes of it.

It runs the library as a user would. `story` and `ending` are what happens in which order, `worker` is what a rank does,
`messages` what it reports; `processes` starts and kills ranks, `plot` draws the loss.
"""
