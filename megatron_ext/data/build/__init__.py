"""Offline work that makes a dataset: gathering a corpus, and tokenizing documents into .bin and .idx."""
