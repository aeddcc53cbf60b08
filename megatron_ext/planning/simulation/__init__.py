"""Simulates a run on any number of cards: pipeline x context x data ranks over real rows, stragglers, failures.

rows.py       a step's rows under a window -> attention and exchanged keys of each rank and micro-batch
pipeline.py   the order of passes on each stage -> when each one starts and ends, for all replicas at once
step.py       both, and every card's own speed -> the seconds of a step, and where they go
failures.py   steps, failures, checkpoints, restarts -> goodput, and the best interval between checkpoints
whole_run.py  a configuration -> steps at moments of its schedule, and the run
"""
