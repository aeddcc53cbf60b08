"""Rehearsal: run any rank's step on a CPU with the real code, fake tensors and fake process groups."""
